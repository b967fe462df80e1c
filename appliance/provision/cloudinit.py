"""``/cloud-init/...``: cloud-init data per node, per group and for all nodes.

The data may be confidential, so only the node gets it, with its certificate, which is readable only by root. The admin
may read that of any node. Requests without a certificate may come from any user of a node: they get only entries marked
``public``, and only if the ARP table has one of the node's MAC addresses at the peer's address.
"""

from __future__ import annotations

from collections.abc import Mapping

import yaml
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from appliance.provision import bss
from appliance.provision.access import identify
from appliance.provision.bootscript import FRESH
from appliance.provision.model import Component, Inventory
from appliance.provision.peers import is_node
from appliance.provision.problem import bad_request, not_found
from appliance.provision.world import Views, World


def routes(world: World) -> list[Route]:
    views = CloudInit(world)
    documents = {"meta-data": views.meta, "user-data": views.user, "vendor-data": views.vendor}
    tops = ("/cloud-init", "")
    return [Route(f"{top}/{name}", view, methods=["GET"]) for top in tops for name, view in documents.items()]


class CloudInit(Views):
    """Request handlers of the three documents of a node."""

    def _node(self, inventory: Inventory, request: Request) -> Component:
        """Return the calling node, or the node that the admin names; 404 for all others, without details."""
        caller, name = identify(request), request.query_params.get("name")
        if caller.role == "admin":
            if not name:
                raise bad_request("a query parameter is required: name=")
            found = inventory.find_node(name)
        elif caller.role == "node":
            found = inventory.find_node(caller.name)
        else:
            found = inventory.by_address.get(caller.address)
            if found and not is_node(inventory, found, caller.address, self.world.config.neighbours):
                found = None
        if found is None:
            raise not_found("there is nothing here for this address")
        return found

    def _document(self, request: Request, what: str) -> tuple[Component, Mapping[str, object] | str]:
        """Return the node and its content of a document."""
        inventory = self.world.inventory()
        node = self._node(inventory, request)
        return node, merge(inventory, node, what, include_private=identify(request).role in ("admin", "node"))

    def meta(self, request: Request) -> Response:
        node, given = self._document(request, "meta-data")
        own = {
            "instance-id": node.id,
            "local-hostname": node.name or node.id,
            "cluster-name": self.world.config.cluster,
        }
        return _yaml(own if isinstance(given, str) else {**own, **given})

    def user(self, request: Request) -> Response:
        return _cloud_config(self._document(request, "user-data")[1])

    def vendor(self, request: Request) -> Response:
        return _cloud_config(self._document(request, "vendor-data")[1])


def merge(inventory: Inventory, node: Component, what: str, *, include_private: bool) -> Mapping[str, object] | str:
    """Merge a document of a node: its own keys take precedence over its groups', then the default's.

    A document that is text is returned unchanged. Without ``include_private`` only entries marked ``public`` count.
    """
    found: dict[str, object] = {}
    for key in bss.keys_of(inventory, node):
        entry = inventory.boot[key].cloud_init if key in inventory.boot else {}
        given = entry.get(what) if include_private or entry.get("public") is True else None
        if isinstance(given, str) and not found:
            return given
        if isinstance(given, dict):
            found = {**given, **found}
    return found


def _cloud_config(given: Mapping[str, object] | str) -> Response:
    if isinstance(given, str):
        return PlainTextResponse(given, headers=FRESH)
    return _yaml(given, head="#cloud-config\n")


def _yaml(value: Mapping[str, object], *, head: str = "") -> Response:
    text = yaml.safe_dump(value, sort_keys=True, allow_unicode=True) if value else ""
    return PlainTextResponse(head + text, headers=FRESH, media_type="text/yaml" if not head else "text/cloud-config")
