"""``/hsm/v2/Inventory/RedfishEndpoints`` and ``EthernetInterfaces``: the paths and payloads of OpenCHAMI's SMD."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from appliance.provision import names
from appliance.provision.draft import Draft, read_addresses
from appliance.provision.hsm import ok_response, put
from appliance.provision.model import Endpoint, Interface, Inventory
from appliance.provision.payloads import Address, Found, ShownInterface, SmdAddress, SmdEndpoint, SmdInterface
from appliance.provision.problem import bad_request, conflict, find_entry, not_found
from appliance.provision.rules import Finding, address_problem
from appliance.provision.world import Views, World

ENDPOINTS = "/hsm/v2/Inventory/RedfishEndpoints"
INTERFACES = "/hsm/v2/Inventory/EthernetInterfaces"
OWNER_KEYS: tuple[Literal["ComponentID", "Type"], ...] = ("ComponentID", "Type")
ADDRESS_KEYS: tuple[Literal["IPAddress", "Network"], ...] = ("IPAddress", "Network")
"""Queries of interfaces: keys of a payload, and of its addresses."""
KEPT: tuple[
    Literal["Name", "UUID", "UseSSDP", "MACRequired", "RediscoverOnUpdate", "TemplateID", "DiscoveryInfo", "URI"], ...
] = ("Name", "UUID", "UseSSDP", "MACRequired", "RediscoverOnUpdate", "TemplateID", "DiscoveryInfo", "URI")
"""Fields of an endpoint stored unchanged. User and Password are not stored: `sms` has them on the admin host."""
FILTERS = (("id", "ID"), ("fqdn", "FQDN"), ("type", "Type"), ("uuid", "UUID"), ("ipaddress", "IPAddress"))


def routes(world: World) -> list[Route]:
    endpoints, interfaces = Endpoints(world), Interfaces(world)
    one = f"{INTERFACES}/{{id}}"
    return [
        Route(ENDPOINTS, endpoints.list_all, methods=["GET"]),
        Route(ENDPOINTS, endpoints.post, methods=["POST"]),
        Route(ENDPOINTS, endpoints.delete_all, methods=["DELETE"]),
        Route(f"{ENDPOINTS}/{{xname}}", endpoints.show, methods=["GET"]),
        Route(f"{ENDPOINTS}/{{xname}}", endpoints.put, methods=["PUT"]),
        Route(f"{ENDPOINTS}/{{xname}}", endpoints.patch, methods=["PATCH"]),
        Route(f"{ENDPOINTS}/{{xname}}", endpoints.delete, methods=["DELETE"]),
        Route(INTERFACES, interfaces.list_all, methods=["GET"]),
        Route(INTERFACES, interfaces.post, methods=["POST"]),
        Route(INTERFACES, interfaces.delete_all, methods=["DELETE"]),
        Route(one, interfaces.show, methods=["GET"]),
        Route(one, interfaces.patch, methods=["PATCH"]),
        Route(one, interfaces.delete, methods=["DELETE"]),
        Route(f"{one}/IPAddresses", interfaces.addresses, methods=["GET"]),
        Route(f"{one}/IPAddresses", interfaces.add_address, methods=["POST"]),
        Route(f"{one}/IPAddresses/{{address}}", interfaces.patch_address, methods=["PATCH"]),
        Route(f"{one}/IPAddresses/{{address}}", interfaces.remove_address, methods=["DELETE"]),
    ]


def show_endpoint(each: Endpoint) -> dict[str, object]:
    """Return an endpoint in SMD's form."""
    host, _, domain = each.fqdn.partition(".")
    if names.clean_address(each.fqdn):
        host, domain = each.fqdn, ""
    shown = {
        "ID": each.id,
        "Type": each.type,
        "Hostname": host,
        "Domain": domain,
        "FQDN": each.fqdn,
        "Enabled": each.enabled,
        "MACAddr": each.mac,
        "IPAddress": each.address,
        **each.details,
    }
    return {key: value for key, value in shown.items() if value not in (None, "")}


class Endpoints(Views):
    """Request handlers below ``Inventory/RedfishEndpoints``."""

    def list_all(self, request: Request) -> Response:
        query = request.query_params
        rows = [show_endpoint(each) for _, each in sorted(self.world.inventory().endpoints.items())]
        for name, key in FILTERS:
            if given := query.getlist(name):
                wanted = {each.lower() for each in given}
                rows = [row for row in rows if str(row.get(key, "")).lower() in wanted]
        if given := query.getlist("macaddr"):
            rows = [row for row in rows if row.get("MACAddr") in {names.clean_mac(each) for each in given}]
        return JSONResponse({"RedfishEndpoints": rows})

    def show(self, request: Request) -> Response:
        return JSONResponse(show_endpoint(self._find(self.world.inventory().endpoints, request)))

    def post(self, request: Request) -> Response:
        body = request.state.body
        entries = body.get("RedfishEndpoints", [body])
        with self.world.edit() as draft:
            keys = [self._add(draft, given, force=False) for given in entries]
        return JSONResponse([{"URI": f"{ENDPOINTS}/{key}"} for key in keys if key], 201)

    def _add(self, draft: Draft, given: SmdEndpoint, *, force: bool, key: str = "") -> str:
        endpoint = read_endpoint(given, key, draft.findings)
        if endpoint is None:
            return ""
        if endpoint.id in draft.endpoints and not force:
            raise conflict(f"RedfishEndpoint {endpoint.id} exists already")
        draft.put_endpoint(endpoint)
        import_discovered(self.world, draft, endpoint.id, given)
        return endpoint.id

    def put(self, request: Request) -> Response:
        body = request.state.body
        with self.world.edit() as draft:
            old = self._find(draft.endpoints, request)
            if names.clean_xname(body.get("ID") or old.id) != old.id:
                raise bad_request("the IDs in path and body differ")
            self._add(draft, body, force=True, key=old.id)
            new = draft.endpoints[old.id] if not draft.findings else old
        return JSONResponse(show_endpoint(new))

    def patch(self, request: Request) -> Response:
        with self.world.edit() as draft:
            old = self._find(draft.endpoints, request)
            whole = cast("SmdEndpoint", {**show_endpoint(old), **request.state.body})
            new = read_endpoint(whole, old.id, draft.findings)
            if new is not None:
                draft.put_endpoint(replace(new, id=old.id, type=old.type))
        return JSONResponse(show_endpoint(new or old))

    def delete(self, request: Request) -> Response:
        with self.world.edit() as draft:
            del draft.endpoints[self._find(draft.endpoints, request).id]
        return ok_response("deleted 1 entry")

    def delete_all(self, _request: Request) -> Response:
        with self.world.edit() as draft:
            count = len(draft.endpoints)
            if not count:
                raise not_found("no entries to delete")
            draft.endpoints = {}
        return ok_response(f"deleted {count} entries")

    def _find(self, endpoints: Mapping[str, Endpoint], request: Request) -> Endpoint:
        xname = request.path_params["xname"]
        return find_entry(endpoints, names.clean_xname(xname), f"no such xname: {xname[:70]}")


def read_endpoint(given: SmdEndpoint, key: str, findings: list[Finding]) -> Endpoint | None:
    """Read an endpoint from SMD's payload; its ID defaults to the first label of its FQDN."""
    fqdn = given.get("FQDN") or ".".join(filter(None, (given.get("Hostname"), given.get("Domain"))))
    xname = names.clean_xname(given.get("ID") or key or fqdn.partition(".")[0])
    kind = names.type_of(xname)
    if not kind.endswith(("BMC", "Controller", "Switch", "CEC", "CDU")):
        findings.append(Finding(f"{xname[:70]!r} is not the xname of a controller: write it as x1000c0s0b0"))
        return None
    address, mac = given.get("IPAddress") or "", given.get("MACAddr") or ""
    if address and not names.clean_address(address):
        findings.append(Finding(f"{xname}: {address[:60]!r} is not an address"))
    if mac and not names.clean_mac(mac):
        findings.append(Finding(f"{xname}: {mac[:60]!r} is not a MAC address"))
    return Endpoint(
        xname,
        type=kind,
        fqdn=fqdn or xname,
        address=names.clean_address(address),
        mac=names.clean_mac(mac),
        enabled=given.get("Enabled", True),
        details={name: given[name] for name in KEPT if given.get(name) is not None},
    )


def import_discovered(world: World, draft: Draft, key: str, given: SmdEndpoint) -> None:
    """Import what magellan discovered at a controller: a component with interfaces, and a node for each system."""
    for manager in given.get("Managers") or ():
        put(draft, key, {"ID": key, "State": "On"}, force=False)
        _import_interfaces(world, draft, key, manager)
    seen: set[str] = set()
    for system in given.get("Systems") or ():
        uuid = system.get("uuid") or ""
        if uuid and uuid in seen:
            continue
        node = f"{key}n{len(seen)}"
        seen.add(uuid or node)
        put(draft, node, {"ID": node, "State": "On"}, force=False)
        if (there := draft.components.get(node)) and not there.bmc:
            endpoint = draft.endpoints[key]
            draft.components[node] = replace(there, bmc=endpoint.address or endpoint.fqdn)
        _import_interfaces(world, draft, node, system)


def _import_interfaces(world: World, draft: Draft, component: str, found: Found) -> None:
    for each in found.get("ethernet_interfaces") or ():
        mac = each.get("mac") or ""
        if not names.clean_mac(mac):
            # Some controllers report interfaces without one; SMD ignores them too.
            continue
        given: list[SmdAddress] | None = (
            [{"IPAddress": each["ip"]}] if names.clean_address(each.get("ip") or "") else None
        )
        there = draft.interfaces.get(names.clean_mac(mac))
        base = there if there and there.component in ("", component) else Interface(names.clean_mac(mac))
        set_addresses(
            world, draft, replace(base, component=component, description=each.get("description") or ""), given
        )


def set_addresses(world: World, draft: Draft, new: Interface, given: Iterable[SmdAddress] | None) -> None:
    """Set an interface and its addresses. The first address in the provisioning network becomes the boot address."""
    node = draft.components.get(new.component)
    if given is None:
        draft.put_interface(new)
        return
    rows: list[Address] = [
        {"address": each["IPAddress"], "network": each.get("Network") or ""} for each in given if each["IPAddress"]
    ]
    addresses = read_addresses(rows, new.mac, draft.findings)
    if node is None or node.type != "Node":
        draft.put_interface(replace(new, addresses=addresses))
        return
    of_node = [each for each in draft.interfaces.values() if each.component == node.id and each.mac != new.mac]
    first = not of_node or new.position < min(each.position for each in of_node)
    inside = [pair[0] for pair in addresses if not address_problem(world.config, pair[0])]
    boots = node.address if node.address in inside else inside[0] if inside and (first or not node.address) else None
    if boots or (first and node.address):
        draft.put_component(replace(node, address=boots))
    if boots and not first:
        new = replace(new, position=min(each.position for each in of_node) - 1)
    elif new.mac not in draft.interfaces and of_node:
        new = replace(new, position=max(each.position for each in of_node) + 1)
    draft.put_interface(replace(new, addresses=tuple(pair for pair in addresses if pair[0] != boots)))


def addresses_of(inventory: Inventory, each: Interface) -> list[SmdAddress]:
    """Return an interface's addresses in SMD's form; the node's boot address belongs to its first interface."""
    node = inventory.components.get(each.component)
    rows: list[SmdAddress] = [{"IPAddress": address, "Network": network} for address, network in each.addresses]
    if node and node.address and inventory.interfaces_of(node.id)[0].mac == each.mac:
        rows.insert(0, {"IPAddress": node.address, "Network": ""})
    return rows


def show_interface(inventory: Inventory, each: Interface) -> ShownInterface:
    owner = inventory.components.get(each.component)
    return {
        "ID": names.mac_id(each.mac),
        "Description": each.description,
        "MACAddress": each.mac,
        "LastUpdate": datetime.fromtimestamp(each.changed, UTC).isoformat().replace("+00:00", "Z"),
        "ComponentID": each.component,
        "Type": owner.type if owner else names.type_of(each.component),
        "IPAddresses": addresses_of(inventory, each),
    }


class Interfaces(Views):
    """Request handlers below ``Inventory/EthernetInterfaces``."""

    def list_all(self, request: Request) -> Response:
        inventory, query = self.world.inventory(), request.query_params
        rows = [show_interface(inventory, each) for _, each in sorted(inventory.interfaces.items())]
        if given := query.getlist("MACAddress"):
            rows = [row for row in rows if row["MACAddress"] in {names.clean_mac(each) for each in given}]
        for owner_key in OWNER_KEYS:
            if given := query.getlist(owner_key):
                wanted = {names.clean_id(each).lower() for each in given}
                rows = [row for row in rows if row[owner_key].lower() in wanted]
        for address_key in ADDRESS_KEYS:
            if given := query.getlist(address_key):
                rows = [row for row in rows if any(each[address_key] in given for each in row["IPAddresses"])]
        for key, later in (("NewerThan", True), ("OlderThan", False)):
            if text := query.get(key):
                limit = _parse_time(text)
                rows = [row for row in rows if (_parse_time(row["LastUpdate"]) > limit) == later]
        return JSONResponse(rows)

    def show(self, request: Request) -> Response:
        inventory = self.world.inventory()
        return JSONResponse(show_interface(inventory, self._find(inventory.interfaces, request)))

    def post(self, request: Request) -> Response:
        body = request.state.body
        mac = names.clean_mac(body["MACAddress"])
        if not mac:
            raise bad_request(f"{body['MACAddress'][:60]!r} is not a MAC address")
        with self.world.edit() as draft:
            if mac in draft.interfaces:
                owner = draft.interfaces[mac].component or "nobody"
                raise conflict(f"interface {mac} exists already: {owner} has it")
            new = Interface(mac, component=self._owner(draft, body), description=body.get("Description") or "")
            set_addresses(self.world, draft, new, body.get("IPAddresses") or [])
        return JSONResponse({"URI": f"{INTERFACES}/{names.mac_id(mac)}"}, 201)

    def patch(self, request: Request) -> Response:
        body = request.state.body
        with self.world.edit() as draft:
            old = self._find(draft.interfaces, request)
            new = replace(old, description=body.get("Description", old.description))
            given = body.get("IPAddresses")
            if "ComponentID" in body and (owner := self._owner(draft, body)) != old.component:
                given = addresses_of(draft.inventory(), old) if given is None else given
                self._detach(draft, old)
                new = replace(new, component=owner)
            set_addresses(self.world, draft, new, given)
        return self._current(old.mac)

    def _detach(self, draft: Draft, old: Interface) -> None:
        """Remove an interface from its component, and the boot address if it belongs to that interface."""
        node = draft.components.get(old.component)
        if node and node.address and draft.inventory().interfaces_of(node.id)[0].mac == old.mac:
            draft.put_component(replace(node, address=None))
        del draft.interfaces[old.mac]

    def delete(self, request: Request) -> Response:
        with self.world.edit() as draft:
            self._detach(draft, self._find(draft.interfaces, request))
        return ok_response("deleted 1 entry")

    def delete_all(self, _request: Request) -> Response:
        with self.world.edit() as draft:
            count = len(draft.interfaces)
            if not count:
                raise not_found("no entries to delete")
            for each in draft.components.values():
                draft.components[each.id] = replace(each, address=None)
            draft.interfaces = {}
        return ok_response(f"deleted {count} entries")

    def addresses(self, request: Request) -> Response:
        inventory = self.world.inventory()
        return JSONResponse(addresses_of(inventory, self._find(inventory.interfaces, request)))

    def add_address(self, request: Request) -> Response:
        body = request.state.body
        with self.world.edit() as draft:
            old = self._find(draft.interfaces, request)
            rows = addresses_of(draft.inventory(), old)
            address = names.clean_address(body["IPAddress"])
            if address in [row["IPAddress"] for row in rows]:
                raise conflict(f"{old.mac} has {address} already")
            set_addresses(self.world, draft, old, [*rows, body])
        return JSONResponse({"URI": f"{INTERFACES}/{names.mac_id(old.mac)}/IPAddresses/{address}"}, 201)

    def patch_address(self, request: Request) -> Response:
        body = request.state.body
        with self.world.edit() as draft:
            old, rows, row = self._row(draft, request)
            row["Network"] = body.get("Network", row["Network"])
            set_addresses(self.world, draft, old, rows)
        return self._current(old.mac)

    def remove_address(self, request: Request) -> Response:
        with self.world.edit() as draft:
            old, rows, row = self._row(draft, request)
            set_addresses(self.world, draft, old, [each for each in rows if each is not row])
        return ok_response("deleted 1 entry")

    def _row(self, draft: Draft, request: Request) -> tuple[Interface, list[SmdAddress], SmdAddress]:
        old = self._find(draft.interfaces, request)
        rows = addresses_of(draft.inventory(), old)
        address = names.clean_address(request.path_params["address"])
        for row in rows:
            if row["IPAddress"] == address:
                return old, rows, row
        raise not_found(f"{old.mac} has no address {request.path_params['address'][:60]}")

    def _find(self, interfaces: Mapping[str, Interface], request: Request) -> Interface:
        given = request.path_params["id"]
        return find_entry(interfaces, names.clean_mac(given), f"no such interface: {given[:60]}")

    def _owner(self, draft: Draft, body: SmdInterface) -> str:
        """Return the component ID of a payload: an existing component, or an xname."""
        given = body.get("ComponentID") or ""
        node = draft.find_node(given) if given else None
        key = node.id if node else names.clean_id(given)
        if key and key not in draft.components and not names.type_of(key):
            raise bad_request(f"{given[:70]!r} is not an xname")
        return key

    def _current(self, mac: str) -> Response:
        inventory = self.world.inventory()
        return JSONResponse(show_interface(inventory, inventory.interfaces[mac]))


def _parse_time(text: str) -> float:
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise bad_request(f"{text[:60]!r} is not a time: write it as 2026-01-31T12:00:00Z") from error
