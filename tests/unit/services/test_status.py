"""`sms status` with a full overlay."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from appliance.cli.services.status import view
from appliance.host.fake import Fake
from appliance.operations import preflight
from appliance.operations.context import open_cluster
from appliance.operations.overlay.mirrored import MirrorState
from appliance.operations.services import status
from appliance.operations.snapshots.status import SnapshotStatus
from appliance.operations.start_note import StartNote
from appliance.operations.vm.deferred import Deferred
from appliance.plan.snapshots.runs import Run
from appliance.progress import Silent
from appliance.shared.lease import Lease
from appliance.tools.apptainer import Instance
from tests.places import DEBIAN_SITE


@pytest.mark.parametrize(("percent", "full"), [(79, False), (80, True), (97, True)])
def test_nearly_full_overlay_is_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, percent: int, full: bool
) -> None:
    cluster = open_cluster(DEBIAN_SITE, tmp_path, Silent())
    output = f"1B-blocks Used\n{100 << 20} {percent << 20}\n"
    host = Fake({("apptainer",): (0, output), ("ps",): (0, "5"), ("test",): (1, "")}, name="host-a")
    monkeypatch.setattr(preflight.apptainer, "find_instance", lambda *_: Instance("sms-sample", 7, "/i.sif"))
    monkeypatch.setattr(status, "query_services", lambda *_: [])
    monkeypatch.setattr(status, "read_note", lambda *_: StartNote("/i.sif", "", "", "", 1, "host-a", 0.0))
    found = status._container_status(cluster, host, Lease(cluster.site.cluster, 1, "host-a", 0.0), [], "")
    warning = f"the overlay is {percent}% full; `sms overlay grow +1G` makes it larger"
    assert (found.healthy, found.warnings) == (not full, [warning] if full else [])


def test_json_and_table() -> None:
    """The keys of --json are an interface."""
    lease = Lease("c", 4, "host-a", 5.0, "host-a")
    state = MirrorState("btrfs", True, ({"file": "/a", "state": "whole"},), ("x",), 2, 1)
    newest = {"number": 7, "age_s": 60.0, "method": "trace", "frozen_ms": 3.0, "running": True}
    snapshots = SnapshotStatus(3, [2], newest, 1 << 20, 30, "cron", 15, Run(5.0, 6.0, True))
    vm = Deferred("vm", "10.77.0.2", False, ("nodes that boot",))
    answers = [status.Answer("chrony", True, "stratum 3", 1.5)]
    found = status.Status("c", "host-a", True, True, lease, answers, {"path": "/i"}, {"size": 2, "used": 1}, state)
    found = replace(found, snapshots=snapshots, provisioning=vm, warnings=["w"])
    shown = json.loads(json.dumps(found.as_dict()))
    facts = {"cluster": "c", "generation": 4, "holder": "host-a", "since": 5.0}
    facts |= {"file": "host-a", "last": "", "sequence": 0}
    assert list(shown) == [
        *("cluster", "host", "running", "healthy", "lease", "services", "image", "overlay", "mirror", "uptime_s"),
        *("warnings", "snapshots", "provisioning"),
    ]
    assert shown["lease"] == facts
    assert shown["mirror"]["members"] == [{"file": "/a", "state": "whole"}] and shown["mirror"]["problems"] == ["x"]
    assert list(shown["snapshots"]) == [
        *("count", "damaged", "newest", "bytes", "limit_minutes", "schedule", "every_minutes", "last_run", "problem")
    ]
    assert shown["snapshots"]["last_run"]["started"] == 5.0
    assert shown["provisioning"] == {
        "hostname": "vm",
        "address": "10.77.0.2",
        "up": False,
        "waits": ["nodes that boot"],
    }
    broken = replace(found, lease_problem="cannot be read", mirror=None, provisioning=None)
    shown = json.loads(json.dumps(broken.as_dict()))
    assert shown["lease"] == {**facts, "problem": "cannot be read"} and "lease_problem" not in shown
    assert (shown["mirror"], shown["provisioning"]) == (None, None)
    output = StringIO()
    for one in (found, broken):
        Console(file=output, width=200).print(view(one))
    for words in ("/a whole", "7, 60 s ago, by trace", "vm (10.77.0.2) is off", "generation 4", "not known"):
        assert words in output.getvalue(), words
