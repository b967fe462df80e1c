"""Demonstration of other engines in a lab: the services move from the container to Kubernetes and Nomad, and back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePosixPath

from appliance.errors import ConfigError, SmsError
from appliance.host.base import Host
from appliance.lab import Extras, Lab
from appliance.lab.engines.agents import IMPORT
from appliance.lab.layout import WORKER
from appliance.lab.render import TAKEN_OVER
from appliance.operations.lab.demo import (
    CARRIER,
    DemoReport,
    as_alice,
    build_image,
    ended_as,
    job_state,
    run_job,
    start,
    wait_for,
    wait_idle,
)
from appliance.progress import Progress

FOLDER = PurePosixPath("/root/demo")
"""On admin and host-a: exports and the OCI form of the image."""
MEMBERS = ("oci-layout", "index.json", "blobs")
"""Of that form, what engines read."""
LIMIT_S = 600
IMAGE_BYTES = 4 << 30
"""Maximum size of the archive of an image."""
USABLE = ("idle", "allocated", "mixed", "completing")
END = "/home/alice/end"
"""The first job ends when this file is there."""
JOB_S = 15


def demo_engines(
    name: str, nodes: int, engines: Sequence[str], progress: Progress, *, quiet: bool = False
) -> DemoReport:
    """Run the services in the container, on each of the engines, and in the container again, under a running job.

    Raises:
        ConfigError: the lab has too few compute nodes.
        SmsError: a check failed.
    """
    if nodes < 2:
        raise ConfigError("a job runs on one compute node through all of it", hint="--nodes 2 or more")
    report = DemoReport(name)
    check = partial(report.try_out, progress)
    what, hosts = "a cluster on this machine, with the engines", f"host-a, host-b, {', '.join(engines)}"
    lab = report.bring_up(nodes, progress, Extras(engines=engines), what=what, hosts=hosts)
    check("a signed services container", lambda: build_image(lab, progress), own_progress=True)
    _leave_engine(lab)
    check(f"sms start --host {CARRIER}", lambda: start(lab, quiet), own_progress=True)
    node = lab.host(lab.nodes[0])
    check("every compute node is idle", lambda: wait_idle(node, nodes))
    job = check("a job begins, which is to run through all moves", lambda: begin_job(node)).split()[1]
    for engine in engines:
        _show(lab, engine, check)
    check("sms migrate --to container", lambda: _move(lab, "container"))
    check("a job, with the container's controller again", lambda: _run_job(lab))
    check("the job of the beginning ends", lambda: end_job(node, job))
    return report


def begin_job(node: Host) -> str:
    """Start a job that runs until ``end_job``."""
    as_alice(node, "rm", "-f", END)
    wait = f"until [ -e {END} ]; do sleep 1; done"
    job = as_alice(node, "sbatch", "--parsable", f"--nodelist={node.name}", f"--wrap={wait}")
    return f"job {job} {wait_for('its start', lambda: _running(node, job))} on {node.name}"


def _running(node: Host, job: str) -> str:
    return state if (state := job_state(node, job)) == "RUNNING" else ""


def end_job(node: Host, job: str) -> str:
    """End the job of ``begin_job``; return how it ended."""
    as_alice(node, "touch", END)
    state = wait_for("the end of the job", lambda: ended_as(node, job))
    if state != "COMPLETED":
        raise SmsError(f"job {job} ended as {state}")
    return f"job {job} {state}, under the same id"


def _show(lab: Lab, engine: str, check: Callable[[str, Callable[[], str]], str]) -> None:
    """Export, deploy, a job, a second deployment, a killed controller, drain."""
    admin = lab.host(CARRIER)
    check(f"sms export {engine}", lambda: _export(admin, engine))
    if engine == "kubernetes":
        check("sms image oci, to the cluster nodes", lambda: load_image(lab))
    else:
        check("munge and slurmd of the nodes are Nomad's from now on", lambda: release_nodes(lab))
    check(f"sms migrate --to {engine}", lambda: _move(lab, engine))
    check(f"a job, with the controller on {engine}", lambda: _run_job(lab))
    check("a second sms deploy", lambda: _deploy_again(admin))
    check("the controller is deleted under a running job", lambda: _kill_controller(lab, engine))
    check(f"sms deploy drain {lab.nodes[-1]}, and --undo", lambda: _drain(lab))


def _leave_engine(lab: Lab) -> None:
    """Move the services back that an interrupted demonstration has left on an engine."""
    admin = lab.host(CARRIER)
    if admin.run("sms", "-q", "deploy", "status", ok=None, timeout=LIMIT_S).status == 0:
        _move(lab, "container")


def _export(admin: Host, engine: str) -> str:
    """Export twice; the same bytes, without the Munge key."""
    folder = str(FOLDER / engine)
    admin.run("mkdir", "-p", "-m", "0700", str(FOLDER))
    shown = json.loads(admin.run("sms", "-q", "export", engine, "-o", folder, "--json").stdout)
    admin.run("sms", "-q", "export", engine, "-o", folder, "--check")
    return f"{shown['files']} files in {folder}, the same bytes again"


def load_image(lab: Lab) -> str:
    """Convert the image, and import it on every cluster node."""
    admin, folder = lab.host("admin"), str(FOLDER / "image")
    admin.run("mkdir", "-p", "-m", "0700", str(FOLDER))
    done = admin.run("sms", "-q", "image", "oci", "-o", folder, "--json", ok=None, timeout=LIMIT_S)
    if done.status == 3:  # of an earlier image
        admin.run("rm", "-r", folder)
        done = admin.run("sms", "-q", "image", "oci", "-o", folder, "--json", timeout=LIMIT_S)
    made = json.loads(done.expect((0,)).stdout)
    archive, workers = (
        admin.run("tar", "-C", folder, "-c", *MEMBERS, limit=IMAGE_BYTES).stdout,
        lab.layout.hosts_of(WORKER),
    )
    for worker in workers:
        lab.host(worker.name).run(*IMPORT, input=archive, timeout=LIMIT_S)
    return f"{made['name']}, {made['digest'][:19]}, on {', '.join(worker.name for worker in workers)}"


def release_nodes(lab: Lab) -> str:
    """End the lab's own daemons, as one disables their units on a real node."""
    for name in lab.nodes:
        lab.host(name).run("supervisorctl", "-c", "/lab/supervisord.conf", "stop", *TAKEN_OVER, ok=None)
    return f"{len(lab.nodes)} nodes; the exported jobs start them"


def _deploy_again(admin: Host) -> str:
    done = json.loads(admin.run("sms", "-q", "deploy", "--json", timeout=LIMIT_S).stdout)
    if changed := [name for name, change in done["changes"].items() if change != "unchanged"]:
        raise SmsError(f"a second deployment changed {', '.join(changed)}")
    admin.run("sms", "-q", "deploy", "status", timeout=LIMIT_S)
    return f"nothing changed, no drift, {len(done['changes'])} workloads"


def _move(lab: Lab, target: str) -> str:
    """Move the services with their state; NAT and time stay in the services container."""
    done = json.loads(lab.host(CARRIER).run("sms", "-q", "migrate", "--to", target, "--json", timeout=LIMIT_S).stdout)
    return f"{done['files']} files of state compared, an outage of {done['outage_s']:.0f} s"


def _run_job(lab: Lab) -> str:
    """Run a job on another node than that of the first job."""
    node = lab.host(lab.nodes[0])
    _wait_usable(node, len(lab.nodes))
    return run_job(node)


def _wait_usable(node: Host, count: int) -> None:
    """Wait until every node is idle or has a job."""

    def usable() -> str:
        shown = node.run("sinfo", "--noheader", "--Node", "--format=%N %T", ok=None).text.splitlines()
        states = dict(line.split() for line in shown)
        return "all" if sum(state in USABLE for state in states.values()) == count else ""

    wait_for("registration of every node", usable)


def _kill_controller(lab: Lab, engine: str) -> str:
    """Delete its pod, or stop its allocation, while a job runs; return how long a node could not reach it."""
    node, admin = lab.host(lab.nodes[0]), lab.host(CARRIER)
    job = as_alice(node, "sbatch", "--parsable", f"--wrap=sleep {JOB_S}")
    wait_for("the start of the job", lambda: _running(node, job))
    delete_controller(admin, engine)
    wait_for("the end of the controller", lambda: "" if answers(node) else "down")
    began = time.monotonic()
    wait_for("another controller", lambda: "up" if answers(node) else "")
    outage = time.monotonic() - began
    state = wait_for("the end of the job", lambda: ended_as(node, job))
    if state != "COMPLETED":
        raise SmsError(f"job {job} ended as {state}")
    return f"job {job} {state}; an outage of {outage:.1f} s, seen from {node.name}"


def delete_controller(admin: Host, engine: str) -> None:
    """Delete its pod, or stop its allocation; the engine starts another one."""
    if engine == "kubernetes":
        admin.run("kubectl", "-n", "lab", "delete", "pod", "slurmctld-0", "--wait=false")
    else:
        shown = json.loads(admin.run("nomad", "job", "allocs", "-json", "slurm-ctl").stdout)
        (running,) = (each["ID"] for each in shown if each["ClientStatus"] == "running")
        admin.run("nomad", "alloc", "stop", "-detach", running)


def answers(node: Host) -> bool:
    """Return whether a controller answers a compute node."""
    return "is UP" in node.run("timeout", "2", "scontrol", "ping", ok=None).text


def _drain(lab: Lab) -> str:
    """Drain a machine in Slurm while a job runs there: the engine waits for it."""
    node, admin, drained = lab.host(lab.nodes[0]), lab.host(CARRIER), lab.nodes[-1]
    job = as_alice(node, "sbatch", "--parsable", f"--nodelist={drained}", f"--wrap=sleep {JOB_S}")
    wait_for("the start of the job", lambda: _running(node, job))
    done = json.loads(admin.run("sms", "-q", "deploy", "drain", drained, "--json", timeout=LIMIT_S).stdout)
    state = ended_as(node, job)
    if state != "COMPLETED":
        raise SmsError(f"job {job} on {drained}, which was drained, ended as {state or 'running'}")
    admin.run("sms", "-q", "deploy", "drain", drained, "--undo", timeout=LIMIT_S)
    _wait_usable(node, len(lab.nodes))
    return f"job {job} {state} first, after {done['waited_s']:.0f} s; then {drained} was drained; idle again"
