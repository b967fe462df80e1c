"""``/sms/v1/images``: upload, activate, roll back and remove node images."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from appliance.provision.images import KEEP, Image, Receiver, free_space
from appliance.provision.payloads import NodeImage
from appliance.provision.problem import bad_request
from appliance.provision.world import Views, World

BLOCK = 1 << 20
BASE = "/sms/v1/images"


def routes(world: World) -> list[Route]:
    views = ImageViews(world)
    one = BASE + "/{profile}/{digest}"
    return [
        Route(BASE, views.all, methods=["GET"]),
        Route(BASE + "/{profile}/rollback", views.rollback, methods=["POST"]),
        Route(one, views.arrived, methods=["GET"]),
        Route(one, views.finish, methods=["POST"]),
        Route(one, views.remove, methods=["DELETE"]),
        Route(one + "/{file}", views.receive, methods=["PUT"]),
    ]


class ImageViews(Views):
    """Request handlers."""

    def all(self, _request: Request) -> Response:
        rows = [_row(*each) for each in self.world.images.all()]
        return JSONResponse({"images": rows, "free_bytes": free_space(self.world.images.folder)})

    def arrived(self, request: Request) -> Response:
        profile, digest = _named(request)
        here = self.world.images.received(profile, digest)
        return JSONResponse({"whole": self.world.images.has(profile, digest), "arrived": here})

    async def receive(self, request: Request) -> Response:
        """Receive one file; an interrupted upload is kept, and the client resumes it."""
        profile, digest = _named(request)
        length = request.headers.get("content-length", "")
        size = int(length) if length.isascii() and length.isdigit() and len(length) < 18 else None
        offset = int(request.query_params.get("offset", "0"))
        receiving = self.world.images.receiving(profile, digest, request.path_params["file"], offset, size)
        receiver = await run_in_threadpool(receiving.__enter__)
        error: BaseException | None = None
        try:
            received = await _copy(request, receiver)
        except BaseException as caught:
            error = caught
        if error is not None:
            # The context manager converts ENOSPC to a response.
            await run_in_threadpool(receiving.__exit__, type(error), error, error.__traceback__)
            if isinstance(error, ClientDisconnect):
                raise bad_request("the upload was interrupted; received data is kept") from None
            raise error
        await run_in_threadpool(receiving.__exit__, None, None, None)
        return JSONResponse({"bytes": offset + received})

    def finish(self, request: Request) -> Response:
        profile, digest = _named(request)
        keep = (request.state.body or {}).get("keep", KEEP)
        removed = self.world.images.finish(profile, digest, keep=keep, used=self._used())
        self.world.touch()
        return JSONResponse({"current": digest, "removed": removed})

    def rollback(self, request: Request) -> Response:
        current, previous = self.world.images.rollback(request.path_params["profile"])
        self.world.touch()
        return JSONResponse({"current": current, "previous": previous})

    def remove(self, request: Request) -> Response:
        self.world.images.remove(*_named(request), used=self._used())
        self.world.touch()
        return Response(status_code=204)

    def _used(self) -> frozenset[str]:
        """Return the digests in the paths of boot parameters."""
        texts = [text for boot in self.world.inventory().boot.values() for text in (boot.kernel, boot.initrd)]
        return frozenset(part for text in texts for part in text.split("/") if len(part) == 64)


async def _copy(request: Request, receiver: Receiver) -> int:
    """Write the request in blocks of 1 MiB, in another thread so that boot scripts do not wait for the disk."""
    received, held, size = 0, [], 0
    async for part in request.stream():
        held.append(part)
        size += len(part)
        if size >= BLOCK:
            await run_in_threadpool(receiver.write, b"".join(held))
            received, held, size = received + size, [], 0
    await run_in_threadpool(receiver.write, b"".join(held))
    return received + size


def _named(request: Request) -> tuple[str, str]:
    return request.path_params["profile"], request.path_params["digest"]


def _row(image: Image, current: bool, previous: bool) -> NodeImage:
    return {
        "profile": image.profile,
        "digest": image.digest,
        "bytes": image.bytes,
        "current": current,
        "previous": previous,
        "made": image.made,
        "kernel": image.kernel,
        "arguments": image.arguments,
        "groups": list(image.groups),
        "files": {name: {"sha256": sha256, "bytes": size} for name, (sha256, size) in image.files.items()},
    }
