"""Perform a typed request of shared/requests.py."""

from typing import Any, Dict

from appliance.agent.protocol import Problem, field
from appliance.shared.records import RecordError, from_value
from appliance.shared.requests import KINDS


def perform(request: Dict[str, Any]) -> Dict[str, Any]:
    """Perform the request named ``kind`` with the fields ``of``; return its ``reply``.

    Raises:
        Problem: it is not a request.
    """
    kind = KINDS.get(field(request, "kind", str))
    if kind is None:
        raise Problem("there is no request %s" % request["kind"], status=2)
    try:
        found = from_value(kind, field(request, "of", dict))
    except RecordError as error:
        raise Problem("the request is invalid: %s" % error, status=2) from None
    return {"reply": found.perform()}
