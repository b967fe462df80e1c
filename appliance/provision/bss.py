"""``/boot/v1/bootparameters``: kernels, initrds and parameters of hosts, in the form of OpenCHAMI's BSS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from appliance.provision import contract, names
from appliance.provision.access import identify
from appliance.provision.draft import Draft
from appliance.provision.model import Boot, Component, Inventory
from appliance.provision.payloads import BootParameters
from appliance.provision.problem import bad_request, find_entry, not_found
from appliance.provision.world import Views, World

PARAMETERS = "/boot/v1/bootparameters"
SCOPES: dict[Literal["hosts", "macs", "nids", "groups"], str] = {
    "hosts": "host",
    "macs": "mac",
    "nids": "nid",
    "groups": "group",
}
"""Payload key, and the scope under which its values are stored."""
DEFAULT = ("host", "Default")
IMAGES: tuple[Literal["kernel", "initrd"], ...] = ("kernel", "initrd")
"""Payload keys that are also scopes of their own."""


def routes(world: World) -> list[Route]:
    views = Parameters(world)
    return [
        Route(PARAMETERS, views.show, methods=["GET"]),
        Route(PARAMETERS, views.post, methods=["POST"]),
        Route(PARAMETERS, views.put, methods=["PUT"]),
        Route(PARAMETERS, views.patch, methods=["PATCH"]),
        Route(PARAMETERS, views.delete, methods=["DELETE"]),
        Route("/boot/v1/service/status", lambda _request: JSONResponse({"bss-status": "running"})),
    ]


def keys_of(inventory: Inventory, node: Component) -> Iterator[tuple[str, str]]:
    """Yield the keys of a node's boot parameters in order of precedence: node, groups, role, default."""
    yield "host", node.id
    if node.name and node.name != node.id:
        yield "host", node.name
    for each in inventory.interfaces_of(node.id):
        yield "mac", each.mac
    if node.nid is not None:
        yield "nid", str(node.nid)
    for label in inventory.groups_of(node.id):
        yield "group", label
        yield "host", label
    yield "host", node.role
    yield DEFAULT


def read_keys(body: BootParameters) -> list[tuple[str, str]]:
    """Return the keys of a payload: its hosts, or without any the kernel or initrd. 400 for an invalid MAC address."""
    found = []
    for name, scope in SCOPES.items():
        for each in body.get(name) or ():
            key = names.clean_mac(str(each)) if scope == "mac" else names.clean_id(str(each))
            if not key:
                raise bad_request(
                    f"{str(each)[:60]!r} is not a MAC address" if scope == "mac" else "a host has no name"
                )
            found.append((scope, key))
    if not found:
        found = [(image, body[image]) for image in IMAGES if body.get(image)]
    if not found:
        raise bad_request("no target given: hosts, macs, nids, groups, or a kernel or initrd alone")
    return found


def show(boot: Boot, *, include_private: bool) -> dict[str, object]:
    """Return boot parameters in BSS's form, without empty fields.

    Without ``include_private`` only cloud-init data marked ``public`` is included.
    """
    shown: dict[str, object] = {"params": boot.params, "kernel": boot.kernel, "initrd": boot.initrd}
    if include_private or boot.cloud_init.get("public") is True:
        shown["cloud-init"] = boot.cloud_init
    keys: dict[str, object] = {
        name: [int(boot.key) if scope == "nid" else boot.key] for name, scope in SCOPES.items() if scope == boot.scope
    }
    return {**keys, **{name: value for name, value in shown.items() if value}}


class Parameters(Views):
    """Request handlers of ``bootparameters``."""

    async def show(self, request: Request) -> Response:
        query = request.query_params
        requested: BootParameters = {
            "hosts": query.getlist("name"),
            "macs": query.getlist("mac"),
            "nids": [each for each in query.getlist("nid") if each.isascii() and each.isdigit()],
        }
        # BSS also accepts the hosts in a body, and its documentation uses that form.
        operation = self.world.contract.operations["DELETE", PARAMETERS]
        data = await request.body() if not any(requested.values()) else b""
        if len(data) > operation.largest_b:
            raise bad_request("the body is too large")
        body = contract.parse_body(operation, data) if data else None
        private = identify(request).role == "admin"
        found = await run_in_threadpool(self._find, body if body else requested)
        return JSONResponse([show(each, include_private=private) for each in found])

    def _find(self, requested: BootParameters) -> list[Boot]:
        boot = self.world.inventory().boot
        if not any(requested.values()):
            return [each for _, each in sorted(boot.items())]
        found = [boot[key] for key in read_keys(requested) if key in boot]
        if not found:
            raise not_found("there are no boot parameters for this query")
        return found

    def post(self, request: Request) -> Response:
        self._put(request.state.body)
        return Response(status_code=201)

    def put(self, request: Request) -> Response:
        self._put(request.state.body)
        return Response(status_code=200)

    def _put(self, body: BootParameters) -> None:
        keys = read_keys(body)
        with self.world.edit() as draft:
            for scope, key in keys:
                draft.put_boot(_update(Boot(scope, key), body))

    def patch(self, request: Request) -> Response:
        body = request.state.body
        with self.world.edit() as draft:
            for key in read_keys(body):
                draft.put_boot(_update(_existing(draft, key), body))
        return Response(status_code=200)

    def delete(self, request: Request) -> Response:
        body = request.state.body
        with self.world.edit() as draft:
            for key in read_keys(body):
                if key[0] in ("kernel", "initrd"):
                    _remove_image(draft, *key)
                else:
                    _existing(draft, key)
                    del draft.boot[key]
        return Response(status_code=200)


def _existing(draft: Draft, key: tuple[str, str]) -> Boot:
    return find_entry(draft.boot, key, f"there are no boot parameters of {key[0]} {key[1][:70]}")


def _update(boot: Boot, body: BootParameters) -> Boot:
    return replace(
        boot,
        kernel=body.get("kernel", boot.kernel),
        initrd=body.get("initrd", boot.initrd),
        params=body.get("params", boot.params),
        cloud_init={**boot.cloud_init, **(body.get("cloud-init") or {})},
    )


def _remove_image(draft: Draft, what: str, path: str) -> None:
    """Remove a kernel or initrd wherever it is referenced; 404 if it is not."""
    found = [
        each for each in draft.boot.values() if getattr(each, what) == path or (each.scope, each.key) == (what, path)
    ]
    if not found:
        raise not_found(f"no boot parameters name {path[:200]}")
    for each in found:
        if (each.scope, each.key) == (what, path):
            del draft.boot[what, path]
        else:
            draft.put_boot(replace(each, kernel="") if what == "kernel" else replace(each, initrd=""))
