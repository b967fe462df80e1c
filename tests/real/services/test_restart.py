"""`sms restart`: single services; the others keep running, and so do jobs."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest

from appliance.operations.lab import demo
from tests.real.conftest import NODES, Playground
from tests.real.processes import begin, kill_sms
from tests.waiting import wait_until

pytestmark = pytest.mark.real


def pids(running: Playground) -> dict[str, str]:
    """Process of each service, by name."""
    shown = running.sms("exec", "--", "supervisorctl", "-c", "/etc/sms/supervisord.conf", "status", ok=(0, 3)).text
    words = [line.split() for line in shown.splitlines()]
    return {each[0]: each[3].rstrip(",") if each[1] == "RUNNING" else "" for each in words}


def test_only_the_named_services_are_restarted(running: Playground) -> None:
    """Adds to `sms start`: they are stopped as the supervisor stops them, in their order, with a job running."""
    demo.wait_idle(running.host("node1"), NODES)
    job = demo.as_alice(running.host("node1"), "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 300")
    wait_until(lambda: running.host("node1").run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING", "the job")
    before = pids(running)
    planned = json.loads(running.sms("restart", "-n", "postfix", "slurmctld", "--json").stdout)
    assert [one["service"] for one in planned] == ["postfix", "slurmctld"] and pids(running) == before
    done = json.loads(running.sms("-q", "restart", "slurmctld", "postfix", "--json").stdout)
    assert [(one["service"], one["ok"]) for one in done] == [("postfix", True), ("slurmctld", True)]
    after = pids(running)
    assert {name for name in before if after[name] != before[name]} == {"postfix", "slurmctld"}
    assert running.host("node1").run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING"
    running.host("node1").run("scancel", job)


def test_what_is_refused(running: Playground) -> None:
    before = pids(running)
    assert "the site has no service" in running.sms("restart", "slurmdbd", ok=(2,)).stderr.decode()
    assert "--host host-a" in running.sms("restart", "postfix", on="host-b", ok=(3,)).stderr.decode()
    assert pids(running) == before


def test_a_killed_run_leaves_no_service_stopped(running: Playground) -> None:
    """Killed between the order to stop and that to start: slurmctld takes some time to save its state."""
    before = pids(running)["slurmctld"]
    process = begin(running, "restart", "slurmctld")
    wait_until(lambda: pids(running).get("slurmctld") != before, "its stop")
    kill_sms(process.pid)
    process.wait()
    wait_until(lambda: pids(running)["slurmctld"] not in ("", before), "its start")
    wait_until(lambda: running.status()["healthy"], "health")


@pytest.mark.full
def test_a_job_whose_end_slurmctld_has_not_saved_does_not_run_on(running: Playground) -> None:
    """After kill -9 its state says that the job runs, on a node that does not have it: the node is asked soon."""
    node = running.host("node1")
    demo.wait_idle(node, NODES)
    job = demo.as_alice(node, "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 15")

    def state() -> str:
        return node.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T", ok=None).text

    wait_until(lambda: state() == "RUNNING", "the job")
    time.sleep(13)
    held = demo.as_alice(node, "sbatch", "--parsable", "--hold", "-o", "/dev/null", "--wrap", "true")
    wait_until(lambda: state() != "RUNNING", "its end")  # within 5 s after the state was saved, which is not again yet
    before = pids(running)["slurmctld"]
    running.sms("exec", "--", "kill", "-KILL", before)
    wait_until(lambda: pids(running)["slurmctld"] not in ("", before), "its start")
    wait_until(lambda: state() == "RUNNING", "the state of before")
    wait_until(lambda: state() not in ("", "RUNNING"), "that it does not run", 90)
    node.run("scancel", job, held)
    wait_until(lambda: running.status()["healthy"], "health")


@pytest.mark.full
def test_the_uplink_is_watched_while_a_service_does_not_answer(running: Playground) -> None:
    """The run has the lock of the host meanwhile; the guard does not need it to take the ports off, and to return."""

    def ports() -> int:
        return len(running.host("host-a").run("sh", "-c", "ls -d /sys/class/net/*/brif/*").text.split())

    def cables(state: str) -> None:
        for port in ("p-host-a", "u-host-a"):
            subprocess.run(["ip", "-n", f"sms-{running.lab.name}-switch", "link", "set", port, state], check=True)

    before, broken = (
        ports(),
        "cp /etc/postfix/main.cf /root && echo 'inet_interfaces = 203.0.113.77' >>/etc/postfix/main.cf",
    )
    running.sms("exec", "--", "sh", "-c", broken)
    process = begin(running, "restart", "postfix", "--wait", "90")
    try:
        time.sleep(5)
        cables("down")
        wait_until(lambda: ports() < before, "the guard", 30)
        cables("up")
        wait_until(lambda: ports() == before, "its return", 80)
        assert process.poll() is None, "it would be watched after its end"
    finally:
        cables("up")
        running.sms("exec", "--", "cp", "/root/main.cf", "/etc/postfix/main.cf", ok=(0, 1, 3))
        process.wait()
    running.sms("-q", "restart", "postfix")
    wait_until(lambda: running.status()["healthy"], "health")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("true",), 0),
        (("sh", "-c", "exit 5"), 5),
        (("nosuch",), 127),
        (("/etc/passwd",), 126),
        (("sh", "-c", "kill -TERM $$"), 128 + signal.SIGTERM),
        (("sh", "-c", "kill -KILL $$"), 128 + signal.SIGKILL),
    ],
)
def test_exec_exits_as_a_shell_does(running: Playground, words: tuple[str, ...], status: int) -> None:
    assert running.sms("exec", "--", *words, ok=None).status == status
