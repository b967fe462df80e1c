"""Snapshots while a writer writes and Slurm works: each is consistent, and none is noticed."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from appliance.operations.context import open_cluster
from appliance.operations.image.build import Built
from appliance.operations.lab.demo import as_alice
from appliance.plan.machine import inside_argv
from appliance.progress import Silent
from tests.real.conftest import NODES, Playground, give_image
from tests.real.labs import fresh_lab
from tests.real.moves import Background, job_states
from tests.real.overlays import is_prefix

pytestmark = [pytest.mark.real, pytest.mark.full]

COUNT = 20
EVERY_S = 1.0
"""Between two jobs: no more than the nodes can run."""
SAVED_S = 15
"""slurmctld writes its state down every few seconds."""
OTHER = "t-soak"
WRITER = """\
mkdir -p /var/lib/soak; rm -f /var/lib/soak/lines; i=0; touch /var/lib/soak/go
while [ -e /var/lib/soak/go ]; do i=$((i+1)); echo $i >>/var/lib/soak/lines; sync /var/lib/soak/lines; done
"""


class Jobs(Background):
    """A stream of short jobs from a compute node."""

    def __init__(self, playground: Playground) -> None:
        self.node = playground.host("node1")
        self.submitted: dict[str, float] = {}
        self.failed: list[str] = []
        self.completed: set[str] = set()
        super().__init__()

    def work(self) -> None:
        while not self._ended.wait(EVERY_S):
            try:
                job = as_alice(self.node, "sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 1")
                self.submitted[job] = time.time()
            except Exception as error:
                self.failed.append(str(error))

    def look(self) -> dict[str, str]:
        """State of each job that has not completed; the controller forgets one 300 s after its end (MinJobAge)."""
        states = job_states(self.node.run("scontrol", "-o", "show", "jobs").text)
        self.completed |= {job for job, state in states.items() if state == "COMPLETED"}
        return {job: states.get(job, "unknown") for job in list(self.submitted) if job not in self.completed}


@contextmanager
def writing(playground: Playground) -> Iterator[None]:
    """A writer in the container, whose every line is on the disk before the next."""
    cluster = open_cluster(playground.lab.etc / "sms.yaml", None, Silent())
    argv = inside_argv(cluster.site, cluster.services, "sh", "-c", WRITER)
    host = playground.host("host-a")
    thread = threading.Thread(target=lambda: host.run(*argv, timeout=None, ok=None))
    thread.start()
    try:
        yield
    finally:
        host.run(*inside_argv(cluster.site, cluster.services, "rm", "-f", "/var/lib/soak/go"))
        thread.join()


@pytest.fixture
def elsewhere(built: Built) -> Iterator[Playground]:
    """A lab of its own for restored controllers."""
    with fresh_lab(OTHER, NODES) as lab:
        other = Playground(lab)
        give_image(other, built)
        yield other


def test_snapshots_under_load(running: Playground, elsewhere: Playground) -> None:
    running.host("host-a").run("rm", "-rf", "/var/lib/sms/snapshots")
    taken = []
    with writing(running), Jobs(running) as jobs:
        time.sleep(SAVED_S)
        for _ in range(COUNT):
            lines = int(running.sms("exec", "--", "wc", "-l", "/var/lib/soak/lines").text.split()[0])
            reported = json.loads(running.sms("overlay", "snapshot", "--json").stdout)
            taken.append((reported, lines))
            jobs.look()
            time.sleep(0.5)
    print("writers waited for", sorted(one["frozen_ms"] for one, _ in taken), "ms")
    assert median(one["frozen_ms"] for one, _ in taken) < 2000
    assert len(jobs.submitted) > COUNT
    no_job_is_lost(jobs)
    for one, lines in taken:
        holds_a_prefix(running, one["number"], lines)
    for one, _ in taken:
        controller_comes_up(running, elsewhere, one, jobs)


def no_job_is_lost(jobs: Jobs) -> None:
    """Every job that was submitted ends as it should."""
    assert jobs.failed == []
    deadline = time.monotonic() + 300
    while (left := jobs.look()) and time.monotonic() < deadline:
        time.sleep(1)
    assert left == {}


def holds_a_prefix(playground: Playground, number: int, at_least: int) -> None:
    """Laid out and looked at: e2fsck finds nothing, and of the writer's lines none is missing in the middle."""
    path = "/var/lib/sms/overlays/soak.img"
    host = playground.host("host-a")
    try:
        playground.sms("overlay", "restore", str(number), "--as", path)
        assert host.run("e2fsck", "-fn", path, ok=None).status == 0
        text = host.run("debugfs", "-R", "cat /upper/var/lib/soak/lines", path).stdout.decode()
        assert is_prefix(text) >= at_least
    finally:
        host.remove(path)


def controller_comes_up(playground: Playground, elsewhere: Playground, one: dict[str, object], jobs: Jobs) -> None:
    """slurmctld starts on what was restored, and knows the jobs of then."""
    source = Path(f"/var/lib/sms-lab/{playground.lab.name}/host-a/snapshots")
    target = Path(f"/var/lib/sms-lab/{elsewhere.lab.name}/host-a/snapshots")
    if not target.exists():
        subprocess.run(["cp", "-a", source, target], check=True)
    elsewhere.host("host-a").run("rm", "-f", "/var/lib/sms/overlays/lab.img")
    elsewhere.sms("-q", "overlay", "restore", str(one["number"]))
    try:
        elsewhere.sms("-q", "start")
        known = job_states(elsewhere.sms("exec", "--", "scontrol", "-o", "show", "jobs").text)
        taken = float(str(one["taken"]))
        due = {job for job, at in jobs.submitted.items() if at < taken - SAVED_S}
        assert due - set(known) == set(), f"snapshot {one['number']}"
    finally:
        elsewhere.sms("-q", "stop")
