"""The snapshots section of `sms status`, collected with one request to the host."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from appliance.errors import SmsError
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.snapshots.list import store_request
from appliance.operations.snapshots.report import record_path
from appliance.operations.snapshots.schedule import schedule_files
from appliance.operations.vm.vm import find_running
from appliance.plan.snapshots.runs import (
    DRILLS,
    HEALTHY,
    Found,
    Judgement,
    Run,
    drill_warnings,
    judge,
    judge_damage,
    limit_minutes,
    one_line,
    read_run,
)
from appliance.plan.snapshots.schedule import has_drill, installed
from appliance.shared.lease import Lease


@dataclass(frozen=True)
class SnapshotStatus:
    """Snapshots on one host. ``newest`` is the newest verified one, with its age in seconds.

    ``bytes``: size of the store after the last scheduled run. ``limit_minutes``: the greatest healthy age.
    ``schedule``: cron, systemd or empty; ``drills``: whether restore drills are scheduled. ``problem``: why the query
    failed.
    """

    count: int = 0
    damaged: list[int] = field(default_factory=list)
    newest: dict[str, Any] | None = None
    bytes: int | None = None
    limit_minutes: int = 0
    schedule: str = ""
    every_minutes: int = 0
    last_run: Run | None = None
    drills: bool = False
    last_drill: Run | None = None
    problem: str = ""
    judgement: Judgement = HEALTHY

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        fields = asdict(self)
        del fields["judgement"]
        return fields


def snapshot_status(cluster: Cluster, host: Host, lease: Lease) -> SnapshotStatus:
    """Query the status of snapshots on the host. Without a schedule, having none is healthy."""
    settings, option = cluster.site.snapshots, " --vm" * cluster.vm
    files = [record_path(cluster), record_path(cluster, DRILLS), *schedule_files(cluster)]
    try:
        reply = cluster.env.agents.call(host, "brief", {**store_request(cluster, host), "files": files})
    except Unreachable:
        raise
    except SmsError as error:
        return SnapshotStatus(problem=error.message)
    texts = {path: found["text"] for path, found in reply["texts"].items()}
    found = installed(texts, cluster.label)
    schedule, every = found or ("", settings.every_minutes)
    run = read_run(texts.get(record_path(cluster)))
    limit = limit_minutes(every, settings.oldest_minutes)
    newest = reply["newest"]
    damaged = sorted([*reply["damaged"], *reply["broken"]])
    if newest:
        newest = {**newest, "age_s": round(reply["now"] - newest["taken"], 1)}
    judgement = judge_damage(len(damaged), verified=newest is not None, option=option)
    if schedule and lease.holder == host.name:
        at = max(reply["texts"][path]["at"] for path in schedule_files(cluster) if path in texts)
        taken, since = newest["taken"] if newest else None, max(at, lease.since)
        judgement = judge(Found(reply["now"], taken, run, every, limit, since, damaged=len(damaged), option=option))
    drill = read_run(texts.get(record_path(cluster, DRILLS)))
    drills = [reply["texts"][path]["at"] for path in schedule_files(cluster) if has_drill(texts.get(path, ""))]
    if drills:
        judgement = judgement.plus(drill_warnings(drill, since=max(drills), now=reply["now"]))
    stored = run.stored_bytes if run else None
    count = reply["count"] + len(reply["broken"])
    return SnapshotStatus(
        count, damaged, newest, stored, limit, schedule, every, run, bool(drills), drill, judgement=judgement
    )


def vm_snapshot_status(cluster: Cluster, host: Host) -> SnapshotStatus:
    """Query the status of snapshots of the VM's state on the host; they may be old while the VM is off.

    Args:
        cluster: ``of_vm``.
    """
    running = find_running(cluster, host)
    # Runs are expected where the VM runs.
    use = Lease("", holder=host.name, since=running.since) if running else Lease("")
    found = snapshot_status(cluster, host, use)
    if run := found.last_run if not running and found.schedule else None:
        failed = () if run.ok else (f"the last scheduled run failed: {one_line(run.error)}",)
        found = replace(found, judgement=found.judgement.plus(failed))
    return replace(found, judgement=found.judgement.of("the VM's state"))
