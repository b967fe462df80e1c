"""E13: a client of Nomad that is isolated for a minute, and comes back: never do two tasks write one state (X5)."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from appliance.lab.engines.hosts import DISK, Runner
from appliance.lab.engines.nomad import NomadCluster
from appliance.share import share
from appliance.shared.state_lease import LEASE_FILE, StateLease, parse_state_lease
from tests.waiting import wait_until

pytestmark = pytest.mark.real

ISOLATED_S = 60
WRITER = 'while :; do echo "$SMS_HOLDER" >>{state}/writes; sleep 0.05; done'
LOCKS = "fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)"
JOB = """
job "{name}" {{
  type = "service"
  group "g" {{
    {disconnect}
    task "writer" {{
      driver = "raw_exec"
      user   = "root"
      config {{
        command = "/usr/bin/python3"
        args    = ["{folder}/bin/sms-run", "--services", "{folder}/services.json", "--jobsync", "writer"]
      }}
      env {{
        SMS_HOLDER = "${{NOMAD_ALLOC_ID}}"
      }}
      resources {{
        cpu    = 20
        memory = 64
      }}
    }}
  }}
}}
"""
AS_EXPORTED = 'disconnect {\n replace = false\n stop_on_client_after = "30s"\n}\n'


@dataclass
class Shared:
    """A folder that all clients see, with the state of one job of that name."""

    name: str
    folder: Path

    @property
    def lease(self) -> StateLease:
        return parse_state_lease((self.folder / "state" / LEASE_FILE).read_bytes())

    @property
    def writers(self) -> list[str]:
        """Allocations that wrote, one after the other."""
        path = self.folder / "state/writes"
        return [name for name, _ in groupby(path.read_text().splitlines())] if path.exists() else []

    @property
    def size(self) -> int:
        return (self.folder / "state/writes").stat().st_size


def make_shared(name: str, *, locks: bool) -> Shared:
    """Write the programs, which see no locks of others unless ``locks``, and the file of services."""
    folder = DISK / name
    (folder / "state").mkdir(parents=True)
    shutil.copytree(share("definitions", "runtime"), folder / "bin")
    if not locks:
        path = folder / "bin/smslease.py"
        assert path.read_text().count(LOCKS) == 1
        path.write_text(path.read_text().replace(LOCKS, 'raise OSError(errno.ENOLCK, "none")'))
    sync = {"holds": [], "signal": "TERM", "stop_s": 3, "release_s": 0, "ports": [], "outlived": False}
    service: dict[str, Any] = {
        "run": ["sh", "-c", WRITER.format(state=folder / "state")],
        "user": "root",
        "groups": [],
        "capabilities": None,
        "setup": "",
        "needs": [],
        "probe": {"kind": "exec", "exec": [["true"]], "timeout_s": 2},
        "jobsync": {**sync, "lease": str(folder / "state")},
    }
    (folder / "services.json").write_text(json.dumps({"services": {"writer": service}}))
    return Shared(name, folder)


@pytest.fixture
def shared(request: pytest.FixtureRequest, nomad: NomadCluster) -> Iterator[Shared]:
    """With the locks of all hosts, or without."""
    name = f"writer-{request.param.replace(' ', '-')}"
    yield make_shared(name, locks=request.param == "locks")
    nomad.purge(name)

    def removed() -> bool:  # a task writes until it has ended
        shutil.rmtree(DISK / name, ignore_errors=True)
        return not (DISK / name).exists()

    wait_until(removed, f"{name} is removed", 60)


def record(client: Runner) -> dict[str, Any]:
    """What the task of a client has recorded."""
    return dict(json.loads(client.host.read("/run/sms/jobsync/writer.json") or b"{}"))


def start(nomad: NomadCluster, shared: Shared, disconnect: str = "") -> tuple[Runner, Runner]:
    """Start the job; the client that runs it, and the other one."""
    nomad.submit(JOB.format(name=shared.name, folder=shared.folder, disconnect=disconnect))
    wait_until(lambda: shared.writers, "it writes", 60)
    (own,) = wait_until(lambda: nomad.running(shared.name), "Nomad knows that", 30)
    assert (shared.lease.generation, shared.lease.holder, shared.writers) == (1, own["ID"], [own["ID"]])
    return tuple(sorted(nomad.clients, key=lambda one: one.name != own["NodeName"]))  # type: ignore[return-value]


@pytest.mark.parametrize("shared", ["locks", pytest.param("no locks", marks=pytest.mark.full)], indirect=True)
def test_an_isolated_client_and_its_replacement(nomad: NomadCluster, shared: Shared) -> None:
    """Nomad starts another task while the first one runs on; the lease keeps that from writing until it is stopped."""
    isolated, other = start(nomad, shared)
    (first,) = shared.writers
    isolated.run("ip", "link", "set", "eth0", "down")
    try:
        until = time.monotonic() + ISOLATED_S
        wait_until(lambda: f"{first} holds it" in record(other).get("detail", ""), "a second task", 60)
        size = shared.size
        time.sleep(max(0, until - time.monotonic()))
        assert record(isolated)["state"] == "ready" and shared.size > size, "X5: the first one runs still"
        assert shared.writers == [first] and shared.lease.generation == 1
    finally:
        isolated.run("ip", "link", "set", "eth0", "up")
    wait_until(lambda: len(shared.writers) > 1, "the second one writes", 120)
    wait_until(lambda: len(nomad.ready_nodes()) == len(nomad.clients), "both clients are ready", 60)
    size = shared.size
    wait_until(lambda: shared.size > size, "it goes on")
    (second,) = nomad.running(shared.name)
    assert shared.writers == [first, second["ID"]], "one after the other"
    assert (shared.lease.generation, shared.lease.holder) == (2, second["ID"])


@pytest.mark.full
@pytest.mark.parametrize("shared", ["locks"], indirect=True)
def test_an_isolated_client_as_jobs_are_exported(nomad: NomadCluster, shared: Shared) -> None:
    """It stops the task itself, nothing is started elsewhere, and it starts again when the client is back."""
    isolated, other = start(nomad, shared, AS_EXPORTED)
    (first,) = shared.writers
    isolated.run("ip", "link", "set", "eth0", "down")
    try:
        until = time.monotonic() + ISOLATED_S
        wait_until(lambda: record(isolated)["status"] == 0, "it was stopped", ISOLATED_S)
        size = shared.size
        time.sleep(max(0, until - time.monotonic()))
        assert shared.size == size and shared.lease.holder is None
        assert record(other).get("state") != "ready"
    finally:
        isolated.run("ip", "link", "set", "eth0", "up")
    wait_until(lambda: shared.size > size, "it writes again", 120)
    assert shared.lease.generation == 2
    assert shared.writers in ([first], [first, shared.lease.holder])
