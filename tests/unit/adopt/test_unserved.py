"""The lease of an admin host that has failed right after the switch, and a network that was split then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appliance.errors import Refused
from appliance.host.base import Result
from appliance.operations.adopt import undo
from appliance.operations.lease import query_lease
from appliance.plan.adopt.adoption import BEGUN, Adoption
from appliance.plan.machine import instance_name
from appliance.shared.adopt import AdoptRequest
from appliance.shared.lease import Lease
from appliance.shared.records import from_value
from appliance.tools.apptainer import Instance
from tests.pairs import HostInFolder, Pair
from tests.support.env import FakeHosts, Reports, with_env
from tests.support.fake import Fake
from tests.unit.adopt.requests import ADOPT


class Machine(HostInFolder):
    """An admin host that has no systemd."""

    def run(self, *argv: str, **options: Any) -> Result:
        if argv == ("test", "-d", "/run/systemd/system"):
            return Result(self.name, argv, 1, b"", b"")
        return super().run(*argv, **options)


@pytest.mark.parametrize(
    ("holder", "active", "runs", "end"),
    [
        ("host-a", True, False, "stopped"),
        ("host-a", True, True, "refused"),
        ("host-a", False, True, ""),
        ("host-a", False, False, ""),
        ("host-b", True, True, ""),
    ],
)
def test_lease_of_a_host_that_does_not_serve(
    tmp_path: Path, *, holder: str, active: bool, runs: bool, end: str
) -> None:
    did, progress = list[str](), Reports()
    pair = Pair(tmp_path, shared=False)
    host = Machine("host-a", tmp_path / "host-a")
    cluster = with_env(pair.cluster, hosts=FakeHosts({**pair.hosts, host.name: host}))
    name, request = cluster.site.cluster, from_value(AdoptRequest, ADOPT)
    record = Adoption(name, "old", "root@old", host.name, BEGUN, 1.0, (), "/etc/slurm/slurm.conf", request)
    host.write(str(cluster.places.lease), Lease(name, 5, holder, 1.0, holder).text())
    if runs:
        host.instances.append(Instance(instance_name(cluster.site), 7, "image"))
    is_active = ("systemctl", "is-active", "--quiet", "slurmctld.service")
    old = Fake({is_active: (0 if active else 3, "")}, name="old")
    try:
        undo.release_unserved(cluster.showing(progress), record, old)
    except Refused as error:
        assert "both have the services" in error.message
        did.append("refused")
    lease = query_lease(host, cluster)
    if lease.holder is None:
        did.append("stopped")
    assert did == ([end] if end else [])
    assert lease.holder in (None, holder) and len(progress.lines) == (end == "stopped")
