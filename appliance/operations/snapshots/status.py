"""What `sms status` says of snapshots: one cheap question to the host."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from appliance.errors import SmsError
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.snapshots.schedule import run_record, schedule_files
from appliance.plan.migration.lease import Lease
from appliance.plan.snapshots.runs import WELL, Judgement, Run, damage_warnings, judge, limit_minutes, read_run
from appliance.plan.snapshots.schedule import installed
from appliance.tools import agent


@dataclass(frozen=True)
class SnapshotStatus:
    """Snapshots on one host. ``newest`` is the newest verified one, with its age in seconds.

    ``bytes`` is what the last scheduled run found them to take on the disk. ``limit_minutes`` is the age that is too
    old, ``schedule`` cron, systemd or nothing. ``problem`` says why nothing is known.
    """

    count: int = 0
    damaged: list[int] = field(default_factory=list)
    newest: dict[str, Any] | None = None
    bytes: int | None = None
    limit_minutes: int = 0
    schedule: str = ""
    every_minutes: int = 0
    last_run: Run | None = None
    problem: str = ""
    judgement: Judgement = WELL

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        told = asdict(self)
        del told["judgement"]
        return told


def snapshot_status(cluster: Cluster, host: Host, lease: Lease) -> SnapshotStatus:
    """How snapshots stand on the host. Where nothing takes them by itself, nothing is wrong with having none."""
    settings = cluster.site.snapshots
    files = [run_record(cluster), *schedule_files(cluster)]
    try:
        said = agent.ask(host, "brief", {"store": str(cluster.places.snapshots), "files": files})
    except Unreachable:
        raise
    except SmsError as error:
        return SnapshotStatus(problem=error.message)
    texts = {path: found["text"] for path, found in said["texts"].items()}
    found = installed(texts, cluster.site.cluster)
    schedule, every = found or ("", settings.every_minutes)
    run = read_run(texts.get(run_record(cluster)))
    limit = limit_minutes(every, settings.oldest_minutes)
    newest = said["newest"]
    damaged = sorted([*said["damaged"], *said["broken"]])
    if newest:
        newest = {**newest, "age_s": round(said["now"] - newest["taken"], 1)}
    judgement = Judgement(True, damage_warnings(len(damaged)))
    if schedule and lease.holder == host.name:
        at = max(said["texts"][path]["at"] for path in schedule_files(cluster) if path in texts)
        judgement = judge(
            now=said["now"],
            newest_taken=newest["taken"] if newest else None,
            run=run,
            every=every,
            limit=limit,
            since=max(at, lease.since),
            damaged=len(damaged),
        )
    stored = run.stored_bytes if run else None
    count = said["count"] + len(said["broken"])
    return SnapshotStatus(count, damaged, newest, stored, limit, schedule, every, run, "", judgement)
