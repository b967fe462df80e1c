"""``/sms/v1/nodes``, ``export``, ``import``, ``unknown``, ``health``: the inventory in the form that ``sms`` uses."""

from __future__ import annotations

import platform
import shutil
import time

import sqlalchemy
import starlette
import yaml
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from appliance.provision import nodes
from appliance.provision.model import Component, Inventory
from appliance.provision.payloads import Node
from appliance.provision.problem import bad_request, not_found
from appliance.provision.world import World
from appliance.shared.files import free_bytes

RECENT_S = 3600
"""For how many seconds health reports a node whose certificate was refused."""
FULL_MB = 64
"""Free space of the state disk in MiB below which the service reports itself unhealthy."""


def routes(world: World) -> list[Route]:
    views = Views(world)
    return [
        Route("/sms/v1/nodes", views.list_nodes),
        Route("/sms/v1/nodes/{name}", views.show, methods=["GET"]),
        Route("/sms/v1/nodes/{name}", views.put, methods=["PUT"]),
        Route("/sms/v1/nodes/{name}", views.patch, methods=["PATCH"]),
        Route("/sms/v1/nodes/{name}", views.delete, methods=["DELETE"]),
        Route("/sms/v1/unknown", views.unknown),
        Route("/sms/v1/export", views.export),
        Route("/sms/v1/import", views.import_all, methods=["POST"]),
        Route("/sms/v1/health", views.health),
    ]


class Views:
    """Request handlers. They run in threads because the database may block."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.started = time.time()

    def list_nodes(self, request: Request) -> Response:
        inventory = self.world.inventory()
        query = request.query_params
        found = inventory.nodes()
        if group := query.get("group"):
            found = [each for each in found if group in inventory.groups_of(each.id)]
        if role := query.get("role"):
            found = [each for each in found if each.role.lower() == role.lower()]
        if state := query.get("state"):
            found = [each for each in found if each.state.lower() == state.lower()]
        return JSONResponse({"nodes": [nodes.show_node(inventory, each) for each in found]})

    def show(self, request: Request) -> Response:
        inventory = self.world.inventory()
        return JSONResponse(nodes.show_node(inventory, _node(inventory, request.path_params["name"])))

    def put(self, request: Request) -> Response:
        name, given = request.path_params["name"], request.state.body
        if given.get("name") not in (None, name):
            raise bad_request(f"the names in path and body differ: {name[:70]}, {given['name'][:70]}")
        with self.world.edit() as draft:
            known = draft.find_node(name) is not None
            nodes.put_node(draft, name, given)
        return JSONResponse(self._current(name), 200 if known else 201)

    def patch(self, request: Request) -> Response:
        name, given = request.path_params["name"], request.state.body
        with self.world.edit() as draft:
            nodes.patch_node(draft, _node(draft.inventory(), name), given)
        return JSONResponse(self._current(given.get("name") or name))

    def delete(self, request: Request) -> Response:
        with self.world.edit() as draft:
            draft.remove_component(_node(draft.inventory(), request.path_params["name"]).id)
        return Response(status_code=204)

    def _current(self, name: str) -> Node:
        inventory = self.world.inventory()
        return nodes.show_node(inventory, _node(inventory, name))

    def unknown(self, _request: Request) -> Response:
        return JSONResponse({"unknown": self.world.unknown_machines.rows()})

    def export(self, request: Request) -> Response:
        document = nodes.export(self.world.inventory())
        if request.query_params.get("format") == "yaml":
            text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)
            return Response(text, media_type="application/yaml")
        return JSONResponse(document)

    def import_all(self, request: Request) -> Response:
        with self.world.edit() as draft:
            count = nodes.import_document(
                draft, request.state.body, replace_all=request.query_params.get("mode") == "replace"
            )
        return JSONResponse({"nodes": count})

    def health(self, _request: Request) -> Response:
        world = self.world
        # Query the database itself: the inventory in memory does not show whether it works.
        with world.store.read() as connection:
            connection.execute(sqlalchemy.text("SELECT COUNT(*) FROM components")).scalar()
        inventory = world.inventory()
        disk = world.config.state if world.config.state.exists() else "/"
        free_mb = free_bytes(disk) >> 20
        recent = [each for each in world.certificates.refused() if each["last"] > time.time() - RECENT_S]
        body = {
            "healthy": free_mb >= FULL_MB,
            "cluster": world.config.cluster,
            "nodes": len(inventory.nodes()),
            "groups": len(inventory.groups),
            "endpoints": len(inventory.endpoints),
            "unknown": len(world.unknown_machines.rows()),
            "refused": sorted({each["node"] for each in recent})[:100],
            "database": {"kind": world.store.kind, "version": world.store.version},
            "disk": {"free_mb": free_mb, "total_mb": shutil.disk_usage(disk).total >> 20},
            "up_s": round(time.time() - self.started),
            "versions": {
                "python": platform.python_version(),
                "starlette": starlette.__version__,
                "sqlalchemy": sqlalchemy.__version__,
            },
        }
        if not body["healthy"]:
            body["problem"] = f"{world.config.state} has {free_mb} MiB left"
        return JSONResponse(body)


def _node(inventory: Inventory, name: str) -> Component:
    found = inventory.find_node(name)
    if found is None:
        raise not_found(f"there is no node {name[:70]}", hint="sms node list")
    return found
