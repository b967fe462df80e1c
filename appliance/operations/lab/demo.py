"""Demonstration in a lab on one machine: build, start and use the container with the real programs."""

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

from appliance.errors import ConfigError, SmsError
from appliance.host.base import Host
from appliance.lab import Extras, Lab
from appliance.lab.capture import SWITCH, listener
from appliance.lab.layout import CONTAINER_ADDRESSES, GATEWAY, PUBLIC, STANDARD
from appliance.lab.waiting import wait_until
from appliance.operations.classify.classify import ClassifyOptions, classify
from appliance.operations.context import open_cluster
from appliance.operations.image.build import build
from appliance.operations.lab.lab import lab_up
from appliance.progress import Progress, Silent
from appliance.tools import tcpdump

OUTSIDE = GATEWAY[PUBLIC]
CARRIER, OTHER = "host-a", "host-b"
OVERLAY = "/var/lib/sms/overlays/lab.img"
CURL = ("curl", "--silent", "--noproxy", "*")
"""A proxy of this machine's environment is not the lab's."""
BIG_BYTES = 50 << 20
"""Size of the file on the outside host (definitions/lab/setup.sh.j2)."""
PATIENCE_S = 150
"""A controller retries an unresponsive node after a third of SlurmdTimeout, 100 s (slurm.conf(5))."""
LISTEN_S = 3600
"""Limit of the capture, for a demo that was killed; usually it ends with the demo."""


@dataclass(frozen=True)
class Check:
    """Result of a check; ``seen`` is the evidence."""

    what: str
    seen: str
    seconds: float


@dataclass
class DemoReport:
    """The checks of a demo."""

    lab: str
    checks: list[Check] = field(default_factory=list)

    def bring_up(self, nodes: int, progress: Progress, extras: Extras = STANDARD, *, what: str, hosts: str) -> Lab:
        """Create the lab, and record it as a check; ``hosts``: those besides compute nodes."""
        began = time.monotonic()
        lab_up(self.lab, nodes, progress, extras)
        seen = f"{nodes} compute nodes, {hosts}"
        self.checks.append(Check(what, seen, round(time.monotonic() - began, 2)))
        return Lab.open(self.lab)

    def try_out(self, progress: Progress, what: str, work: Callable[[], str], *, own_progress: bool = False) -> str:
        """Run a check, record evidence and duration; return the evidence."""
        began = time.monotonic()
        with nullcontext() if own_progress else progress.step(what) as step:
            seen = work()
            if step:
                step.detail(seen)
        self.checks.append(Check(what, seen, round(time.monotonic() - began, 2)))
        return seen


def demo(name: str, nodes: int, progress: Progress, *, quiet: bool = False) -> DemoReport:
    """Build, start and use the services container. Finished steps are not repeated.

    Raises:
        ConfigError: it has no compute node.
        SmsError: a check failed.
    """
    if nodes < 1:
        raise ConfigError("the demonstration runs a job on a compute node", hint="--nodes 1 or more")
    report = DemoReport(name)

    check = partial(report.try_out, progress)

    lab = report.bring_up(nodes, progress, what="a cluster on this machine", hosts="host-a, host-b, admin, outside")
    node, other = lab.host(lab.nodes[0]), lab.host(lab.nodes[-1])
    check("a signed services container", lambda: build_image(lab, progress), own_progress=True)
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
        check("what must never stop, by the traffic of all this", lambda: time_critical(lab, capture))
    return report


def build_image(lab: Lab, progress: Progress) -> str:
    """Build the image of the lab's site file; return what it is."""
    built = build(open_cluster(lab.etc / "sms.yaml", None, progress), lock=lab.etc / "sms.lock")
    state = "built" if built.fresh else "unchanged"
    return f"{state}, {built.packages} packages, {built.bytes >> 20} MiB, key {built.key[:12]}"


@contextmanager
def listening(lab: Lab, capture: Path) -> Iterator[None]:
    """Capture the provisioning network as long as the context lasts."""
    host, interface = listener(lab.layout, SWITCH)
    with capture.open("wb") as file, host.running(*tcpdump.capture_argv(interface, LISTEN_S)) as running:

        def copy() -> None:
            while block := os.read(running.out, tcpdump.BLOCK):
                file.write(block)

        copier = threading.Thread(target=copy, daemon=True)
        copier.start()
        yield
        # The kernel delivers the packets of the last second late.
        time.sleep(tcpdump.LAST_S)
        running.stop()
        copier.join()


def names_by_role(lab: Lab) -> dict[str | None, str]:
    """Return the names of the site's services by their roles."""
    cluster = open_cluster(lab.etc / "sms.yaml", None, Silent())
    return {service.role: service.name for service in cluster.services}


def time_critical(lab: Lab, capture: Path) -> str:
    """Return the services that `sms classify` finds time-critical."""
    by_role = names_by_role(lab)
    found = classify(ClassifyOptions(captures=(str(capture),)), Silent())
    names = [service.name for service in found.services if service.verdict == "time-critical"]
    if missing := {by_role[role] for role in ("controller", "logging", "routing")} - set(names):
        raise SmsError(f"not classified as time-critical: {', '.join(sorted(missing))}")
    return f"{', '.join(names)}; seen in {found.capture.packets:,} packets"


def snapshot_holds(lab: Lab) -> str:
    """Take and verify a snapshot of the running container's overlay."""
    admin = lab.host("admin")
    taken = json.loads(admin.run("sms", "-q", "overlay", "snapshot", "--host", CARRIER, "--json", timeout=300).stdout)
    admin.run("sms", "-q", "overlay", "verify", str(taken["number"]), "--host", CARRIER, timeout=300)
    return f"{taken['used_bytes'] >> 20} MiB, writers waited {taken['frozen_ms']:.0f} ms, verified"


def moves(lab: Lab) -> str:
    """Migrate the running container to the other admin host and back, during a job and a download through it.

    Raises:
        SmsError: the job or the download failed.
    """
    admin, node = lab.host("admin"), lab.host(lab.nodes[0])
    by_role = names_by_role(lab)
    controller, routing = by_role["controller"], by_role["routing"]
    job = as_alice(node, "sbatch", "--parsable", "--wrap=sleep 20")
    wait_for("the start of the job", lambda: "yes" if job_state(node, job) == "RUNNING" else "")
    argv = (*CURL, "--limit-rate", "2M", "--output", "/dev/null", "--write-out", "%{size_download}")
    with ThreadPoolExecutor(1) as pool:
        download = pool.submit(node.run, *argv, f"http://{OUTSIDE}/big", timeout=120)
        outages = []
        for target in (OTHER, CARRIER):
            # On a busy machine the first migration is slow, and the second one is then predicted to be.
            moved = json.loads(admin.run("sms", "-q", "migrate", target, "--force", "--json", timeout=300).stdout)
            outage = moved["outage"]
            outages.append(f"outage of NAT {outage[routing] * 1000:.0f} ms, {controller} {outage[controller]:.1f} s")
        size = int(download.result().text)
    if size != BIG_BYTES:
        raise SmsError(f"the download ended after {size} of {BIG_BYTES} bytes")
    state = wait_for("the end of the job", lambda: ended_as(node, job))
    if state != "COMPLETED":
        raise SmsError(f"job {job} ended as {state}")
    return f"{'; '.join(outages)}; job {job} {state}, {size >> 20} MiB downloaded without a break"


def start(lab: Lab, quiet: bool) -> str:
    """Start the services container as an administrator would, from another machine over SSH."""
    sms = ("sms", *(("-q",) if quiet else ()))
    runs: list[tuple[str, ...]] = [("start", "--host", CARRIER)]
    if lab.host(CARRIER).works("test", "-e", f"{OVERLAY}.moved", "-a", "!", "-e", OVERLAY):
        # An earlier demo ended while the container was on the other host.
        runs = [("start", "--host", OTHER), ("migrate", CARRIER)]
    for arguments in runs:
        if status := lab.host("admin").interact(*sms, *arguments):
            raise SmsError(f"`sms {arguments[0]}` ended with status {status}", hint="see its messages above")
    return "verified, leased, seeded, started; every service answers"


def wait_for(what: str, work: Callable[[], str], timeout_s: float = PATIENCE_S) -> str:
    """Call ``work`` until it returns a non-empty text; return the text.

    Raises:
        SmsError: timeout.
    """
    return wait_until(work, what, timeout_s)


def wait_idle(node: Host, count: int) -> str:
    """Wait until every node has registered with the container's controller."""

    def idle() -> str:
        # A node is listed once for each of its partitions.
        states = {*node.run("sinfo", "--noheader", "--Node", "--format=%N %T", ok=None).text.splitlines()}
        return f"{count} nodes" if sum(line.endswith(" idle") for line in states) == count else ""

    return wait_for("registration of every node", idle)


def as_alice(node: Host, *argv: str, timeout: float = 90) -> str:
    """Run a command as the lab's user; return its output."""
    return node.run(
        "runuser", "-u", "alice", "--", "env", "-C", "/home/alice", "HOME=/home/alice", *argv, timeout=timeout
    ).text


def run_job(node: Host) -> str:
    """Submit a batch job on a compute node and wait for its end."""
    mail = ("--mail-type=END", "--mail-user=alice@example.test")
    job = as_alice(node, "sbatch", "--parsable", *mail, "--wrap=hostname")

    state = wait_for("the end of the job", lambda: ended_as(node, job))
    if state != "COMPLETED":
        raise SmsError(f"job {job} ended as {state}")
    return f"job {job} {state}, on {node.run('cat', f'/home/alice/slurm-{job}.out').text}"


def job_state(node: Host, job: str) -> str:
    """Return Slurm's state of a job."""
    fields = dict(word.partition("=")[::2] for word in node.run("scontrol", "-o", "show", "job", job).text.split())
    return fields["JobState"]


def ended_as(node: Host, job: str) -> str:
    """Return the final state of a job; empty while it has not ended."""
    state = job_state(node, job)
    return state if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING") else ""


def mail_arrives(outside: Host, job: str) -> str:
    """Wait for Slurm's mail about the job on the outside host; return its subject."""

    def subject() -> str:
        lines = outside.run("grep", f"^Subject: Slurm Job_id={job} ", "/var/mail/all", ok=None).text.splitlines()
        return lines[-1].removeprefix("Subject: ") if lines else ""

    return wait_for("the job's mail", subject)


def fetch_outside(node: Host) -> str:
    """Fetch a page from the outside host, which contains the client's address."""
    page = node.run(*CURL, "--fail", "--max-time", "10", f"http://{OUTSIDE}/").text
    if CONTAINER_ADDRESSES[PUBLIC] not in page:
        raise SmsError(f"the request did not come from the container's address: {page}")
    return page


def syslog_arrives(lab: Lab, node: Host, on: str = CARRIER) -> str:
    """Log a line on a node and wait for it in the container's messages."""
    word = f"sms-demo-{time.time_ns()}"
    node.run("logger", "--tag", "demo", word)

    def line() -> str:
        messages = lab.host("admin").run(
            "sms", "exec", "--host", on, "--", "grep", "-h", word, "/var/log/messages", ok=None
        )
        return next((found for found in messages.text.splitlines() if word in found and "demo" in found), "")

    return wait_for("the line", line)


def clock_follows(node: Host) -> str:
    """Wait until the node's chronyd has selected the container as its source."""

    def source() -> str:
        lines = node.run("chronyc", "-n", "sources", ok=None).text.splitlines()
        return next((" ".join(line.split()[:4]) for line in lines if line.startswith("^*")), "")

    return wait_for("the node's clock", source)
