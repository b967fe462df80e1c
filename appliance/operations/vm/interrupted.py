"""A VM that a live migration left paused because its ``sms`` was killed in the moment of the switch."""

from __future__ import annotations

from contextlib import suppress

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.vm.vm import all_hosts, find_running, tidy_run, view_hosts
from appliance.plan.vm.holder import newest_holder
from appliance.plan.vm.vm import VmPlaces
from appliance.tools.memory import resume
from appliance.tools.qemu import end_machine
from appliance.tools.qmp import open_qmp

PAUSED = ("paused", "postmigrate")
WAITS = "inmigrate"
"""It has no memory yet."""
RUNS = "running"


def continue_paused(cluster: Cluster, host: Host) -> None:
    """Let the machine on ``host`` run if it is paused and has the disks; the caller holds the lock of every host.

    The other half of the migration is ended first, also if the machine on ``host`` runs already and has the disks.

    Raises:
        Refused: another host has the disks, or the VM runs there.
        SmsError: it cannot be continued.
    """
    where = VmPlaces(cluster.site)
    state = _query_state(host, where)
    if state == WAITS:
        raise Refused(
            f"an interrupted migration left an empty machine on {host.name}", hint=f"`sms vm stop --host {host.name}`"
        )
    if state not in (*PAUSED, RUNS):
        return
    views = view_hosts(cluster, host)
    newest = newest_holder(views)
    running = {view.name for view in views if view.running}
    others = [other for other in all_hosts(cluster, host)[1:] if other.name in running]
    left = [other for other in others if _query_state(other, where) in (*PAUSED, WAITS)]
    if state == RUNS:
        if left and newest and newest.holder == host.name:
            with cluster.env.progress.step(
                f"end what an interrupted migration left on {', '.join(one.name for one in left)}"
            ):
                _end(cluster, left)
        return
    if newest and newest.holder != host.name:
        raise Refused(
            f"an interrupted migration left the VM paused on {host.name}, and its disks are on {newest.holder}",
            hint=f"`sms vm start --host {newest.holder}` continues it",
        )
    for other in others:
        if other not in left:
            raise Refused(f"the VM runs on {other.name}", hint=f"`sms vm stop --host {host.name}`")
    with cluster.env.progress.step("continue the VM that an interrupted migration left paused"):
        _end(cluster, left)
        if wrong := resume(host, str(where.qmp), force=True):
            raise SmsError(f"the VM on {host.name} cannot be continued: {wrong}", hint="`sms vm stop`, `sms vm start`")


def _end(cluster: Cluster, hosts: list[Host]) -> None:
    for host in hosts:
        if process := find_running(cluster, host):
            end_machine(host, process)
        tidy_run(cluster, host)


def _query_state(host: Host, where: VmPlaces) -> str:
    """Return the state of a machine; empty if it does not answer."""
    with suppress(SmsError), open_qmp(host, str(where.qmp), silence_s=20) as qmp:
        return str(qmp.execute("query-status")["status"])
    return ""
