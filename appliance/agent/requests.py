"""Perform a typed request of shared/requests.py."""

from typing import Any, Dict

from appliance.agent.protocol import Problem, field, read_request
from appliance.shared.requests import KINDS


def perform(request: Dict[str, Any]) -> Dict[str, Any]:
    """Perform the request named ``kind`` with the fields ``of``; return its ``reply``.

    Raises:
        Problem: it is not a request.
    """
    kind = KINDS.get(field(request, "kind", str))
    if kind is None:
        raise Problem("there is no request %s" % request["kind"], status=2)
    return {"reply": read_request(kind, field(request, "of", dict)).perform()}
