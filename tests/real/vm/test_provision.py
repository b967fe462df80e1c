"""The whole thread of the provisioning VM: a machine without a disk boots from it, and then it is switched off.

`make demo-vm` has two: here each costs minutes of both cores.

The images of the VM and of the nodes lie on this machine, as the container's does: they are built once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from appliance.operations.classify.classify import ClassifyOptions, classify
from appliance.operations.lab import demo
from appliance.operations.upgrade.rehearse_vm import TCP, find_clients
from appliance.progress import Silent
from tests.real.conftest import Playground
from tests.real.labs import console_text, fresh_lab, need_machine

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.timeout(1800)]

NAME = "t-provision"
METAL = ("metal1",)
CONTAINER, VM, NODES = "10.77.0.1", "10.77.0.2", ("10.77.0.151",)
API_PORT = 8443
BOOT_S = 480  # of a machine, where another test may have this one busy
MAIL = """
import smtplib, sys
with smtplib.SMTP("10.77.0.1", timeout=30) as relay:
    relay.sendmail("root@example.test", ["someone@example.test"], "Subject: " + sys.argv[1] + "\\n\\nwords\\n")
"""
FETCH = "import urllib.request as ask; print(ask.urlopen('http://10.78.0.254/', timeout=30).read().decode())"


@dataclass
class Thread:
    """The lab; how long each part took, in seconds."""

    there: Playground
    took: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Take the time, and show it: `-s`."""
        began = time.monotonic()
        yield
        self.took[what] = round(time.monotonic() - began, 1)
        print(f"{what}: {self.took[what]} s", flush=True)

    def make(self, *words: str) -> None:
        """`sms` on this machine, which has the mirrors."""
        argv = [sys.executable, "-m", "appliance", "-q", "--site", str(self.there.lab.etc / "sms.yaml"), *words]
        deadline = time.monotonic() + 900
        while True:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
            if "another build" not in done.stderr or time.monotonic() > deadline:
                break
            time.sleep(2)
        assert done.returncode == 0, done.stdout + done.stderr

    def inside(self, *argv: str, ok: tuple[int, ...] | None = (0,)) -> str:
        """A command in the container."""
        return self.there.sms("exec", "--", *argv, ok=ok, timeout=180).text

    def job(self, node: str, *argv: str) -> str:
        """A command on a node, as a job that is given from the container."""
        return self.inside("srun", "--immediate=60", "-w", node, *argv)

    def states(self) -> dict[str, str]:
        """What the controller says of its nodes."""
        lines = self.inside("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.partition(" ")[::2] for line in lines)

    def wait_idle(self) -> None:
        """Until every node is; else with what they have said last."""
        deadline = time.monotonic() + BOOT_S
        while True:
            states = self.states()
            for name in METAL:
                if states.get(name) == "idle" and name not in self.took:
                    self.took[name] = round(time.monotonic() - self.booted, 1)
            if set(states.values()) == {"idle"}:
                return
            said = {name: console_text(self.there.lab.metal(name))[-1500:] for name in METAL}
            assert time.monotonic() < deadline, (states, said)
            time.sleep(3)  # a look costs a second of the processor that the nodes boot on

    booted: float = 0


@pytest.fixture(scope="module")
def thread() -> Iterator[Thread]:
    """Everything up to the first idle node."""
    need_machine(metal=True)
    with fresh_lab(NAME, 0, metal=len(METAL)) as lab:
        there = Playground(lab)
        found = Thread(there)
        bring_up(found, there)
        print(found.took, flush=True)
        yield found


def bring_up(thread: Thread, there: Playground) -> None:
    """As an administrator does it, from an empty admin host to a cluster of nodes without disks."""
    with thread.timed("images"):
        for words in (("build",), ("vm", "build"), ("image", "build", "compute")):
            thread.make(*words)
    with thread.timed("all"):
        with thread.timed("container"):
            there.sms("-q", "start", "--host", "host-a", on="admin")
        with thread.timed("vm"):
            there.sms("-q", "vm", "start", "--host", "host-a", "--wait", "15m", on="admin", timeout=1000)
        with thread.timed("push"):
            there.sms("-q", "image", "push", "compute", on="admin")
        with thread.timed("discover"):
            reported = json.loads(there.sms("-q", "node", "discover", "10.77.0.191", "--json", ok=(0, 4)).stdout)
            assert reported["problems"] == [] and [node["what"] for node in reported["nodes"]] == ["new"], reported
        with thread.timed("files"):
            there.sms("-q", "files", "push", "--wait", "2m", on="admin")
        thread.booted = time.monotonic()
        with thread.timed("boot"):
            there.sms("-q", "node", "boot", *METAL, "--yes")
        thread.wait_idle()


def test_a_machine_without_a_disk_runs_jobs_of_the_container(thread: Thread) -> None:
    assert sorted(thread.inside("srun", "hostname").split()) == list(METAL)
    # It is the container's controller that they are with: the VM has none.
    assert "slurm" not in thread.there.sms("vm", "exec", "--", "sh", "-c", "ps -e || ls /proc/*/exe -l").text
    assert " / overlay " in thread.job("metal1", "cat", "/proc/mounts")


def test_the_cluster_runs_on_without_the_vm(thread: Thread, tmp_path: Path) -> None:
    there, outside = thread.there, thread.there.host("outside")
    job = thread.inside("sbatch", "--parsable", "--chdir=/tmp", "--wrap=srun sleep 30")
    capture, word = tmp_path / "off.pcap", f"t-provision-{time.time_ns()}"
    there.sms("-q", "vm", "stop")
    with demo.listening(there.lab, capture):
        assert "RUNNING" in thread.inside("scontrol", "show", "job", job)
        demo.wait_for("the end of the job", lambda: ended(thread, job), 120)
        assert "COMPLETED" in thread.inside("scontrol", "show", "job", job)
        assert sorted(thread.inside("srun", "hostname").split()) == list(METAL)
        for node in METAL:
            thread.job(node, "logger", "--tag", "t-provision", f"{word} of {node}")
            thread.job(node, "python3", "-c", MAIL, f"{word} of {node}")
            assert "10.78.0.2" in thread.job(node, "python3", "-c", FETCH)
            demo.wait_for("the node's clock", lambda node=node: clock(thread, node), 120)  # type: ignore[misc]
        for node in METAL:
            for file in ("/var/log/remote.log", "/var/mail/all"):
                line = ("grep", "-m1", f"{word} of {node}", file)
                demo.wait_for(f"{node}'s line in {file}", lambda line=line: outside.run(*line, ok=None).text, 60)  # type: ignore[misc]
        status = there.status()
    assert status["healthy"], status
    assert not status["provisioning"]["up"] and "nodes that boot" in status["provisioning"]["waits"]
    found = classify(ClassifyOptions(captures=(str(capture),), sms=CONTAINER), Silent())
    assert "slurmctld" in {service.name for service in found.services if service.verdict == "time-critical"}
    # It sees none of what the VM does but file synchronisation's polls, which are not answered.
    assert not {"provisioning", "warewulf"} & {service.name for service in found.services}
    clients = find_clients(capture, VM)
    assert not [link for link in clients if link[1:] != (TCP, API_PORT) or link[0] not in (CONTAINER, *NODES)], clients


def ended(thread: Thread, job: str) -> str:
    reported = thread.inside("scontrol", "show", "job", job)
    return "" if any(word in reported for word in ("RUNNING", "PENDING", "COMPLETING")) else reported


def clock(thread: Thread, node: str) -> str:
    """The node's chronyd follows the container."""
    lines = thread.job(node, "chronyc", "-n", "sources").splitlines()
    return next((line for line in lines if line.startswith("^*") and CONTAINER in line), "")


def test_what_has_changed_reaches_nodes_and_container_when_the_vm_is_back(thread: Thread) -> None:
    there, etc = thread.there, thread.there.lab.etc
    motd = "/etc/site-motd"  # none of the image's, which would come back
    with thread.timed("vm again"):
        there.sms("-q", "vm", "start", "--host", "host-a", "--wait", "15m", on="admin", timeout=1000)
    with (etc / "passwd").open("a") as passwd:
        passwd.write("bob:x:2001:2000:Bob:/home/bob:/bin/bash\n")
    site = yaml.safe_load((etc / "sms.yaml").read_text())
    site["slurm"]["partitions"].append({"name": "late", "nodes": "metal1"})
    (etc / "sms.yaml").write_text(yaml.safe_dump(site))
    (etc / "motd").write_text("a word to all\n")
    there.sms("files", "add", motd, "/etc/sms/motd")
    there.sms("files", "push", "--wait", "2m")
    for node in METAL:
        assert "Bob" in thread.job(node, "getent", "passwd", "bob")
        assert thread.job(node, "cat", motd) == "a word to all"
    assert "Bob" in thread.inside("getent", "passwd", "bob")
    assert sorted(thread.inside("srun", "-p", "late", "hostname").split()) == list(METAL)
    there.sms("files", "remove", motd, "--wait", "2m")
    for node in METAL:
        assert thread.job(node, "sh", "-c", f"[ -e {motd} ] || echo gone") == "gone"
