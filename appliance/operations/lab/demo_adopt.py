"""Demonstration of an adoption in a lab: a node that serves is taken over, gets all back, and is taken over again."""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import Host
from appliance.lab import Extras, Lab
from appliance.operations.lab.demo import (
    BIG_BYTES,
    CARRIER,
    CURL,
    OUTSIDE,
    DemoReport,
    build_image,
    fetch_outside,
    listening,
    names_by_role,
    run_job,
    time_critical,
    wait_for,
    wait_idle,
)
from appliance.operations.lab.demo_engines import answers, begin_job, end_job
from appliance.progress import Progress

OLD = "sms-old"
SITE = "/root/adopted"
"""On admin: the site that the survey writes."""
LIMIT_S = 600
CAPTURE_S = 15
RATE = "900k"
"""Of the download: it takes longer than an adoption."""


def demo_adopt(name: str, nodes: int, progress: Progress) -> DemoReport:
    """Capture, classify, survey, build, adopt under load, undo, adopt again.

    Raises:
        ConfigError: the lab has too few compute nodes.
        Refused: the lab has the state of another demonstration.
        SmsError: a check failed.
    """
    if nodes < 2:
        raise ConfigError("a job runs on one compute node through all of it", hint="--nodes 2 or more")
    report = DemoReport(name)
    check = partial(report.try_out, progress)
    what, hosts = "a cluster on this machine, without sms", f"{OLD} that serves them, host-a, host-b"
    lab = report.bring_up(nodes, progress, Extras(legacy=True), what=what, hosts=hosts)
    admin, node = lab.host("admin"), lab.host(lab.nodes[0])
    admin.run("sms", "-q", "adopt", "--undo", ok=(0, 3), timeout=LIMIT_S)  # of an earlier demonstration
    _refuse_other_state(admin, name)
    check("every compute node is idle", lambda: wait_idle(node, nodes))
    with tempfile.TemporaryDirectory(prefix="sms-demo-") as folder:
        capture = Path(folder) / "demo.pcap"
        with listening(lab, capture):
            check(f"a job, with the controller of {OLD}", lambda: run_job(node))
            check(f"the outside, through the NAT of {OLD}", lambda: fetch_outside(node))
            node.run("logger", "demo")
        check("what must never stop, by the traffic of all this", lambda: time_critical(lab, capture))
    check(f"sms survey {OLD} --write", lambda: _survey(admin))
    check("a signed services container", lambda: build_image(lab, progress), own_progress=True)
    job = check("a job begins, which is to run through all of it", lambda: begin_job(node)).split()[1]
    check(f"sms adopt {OLD} --to {CARRIER}, under a download", lambda: _adopt(lab))
    check("a job, with the controller in the container", lambda: run_job(lab.host(lab.nodes[-1])))
    check("sms adopt --undo, under a download", lambda: _undo(lab))
    check(f"a job, with the controller of {OLD} again", lambda: run_job(lab.host(lab.nodes[-1])))
    check(f"sms adopt {OLD} --to {CARRIER}, again", lambda: _adopt(lab))
    check("the job of the beginning ends", lambda: end_job(node, job))
    return report


def _refuse_other_state(admin: Host, name: str) -> None:
    """Refuse a lab whose admin hosts keep a cluster of their own, from another demonstration.

    Raises:
        Refused: it is so.
    """
    shown = admin.run("sms", "-q", "status", "--host", CARRIER, "--json", ok=None, timeout=LIMIT_S).stdout
    if holder := json.loads(shown)["lease"]["holder"]:
        raise Refused(
            f"{holder} of lab {name} has a cluster already, which does not come from {OLD}",
            hint=f"`sms lab down --all --name {name}` removes it, or give another --name",
        )


def _survey(admin: Host) -> str:
    admin.run("rm", "-rf", SITE)
    found = json.loads(admin.run("sms", "-q", "survey", OLD, "--write", SITE, "--json", timeout=LIMIT_S).stdout)
    left = sum(one["carried"] == "left" for one in found["findings"])
    return f"{', '.join(found['services'])}; {left} findings that the site does not have, in {SITE}/REPORT.md"


def _adopt(lab: Lab) -> str:
    return _under_download(lab, "adopt", OLD, "--to", CARRIER, "--capture", f"{CAPTURE_S}s")


def _undo(lab: Lab) -> str:
    return _under_download(lab, "adopt", "--undo")


def _under_download(lab: Lab, *words: str) -> str:
    """Run a verb of `sms` that moves the services, while a node downloads through them; return the outages.

    Raises:
        SmsError: the download failed.
    """
    node, by_role = lab.host(lab.nodes[-1]), names_by_role(lab)
    argv = (*CURL, "--limit-rate", RATE, "--output", "/dev/null", "--write-out", "%{size_download}")
    with ThreadPoolExecutor(1) as pool:
        download = pool.submit(node.run, *argv, f"http://{OUTSIDE}/big", timeout=LIMIT_S)
        done = json.loads(lab.host("admin").run("sms", "-q", *words, "--json", timeout=LIMIT_S).stdout)
        size = int(download.result().text)
    if size != BIG_BYTES:
        raise SmsError(f"the download ended after {size} of {BIG_BYTES} bytes")
    wait_for("the controller", lambda: "yes" if answers(node) else "")
    controller, routing, outage = by_role["controller"], by_role["routing"], done["outage"]
    away = f"outage of NAT {outage[routing] * 1000:.0f} ms, {controller} {outage[controller]:.1f} s"
    if traffic := done.get("traffic"):
        unplanned = sum(not one["planned"] for one in traffic["speakers"])
        away += f"; nodes use {', '.join(traffic['services'])} at {CARRIER}, {unplanned} unplanned uses of {OLD}"
    return f"{away}; {done['jobs']} jobs known, {size >> 20} MiB downloaded without a break"
