"""The main job in the one-machine lab, every part of it with the real programs."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from appliance.errors import SmsError
from appliance.flow.build import build
from appliance.flow.classify import Question, classify
from appliance.flow.context import open_cluster
from appliance.flow.lab import lab_up
from appliance.host.base import Host
from appliance.lab import Lab
from appliance.lab.capture import SWITCH, listener
from appliance.lab.layout import CONTAINER_ADDRESSES, GATEWAY, PUBLIC
from appliance.progress import Progress, Silent
from appliance.tools import tcpdump

OUTSIDE = GATEWAY[PUBLIC]
CARRIER, OTHER = "host-a", "host-b"
OVERLAY = "/var/lib/sms/overlays/lab.img"
BIG_BYTES = 50 << 20
"""Of the file that lies outside (definitions/lab/setup.sh.j2)."""
PATIENCE_S = 150
"""A controller asks a node that did not hear it again after a third of SlurmdTimeout, 100 s (slurm.conf(5))."""
LISTEN_S = 3600
"""The capture ends with the demo; this is for a demo that was killed."""


@dataclass(frozen=True)
class Check:
    """One thing that was tried; ``seen`` is the evidence."""

    what: str
    seen: str
    seconds: float


@dataclass
class Shown:
    """What the demo has seen."""

    lab: str
    checks: list[Check] = field(default_factory=list)

    def try_out(self, progress: Progress, what: str, work: Callable[[], str], *, own_progress: bool = False) -> str:
        """Do one thing, note the evidence and how long it took; give the evidence."""
        began = time.monotonic()
        with nullcontext() if own_progress else progress.step(what) as step:
            seen = work()
            if step:
                step.detail(seen)
        self.checks.append(Check(what, seen, round(time.monotonic() - began, 2)))
        return seen


def demo(name: str, nodes: int, progress: Progress, *, quiet: bool = False) -> Shown:
    """Build, start, and use the appliance. What is done already is not done again.

    Raises:
        SmsError: something does not work; nothing is hidden by going on.
    """
    shown = Shown(name)

    check = partial(shown.try_out, progress)

    def build_image() -> str:
        cluster = open_cluster(lab.etc / "sms.yaml", None, progress)
        built = build(cluster, progress, lock=lab.etc / "sms.lock")
        how = "built" if built.fresh else "unchanged"
        return f"{how}, {built.packages} packages, {built.bytes >> 20} MiB, key {built.key[:12]}"

    began = time.monotonic()
    lab_up(name, nodes, progress)
    lab = Lab.open(name)
    hosts = f"{len(lab.nodes)} compute nodes, host-a, host-b, admin, outside"
    shown.checks.append(Check("a cluster on this machine", hosts, round(time.monotonic() - began, 2)))
    node, other = lab.host(lab.nodes[0]), lab.host(lab.nodes[-1])
    check("a signed services container", build_image, own_progress=True)
    check(f"sms start --host {CARRIER}, over SSH", lambda: start(lab, quiet), own_progress=True)
    with tempfile.TemporaryDirectory(prefix="sms-demo-") as folder:
        capture = Path(folder) / "demo.pcap"
        with listening(lab, capture):
            check("every compute node is idle", lambda: wait_idle(node, len(lab.nodes)))
            job = check("a Slurm job from a compute node", lambda: run_job(node)).split()[1]
            check("its mail arrives outside", lambda: mail_arrives(lab.host("outside"), job))
            check("the outside, through the container's NAT", lambda: fetch_outside(node))
            check("a node's syslog arrives in the container", lambda: syslog_arrives(lab, other))
            check("a node's clock follows the container", lambda: clock_follows(node))
        check("a snapshot of all it has written, while it runs", lambda: snapshot_holds(lab))
        check("it moves to host-b and back, under a job and a download", lambda: moves(lab))
        check("what must never stop, by the traffic of all this", lambda: time_critical(capture))
    return shown


@contextmanager
def listening(lab: Lab, capture: Path) -> Iterator[None]:
    """Capture the provisioning network for as long as the context lasts."""
    host, interface = listener(lab.layout, SWITCH)
    with capture.open("wb") as file, host.running(*tcpdump.capture_argv(interface, LISTEN_S)) as running:

        def copy() -> None:
            while block := os.read(running.out, tcpdump.BLOCK):
                file.write(block)

        copier = threading.Thread(target=copy, daemon=True)
        copier.start()
        yield
        # The kernel hands the last second's packets over late.
        time.sleep(tcpdump.LAST_S)
        running.stop()
        copier.join()


def time_critical(capture: Path) -> str:
    """The services that nodes need at every moment, as `sms classify` says."""
    found = classify(Question(captures=(str(capture),)), Silent())
    names = [service.name for service in found.services if service.verdict == "time-critical"]
    if missing := {"slurmctld", "rsyslog", "nat"} - set(names):
        raise SmsError(f"the classification does not say so of {', '.join(sorted(missing))}")
    return f"{', '.join(names)}; seen in {found.capture.packets:,} packets"


def snapshot_holds(lab: Lab) -> str:
    """A snapshot of the running appliance's overlay, every byte of it read again."""
    admin = lab.host("admin")
    taken = json.loads(admin.run("sms", "-q", "overlay", "snapshot", "--host", CARRIER, "--json", timeout=300).stdout)
    admin.run("sms", "-q", "overlay", "verify", str(taken["number"]), "--host", CARRIER, timeout=300)
    return f"{taken['used_bytes'] >> 20} MiB, writers waited {taken['frozen_ms']:.0f} ms, verified"


def moves(lab: Lab) -> str:
    """The running appliance goes to the other admin host and back, while a job runs and a node downloads through it.

    Raises:
        SmsError: the job or the download ended otherwise than it should.
    """
    admin, node = lab.host("admin"), lab.host(lab.nodes[0])
    job = as_alice(node, "sbatch", "--parsable", "--wrap=sleep 20")
    wait_for("the start of the job", lambda: "yes" if job_state(node, job) == "RUNNING" else "")
    argv = ("curl", "--silent", "--limit-rate", "2M", "--output", "/dev/null", "--write-out", "%{size_download}")
    with ThreadPoolExecutor(1) as pool:
        download = pool.submit(node.run, *argv, f"http://{OUTSIDE}/big", timeout=120)
        said = []
        for target in (OTHER, CARRIER):
            # Forced: where the machine is busy, the first one was slow, and the second is expected to be.
            moved = json.loads(admin.run("sms", "-q", "migrate", target, "--force", "--json", timeout=300).stdout)
            away = moved["outage"]
            said.append(f"NAT away {away['nat'] * 1000:.0f} ms, slurmctld {away['slurmctld']:.1f} s")
        size = int(download.result().text)
    if size != BIG_BYTES:
        raise SmsError(f"the download ended after {size} of {BIG_BYTES} bytes")
    state = wait_for("the end of the job", lambda: ended_as(node, job))
    if state != "COMPLETED":
        raise SmsError(f"job {job} ended as {state}")
    return f"{'; '.join(said)}; job {job} {state}, {size >> 20} MiB downloaded in one go"


def start(lab: Lab, quiet: bool) -> str:
    """Start the appliance as an administrator would: from their own machine, over SSH."""
    sms = ("sms", *(("-q",) if quiet else ()))
    runs: list[tuple[str, ...]] = [("start", "--host", CARRIER)]
    if lab.host(CARRIER).works("sh", "-c", '[ -e "$1.moved" ] && [ ! -e "$1" ]', "moved", OVERLAY):
        # An earlier demo was ended while it was away.
        runs = [("start", "--host", OTHER), ("migrate", CARRIER)]
    for words in runs:
        if status := lab.host("admin").interact(*sms, *words):
            raise SmsError(f"`sms {words[0]}` ended with status {status}", hint="its own words are above")
    return "verified, leased, seeded, started; every service answers"


def wait_for(what: str, work: Callable[[], str], timeout_s: float = PATIENCE_S) -> str:
    """Call ``work`` until it gives a text; it gives an empty one while it has to be waited for.

    Raises:
        SmsError: it did not in time.
    """
    deadline = time.monotonic() + timeout_s
    while not (seen := work()):
        if time.monotonic() > deadline:
            raise SmsError(f"{what} did not happen within {timeout_s:g} s")
        time.sleep(0.1)
    return seen


def wait_idle(node: Host, count: int) -> str:
    """Every node has registered with the container's controller."""

    def idle() -> str:
        states = node.run("sinfo", "--noheader", "--Node", "--format=%N %T", ok=None).text.splitlines()
        return f"{count} nodes" if sum(line.endswith(" idle") for line in states) == count else ""

    return wait_for("registration of every node", idle)


def as_alice(node: Host, *argv: str, timeout: float = 90) -> str:
    """Run a command as the lab's user; give what it prints."""
    return node.run(
        "runuser", "-u", "alice", "--", "env", "-C", "/home/alice", "HOME=/home/alice", *argv, timeout=timeout
    ).text


def run_job(node: Host) -> str:
    """A batch job, submitted and waited for on a compute node."""
    mail = ("--mail-type=END", "--mail-user=alice@example.test")
    job = as_alice(node, "sbatch", "--parsable", *mail, "--wrap=hostname")

    state = wait_for("the end of the job", lambda: ended_as(node, job))
    if state != "COMPLETED":
        raise SmsError(f"job {job} ended as {state}")
    return f"job {job} {state}, on {node.run('cat', f'/home/alice/slurm-{job}.out').text}"


def job_state(node: Host, job: str) -> str:
    """What Slurm says of a job."""
    told = dict(word.partition("=")[::2] for word in node.run("scontrol", "-o", "show", "job", job).text.split())
    return told["JobState"]


def ended_as(node: Host, job: str) -> str:
    """How a job ended; empty while it has not."""
    state = job_state(node, job)
    return state if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING") else ""


def mail_arrives(outside: Host, job: str) -> str:
    """Slurm's mail about the job left through the container."""

    def subject() -> str:
        lines = outside.run(
            "sh", "-c", 'grep "^Subject: Slurm Job_id=$1 " /var/mail/all', "find", job, ok=None
        ).text.splitlines()
        return lines[-1].removeprefix("Subject: ") if lines else ""

    return wait_for("the job's mail", subject)


def fetch_outside(node: Host) -> str:
    """A page from beyond the public network; it says which address it was fetched by."""
    page = node.run("curl", "--silent", "--fail", "--max-time", "10", f"http://{OUTSIDE}/").text
    if CONTAINER_ADDRESSES[PUBLIC] not in page:
        raise SmsError(f"the outside saw somebody else than the container: {page}")
    return page


def syslog_arrives(lab: Lab, node: Host) -> str:
    """A line logged on a node is in the container's messages."""
    word = f"sms-demo-{time.time_ns()}"
    node.run("logger", "--tag", "demo", word)

    def line() -> str:
        messages = lab.host("admin").run(
            "sms", "exec", "--host", CARRIER, "--", "grep", "-h", word, "/var/log/messages", ok=None
        )
        return next((found for found in messages.text.splitlines() if word in found and "demo" in found), "")

    return wait_for("the line", line)


def clock_follows(node: Host) -> str:
    """The node's chronyd has chosen the container as its source."""

    def source() -> str:
        lines = node.run("chronyc", "-n", "sources", ok=None).text.splitlines()
        return next((" ".join(line.split()[:4]) for line in lines if line.startswith("^*")), "")

    return wait_for("the node's clock", source)
