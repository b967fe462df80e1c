"""Routes of master files: what clients pull below ``/sms/v1/sync``, and what the administrator does with them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from appliance.provision.access import need, who
from appliance.provision.blobs import Blobs
from appliance.provision.files import LARGEST_B, Files
from appliance.provision.problem import HttpProblem, bad_request, forbidden
from appliance.provision.world import World

PATH = r"(/\.?[A-Za-z0-9_+@%-][A-Za-z0-9._+@%-]{0,200}){1,30}"
MOST_WAITING = 5000
LOOK_S = 10
"""Seconds between two looks whether a waiting client is still there."""
log = logging.getLogger("sms-provd")


class Bell:
    """Rung at a push: all that wait hear it at once. It is rung and heard in the server's one event loop."""

    def __init__(self, push: int) -> None:
        self.push = push
        self.waiting = 0
        self.closed = False
        self._event: asyncio.Event | None = None

    def ring(self, push: int) -> None:
        """Tell everybody of a push."""
        self.push = max(self.push, push)
        event, self._event = self._event, None
        if event:
            event.set()

    def close(self) -> None:
        """Let everybody go, and keep nobody from now on: the service ends."""
        self.closed = True
        self.ring(self.push)

    async def hear(self, seconds: float) -> None:
        """Wait until it is rung, or the time is over."""
        if self._event is None:
            self._event = asyncio.Event()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._event.wait(), seconds)


def routes(world: World) -> list[Route]:
    files = Files(world.store, world.config, Blobs(world.config.state / "files"))
    bell = Bell(files.last_push())
    world.parts["files"], world.parts["bell"] = files, bell
    return [*_client_routes(files, bell), *_admin_routes(files, bell)]


def _client_routes(files: Files, bell: Bell) -> list[Route]:
    def manifest(request: Request) -> Response:
        caller = _certified(request)
        push = bell.push  # before it is looked: what comes meanwhile is heard of again
        with files.store.read() as connection:
            client = files.client(connection, caller.role, caller.name)
            view = files.view(connection, client)
            # 0: there never was a file. A VM that has lost its disk must not have clients remove all that they have.
            generation = files.generation(connection)
        files.note_look(client)
        told = {"files": list(view.entries), "held": list(view.held), "push": push, "generation": generation}
        interval = (files.config.raw or {}).get("interval_s")
        return JSONResponse({**told, "interval_s": interval} if isinstance(interval, int) else told)

    def content(request: Request) -> Response:
        caller = _certified(request)
        with files.store.read() as connection:
            client = files.client(connection, caller.role, caller.name)
            data = files.content(connection, client, request.path_params["sha256"])
        return Response(data, media_type="application/octet-stream")

    async def wait(request: Request) -> Response:
        _certified(request)
        after, seconds = _number(request, "after", 0), _number(request, "seconds", 30)
        if bell.waiting >= MOST_WAITING:
            raise HttpProblem(503, "too many wait already", retry_s=30)
        bell.waiting += 1
        try:
            ends = asyncio.get_running_loop().time() + seconds
            while bell.push <= after and not bell.closed:
                left = ends - asyncio.get_running_loop().time()
                if left <= 0 or await request.is_disconnected():
                    break
                await bell.hear(min(left, LOOK_S))
        finally:
            bell.waiting -= 1
        return JSONResponse({"push": bell.push})

    def report(request: Request) -> Response:
        caller = _certified(request)
        with files.store.write() as connection:
            files.report(connection, files.client(connection, caller.role, caller.name), request.state.body)
        return Response(status_code=204)

    return [
        Route("/sms/v1/sync/manifest.json", manifest),
        Route("/sms/v1/sync/files/{sha256}", content),
        Route("/sms/v1/sync/wait", wait),
        Route("/sms/v1/sync/report", report, methods=["POST"]),
    ]


def _admin_routes(files: Files, bell: Bell) -> list[Route]:
    def listed(_request: Request) -> Response:
        with files.store.read() as connection:
            masters = [master.as_dict() for master in files.masters(connection)]
        return JSONResponse({"files": masters})

    def show(request: Request) -> Response:
        return JSONResponse(files.show(_path(request)))

    def put(request: Request) -> Response:
        done = files.put(_path(request), request.state.body)
        return JSONResponse(done, 200)

    def remove(request: Request) -> Response:
        files.remove(_path(request))
        log.info("files: %s is removed", _path(request))
        return Response(status_code=204)

    def roll_back(request: Request) -> Response:
        body: dict[str, Any] = request.state.body
        return JSONResponse(files.roll_back(body["path"], body.get("version")))

    def give(request: Request) -> Response:
        data = files.blobs.read(_digest(request))
        content = {"content": base64.b64encode(data).decode()} if data is not None else {}
        return JSONResponse({"there": data is not None, **content})

    async def take(request: Request) -> Response:
        size = request.headers.get("content-length", "")
        if not re.fullmatch(r"[0-9]{1,12}", size):
            raise HttpProblem(411, "Content-Length is missing")
        if int(size) > LARGEST_B:
            raise HttpProblem(413, f"a file has at most {LARGEST_B >> 20} MiB")
        await files.blobs.take(_digest(request), int(size), _blocks(request))
        await run_in_threadpool(files.prune)
        return Response(status_code=204)

    async def push(_request: Request) -> Response:
        number = await run_in_threadpool(files.count_push)
        waiting = bell.waiting
        bell.ring(number)
        return JSONResponse({"push": number, "waiting": waiting})

    def reports(_request: Request) -> Response:
        with files.store.read() as connection:
            return JSONResponse({**files.reports(connection), "waiting": bell.waiting, "now": time.time()})

    return [
        Route("/sms/v1/files", listed),
        Route("/sms/v1/files/{path:path}", show, methods=["GET"]),
        Route("/sms/v1/files/{path:path}", put, methods=["PUT"]),
        Route("/sms/v1/files/{path:path}", remove, methods=["DELETE"]),
        Route("/sms/v1/sync/rollback", roll_back, methods=["POST"]),
        Route("/sms/v1/blobs/{sha256}", give, methods=["GET"]),
        Route("/sms/v1/blobs/{sha256}", take, methods=["PUT"]),
        Route("/sms/v1/sync/push", push, methods=["POST"]),
        Route("/sms/v1/sync/reports", reports),
    ]


async def _blocks(request: Request) -> AsyncIterator[bytes]:
    try:
        async for block in request.stream():
            yield block
    except ClientDisconnect:
        raise bad_request("the file was cut off on its way") from None


def _certified(request: Request) -> Any:
    """A client that has shown its certificate over TLS; no plain HTTP GET reads a master file."""
    if not who(request).secure:
        raise forbidden("master files are given over TLS only", hint="ask at port 8443, with a certificate")
    return need(request, "node", "services")


def _path(request: Request) -> str:
    path = "/" + str(request.path_params["path"])
    if not re.fullmatch(PATH, path) or len(path) > 1000:
        raise bad_request("this is no path of a file on a client", hint="/etc/motd is at /sms/v1/files/etc/motd")
    return path


def _digest(request: Request) -> str:
    digest = str(request.path_params["sha256"])
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise bad_request("this is no SHA-256 digest")
    return digest


def _number(request: Request, name: str, usual: int) -> int:
    text = request.query_params.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else usual
