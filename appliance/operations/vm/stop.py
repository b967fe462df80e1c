"""``sms vm stop``: shut the VM down through its guest agent, then by its power button, then kill it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.operations.vm.vm import check_programs, find_running, lock_vm_everywhere, tidy
from appliance.plan.vm.vm import VmPlaces
from appliance.progress import Step
from appliance.tools.guest import open_guest
from appliance.tools.qemu import Process, end_machine, has_ended
from appliance.tools.qmp import open_qmp


@dataclass(frozen=True)
class StoppedVm:
    """How the VM ended: ``not running``, ``guest agent``, ``power button`` or ``killed``; and how long that took."""

    host: str
    how: str
    seconds: float


def stop_vm(cluster: Cluster, host: Host, *, timeout_s: float = 180) -> StoppedVm:
    """Stop the VM on ``host`` and remove its run folder; its disks stay.

    Args:
        timeout_s: how long it may take to shut down before it is killed.

    Raises:
        SmsError: it cannot be stopped.
    """
    check_programs(host, ("ip", "flock"))
    with lock_vm_everywhere(cluster, host):
        return stop_locked(cluster, host, timeout_s=timeout_s)


def stop_locked(cluster: Cluster, host: Host, *, timeout_s: float) -> StoppedVm:
    """Stop the VM; the caller holds the lock of every host."""
    began = cluster.env.clock.monotonic()
    how = "not running"
    if process := find_running(cluster, host):
        with cluster.env.progress.step("stop the VM") as step:
            how = _end(cluster, host, process, timeout_s, step)
            step.detail(how)
    tidy(cluster, host)
    took = round(cluster.env.clock.monotonic() - began, 1)
    if how != "not running":
        host.run("sync", "-f", str(VmPlaces(cluster.site).disks), timeout=300)
        note(cluster, host, "vm stop", "stopped", how=how, seconds=took)
    return StoppedVm(host.name, how, took)


def _end(cluster: Cluster, host: Host, process: Process, timeout_s: float, step: Step) -> str:
    where = VmPlaces(cluster.site)
    began = cluster.env.clock.monotonic()
    step.detail("shut down through the guest agent")
    # Errors do not matter here: a later attempt is stronger.
    with suppress(SmsError), open_guest(host, str(where.guest), silence_s=5) as guest:
        guest.execute("guest-exec", path="/bin/systemctl", arg=["poweroff"])
        if _ended(cluster, host, process, began + timeout_s * 0.75):
            return "guest agent"
    step.detail("press the power button")
    with suppress(SmsError), open_qmp(host, str(where.qmp), silence_s=5) as qmp:
        qmp.execute("system_powerdown")
        if _ended(cluster, host, process, began + timeout_s):
            return "power button"
    step.detail("kill it")
    with suppress(SmsError), open_qmp(host, str(where.qmp), silence_s=5) as qmp:
        qmp.execute("quit")
        if _ended(cluster, host, process, cluster.env.clock.monotonic() + 5):
            return "killed"
    end_machine(host, process)
    return "killed"


def _ended(cluster: Cluster, host: Host, process: Process, deadline: float) -> bool:
    while True:
        found = find_running(cluster, host)
        if (found is None or found.pid != process.pid) and has_ended(host, process):
            return True
        if cluster.env.clock.monotonic() > deadline:
            return False
        cluster.env.clock.sleep(0.3)
