"""``/hsm/v2/State/Components``, ``groups``, ``memberships``: the paths and payloads of OpenCHAMI's SMD."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from appliance.provision import names
from appliance.provision.draft import Draft
from appliance.provision.model import Component, Group, Inventory
from appliance.provision.payloads import SmdComponent
from appliance.provision.problem import bad_request, conflict, find_entry, not_found
from appliance.provision.rules import Finding
from appliance.provision.world import Views, World

COMPONENTS = "/hsm/v2/State/Components"
GROUPS = "/hsm/v2/groups"
PATCHES = ("StateData", "FlagOnly", "Enabled", "SoftwareStatus", "Role", "NID")


def routes(world: World) -> list[Route]:
    views, groups = Components(world), Groups(world)
    patches = [
        *(Route(f"{COMPONENTS}/Bulk{what}", views.patch_many, methods=["PATCH"]) for what in PATCHES),
        *(Route(f"{COMPONENTS}/{{xname}}/{what}", views.patch, methods=["PATCH"]) for what in PATCHES),
    ]
    return [
        Route("/hsm/v2/service/ready", views.ready),
        Route("/hsm/v2/service/liveness", lambda _request: Response(status_code=204)),
        Route(COMPONENTS, views.list_all, methods=["GET"]),
        Route(COMPONENTS, views.post, methods=["POST"]),
        Route(COMPONENTS, views.delete_all, methods=["DELETE"]),
        *patches,
        Route(f"{COMPONENTS}/ByNID/{{nid}}", views.by_nid),
        Route(f"{COMPONENTS}/{{xname}}", views.show, methods=["GET"]),
        Route(f"{COMPONENTS}/{{xname}}", views.put, methods=["PUT"]),
        Route(f"{COMPONENTS}/{{xname}}", views.delete, methods=["DELETE"]),
        Route(GROUPS, groups.list_all, methods=["GET"]),
        Route(GROUPS, groups.post, methods=["POST"]),
        Route(f"{GROUPS}/labels", groups.labels),
        Route(f"{GROUPS}/{{label}}", groups.show, methods=["GET"]),
        Route(f"{GROUPS}/{{label}}", groups.patch, methods=["PATCH"]),
        Route(f"{GROUPS}/{{label}}", groups.delete, methods=["DELETE"]),
        Route(f"{GROUPS}/{{label}}/members", groups.members, methods=["GET"]),
        Route(f"{GROUPS}/{{label}}/members", groups.add_member, methods=["POST"]),
        Route(f"{GROUPS}/{{label}}/members", groups.set_members, methods=["PUT"]),
        Route(f"{GROUPS}/{{label}}/members/{{xname}}", groups.remove_member, methods=["DELETE"]),
        Route("/hsm/v2/memberships", groups.memberships),
        Route("/hsm/v2/memberships/{xname}", groups.membership),
    ]


def ok_response(message: str) -> Response:
    """Return SMD's success response."""
    return JSONResponse({"code": 0, "message": message})


def find(inventory: Inventory, key: str) -> Component:
    """Return a component by its ID; 404 if there is none."""
    found = inventory.components.get(names.clean_id(key)) or inventory.find_node(key)
    if found is None:
        raise not_found(f"no such xname: {key[:70]}")
    return found


def show(one: Component) -> dict[str, str | int]:
    """Return a component in SMD's form, without empty fields."""
    shown = {key: getattr(one, name) for key, name in FIELDS.items()}
    return {key: value for key, value in shown.items() if value is not None and value != ""}


FIELDS = {
    "ID": "id",
    "Type": "type",
    "State": "state",
    "Flag": "flag",
    "Enabled": "enabled",
    "SoftwareStatus": "software",
    "Role": "role",
    "SubRole": "subrole",
    "NID": "nid",
    "NetType": "net_type",
    "Arch": "arch",
    "Class": "klass",
}
"""Keys of SMD's form, and the component's fields."""
FILTERS = ("ID", "Type", "State", "Flag", "Role", "SubRole", "SoftwareStatus", "Arch", "Class")
"""Keys that a query filters by, in lower case."""


def select(inventory: Inventory, query: QueryParams) -> list[Component]:
    """Return the components that match a query; a value that begins with ``!`` excludes."""
    found: Iterable[Component] = sorted(inventory.components.values(), key=lambda one: one.id)
    for key in FILTERS:
        if given := query.getlist(key.lower()):
            wanted = {names.clean_id(each).lower() for each in given if not each.startswith("!")}
            unwanted = {each[1:].lower() for each in given if each.startswith("!")}
            values = [(one, getattr(one, FIELDS[key]).lower()) for one in found]
            found = [one for one, value in values if (not wanted or value in wanted) and value not in unwanted]
    if given := query.getlist("enabled"):
        found = [one for one in found if str(one.enabled).lower() in {each.lower() for each in given}]
    if given := query.getlist("nid"):
        found = [one for one in found if str(one.nid) in given]
    if first := query.get("nid_start"):
        found = [one for one in found if one.nid is not None and one.nid >= int(first)]
    if last := query.get("nid_end"):
        found = [one for one in found if one.nid is not None and one.nid <= int(last)]
    if labels := query.getlist("group"):
        found = [one for one in found if set(labels) & set(inventory.groups_of(one.id) or ["NULL"])]
    return list(found)


ONLY = {
    "stateonly": ("ID", "Type", "State", "Flag"),
    "flagonly": ("ID", "Type", "Flag"),
    "roleonly": ("ID", "Type", "Role", "SubRole"),
    "nidonly": ("ID", "Type", "NID"),
}


class Components(Views):
    """Request handlers below ``State/Components``."""

    def ready(self, _request: Request) -> Response:
        with self.world.store.read():
            return ok_response("HSM is healthy")

    def list_all(self, request: Request) -> Response:
        query = request.query_params
        rows = [show(one) for one in select(self.world.inventory(), query)]
        for flag, kept in ONLY.items():
            if query.get(flag, "").lower() == "true":
                rows = [{key: row[key] for key in kept if key in row} for row in rows]
        return JSONResponse({"Components": rows})

    def show(self, request: Request) -> Response:
        return JSONResponse(show(find(self.world.inventory(), request.path_params["xname"])))

    def by_nid(self, request: Request) -> Response:
        text = request.path_params["nid"]
        if not text.isascii() or not text.isdigit():
            raise bad_request(f"{text[:70]!r} is not a NID")
        return JSONResponse(
            show(find_entry(self.world.inventory().by_nid, int(text[:12]), f"no such NID: {text[:70]}"))
        )

    def post(self, request: Request) -> Response:
        body = request.state.body
        with self.world.edit() as draft:
            for given in body["Components"]:
                put(draft, given["ID"], given, force=bool(body.get("Force")))
        return Response(status_code=204)

    def put(self, request: Request) -> Response:
        key, body = request.path_params["xname"], request.state.body
        given = body["Component"]
        if names.clean_id(given.get("ID") or key) != names.clean_id(key):
            raise bad_request("the IDs in path and body differ")
        with self.world.edit() as draft:
            put(draft, key, given, force=bool(body.get("Force")))
        return Response(status_code=204)

    def delete(self, request: Request) -> Response:
        with self.world.edit() as draft:
            draft.remove_component(find(draft.inventory(), request.path_params["xname"]).id)
        return ok_response("deleted 1 entry")

    def delete_all(self, _request: Request) -> Response:
        with self.world.edit() as draft:
            count = len(draft.components)
            if not count:
                raise not_found("no entries to delete")
            for key in list(draft.components):
                draft.remove_component(key)
        return ok_response(f"deleted {count} entries")

    def patch(self, request: Request) -> Response:
        what = request.url.path.rpartition("/")[2]
        with self.world.edit() as draft:
            one = find(draft.inventory(), request.path_params["xname"])
            draft.put_component(change(draft, one, what, request.state.body))
        return Response(status_code=204)

    def patch_many(self, request: Request) -> Response:
        what, body = request.url.path.rpartition("/Bulk")[2], request.state.body
        common: SmdComponent = body
        entries: list[SmdComponent] = (
            body["Components"] if what == "NID" else [{**common, "ID": key} for key in body["ComponentIDs"]]
        )
        with self.world.edit() as draft:
            before = draft.inventory()
            for given in entries:
                one = draft.components[find(before, given["ID"]).id]
                draft.put_component(change(draft, one, what, given))
        return Response(status_code=204)


def put(draft: Draft, key: str, given: SmdComponent, *, force: bool) -> None:
    """Add a component; with ``force`` also update state and kind of an existing one."""
    there = draft.find_node(key) or draft.components.get(names.clean_id(key))
    if there and not force:
        return
    kind = there.type if there else names.type_of(names.clean_id(key))
    if not kind:
        draft.findings.append(Finding(f"{key[:70]!r} is not an xname"))
        return
    if not there:
        xname, node = names.clean_id(key), kind == "Node"
        there = Component(
            xname,
            type=kind,
            name=xname if node else None,
            xname=xname if node else None,
            role="Compute" if node else "",
            arch="X86" if node else "Other",
        )
        there = change(draft, there, "NID", given) if node and "NID" in given else there
        there = change(draft, there, "Role", given) if given.get("Role") else there
        there = change(draft, there, "Enabled", given) if "Enabled" in given else there
        there = change(draft, there, "SoftwareStatus", given) if "SoftwareStatus" in given else there
    draft.put_component(_state(draft, there, given))


ENUMERATIONS: dict[Literal["State", "Flag", "Arch", "Class", "NetType"], Sequence[str]] = {
    "State": names.STATES,
    "Flag": names.FLAGS,
    "Arch": names.ARCHES,
    "Class": names.CLASSES,
    "NetType": names.NET_TYPES,
}
"""Keys of a payload, and the known values."""


def _state(draft: Draft, one: Component, given: SmdComponent) -> Component:
    """Return the component with state, flag and kind updated from the fields given."""
    for key, known in ENUMERATIONS.items():
        if given.get(key):
            value = names.pick(given[key], known)
            if value is None:
                draft.findings.append(Finding(f"{one.id}: {given[key][:70]!r} is not a valid {key}"))
            else:
                one = replace(one, **{FIELDS[key]: value})  # type: ignore[arg-type]
    return one


def change(draft: Draft, one: Component, what: str, given: SmdComponent) -> Component:
    """Return a component after one of SMD's patches."""
    if what == "StateData":
        return _state(draft, one, {"State": given.get("State", ""), "Flag": given.get("Flag", "OK")})
    if what == "FlagOnly":
        return _state(draft, one, {"Flag": given["Flag"]})
    if what == "Enabled":
        return replace(one, enabled=given["Enabled"])
    if what == "SoftwareStatus":
        return replace(one, software=given["SoftwareStatus"])
    if what == "Role":
        return replace(one, role=given["Role"] or one.role, subrole=given.get("SubRole", ""))
    nid = int(given["NID"])
    return replace(one, nid=nid if nid > 0 else None)


class Groups(Views):
    """Request handlers below ``groups`` and ``memberships``."""

    def list_all(self, request: Request) -> Response:
        query = request.query_params
        found: Iterable[Group] = [group for _, group in sorted(self.world.inventory().groups.items())]
        if labels := query.getlist("group"):
            found = [group for group in found if group.label in labels]
        if tags := query.getlist("tag"):
            found = [group for group in found if set(tags) & set(group.tags)]
        return JSONResponse([_show_group(group) for group in found])

    def labels(self, _request: Request) -> Response:
        return JSONResponse(sorted(self.world.inventory().groups))

    def show(self, request: Request) -> Response:
        return JSONResponse(_show_group(_group(self.world.inventory().groups, request)))

    def post(self, request: Request) -> Response:
        body = request.state.body
        label = body["label"]
        with self.world.edit() as draft:
            if label in draft.groups:
                raise conflict(f"group {label[:70]} exists already")
            draft.put_group(
                Group(
                    label,
                    description=body.get("description", ""),
                    exclusive=body.get("exclusiveGroup", ""),
                    tags=tuple(dict.fromkeys(body.get("tags") or ())),
                    members=_members(draft, (body.get("members") or {}).get("ids") or ()),
                )
            )
        return JSONResponse([{"URI": f"{GROUPS}/{label}"}], 201)

    def patch(self, request: Request) -> Response:
        body = request.state.body
        with self.world.edit() as draft:
            group = _group(draft.groups, request)
            tags = tuple(dict.fromkeys(body["tags"])) if "tags" in body else group.tags
            draft.put_group(replace(group, description=body.get("description", group.description), tags=tags))
        return Response(status_code=204)

    def delete(self, request: Request) -> Response:
        with self.world.edit() as draft:
            del draft.groups[_group(draft.groups, request).label]
        return ok_response("deleted 1 entry")

    def members(self, request: Request) -> Response:
        return JSONResponse({"ids": list(_group(self.world.inventory().groups, request).members)})

    def add_member(self, request: Request) -> Response:
        with self.world.edit() as draft:
            group = _group(draft.groups, request)
            (member,) = _members(draft, [request.state.body["id"]])
            if member in group.members:
                raise conflict(f"{member} is in {group.label} already")
            draft.put_group(replace(group, members=(*group.members, member)))
        return JSONResponse([{"URI": f"{GROUPS}/{group.label}/members/{member}"}], 201)

    def set_members(self, request: Request) -> Response:
        body = request.state.body
        if body.get("label") not in (None, request.path_params["label"]):
            raise bad_request("the labels in path and body differ")
        with self.world.edit() as draft:
            group = _group(draft.groups, request)
            draft.put_group(replace(group, members=_members(draft, body["ids"])))
            members = draft.groups[group.label].members
        return JSONResponse([{"URI": f"{GROUPS}/{group.label}/members/{member}"} for member in members], 201)

    def remove_member(self, request: Request) -> Response:
        with self.world.edit() as draft:
            group = _group(draft.groups, request)
            (member,) = _members(draft, [request.path_params["xname"]])
            if member not in group.members:
                raise not_found(f"{member[:70]} is not in {group.label}")
            draft.put_group(replace(group, members=tuple(each for each in group.members if each != member)))
        return ok_response("deleted 1 entry")

    def memberships(self, request: Request) -> Response:
        inventory = self.world.inventory()
        return JSONResponse([_membership(inventory, one) for one in select(inventory, request.query_params)])

    def membership(self, request: Request) -> Response:
        inventory = self.world.inventory()
        return JSONResponse(_membership(inventory, find(inventory, request.path_params["xname"])))


def _membership(inventory: Inventory, one: Component) -> dict[str, object]:
    return {"id": one.id, "groupLabels": inventory.groups_of(one.id), "partitionName": ""}


def _group(groups: Mapping[str, Group], request: Request) -> Group:
    label = request.path_params["label"]
    return find_entry(groups, label, f"there is no group {label[:70]}")


def _members(draft: Draft, given: Iterable[str]) -> tuple[str, ...]:
    """Return the IDs of components given by ID or name. Missing ones are reported by the rules."""
    found = [draft.find_node(each) for each in given]
    return tuple(dict.fromkeys(one.id if one else names.clean_id(each) for one, each in zip(found, given, strict=True)))


def _show_group(group: Group) -> dict[str, object]:
    shown: dict[str, object] = {"label": group.label, "description": group.description}
    if group.tags:
        shown["tags"] = list(group.tags)
    if group.exclusive:
        shown["exclusiveGroup"] = group.exclusive
    return {**shown, "members": {"ids": list(group.members)}}
