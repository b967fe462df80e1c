"""jobsync with real munged, slurmctld and slurmd: nothing starts before munge answers, whatever happens on the node."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from appliance.errors import SmsError
from appliance.operations.context import open_cluster
from appliance.operations.image.build import build
from appliance.progress import Silent
from tests.images import make_site
from tests.real.tasks import SHORT, SHORT_S, Engine, engine_in
from tests.waiting import wait_until

pytestmark = pytest.mark.real

SERVICES = ("munge", "slurmctld", "slurmd")
USUAL, ALL = 5, 50
"""Orders that are tried in each run, and in a full one."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A node with the image of a lab."""
    site = make_site()
    built = build(open_cluster(site, None, Silent()), lock=site.with_name("sms.lock"))
    with engine_in(tmp_path_factory.mktemp("node"), built.image) as engine:
        yield engine


@pytest.fixture
def running(engine: Engine) -> Engine:
    """All services are ready."""
    for name in SERVICES:
        if name not in engine.tasks:
            engine.start(name)
    engine.await_ready(*SERVICES)
    return engine


def run_job(engine: Engine) -> str:
    """Run a job on the node; its output. One that was running at a reboot is the controller's until it is cancelled."""
    engine.inside("scancel", "--user", "root")
    try:
        wait_until(lambda: engine.inside("sinfo", "-h", "-o", "%T").stdout.strip() == "idle", "an idle node", 60)
    except SmsError as error:
        raise AssertionError(engine.inside("scontrol", "show", "node").stdout + engine.output()) from error
    done = engine.inside("srun", "-n", "1", "echo", "it ran")
    assert done.returncode == 0, done.stderr + engine.output()
    return done.stdout


def test_starts_in_order(engine: Engine) -> None:
    """munge is started last; the others wait, and say for what."""
    engine.reboot()
    engine.start("slurmd")
    engine.start("slurmctld")
    for name in ("slurmd", "slurmctld"):
        wait_until(lambda name=name: engine.record(name).get("waits_for") == ["munge"], "it waits")  # type: ignore[misc]
    assert engine.processes("slurmd") == engine.processes("slurmctld") == []
    engine.start("munge")
    engine.await_ready(*SERVICES)
    ready = {name: engine.record(name)["times"]["ready"] for name in SERVICES}
    assert ready["munge"] <= min(ready.values())
    assert {row[:2] for row in engine.starts()} == {("slurmd", "answers"), ("slurmctld", "answers")}
    assert run_job(engine) == "it ran\n"


def test_stops_in_order(running: Engine) -> None:
    """munge is to stop first; it answers until its users have stopped, and slurmctld saves its state."""
    tasks = {name: running.tasks.pop(name) for name in SERVICES}
    tasks["munge"].terminate()
    wait_until(lambda: running.record("munge")["state"] == "removal", "it")
    time.sleep(1)
    assert running.record("munge")["detail"] == "is needed by slurmctld, slurmd"
    assert running.inside("sh", "-c", "munge -n | unmunge").returncode == 0
    for name in ("slurmctld", "slurmd"):
        tasks[name].terminate()
    assert [tasks[name].wait(120) for name in SERVICES] == [0, 0, 0], running.output()
    ended = {name: running.record(name)["times"]["ended"] for name in SERVICES}
    assert ended["munge"] == max(ended.values())
    assert not (running.folder / "state/.sms-running").exists(), "it ended in order"
    assert running.processes() == []


def test_munge_does_not_wait_for_ever_and_slurmctld_is_not_restarted_for_it(running: Engine) -> None:
    running.kill_task("munge")
    running.start("munge", "--services", SHORT)
    running.await_ready("munge")
    before = running.record("slurmctld")["process"]["pid"]
    began = time.monotonic()
    running.restart("munge")
    assert running.tasks["munge"].wait(60) == 0
    assert time.monotonic() - began >= SHORT_S
    assert f"munge stops although slurmctld, slurmd still uses it, after {SHORT_S} s" in running.output()
    running.await_ready(*SERVICES)
    assert running.record("slurmctld")["process"]["pid"] == before
    assert run_job(running) == "it ran\n"


def test_a_second_task_waits_for_the_first(running: Engine) -> None:
    """As when an allocation that was taken for lost is restarted where it still runs."""
    first = running.tasks["slurmctld"]
    daemons = running.daemons("slurmctld")
    running.start("slurmctld")
    time.sleep(3)
    assert running.daemons("slurmctld") == daemons and len(daemons) == 1
    assert running.record("slurmctld")["state"] == "ready"
    first.terminate()
    assert first.wait(120) == 0
    running.await_ready(*SERVICES)
    assert running.daemons("slurmctld") != daemons and len(running.daemons("slurmctld")) == 1


def test_no_daemon_outlives_what_runs_it(running: Engine) -> None:
    """SIGKILL of `apptainer exec` alone, then of sms-run alone."""
    running.tasks["slurmctld"].kill()
    running.tasks["slurmctld"].wait(60)
    wait_until(lambda: not running.processes("slurmctld"), "its end", 60)
    running.await_ready(*SERVICES)
    for name in ("slurmctld", "slurmd"):
        running.kill_task(name)
        wait_until(lambda name=name: not running.processes(name), "its end", 30)  # type: ignore[misc]
    running.await_ready(*SERVICES)
    assert len(running.processes("slurmctld")) == len(running.processes("slurmd")) == 1


@pytest.mark.parametrize(
    "seed", [pytest.param(number, marks=[pytest.mark.full] if number >= USUAL else []) for number in range(ALL)]
)
def test_random_orders(engine: Engine, seed: int) -> None:
    """Starts, kills of daemons and of sms-run, restarts, second tasks, a reboot: never before munge, never two."""
    chance = random.Random(seed)
    twice: list[list[int]] = []
    watching = threading.Event()

    def watch() -> None:
        while not watching.wait(0.1):
            found = engine.daemons("slurmctld")
            if len(found) > 1:
                twice.append(found)

    engine.reboot()
    seen = len(engine.starts())
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for name in chance.sample(SERVICES, len(SERVICES)):
            engine.start(name)
            time.sleep(chance.uniform(0, 1))
        for action in [*chance.choices(("task", "service", "restart", "second"), k=4), "reboot", "task"]:
            name = chance.choice(SERVICES)
            if action == "task":
                engine.kill_task(name)
            elif action == "service":
                engine.kill_service(name)
            elif action == "restart":
                engine.restart(name)
            elif action == "second":
                engine.supersede(name)
            else:
                engine.reboot()
                for other in chance.sample(SERVICES, len(SERVICES)):
                    engine.start(other)
            engine.revive()
            time.sleep(chance.uniform(0, 1))
        engine.await_ready(*SERVICES)
    finally:
        watching.set()
        thread.join()
    assert engine.starts_without_munge() == [], engine.output()
    assert {row[0] for row in engine.starts()[seen:]} == {"slurmctld", "slurmd"}
    assert twice == [], "two slurmctld of one state"
    if seed % 5 == 0:
        assert run_job(engine) == "it ran\n"
