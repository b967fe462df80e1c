"""Demonstration of the provisioning VM: diskless machines boot from it and run a job; then it is switched off."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

from appliance.errors import SmsError
from appliance.lab import Extras, Lab
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.image.build import build
from appliance.operations.lab.demo import CARRIER, DemoReport, start, wait_for
from appliance.operations.lab.lab import lab_up
from appliance.operations.nodes.image import NodeImage, build_node
from appliance.operations.vm.build import BuiltVm, build_vm
from appliance.progress import Progress

PROFILE = "compute"
BOOT_S = 300
"""Timeout from power-on to an idle node, in seconds; the machines are emulated."""
VM_S = "5m"
FILES_S = "2m"
"""Only the container's client is waited for: no node has contacted the VM yet."""


def demo_vm(name: str, machines: int, progress: Progress, *, quiet: bool = False) -> DemoReport:
    """Build, start and use container and VM. Finished steps are not repeated.

    Raises:
        SmsError: a check failed.
    """
    report = DemoReport(name)
    check = partial(report.try_out, progress)
    lab_up(name, 0, progress, Extras(metal=machines))
    lab = Lab.open(name)
    cluster = open_cluster(lab.etc / "sms.yaml", None, progress)
    names = [machine.name for machine in lab.layout.machines]
    check("a signed services container", lambda: _build(cluster, lab), own_progress=True)
    check("a sealed image of the VM", lambda: _built(build_vm(cluster)), own_progress=True)
    check("a sealed image of nodes", lambda: _built(build_node(cluster, PROFILE)), own_progress=True)
    check(f"sms start --host {CARRIER}, over SSH", lambda: start(lab, quiet), own_progress=True)
    check(f"sms vm start --host {CARRIER}", lambda: _start_vm(lab))
    check(f"sms image push {PROFILE}", lambda: _sms(lab, "image", "push", PROFILE) or "up to date")
    check("sms node discover: machines found by Redfish", lambda: _discover(lab))
    check("sms files push: accounts, munge key, slurm.conf", lambda: _sms(lab, "files", "push", "--wait", FILES_S))
    check(f"sms node boot {' '.join(names)}: idle in the container's cluster", lambda: _boot(lab, names))
    check("a job on both, by the container's controller", lambda: _job(lab, names))
    check("sms vm stop", lambda: _sms(lab, "vm", "stop") or "off")
    check("without it: a new job", lambda: _job(lab, names))
    check("without it: sms status", lambda: _status(lab))
    return report


def _sms(lab: Lab, *words: str, on: str = "admin") -> str:
    """Run `sms` on a lab host; return its last line of output."""
    lines = lab.host(on).run("sms", "-q", *words, timeout=600).text.splitlines()
    return lines[-1].strip() if lines else ""


def _json(lab: Lab, *words: str, on: str = "admin", ok: tuple[int, ...] = (0,)) -> Any:
    return json.loads(lab.host(on).run("sms", "-q", *words, "--json", ok=ok, timeout=600).stdout)


def _build(cluster: Cluster, lab: Lab) -> str:
    built = build(cluster, lock=lab.etc / "sms.lock")
    return f"{'built' if built.fresh else 'unchanged'}, {built.bytes >> 20} MiB, key {built.key[:12]}"


def _built(image: BuiltVm | NodeImage) -> str:
    return f"{'built' if image.fresh else 'unchanged'}, {image.bytes >> 20} MiB, sha256:{image.digest[:12]}"


def _start_vm(lab: Lab) -> str:
    if _json(lab, "vm", "status", ok=(0, 4))["running"]:
        return "already running"
    return _sms(lab, "vm", "start", "--host", CARRIER, "--wait", VM_S)


def _discover(lab: Lab) -> str:
    addresses = [machine.bmc for machine in lab.layout.machines]
    # The controllers are in the provisioning network, which the host `admin` cannot reach.
    found = _json(lab, "node", "discover", f"{addresses[0]}-{addresses[-1]}", on=CARRIER)
    return ", ".join(f"{node['name']} {node['what']}" for node in found["nodes"])


def _boot(lab: Lab, names: list[str]) -> str:
    began = time.monotonic()
    idle: dict[str, float] = {}
    _sms(lab, "node", "boot", *names, "--yes", on=CARRIER)

    def booted() -> str:
        argv = ("sinfo", "--noheader", "--Node", "--format=%N %T")
        for line in _inside(lab, *argv).splitlines():
            name, _, state = line.partition(" ")
            if state.strip() == "idle":
                idle.setdefault(name, time.monotonic() - began)
        return "yes" if set(names) <= idle.keys() else ""

    wait_for("an idle node on every machine", booted, BOOT_S)
    return ", ".join(f"{name} after {idle[name]:.0f} s" for name in names)


def _inside(lab: Lab, *argv: str) -> str:
    return lab.host("admin").run("sms", "exec", "--host", CARRIER, "--", *argv, timeout=120).text


def _job(lab: Lab, names: list[str]) -> str:
    hosts = _inside(lab, "srun", f"-N{len(names)}", "hostname").split()
    if sorted(hosts) != sorted(names):
        raise SmsError(f"the job ran on {', '.join(hosts) or 'no node'}")
    return f"srun -N{len(names)} hostname: {', '.join(sorted(hosts))}"


def _status(lab: Lab) -> str:
    found = _json(lab, "status", "--host", CARRIER, ok=(0, 4))
    if not found["healthy"]:
        raise SmsError(f"the services container is not healthy: {[one for one in found['services'] if not one['ok']]}")
    return f"healthy; waiting for the VM: {', '.join(found['provisioning']['waits'])}"
