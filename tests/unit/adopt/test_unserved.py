"""The lease of an admin host that has failed right after the switch, and a network that was split then."""

from __future__ import annotations

from typing import Any, cast

import pytest

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.adopt import undo
from appliance.operations.context import Cluster
from appliance.plan.adopt.adoption import BEGUN, Adoption
from appliance.progress import Silent
from appliance.shared.adopt import AdoptRequest
from appliance.shared.lease import Lease
from appliance.shared.records import from_value
from tests.unit.adopt.requests import ADOPT

RECORD = Adoption("c", "old", "root@old", "a", BEGUN, 1.0, (), "/etc/slurm/slurm.conf", from_value(AdoptRequest, ADOPT))


class Machine:
    """A host whose controller is active, or not."""

    name = "a"

    def __init__(self, active: bool = False) -> None:
        self.active = active

    def works(self, *argv: str) -> bool:
        assert argv == ("systemctl", "is-active", "--quiet", "slurmctld.service")
        return self.active

    def host(self, name: str) -> Machine:
        assert name == self.name
        return self


@pytest.mark.parametrize(
    ("holder", "active", "runs", "end"),
    [
        ("a", True, False, "stopped"),
        ("a", True, True, "refused"),
        ("a", False, True, ""),
        ("a", False, False, ""),
        ("b", True, True, ""),
    ],
)
def test_lease_of_a_host_that_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, *, holder: str, active: bool, runs: bool, end: str
) -> None:
    did: list[Any] = []
    monkeypatch.setattr(undo, "query_lease", lambda *_: Lease("c", 5, holder, 1.0, holder))
    monkeypatch.setattr(undo, "find_instance", lambda *_: runs)
    monkeypatch.setattr(undo, "stop", lambda *_: did.append("stopped"))
    cluster, old = cast("Cluster", Machine()), cast("Host", Machine(active))
    try:
        undo.release_unserved(cluster, RECORD, old, Silent())
    except Refused as error:
        assert "both have the services" in error.message
        did.append("refused")
    assert did == ([end] if end else [])
