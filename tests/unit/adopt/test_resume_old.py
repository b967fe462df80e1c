"""An old node that does not decide alone any more serves only if the container cannot have served since."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.host.base import Host
from appliance.operations.adopt import inspection
from appliance.operations.adopt.inspection import resume_old
from appliance.operations.context import Cluster
from appliance.tools import agent

OLD = cast("Host", SimpleNamespace(name="old"))
CLUSTER = cast("Cluster", SimpleNamespace(host=lambda name: name, site=SimpleNamespace(cluster="c")))
BACKED_OUT = {"verb": "adopt", "event": "backed out", "peer": "old"}
GIVEN = {"verb": "adopt", "event": "given", "peer": "old"}
FAILED = {"verb": "adopt", "event": "failed"}
CABLE = {"verb": "guard", "event": "uplink back"}


@pytest.mark.parametrize(
    ("state", "history", "holder", "runs", "sure"),
    [
        pytest.param("released", [BACKED_OUT, FAILED, CABLE], None, False, True, id="the container has ended"),
        pytest.param("up", [GIVEN], None, False, True, id="the container has given all back"),
        pytest.param("up", [GIVEN, {**GIVEN, "event": "gone"}], None, False, True, id="and has ended"),
        pytest.param("released", [BACKED_OUT], "a", False, False, id="a host has the lease"),
        pytest.param("released", [BACKED_OUT], None, True, False, id="an instance runs"),
        pytest.param("released", [{**GIVEN, "event": "arrived"}], None, False, False, id="it has served"),
        pytest.param("up", [GIVEN, {"verb": "start", "event": "started"}], None, False, False, id="started since"),
        pytest.param("up", [{**GIVEN, "peer": "b"}], None, False, False, id="given to another admin host"),
        pytest.param("up", [BACKED_OUT], None, False, False, id="the event of the other direction"),
        pytest.param("given", [GIVEN], None, False, False, id="it has decided"),
        pytest.param("", [], None, False, False, id="nothing is stored"),
    ],
)
def test_it_is_ordered_to_serve(
    monkeypatch: pytest.MonkeyPatch, *, state: str, history: list[Any], holder: str | None, runs: bool, sure: bool
) -> None:
    orders: list[bool] = []
    monkeypatch.setattr(inspection, "query_mark", lambda *_: "" if True in orders else state)
    monkeypatch.setattr(agent, "call", lambda _, command, request: orders.append(request["sure"]))
    monkeypatch.setattr(inspection, "find_record", lambda _: SimpleNamespace(old="old", host="a"))
    monkeypatch.setattr(inspection, "query_all_leases", lambda *_: SimpleNamespace(views={}))
    monkeypatch.setattr(inspection, "find_holder", lambda _: holder and SimpleNamespace(holder=holder, engine=""))
    monkeypatch.setattr(inspection, "find_instance", lambda *_: runs)
    monkeypatch.setattr(inspection, "read_history", lambda *_: history)
    assert resume_old(CLUSTER, OLD) == ("" if sure else state)
    assert orders == [*([False] if state else []), *([True] if sure else [])]
