"""Liveness, and (soon) the inventory."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from appliance.provision.world import World


def routes(world: World) -> list[Route]:
    def ready(_request: Request) -> Response:
        with world.store.read():
            return JSONResponse({"code": 0, "message": "HSM is healthy"})

    return [Route("/hsm/v2/service/ready", ready)]
