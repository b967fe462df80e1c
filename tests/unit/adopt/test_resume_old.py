"""An old node that does not decide alone any more serves only if the container cannot have served since."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.operations.adopt.inspection import resume_old
from appliance.operations.adopt.record import save_record
from appliance.plan.adopt.adoption import BEGUN, Adoption
from appliance.plan.machine import instance_name
from appliance.shared.adopt import AdoptRequest
from appliance.shared.lease import Lease
from appliance.shared.records import from_value
from appliance.tools.apptainer import Instance
from appliance.tools.scripts import read_script
from tests.pairs import Pair
from tests.support.env import FakeAgents
from tests.support.fake import Fake
from tests.unit.adopt.requests import ADOPT

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
        pytest.param("released", [BACKED_OUT], "host-a", False, False, id="a host has the lease"),
        pytest.param("released", [BACKED_OUT], None, True, False, id="an instance runs"),
        pytest.param("released", [{**GIVEN, "event": "arrived"}], None, False, False, id="it has served"),
        pytest.param("up", [GIVEN, {"verb": "start", "event": "started"}], None, False, False, id="started since"),
        pytest.param("up", [{**GIVEN, "peer": "host-b"}], None, False, False, id="given to another admin host"),
        pytest.param("up", [BACKED_OUT], None, False, False, id="the event of the other direction"),
        pytest.param("given", [GIVEN], None, False, False, id="it has decided"),
        pytest.param("", [], None, False, False, id="nothing is stored"),
    ],
)
def test_it_is_ordered_to_serve(
    tmp_path: Path, *, state: str, history: list[Any], holder: str | None, runs: bool, sure: bool
) -> None:
    orders: list[bool] = []

    def resume(_: object, request: dict[str, Any]) -> dict[str, Any]:
        orders.append(request["sure"])
        return {}

    def facts(*_: object) -> tuple[int, str]:
        return 0, f"mark {state}\n" if state and True not in orders else ""

    pair = Pair(tmp_path, shared=False, agents=FakeAgents(answers={"adopt_resume": resume}))
    cluster, host = pair.cluster, pair.hosts["host-a"]
    name = cluster.site.cluster
    request = from_value(AdoptRequest, ADOPT)
    save_record(cluster, host, Adoption(name, "old", "old", host.name, BEGUN, 1.0, (), "/etc/slurm.conf", request))
    host.write(str(cluster.places.lease), Lease(name, 5, holder, 1.0, host.name).text())
    host.write(str(cluster.places.history), b"".join(json.dumps(line).encode() + b"\n" for line in history))
    if runs:
        host.instances.append(Instance(instance_name(cluster.site), 7, "image"))
    old = Fake({("sh", "-c", read_script("adopt-facts")): facts}, name="old")
    assert resume_old(cluster, old) == ("" if sure else state)
    assert orders == [*([False] if state else []), *([True] if sure else [])]
