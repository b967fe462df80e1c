"""The application: the routes of all modules behind middleware that checks requests against the contract."""

from __future__ import annotations

import asyncio
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
from appliance.provision.access import authenticate, require_role
from appliance.provision.contract import Operation
from appliance.provision.problem import HttpProblem, answer, not_found
from appliance.provision.world import World

log = logging.getLogger("sms-provd")

MODULES = ["hsm", "hsm_inventory", "bss", "bootscript", "cloudinit", "sms_routes", "enrol", "sync_routes"]
MODULES += ["image_routes"]
"""Modules of this package with ``routes(world) -> list[Route]``; the paths of each are in openapi.yaml."""
BODY_S, SLOWEST_B = 10, 1 << 18
"""A body must be complete after this many seconds, and one more for each that many bytes of its maximum size."""


def make_app(world: World, *, trust: bool = False) -> Starlette:
    """Return the application. ``trust``: take the caller from nginx's headers; otherwise every caller is "nobody"."""
    routes = [route for name in MODULES for route in module_routes(name, world)]
    app = Starlette(
        routes=routes,
        exception_handlers={HttpProblem: _handle_problem, SmsError: _handle_sms_error, Exception: _handle_unexpected},
    )
    app.state.trust, app.state.world = trust, world
    app.add_middleware(ContractMiddleware, world=world)
    return app


def module_routes(name: str, world: World) -> list[BaseRoute]:
    """Return the routes of one module of this package."""
    return list(importlib.import_module(f"appliance.provision.{name}").routes(world))


def _handle_problem(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpProblem)
    return answer(error)


def _handle_sms_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, SmsError)
    return answer(HttpProblem(409 if error.status == 3 else 400, error.message, hint=error.hint))


def _handle_unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s: %s", request.method, request.url.path, type(error).__name__)
    return answer(HttpProblem(500, "internal error; see the service's log", hint="sms vm exec journalctl -u sms-provd"))


class ContractMiddleware:
    """Check operation, caller, query and body of each request before its route runs.

    The caller is stored in ``request.state.caller``, a parsed JSON body in ``request.state.body``; other bodies are
    left to the route.
    """

    def __init__(self, app: ASGIApp, world: World) -> None:
        self.app, self.world = app, world

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            operation = self.world.contract.find(scope["method"], scope["path"])
            if operation is None:
                raise not_found(f"there is no {scope['path'][:200]}")
            request = Request(scope)
            scope.setdefault("state", {})["caller"] = await authenticate(request, self.world)
            require_role(request, *operation.roles)
            contract.check_query(operation, scope["query_string"].decode("latin-1"))
            if operation.json:
                data = await _read(scope, receive, operation)
                scope["state"]["body"] = contract.parse_body(operation, data)
                receive = _replay(data, receive)
        except HttpProblem as problem:
            await answer(problem)(scope, receive, send)
            return
        await self.app(scope, receive, send)


async def _read(scope: Scope, receive: Receive, operation: Operation) -> bytes:
    """Return the whole body; 413 as soon as it exceeds the limit, 408 if it takes too long."""
    try:
        return await asyncio.wait_for(_read_all(receive, operation), BODY_S + operation.largest_b / SLOWEST_B)
    except TimeoutError:
        raise HttpProblem(408, "the body was not received in time") from None


async def _read_all(receive: Receive, operation: Operation) -> bytes:
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


def _replay(data: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that delivers the body again, for a route that reads it itself."""
    sent: list[Any] = []

    async def again() -> Message:
        if sent:
            return await receive()
        sent.append(True)
        return {"type": "http.request", "body": data, "more_body": False}

    return again
