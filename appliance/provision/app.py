"""The application: routes of all modules behind one gate, which asks the contract."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from appliance.errors import SmsError
from appliance.provision import contract
from appliance.provision.access import need
from appliance.provision.contract import Contract, Operation
from appliance.provision.problem import HttpProblem, answer, not_found
from appliance.provision.world import World

log = logging.getLogger("sms-provd")

MODULES = ["hsm", "hsm_inventory", "bss", "bootscript", "cloudinit", "sms_routes", "enrol", "sync_routes"]
MODULES += ["image_routes"]
"""Modules of this package with ``routes(world) -> list[Route]``; the paths of each are in openapi.yaml."""


def make_app(world: World, *, trust: bool = False) -> Starlette:
    """The application of a world. ``trust``: nginx's headers say who asks; else everybody is nobody."""
    routes = [route for name in MODULES for route in module_routes(name, world)]
    app = Starlette(routes=routes, exception_handlers={HttpProblem: _tell, SmsError: _tell_sms, Exception: _tell_any})
    app.state.trust, app.state.world = trust, world
    app.add_middleware(Gate, contract=world.contract)
    return app


def module_routes(name: str, world: World) -> list[BaseRoute]:
    """The routes of one module of this package."""
    return list(importlib.import_module(f"appliance.provision.{name}").routes(world))


def _tell(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpProblem)
    return answer(error)


def _tell_sms(_request: Request, error: Exception) -> Response:
    assert isinstance(error, SmsError)
    return answer(HttpProblem(409 if error.status == 3 else 400, error.message, hint=error.hint))


def _tell_any(request: Request, error: Exception) -> Response:
    log.error("%s %s: %s", request.method, request.url.path, type(error).__name__)
    return answer(
        HttpProblem(500, "the service has a fault; its log has more", hint="sms vm exec journalctl -u sms-provd")
    )


class Gate:
    """Before any route: is there such an operation, may this one ask it, is its body what the contract says?

    The parsed body is then at ``request.state.body``; one that is not JSON is left to be read by the route.
    """

    def __init__(self, app: ASGIApp, contract: Contract) -> None:
        self.app, self.contract = app, contract

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            operation = self.contract.find(scope["method"], scope["path"])
            if operation is None:
                raise not_found(f"there is no {scope['path'][:200]}")
            need(Request(scope), *operation.roles)
            contract.check_query(operation, scope["query_string"].decode("latin-1"))
            if operation.json:
                data = await _read(scope, receive, operation)
                scope.setdefault("state", {})["body"] = contract.parse_body(operation, data)
                receive = _again(data, receive)
        except HttpProblem as problem:
            await answer(problem)(scope, receive, send)
            return
        await self.app(scope, receive, send)


async def _read(scope: Scope, receive: Receive, operation: Operation) -> bytes:
    """The whole body; 413 for one that is too large, before it is in memory."""
    found, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise HttpProblem(400, "the request ended early")
        size += len(message.get("body", b""))
        if size > operation.largest_b:
            raise HttpProblem(413, f"the body has more than {operation.largest_b} bytes")
        found.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(found)


def _again(data: bytes, receive: Receive) -> Receive:
    """A channel that says the body once more, for a route that reads it itself."""
    said: list[Any] = []

    async def again() -> Message:
        if said:
            return await receive()
        said.append(True)
        return {"type": "http.request", "body": data, "more_body": False}

    return again
