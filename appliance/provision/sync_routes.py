"""Routes of master files: ``/sms/v1/sync`` for clients, and administration."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from appliance.provision.access import identify, require_role
from appliance.provision.blobs import Blobs
from appliance.provision.files import LARGEST_B, Files
from appliance.provision.payloads import Rollback
from appliance.provision.problem import HttpProblem, bad_request, forbidden
from appliance.provision.sync_tables import read_counter
from appliance.provision.world import World

PATH = r"(/\.?[A-Za-z0-9_+@%-][A-Za-z0-9._+@%-]{0,200}){1,30}"
MAX_WAITING, MAX_WAITING_EACH = 5000, 4
"""Waiting requests of all clients, and of each: its next one may come before the service has noticed that one broke."""
DISCONNECT_CHECK_S = 10
"""Seconds between two checks whether a waiting client is still connected."""
log = logging.getLogger("sms-provd")


class PushNotifier:
    """Wakes all waiting requests at a push. Used only in the server's event loop."""

    def __init__(self, push: int) -> None:
        self.push = push
        self.waiting: Counter[str] = Counter()
        """Waiting requests by client."""
        self.closed = False
        self._event: asyncio.Event | None = None

    def notify(self, push: int) -> None:
        """Wake all waiting requests."""
        self.push = max(self.push, push)
        event, self._event = self._event, None
        if event:
            event.set()

    def close(self) -> None:
        """Wake all waiting requests and let no new ones wait: the service is stopping."""
        self.closed = True
        self.notify(self.push)

    async def wait(self, seconds: float) -> None:
        """Wait for a push, at most ``seconds``."""
        if self._event is None:
            self._event = asyncio.Event()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._event.wait(), seconds)


def routes(world: World) -> list[Route]:
    files = Files(world.store, world.config, Blobs(world.config.state / "files"))
    with world.store.read() as connection:
        notifier = PushNotifier(read_counter(connection, "push"))
    world.on_stop.append(notifier.close)
    return [*_client_routes(files, notifier), *_admin_routes(files, notifier)]


def _client_routes(files: Files, notifier: PushNotifier) -> list[Route]:
    def manifest(request: Request) -> Response:
        caller = _require_client(request)
        push = notifier.push  # read first: a push during the query is reported again
        with files.store.read() as connection:
            client = files.client(connection, caller.role, caller.name)
            view = files.view(connection, client)
            # 0: no file was ever stored. After a loss of the VM's disk, clients must not remove all their files.
            generation = read_counter(connection, "files")
        files.record_poll(client)
        body = {"files": list(view.entries), "held": list(view.held), "push": push, "generation": generation}
        interval = files.config.interval_s
        return JSONResponse({**body, "interval_s": interval} if interval is not None else body)

    def content(request: Request) -> Response:
        caller = _require_client(request)
        with files.store.read() as connection:
            client = files.client(connection, caller.role, caller.name)
            data = files.content(connection, client, request.path_params["sha256"])
        return Response(data, media_type="application/octet-stream")

    async def wait(request: Request) -> Response:
        caller = _require_client(request)
        client = f"{caller.role}/{caller.name}"
        query = request.query_params
        after, seconds = int(query.get("after", "0")), int(query.get("seconds", "30"))
        if notifier.waiting.total() >= MAX_WAITING:
            raise HttpProblem(503, "too many waiting clients", retry_s=30)
        if notifier.waiting[client] >= MAX_WAITING_EACH:
            raise HttpProblem(429, f"{caller.name} has {MAX_WAITING_EACH} waiting requests already", retry_s=30)
        notifier.waiting[client] += 1
        try:
            deadline = asyncio.get_running_loop().time() + seconds
            while notifier.push <= after and not notifier.closed:
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0 or await request.is_disconnected():
                    break
                await notifier.wait(min(left, DISCONNECT_CHECK_S))
        finally:
            notifier.waiting[client] -= 1
            if not notifier.waiting[client]:
                del notifier.waiting[client]
        return JSONResponse({"push": notifier.push})

    def report(request: Request) -> Response:
        caller = _require_client(request)
        with files.store.write() as connection:
            files.report(connection, files.client(connection, caller.role, caller.name), request.state.body)
        return Response(status_code=204)

    return [
        Route("/sms/v1/sync/manifest.json", manifest),
        Route("/sms/v1/sync/files/{sha256}", content),
        Route("/sms/v1/sync/wait", wait),
        Route("/sms/v1/sync/report", report, methods=["POST"]),
    ]


def _admin_routes(files: Files, notifier: PushNotifier) -> list[Route]:
    def listed(_request: Request) -> Response:
        with files.store.read() as connection:
            masters = [master.as_dict() for master in files.masters(connection)]
        return JSONResponse({"files": masters})

    def show(request: Request) -> Response:
        return JSONResponse(files.show(_path(request)))

    def put(request: Request) -> Response:
        result = files.put(_path(request), request.state.body)
        return JSONResponse(result, 200)

    def remove(request: Request) -> Response:
        files.remove(_path(request))
        log.info("files: removed %s", _path(request))
        return Response(status_code=204)

    def roll_back(request: Request) -> Response:
        body: Rollback = request.state.body
        return JSONResponse(files.roll_back(body["path"], body.get("version")))

    def download(request: Request) -> Response:
        data = files.blobs.read(_digest(request))
        content = {"content": base64.b64encode(data).decode()} if data is not None else {}
        return JSONResponse({"there": data is not None, **content})

    async def upload(request: Request) -> Response:
        size = request.headers.get("content-length", "")
        if not re.fullmatch(r"[0-9]{1,12}", size):
            raise HttpProblem(411, "Content-Length is missing")
        if int(size) > LARGEST_B:
            raise HttpProblem(413, f"the maximum file size is {LARGEST_B >> 20} MiB")
        await files.blobs.store(_digest(request), int(size), _blocks(request))
        await run_in_threadpool(files.prune)
        return Response(status_code=204)

    async def push(_request: Request) -> Response:
        number = await run_in_threadpool(files.count_push)
        waiting = notifier.waiting.total()
        notifier.notify(number)
        return JSONResponse({"push": number, "waiting": waiting})

    def reports(_request: Request) -> Response:
        with files.store.read() as connection:
            return JSONResponse({**files.reports(connection), "waiting": notifier.waiting.total(), "now": time.time()})

    return [
        Route("/sms/v1/files", listed),
        Route("/sms/v1/files/{path:path}", show, methods=["GET"]),
        Route("/sms/v1/files/{path:path}", put, methods=["PUT"]),
        Route("/sms/v1/files/{path:path}", remove, methods=["DELETE"]),
        Route("/sms/v1/sync/rollback", roll_back, methods=["POST"]),
        Route("/sms/v1/blobs/{sha256}", download, methods=["GET"]),
        Route("/sms/v1/blobs/{sha256}", upload, methods=["PUT"]),
        Route("/sms/v1/sync/push", push, methods=["POST"]),
        Route("/sms/v1/sync/reports", reports),
    ]


async def _blocks(request: Request) -> AsyncIterator[bytes]:
    try:
        async for block in request.stream():
            yield block
    except ClientDisconnect:
        raise bad_request("the transfer was interrupted") from None


def _require_client(request: Request) -> Any:
    """Return the caller if it authenticated with a certificate over TLS; 401 or 403 otherwise."""
    if not identify(request).secure:
        raise forbidden("master files are available over TLS only", hint="use port 8443 with a certificate")
    return require_role(request, "node", "services")


def _path(request: Request) -> str:
    path = "/" + str(request.path_params["path"])
    if not re.fullmatch(PATH, path) or len(path) > 1000:
        raise bad_request("invalid path of a file on a client", hint="/etc/motd is at /sms/v1/files/etc/motd")
    return path


def _digest(request: Request) -> str:
    digest = str(request.path_params["sha256"])
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise bad_request("invalid SHA-256 digest")
    return digest
