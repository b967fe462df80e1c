"""`sms-run --jobsync`: order of starts and stops of services on one node, whatever happens to its processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from appliance.catalog import read_catalog, select
from appliance.operations.site.find import open_site
from appliance.plan.render import Templates
from appliance.plan.services.jobsync import PROGRAMS, stop_limits, task_json
from appliance.share import share
from tests.places import DEBIAN_SITE
from tests.unit.services.conftest import RUNTIME, needs_root, run_program
from tests.unit.services.tasks import Node, end, gone, later, node_in
from tests.waiting import alive


@pytest.fixture
def node(root: Path) -> Iterator[Node]:
    with node_in(root) as node:
        yield node


# What the catalogue gives

SITE = open_site(DEBIAN_SITE).site
CATALOG = read_catalog(share("definitions", "services"))
SERVICES = select(CATALOG, ("slurmctld", "slurmdbd", "slurmrestd", "munge", "mariadb"))


def test_limits_of_stops() -> None:
    """A service has its own time after that of the slowest chain of its users."""
    waits = {service.name: service.stop_wait_s for service in SERVICES}
    limits = stop_limits(SERVICES)
    assert limits["slurmrestd"] == waits["slurmrestd"]
    assert limits["slurmctld"] == waits["slurmctld"] + waits["slurmrestd"], "slurmrestd needs it"
    assert limits["slurmdbd"] == waits["slurmdbd"], "slurmctld only starts after it"
    assert limits["mariadb"] == waits["mariadb"] + waits["slurmdbd"]
    assert limits["munge"] == waits["munge"] + max(limits["slurmctld"], limits["slurmdbd"])


def test_file_of_services() -> None:
    tasks: Any = task_json(SERVICES, Templates(share("overlays"), site=SITE, services=SITE.service_names))["services"]
    found = {name: each["jobsync"] for name, each in tasks.items()}
    limits = stop_limits(SERVICES)
    assert list(found) == [service.name for service in SERVICES]
    assert {name: each["holds"] for name, each in found.items()} == {
        "mariadb": [],
        "munge": [],
        "slurmdbd": ["munge", "mariadb"],
        "slurmctld": ["munge"],
        "slurmrestd": ["munge", "slurmctld"],
    }
    assert "slurmdbd" in tasks["slurmctld"]["needs"], "it waits for that, too"
    for service in SERVICES:
        each = found[service.name]
        assert each["release_s"] + each["stop_s"] == limits[service.name]
        assert each["signal"] == service.stop_signal
    assert (found["slurmctld"]["ports"], found["slurmdbd"]["ports"], found["munge"]["ports"]) == ([6817], [6819], [])


def test_what_runs_on_nodes_keeps_the_rights_of_its_user() -> None:
    """slurmd starts jobs as any user."""
    tasks: Any = task_json((CATALOG["munge"], CATALOG["slurmd"]), Templates(share("overlays"), site=SITE))["services"]
    assert (tasks["munge"]["capabilities"], tasks["slurmd"]["capabilities"]) == ([], None)
    assert (tasks["slurmd"]["needs"], tasks["slurmd"]["jobsync"]["holds"]) == (["munge"], ["munge"])


# Tasks


def test_starts_in_order(node: Node) -> None:
    """Each waits for what it needs, in whatever order they are started; the record says for what."""
    node.add("munge", ready_s=0.5)
    node.add("slurmctld", needs=["munge"])
    node.add("slurmrestd", needs=["munge", "slurmctld"])
    for name in ("slurmrestd", "slurmctld"):
        node.start(name)
    later(lambda: node.record("slurmrestd").get("waits_for") == ["munge", "slurmctld"])
    waiting = node.record("slurmrestd")
    assert (waiting["state"], waiting["holds"], waiting["process"]) == ("deploy", [], None)
    assert "munge: " in waiting["detail"]
    assert node.log == []
    node.start("munge")
    for name in ("munge", "slurmctld", "slurmrestd"):
        record = node.await_state(name, "ready")
        assert alive(record["process"]["pid"])
        assert record["holds"] == node.services[name]["jobsync"]["holds"]
        assert list(record["times"]) == ["deploy", "ready"] and record["times"]["deploy"] <= record["times"]["ready"]
    assert node.log == ["munge starts", "slurmctld starts", "slurmrestd starts"]


def test_stops_in_order(node: Node) -> None:
    """munge is to stop first, and ends last."""
    node.add("munge")
    node.add("slurmctld", needs=["munge"], stop_s=0.5)
    node.add("slurmrestd", needs=["slurmctld"], stop_s=0.5)
    tasks = {name: node.start(name) for name in ("munge", "slurmctld", "slurmrestd")}
    node.await_state("slurmrestd", "ready")
    for name in ("munge", "slurmctld", "slurmrestd"):
        tasks[name].terminate()
        time.sleep(0.3)
    assert node.record("munge")["detail"] == "is needed by slurmctld"
    assert [tasks[name].wait(60) for name in tasks] == [0, 0, 0]
    ends = [line for line in node.log if "end" in line]
    assert ends == [
        *("slurmrestd ends", "slurmrestd ended"),
        *("slurmctld ends", "slurmctld ended"),
        *("munge ends", "munge ended"),
    ]
    for name in tasks:
        record = node.record(name)
        assert (record["state"], record["status"], record["process"], record["holds"]) == ("removal", 0, None, [])


def test_wait_for_users_is_bounded(node: Node) -> None:
    node.add("munge", release_s=1)
    node.add("slurmctld", needs=["munge"])
    munge, other = node.start("munge"), node.start("slurmctld")
    node.await_state("slurmctld", "ready")
    began = time.monotonic()
    assert end(munge) == 0
    assert time.monotonic() - began >= 1
    assert "munge stops although slurmctld still uses it, after 1 s" in node.output("munge")
    assert other.poll() is None, "it runs on: a dead munge is not a reason to restart it"


def test_no_start_on_what_is_being_stopped(node: Node) -> None:
    """munge still answers while it waits for slurmctld: slurmrestd waits for the next one."""
    node.add("munge")
    node.add("slurmctld", needs=["munge"])
    node.add("slurmrestd", needs=["munge"])
    munge, user = node.start("munge"), node.start("slurmctld")
    node.await_state("slurmctld", "ready")
    munge.terminate()
    node.await_state("munge", "removal")
    node.start("slurmrestd")
    later(lambda: "it is being stopped" in node.record("slurmrestd").get("detail", ""))
    assert end(user) == 0
    assert munge.wait(60) == 0
    assert "slurmrestd starts" not in node.log
    node.start("munge")
    node.await_state("slurmrestd", "ready")
    assert not [line for line in node.log if "BEFORE" in line]


def test_killed_task_takes_its_service_along(node: Node) -> None:
    """SIGKILL of sms-run: the service is stopped in order, and the next one starts when it has ended."""
    node.add("munge", stop_s=1)
    first = node.start("munge")
    before = node.await_state("munge", "ready")["process"]["pid"]
    first.kill()
    first.wait()
    node.start("munge")
    later(
        lambda: (
            node.record("munge")["state"] == "ready" and (node.record("munge")["process"] or {}).get("pid") != before
        )
    )
    assert node.pid("munge") != before and not alive(before)
    assert node.log == ["munge starts", "munge ends", "munge ended", "munge starts"]


def test_service_of_a_killed_task_counts_as_a_user(node: Node) -> None:
    node.add("munge")
    node.add("slurmctld", needs=["munge"], stop_s=1.5)
    munge, user = node.start("munge"), node.start("slurmctld")
    node.await_state("slurmctld", "ready")
    user.kill()
    user.wait()
    assert end(munge) == 0
    assert [line for line in node.log if "ended" in line] == ["slurmctld ended", "munge ended"]


def test_service_that_does_not_stop_is_killed(node: Node) -> None:
    node.add("munge", stop_s=60)
    task = node.start("munge")
    pid = node.await_state("munge", "ready")["process"]["pid"]
    began = time.monotonic()
    assert end(task) == 137
    assert time.monotonic() - began >= 3
    gone(pid)
    assert "munge has not stopped within 3 s: killed" in node.output("munge")


def test_waits_for_another_task_of_the_same_service(node: Node) -> None:
    node.add("munge", stop_s=0.5)
    first = node.start("munge")
    node.await_state("munge", "ready")
    second = node.start("munge")
    time.sleep(0.5)
    assert node.log == ["munge starts"]
    assert end(first) == 0
    later(lambda: node.record("munge")["state"] == "ready" and node.record("munge")["status"] is None)
    assert node.log == ["munge starts", "munge ends", "munge ended", "munge starts"]
    third = node.start("munge", "--wait", "1")
    assert third.wait(60) == 1
    assert "another sms-run of munge has not ended" in node.output("munge")
    assert second.poll() is None and node.record("munge")["state"] == "ready", "the record stays that of the other"


def test_wait_for_needs_is_bounded(node: Node) -> None:
    node.add("munge")
    node.add("slurmctld", needs=["munge"])
    assert node.start("slurmctld", "--wait", "1").wait(60) == 1
    words = node.output("slurmctld")
    assert "slurmctld gives up after" in words and "no answer of munge" in words and "since 20" in words
    record = node.record("slurmctld")
    assert (record["state"], record["status"], record["holds"]) == ("removal", 1, [])
    assert node.log == []


def test_what_is_only_waited_for_is_left_out_at_the_limit(node: Node) -> None:
    """slurmctld starts after slurmdbd, and works without it."""
    node.add("munge")
    node.add("slurmdbd", needs=["munge"])
    node.add("slurmctld", needs=["munge"], after=["slurmdbd"])
    node.start("munge")
    node.start("slurmctld", "--wait", "1")
    node.await_state("slurmctld", "ready")
    assert "slurmctld starts without slurmdbd" in node.output("slurmctld")


def test_stop_while_it_waits(node: Node) -> None:
    node.add("munge")
    node.add("slurmctld", needs=["munge"])
    task = node.start("slurmctld")
    later(lambda: node.record("slurmctld").get("waits_for"))
    assert end(task) == 0
    assert node.record("slurmctld")["detail"] == "stopped before it ran"


def test_emptied_folder_of_a_running_node(node: Node) -> None:
    """The record and the lock come back; there is no second process."""
    node.add("munge")
    node.start("munge")
    pid = node.await_state("munge", "ready")["process"]["pid"]
    shutil.rmtree(node.root / "run/sms/jobsync")
    later(lambda: node.record("munge").get("state") == "ready")
    second = node.start("munge", "--wait", "1")
    assert second.wait(60) == 1
    assert node.pid("munge") == pid and node.log == ["munge starts"]


def test_reboot(node: Node) -> None:
    """All processes killed, /run empty: the order holds again, in whatever order they are started."""
    node.add("munge", ready_s=0.3)
    node.add("slurmctld", needs=["munge"])
    for _ in range(2):
        tasks = [node.start("slurmctld"), node.start("munge")]
        node.await_state("slurmctld", "ready")
        for name in node.services:
            os.killpg(node.pid(name), signal.SIGKILL)
        for task in tasks:
            task.kill()
            task.wait()
        shutil.rmtree(node.root / "run/sms/jobsync")
        for name in node.services:
            (node.root / f"{name}.up").unlink(missing_ok=True)
    assert node.log == ["munge starts", "slurmctld starts"] * 2


def test_ends_with_the_engine_that_started_it(node: Node) -> None:
    """Its executor was killed: nobody could stop it any more."""
    node.add("munge")
    starter = subprocess.Popen(
        ["sh", "-c", '"$@" & wait', "starter", sys.executable, str(RUNTIME / "sms-run"), "--jobsync", "munge"],
        env={**os.environ, "SMS_ROOT": str(node.root), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    node.await_state("munge", "ready")
    starter.kill()
    starter.wait()
    later(lambda: node.record("munge")["state"] == "removal" and node.record("munge")["status"] == 0)
    assert node.log == ["munge starts", "munge ends", "munge ended"]


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137), ("exec /no/such/program", 127)],
)
def test_exit_status_of_a_service_that_ends(node: Node, script: str, status: int) -> None:
    node.add("it")
    node.services["it"]["run"] = ["sh", "-c", script]
    node.add("other")
    assert node.start("it").wait(60) == status
    record = node.record("it")
    assert (record["state"], record["status"], record["detail"]) == ("removal", status, f"ended with status {status}")


def test_exit_status_of_a_stop_by_signal(node: Node) -> None:
    """A daemon without a handler ends by the signal that it was sent: that is a stop in order."""
    node.add("it")
    node.services["it"]["run"] = ["sleep", "60"]
    node.add("other")
    task = node.start("it")
    later(lambda: node.record("it").get("process"))
    assert end(task) == 0


def test_signals_are_passed_on(node: Node) -> None:
    node.add("munge")
    task = node.start("munge")
    node.await_state("munge", "ready")
    task.send_signal(signal.SIGHUP)
    later(lambda: "munge HUP" in node.log)
    assert task.poll() is None and node.record("munge")["state"] == "ready"


def test_failed_preparation(node: Node) -> None:
    node.add("it")
    node.services["it"]["setup"] = "echo no room; false"
    node.add("other")
    assert node.start("it").wait(60) == 1
    assert "the preparation of it ended with status 1" in node.output("it")
    assert node.log == []


def test_preparation_beforehand(node: Node) -> None:
    """An init container prepares as root; the task itself runs as the service's user."""
    node.add("it")
    node.services["it"]["setup"] = f"echo prepares >>{node.root}/log"
    node.add("other")
    assert run_program("sms-run", node.root, "--prepare", "it").returncode == 0
    node.start("it", "--prepared")
    node.await_state("it", "ready")
    assert node.log == ["prepares", "it starts"]


def test_mark_of_an_unclean_end(node: Node) -> None:
    """Removed by an end with status 0 only."""
    mark = node.root / "var/lib/sms/.running"
    node.add("it")
    node.services["it"].update(running="/var/lib/sms/.running", setup=f"echo ${{SMS_UNCLEAN:-clean}} >>{node.root}/log")
    node.add("other")
    for killed in (True, False, False):
        task = node.start("it")
        later(lambda: node.record("it").get("state") == "ready")
        assert mark.exists()
        if killed:
            os.killpg(node.pid("it"), signal.SIGKILL)
            assert task.wait(60) == 137
        else:
            assert end(task) == 0
        assert mark.exists() == killed
    assert [line for line in node.log if "it" not in line] == ["clean", "1", "clean"]


def test_unclean_end_of_a_task_that_is_prepared_beforehand(node: Node) -> None:
    """As of a container that is started again in its pod: its preparation is not, what such an end needs is."""
    mark = node.root / "var/lib/sms/.running"
    node.add("it")
    setup, unclean = (f"echo {word} >>{node.root}/log" for word in ("prepares", "unclean"))
    node.services["it"].update(running="/var/lib/sms/.running", setup=setup, unclean=unclean)
    node.add("other")
    for killed in (True, False, False):
        task = node.start("it", "--prepared")
        later(lambda: node.record("it").get("state") == "ready")
        if killed:
            os.killpg(node.pid("it"), signal.SIGKILL)
            assert task.wait(60) == 137
        else:
            assert end(task) == 0
        assert mark.exists() == killed
    assert [line for line in node.log if "it" not in line] == ["unclean"]


def test_what_an_unclean_end_needs_is_in_the_preparation_too(node: Node) -> None:
    """Images of before know no other way."""
    tasks: Any = task_json(SERVICES, Templates(share("overlays"), site=SITE, services=SITE.service_names))["services"]
    found = tasks["slurmctld"]
    assert found["unclean"].startswith("/opt/sms/bin/sms-slurm-ids /var/spool/slurmctld/job_state\n")
    assert f'if [ -n "${{SMS_UNCLEAN:-}}" ]; then\n{found["unclean"]}\nfi\n' in found["setup"]
    assert tasks["munge"]["unclean"] == "" and "SMS_UNCLEAN" not in tasks["munge"]["setup"]
    assert (found["jobsync"]["lease"], tasks["mariadb"]["jobsync"]["lease"]) == (
        "/var/spool/slurmctld",
        "/var/lib/mysql",
    )
    assert [name for name, each in tasks.items() if each["jobsync"]["lease"]] == ["mariadb", "slurmctld"]


@needs_root
@pytest.mark.parametrize("version", ["cgroup", "cgroup2"])
def test_what_outlives_its_task_leaves_the_cgroups_of_the_engine(node: Node, version: str) -> None:
    """The executor of an engine is not in the cgroup of the task; jobs of slurmd must not be either."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    wanted = {"freezer"} if version == "cgroup" else set()
    places = [row[1] for row in mounts if row[2] == version and wanted <= set(row[3].split(","))]
    if not places:
        pytest.skip(f"{version} is not mounted")
    folder = Path(places[0]) / f"engine-{os.getpid()}"
    node.add("it")
    node.services["it"]["jobsync"]["outlived"] = True
    node.add("other")
    folder.mkdir()
    own = Path(places[0]) / "sms-it"
    try:
        node.start("it", prefix=["sh", "-c", f'echo $$ >{folder}/cgroup.procs; exec "$@"', "engine"])
        node.await_state("it", "ready")
        pid = node.pid("it")
        assert str(pid) in (own / "cgroup.procs").read_text().split()
        assert str(pid) not in (folder / "cgroup.procs").read_text().split()
        assert str(node.started[0].pid) in (folder / "cgroup.procs").read_text().split()
        assert end(node.started[0]) == 0
    finally:
        for place in (folder, own):
            remove_cgroup(place)


def remove_cgroup(place: Path) -> None:
    later(lambda: not (place / "cgroup.procs").read_text())
    place.rmdir()


def test_programs_outside_of_the_image(node: Node, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those files in one folder are all that a node needs."""
    folder = tmp_path_factory.mktemp("programs")
    for name in PROGRAMS:
        shutil.copy(RUNTIME / name, folder)
    node.add("munge")
    environment = {"PATH": os.environ["PATH"], "SMS_ROOT": str(node.root)}
    run = ["/usr/bin/python3", str(folder / "sms-run"), "--jobsync", "munge"]
    node.started.append(subprocess.Popen(run, env=environment))
    node.await_state("munge", "ready")
    for words, status in ((["munge"], 0), (["--live", "munge"], 0), (["--serve", "not an address"], 2)):
        probe = ["/usr/bin/python3", str(folder / "sms-probe"), *words]
        assert subprocess.run(probe, env=environment, capture_output=True, timeout=60).returncode == status


def test_that_of_the_container_is_refused(node: Node) -> None:
    node.add("munge")
    del node.services["munge"]["jobsync"]
    node.add("other")
    assert node.start("munge").wait(60) == 2
    assert node.start("nosuch").wait(60) == 2
    assert run_program("sms-run", node.root, "--prepared", "other").returncode == 2


@needs_root
def test_in_containers_of_one_pod(node: Node) -> None:
    """Each is the first process of a pid namespace, and sees no process of the others: locks tell who lives."""
    container = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
    node.add("munge")
    node.services["munge"]["run"][2] = "(sleep 0.1 &)\n(sleep 0.1 &)\n" + node.services["munge"]["run"][2]
    node.add("slurmctld", needs=["munge"], stop_s=0.5)
    node.add("slurmrestd", needs=["munge"])
    tasks = {name: node.start(name, prefix=container) for name in ("slurmrestd", "slurmctld", "munge")}
    for name in tasks:
        node.await_state(name, "ready")
    first = {name: int(Path(f"/proc/{task.pid}/task/{task.pid}/children").read_text()) for name, task in tasks.items()}

    def zombies() -> list[str]:
        children = Path(f"/proc/{first['munge']}/task/{first['munge']}/children").read_text().split()
        return [pid for pid in children if not alive(int(pid))]

    time.sleep(0.3)
    os.kill(first["munge"], signal.SIGHUP)  # each signal makes it look
    later(lambda: "munge HUP" in node.log and not zombies())
    os.kill(first["munge"], signal.SIGTERM)
    later(lambda: node.record("munge")["detail"] == "is needed by slurmctld, slurmrestd")
    os.kill(first["slurmrestd"], signal.SIGKILL)  # its container is gone at once
    later(lambda: node.record("munge")["detail"] == "is needed by slurmctld")
    os.kill(first["slurmctld"], signal.SIGTERM)
    assert [tasks[name].wait(60) for name in ("slurmctld", "munge")] == [0, 0]
    assert [line for line in node.log if "ended" in line] == ["slurmctld ended", "munge ended"]


@needs_root
@pytest.mark.parametrize(("user", "status"), [("nobody", 0), ("daemon", 127)])
def test_as_the_user_of_the_service(user: str, status: int) -> None:
    """Kubernetes starts the task as that user; as another one it is refused."""
    with TemporaryDirectory() as folder, node_in(Path(folder)) as node:
        node.root.chmod(0o777)
        for path in ("etc/sms", "run/sms/jobsync"):
            (node.root / path).mkdir(parents=True)
        (node.root / "run/sms/jobsync").chmod(0o777)
        shutil.copytree(RUNTIME, node.root / "bin", ignore=shutil.ignore_patterns("__pycache__"))
        node.add("it")
        node.services["it"]["user"] = "nobody"
        node.add("other")
        argv = ["setpriv", "--reuid", user, "--regid", "65534", "--clear-groups", "/usr/bin/python3"]
        process = subprocess.Popen(
            [*argv, str(node.root / "bin/sms-run"), "--jobsync", "--prepared", "it"],
            env={"PATH": os.environ["PATH"], "SMS_ROOT": str(node.root), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        node.started.append(process)
        if not status:
            node.await_state("it", "ready")
            process.terminate()
        assert process.wait(60) == status
