"""An admin host without programs: its agent replies as a test wants."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from appliance.operations.context import Cluster
from appliance.operations.start_note import StartNote
from appliance.plan.machine import inside_argv
from appliance.tools import python
from appliance.tools.agent import Agents
from tests.sites import open_debian
from tests.support.fake import Answer, Fake

NOW = 1_800_000_000.0
IMAGE = "/nowhere/sms/images/k1.sif"
JOBS = "/var/spool/slurmctld/job_state"


def cluster(**changes: Any) -> Cluster:
    """Return the sample site, independent of this machine; ``changes`` go to its snapshots section."""
    found = open_debian(Path("/nowhere/sms"))
    site = found.site.model_copy(update={"snapshots": found.site.snapshots.model_copy(update=changes)})
    return replace(found, site=site)


INSIDE = inside_argv(cluster().site, cluster().services)


def manifest(number: int = 42, **changes: Any) -> dict[str, Any]:
    """Return a snapshot as the agent reports it."""
    return {
        "format": 1,
        "number": number,
        "uuid": f"{number:032x}",
        "cluster": "sample",
        "host": "host-a",
        "generation": 7,
        "image": {"key": "k1", "sha256": "ab" * 32},
        "slurm_cluster": "sample",
        "taken": NOW - 720,
        "running": True,
        "frozen_ms": 31.2,
        "method": "delta",
        "found_by": "trace",
        "size": 2 << 30,
        "used_bytes": 48 << 20,
        "new_bytes": 1_363_149,
        "digests": f"{number:064x}",
        "checks": {
            "e2fsck": "clean",
            "state_files": 14,
            "state_bytes": 100,
            "heads": ["/var/spool/slurmctld/job_state"],
        },
        "notes": [],
        "reason": "",
        "health": {"ok": True, "at": NOW - 719},
        **changes,
    }


Agent = dict[str, Callable[[dict[str, Any]], dict[str, Any]] | dict[str, Any]]


def host(
    agent: Agent | None = None,
    *,
    running: bool = False,
    overlay: bool = True,
    loops: tuple[str, ...] | None = None,
    lease: dict[str, Any] | None = None,
    more: dict[tuple[str, ...], Answer] | None = None,
) -> Fake:
    """Return an admin host; ``agent`` has the replies of its agent by command."""
    instances = [{"instance": "sms-sample", "pid": 7, "img": IMAGE}] if running else []
    users = loops if loops is not None else ("/dev/loop0",) if running else ()

    def ask(argv: tuple[str, ...], _: bytes | None) -> tuple[int, str]:
        command, request = argv[3], json.loads(argv[4])
        answer = (agent or {})[command]
        reply = answer(request) if callable(answer) else answer
        kind = "problem" if "message" in reply else "result"
        return reply.get("status", 0), json.dumps({"kind": kind, **reply})

    answers: dict[tuple[str, ...], Answer] = {
        ("rm", "-f", "--"): (0, ""),  # the list of jobs of the last stop
        ("sh", "-c"): (0, ""),
        ("sh", "-c", python.FIND): (0, "python3"),
        ("mkdir",): (0, ""),
        ("mv",): (0, ""),
        ("find",): (0, ""),
        ("test",): (0 if overlay else 1, ""),
        ("test", "-L"): (1, ""),
        ("test", str(cluster().places.overlay), "-ef"): (1, ""),
        ("losetup",): (0, "\n".join(users)),
        ("apptainer", "instance", "list"): (0, json.dumps({"instances": instances})),
        ("python3", "-I", Agents().installed_path()): ask,
        ("readlink",): (0, IMAGE),
        INSIDE: (0, ""),
        **(more or {}),
    }

    fake = Fake(answers, name="host-a")
    site = cluster()
    if lease is not None:
        record = {"cluster": "sample", "generation": 7, "holder": None, "since": 1.0, **lease}
        fake.files[str(site.places.lease)] = json.dumps(record).encode()
    note = asdict(StartNote(IMAGE, "k1", "ab" * 32, "s", 7, "host-a", 0.0))
    fake.files[f"{site.places.journal}/sample.json"] = json.dumps(note).encode()
    return fake


def requests(fake: Fake, command: str) -> list[dict[str, Any]]:
    """Return the requests to the agent."""
    asked = [argv for argv in fake.asked if argv[:1] == ("python3",) and argv[3] == command]
    return [json.loads(argv[4]) for argv in asked]


def locks(fake: Fake) -> list[str]:
    """Return the locks that were taken, in order."""
    return [argv[4] for argv in fake.asked if argv[0] == "sh" and "exec flock" in argv[2]]


def echo(request: dict[str, Any]) -> dict[str, Any]:
    """Reply to `take` with the requested reason and notes."""
    return {"snapshot": manifest(57, notes=request["notes"], reason=request["reason"])}


LISTED: dict[str, Any] = {
    "snapshots": [manifest(40), manifest(41), manifest(42, health={"ok": False, "at": 1.0, "damage": ["x"]})],
    "broken": {"39": "its manifest has changed"},
    "stored_bytes": 64 << 20,
    "free_bytes": 10 << 30,
}
NONE: dict[str, Any] = {"snapshots": [], "broken": {}, "stored_bytes": 0, "free_bytes": 0}
