"""``sms overlay schedule``: install a cron or systemd job that takes snapshots on an admin host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.hosts.installed import SITE_FILE, find_sms, has_systemd, lies_there
from appliance.operations.snapshots.push import site_targets
from appliance.operations.snapshots.report import record_path
from appliance.plan.snapshots.runs import DRILLS, Run, read_run
from appliance.plan.snapshots.schedule import (
    Job,
    Kind,
    Schedule,
    Unit,
    check_every,
    cron_path,
    drill_job,
    has_drill,
    installed,
    job,
    plan_schedule,
    unit_name,
    unit_path,
)
from appliance.plan.vm.vm import VmPlaces
from appliance.tools.programs import find_missing
from appliance.tools.scripts import script_argv


@dataclass(frozen=True)
class Scheduled:
    """The schedule of one host; ``kind`` is empty where there is none, ``every`` is in minutes.

    ``drills``: whether restore drills are scheduled, too. ``runs``: whether cron or the timer is active; ``changed``:
    whether this call changed anything.
    """

    host: str
    kind: Kind | str = ""
    every: int = 0
    runs: bool = False
    changed: bool = False
    files: dict[str, str] = field(default_factory=dict)
    last_run: Run | None = None
    drills: bool = False
    last_drill: Run | None = None
    vm: Scheduled | None = None


def schedule_files(cluster: Cluster) -> list[str]:
    """Return the paths of a schedule's files on a host, for both kinds."""
    name = cluster.label
    return [cron_path(name), *(unit_path(name, one, kind) for one in get_args(Job) for kind in get_args(Unit))]


def show_schedule(cluster: Cluster, host: Host) -> Scheduled:
    """Return the schedule that is installed on the host; with that of the VM's state, if the site has a VM."""
    shown = _show(cluster, host)
    return replace(shown, vm=_show(cluster.of_vm(), host)) if cluster.site.provisioning else shown


def _show(cluster: Cluster, host: Host) -> Scheduled:
    texts = _read(cluster, host)
    found = installed(texts, cluster.label)
    if not found:
        return Scheduled(host.name)
    kind, every = found
    last, drill = (read_run(host.read(path)) for path in (record_path(cluster), record_path(cluster, DRILLS)))
    drills = any(map(has_drill, texts.values()))
    return Scheduled(host.name, kind, every, _runs(cluster, host, kind), False, texts, last, drills, drill)


def install_schedule(
    cluster: Cluster,
    host: Host,
    *,
    site_file: Path,
    every: int | None = None,
    dry_run: bool = False,
) -> Scheduled:
    """Install a schedule on the host, and that of the VM's state, if the site has a VM.

    Files of the other kind are removed.

    Args:
        site_file: the one in use here; another host reads its own.
        every: minutes; the setting of the site file when None.

    Raises:
        ConfigError: the interval does not divide an hour or a day evenly.
        Refused: the host has no sms, no site file of this cluster, or neither systemd nor cron.
    """
    minutes = cluster.site.snapshots.every_minutes if every is None else every
    check_every(minutes)
    each = [cluster, *([cluster.of_vm()] if cluster.site.provisioning else [])]
    plans = [_plan(one, host, site_file, minutes) for one in each]
    if dry_run:
        would = [_would_install(one, host, planned) for one, planned in zip(each, plans, strict=True)]
        return replace(would[0], vm=would[1]) if would[1:] else would[0]
    with cluster.env.progress.step(f"schedule snapshots on {host.name}") as step:
        changes = [_install(one, host, planned) for one, planned in zip(each, plans, strict=True)]
        changed = any(changes)
        if not cluster.site.provisioning:  # any more
            vm = replace(cluster, vm=True)
            changed = _remove_files(vm, host, _read(vm, host)) or changed
        step.detail(f"every {minutes} min, by {plans[0].kind}" + ("" if changed else ": unchanged"))
    shown = show_schedule(cluster, host)
    if not shown.runs:
        cluster.env.progress.report(
            f"note: cron does not run on {host.name}: `sms doctor --host {host.name}` shows how to start it"
        )
    for other in cluster.site.admin_hosts:
        if changed and other.name != host.name:
            cluster.env.progress.report(
                f"note: {other.name} takes no snapshots after a failover or migration without its own schedule: "
                f"sms overlay schedule install --host {other.name}"
            )
    return replace(shown, changed=changed)


def _would_install(cluster: Cluster, host: Host, planned: Schedule) -> Scheduled:
    changed = _read(cluster, host) != dict(planned.files)
    runs = planned.kind == "systemd" or _runs(cluster, host, planned.kind)
    drills = any(map(has_drill, planned.files.values()))
    return Scheduled(host.name, planned.kind, planned.every, runs, changed, dict(planned.files), drills=drills)


def _install(cluster: Cluster, host: Host, planned: Schedule) -> bool:
    """Install a planned schedule; return whether anything changed."""
    left = {path: text for path, text in _read(cluster, host).items() if path not in planned.files}
    changed = _remove_files(cluster, host, left)
    written = [host.write(path, text.encode()) for path, text in planned.files.items()]
    changed = any(written) or changed
    for unit in planned.units:
        changed = _start_timer(host, unit, reload=any(written)) or changed
    return changed


def remove_schedule(cluster: Cluster, host: Host, *, dry_run: bool = False) -> Scheduled:
    """Remove the schedules from the host; existing snapshots stay."""
    vm = replace(cluster, vm=True)  # also where the site has no VM any more
    texts = {**_read(cluster, host), **_read(vm, host)}
    if dry_run or not texts:
        return Scheduled(host.name, changed=bool(texts), files=texts if dry_run else {})
    with cluster.env.progress.step(f"remove the schedule from {host.name}"):
        for one in (cluster, vm):
            _remove_files(one, host, {path: texts[path] for path in schedule_files(one) if path in texts})
    return Scheduled(host.name, changed=True)


def _plan(cluster: Cluster, host: Host, site_file: Path, every: int) -> Schedule:
    """Plan the host's schedule."""
    kind: Kind = "systemd" if has_systemd(host) else "cron"
    if kind == "cron" and not _has_cron(host):
        raise Refused(
            f"{host.name} has neither systemd nor cron",
            hint=f"`sms doctor --host {host.name}` shows how to install cron",
        )
    sms = find_sms(host)
    if not sms.startswith("/"):
        raise Refused(f"sms is not installed on {host.name}", hint="install it there: docs/install.md")
    if not isinstance(host, Local):
        if not lies_there(cluster, host):
            raise Refused(
                f"{SITE_FILE} on {host.name} is not the site file of {cluster.site.cluster}",
                hint=f"copy it there, with the files that it names: {host.name} takes its snapshots itself",
            )
        site_file = Path(SITE_FILE)
    folders = (str(cluster.places.overlay.parent), str(cluster.places.snapshots.parent))
    if cluster.vm:
        folders = (str(VmPlaces(cluster.site).disks.parent), folders[1])
    common = (sms, str(site_file.absolute()), str(cluster.site.state))
    options = ("--vm",) if cluster.vm else ()
    drill = drill_job(*common, host.name, *options) if site_targets(cluster, host.name) else None
    return plan_schedule(cluster.label, kind, every, argv=job(*common, *options), folders=folders, drill=drill)


def _has_cron(host: Host) -> bool:
    return host.works("test", "-d", "/etc/cron.d") and len(find_missing(host, "cron", "crond")) < 2


def _read(cluster: Cluster, host: Host) -> dict[str, str]:
    found = {path: host.read(path) for path in schedule_files(cluster)}
    return {path: data.decode(errors="replace") for path, data in found.items() if data is not None}


def _runs(cluster: Cluster, host: Host, kind: str) -> bool:
    if kind == "cron":
        return host.works(*script_argv("cron-runs"))
    return host.works("systemctl", "is-active", "--quiet", unit_name(cluster.label, "snapshot"))


def _remove_files(cluster: Cluster, host: Host, texts: Mapping[str, str]) -> bool:
    name = cluster.label
    units = [path for path in texts if path != cron_path(name)]
    for one in get_args(Job):
        if unit_path(name, one) in units:
            # A run in progress is not stopped; it ends on its own.
            host.run("systemctl", "disable", "--quiet", "--now", unit_name(name, one), ok=None)
    for path in texts:
        host.remove(path)
    if units:
        host.run("systemctl", "daemon-reload", ok=None)
    return bool(texts)


def _start_timer(host: Host, unit: str, *, reload: bool) -> bool:
    if reload:
        host.run("systemctl", "daemon-reload")
        # An active timer keeps its old times until it is restarted.
        host.run("systemctl", "try-restart", "--quiet", unit)
    if host.works("systemctl", "is-enabled", "--quiet", unit) and host.works("systemctl", "is-active", "--quiet", unit):
        return reload
    host.run("systemctl", "enable", "--quiet", "--now", unit)
    return True
