"""``sms vm status``: where the VM runs, the health of its services, and the size of its disks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.site.ca import UNHEALTHY_DAYS
from appliance.operations.vm.snapshots import count_elsewhere, list_snapshots
from appliance.operations.vm.start import issuer_days, read_note
from appliance.operations.vm.vm import Health, all_hosts, find_running, query_health, view_hosts
from appliance.plan.vm.holder import newest_holder, running_host
from appliance.plan.vm.vm import VmPlaces, need_vm
from appliance.tools import files
from appliance.tools.qemu import image_info


@dataclass(frozen=True)
class VmStatus:
    """State of the VM.

    Attributes:
        host: the admin host that runs it, else the one that has its disks, else empty.
        guest_agent: whether its guest agent answers.
        services: state of each, ``ok`` or the problem; empty if the VM does not run or does not answer.
        silent: unreachable admin hosts.
        issuer_days: while it runs, for how many days it can still sign certificates of nodes.
        snapshots_elsewhere: number of snapshots on other admin hosts.
        busy: another sms process starts, stops or moves it.
    """

    cluster: str
    address: str
    host: str
    running: bool
    healthy: bool
    since: float = 0
    accel: str = ""
    why_no_kvm: str = ""
    memory_mb: int = 0
    used_memory_mb: int = 0
    cpus: int = 0
    guest_agent: bool = False
    services: dict[str, str] = field(default_factory=dict)
    state_used_mb: int = 0
    state_mb: int = 0
    disk_bytes: dict[str, int] = field(default_factory=dict)
    image: str = ""
    digest: str = ""
    snapshots: int = 0
    newest_snapshot: float = 0
    api: Mapping[str, object] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    issuer_days: int = 0
    snapshots_elsewhere: dict[str, int] = field(default_factory=dict)
    busy: bool = False


def status_vm(cluster: Cluster, first: Host, *, only: bool = False) -> VmStatus:
    """Return the state of the VM. Changes nothing.

    Args:
        first: the host that is queried first.
        only: query no other host.
    """
    views = [view for view in view_hosts(cluster, first) if not only or view.name == first.name]
    silent = tuple(view.name for view in views if not view.reachable)
    newest = newest_holder(views)
    name = running_host(views) or (newest.holder if newest else "")
    site, settings = cluster.site, need_vm(cluster.site)
    if not name or name in silent:
        answering = {view.name for view in views if view.reachable}
        lock = str(VmPlaces(site).lock)
        busy = any(files.is_locked(host, lock) for host in all_hosts(cluster, first) if host.name in answering)
        return VmStatus(site.cluster, str(settings.address.ip), name, False, False, silent=silent, busy=busy)
    host = next((one for one in all_hosts(cluster, first) if one.name == name), None) or cluster.host(name)
    return _status(cluster, host, silent)


def _status(cluster: Cluster, host: Host, silent: tuple[str, ...]) -> VmStatus:
    site, settings, where = cluster.site, need_vm(cluster.site), VmPlaces(cluster.site)
    process = find_running(cluster, host)
    health, agent = Health(), False
    used = 0
    if process:
        with suppress(SmsError):
            health = query_health(cluster, host)
            agent = True
        used = files.used_memory_mb(host, process.pid)
    written = read_note(cluster, host)
    disks = {}
    for name, path in (("root", where.root), ("state", where.state)):
        with suppress(SmsError):
            if info := image_info(host, str(path)):
                disks[name] = int(info["actual-size"])
    snapshots = list_snapshots(cluster, host)
    return VmStatus(
        site.cluster,
        str(settings.address.ip),
        host.name,
        process is not None,
        process is not None and health.ok and issuer_days(written, cluster.env.clock.time()) >= UNHEALTHY_DAYS,
        round(process.since) if process else 0,
        written.accel,
        written.why,
        settings.memory_mb,
        used,
        settings.cpus,
        agent,
        health.services if agent else {},
        health.state_used_kib >> 10,
        health.state_kib >> 10,
        disks,
        written.image,
        written.digest,
        len(snapshots),
        snapshots[-1].taken if snapshots else 0,
        health.api,
        silent,
        issuer_days(written, cluster.env.clock.time()) if process else 0,
        count_elsewhere(cluster, host),
        files.is_locked(host, str(where.lock)),
    )
