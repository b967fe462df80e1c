"""``/cloud-init/...``: what cloud-init asks for, per node, group or for all.

It may hold what is not everybody's, so it is given to the node alone, by its certificate, which its root has. The admin
may look at any node's. Without a certificate every user of a node can ask from its address: that gives what the admin
marked ``public``, when the kernel knows one of the node's MAC addresses at that address, and nothing else.
"""

from __future__ import annotations

from typing import Any

import yaml
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from appliance.provision import bss
from appliance.provision.access import who
from appliance.provision.model import Component, Inventory
from appliance.provision.peers import is_node
from appliance.provision.problem import bad_request, not_found
from appliance.provision.world import World

FRESH = {"Cache-Control": "no-store"}


def routes(world: World) -> list[Route]:
    views = CloudInit(world)
    found = []
    for top in ("/cloud-init", ""):
        found += [
            Route(f"{top}/meta-data", views.meta, methods=["GET"]),
            Route(f"{top}/user-data", views.user, methods=["GET"]),
            Route(f"{top}/vendor-data", views.vendor, methods=["GET"]),
        ]
    return found


class CloudInit:
    """The three documents of a node."""

    def __init__(self, world: World) -> None:
        self.world = world

    def _node(self, inventory: Inventory, request: Request) -> Component:
        """The node that asks, or whom the admin asks for; 404 for anybody else, who learns no more than that."""
        caller, name = who(request), request.query_params.get("name")
        if caller.role == "admin":
            if not name:
                raise bad_request("say whose: name=")
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

    def _asked(self, request: Request, what: str) -> tuple[Component, dict[str, Any] | str]:
        """The node, and what it is to have of a document."""
        inventory = self.world.inventory()
        node = self._node(inventory, request)
        return node, merged(inventory, node, what, all_of_it=who(request).role in ("admin", "node"))

    def meta(self, request: Request) -> Response:
        node, given = self._asked(request, "meta-data")
        own = {
            "instance-id": node.id,
            "local-hostname": node.name or node.id,
            "cluster-name": self.world.config.cluster,
        }
        return _yaml({**own, **given} if isinstance(given, dict) else own)

    def user(self, request: Request) -> Response:
        return _cloud_config(self._asked(request, "user-data")[1])

    def vendor(self, request: Request) -> Response:
        return _cloud_config(self._asked(request, "vendor-data")[1])


def merged(inventory: Inventory, node: Component, what: str, *, all_of_it: bool) -> dict[str, Any] | str:
    """A document of a node: the keys of its own, then of its groups, then of all. One that is text stands as it is.

    Without ``all_of_it`` only from entries that are marked ``public``.
    """
    found: dict[str, Any] = {}
    for key in bss.keys_of(inventory, node):
        entry = inventory.boot[key].cloud_init if key in inventory.boot else {}
        given = entry.get(what) if all_of_it or entry.get("public") is True else None
        if isinstance(given, str) and not found:
            return given
        if isinstance(given, dict):
            found = {**given, **found}
    return found


def _cloud_config(given: dict[str, Any] | str) -> Response:
    if isinstance(given, str):
        return PlainTextResponse(given, headers=FRESH)
    return _yaml(given, head="#cloud-config\n")


def _yaml(value: dict[str, Any], *, head: str = "") -> Response:
    text = yaml.safe_dump(value, sort_keys=True, allow_unicode=True) if value else ""
    return PlainTextResponse(head + text, headers=FRESH, media_type="text/yaml" if not head else "text/cloud-config")
