"""Starts and stops the guard of an admin host together with the services container."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from pathlib import PurePath

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.hosts.installed import SITE_FILE, find_sms, has_systemd, lies_there
from appliance.operations.preflight import find_instance, lock_host
from appliance.plan.services.unit import guard_unit_name, guard_unit_text
from appliance.tools import files
from appliance.tools.scripts import script_argv

GUARD_VERSION = "9"
"""What a guard does. Raise it with every change that one which runs already must not miss: the next start or scheduled
run replaces it.

Each guard writes its process id and its version into a file beside its lock; those of version 519381b wrote none."""
STOP_TIMEOUT_S, START_TIMEOUT_S = 5, 5
"""Seconds that a guard may take to stop, and that systemd may take to start one."""
POLL_S = 0.2


def is_guarded(cluster: Cluster, host: Host) -> bool:
    """Return whether a guard of this cluster runs on the host."""
    return files.is_locked(host, str(cluster.places.guard_lock))


def guard_version(cluster: Cluster) -> str:
    """Return the version of a guard: what it does, and the admin hosts that it knows."""
    hosts = [(one.name, one.address, one.user, one.port) for one in cluster.site.admin_hosts]
    return f"{GUARD_VERSION}-{hashlib.sha256(repr(hosts).encode()).hexdigest()[:12]}"


def version_path(cluster: Cluster) -> str:
    """Return the path of the file with id and version of the guard. Its lock has only the id: others read it."""
    return f"{cluster.places.guard_lock}.version"


def is_outdated(cluster: Cluster, host: Host) -> bool:
    """Return whether the guard that runs on the host is of another version of sms, or knows other admin hosts."""
    owner = host.read(str(cluster.places.guard_lock)) or b""
    if owner.endswith(b"\n"):
        return False  # start-daemon wrote it: the guard's own code does not run yet
    return host.read(version_path(cluster)) != owner + b" " + guard_version(cluster).encode()


def start_guard(cluster: Cluster, host: Host, *, renew: bool = False) -> bool:
    """Start the host's guard if there is another admin host, and replace one of another version.

    Args:
        renew: replace any, as it has read the site file of before.

    Return whether it has one now; reports why if it cannot have one.
    """
    runs = is_guarded(cluster, host)
    if len(cluster.site.admin_hosts) < 2:
        if runs:  # that of a site which had more: it would obey the lease of a host that is not there any more
            stop_guard(cluster, host)
        return False
    if runs and not renew and not is_outdated(cluster, host):
        return True
    try:
        why = _start(cluster, host, replaces=runs)
    except SmsError as error:
        why = error.message
    if why:
        runs = runs and is_guarded(cluster, host)
        cluster.env.progress.report(
            f"note: the guard on {host.name} cannot be replaced: {why}"
            if runs
            else f"note: no guard on {host.name} stops the services container when another host takes over: {why}"
        )
    return runs or not why


def ensure_guard(cluster: Cluster, host: Host) -> None:
    """Start the host's guard if the services container runs without one; replace one of another version of sms.

    Another version may not be able to read the leases of this one. None runs where one was killed, or a verb before it
    had started one.

    Raises:
        Busy: none runs, and another run is at work there, which may be about to stop both.
        SmsError: it cannot be started or replaced.
    """
    if len(cluster.site.admin_hosts) < 2:
        return
    runs = is_guarded(cluster, host)
    if runs and not is_outdated(cluster, host):
        return
    with nullcontext() if runs else lock_host(cluster, host):
        if not runs and not find_instance(cluster, host):
            return
        why = _start(cluster, host, replaces=runs)
    if why and runs:
        raise SmsError(f"the one on {host.name} is of another version of sms and cannot be replaced: {why}")
    if why:
        raise SmsError(f"none runs on {host.name}, and none can be started: {why}")


def _start(cluster: Cluster, host: Host, *, replaces: bool) -> str:
    """Start the guard; return why it cannot be started, empty if it was.

    Args:
        replaces: stop the one that runs, if another can be started.
    """
    sms = find_sms(host)
    if PurePath(sms).name != "sms":
        return "sms is not installed there"
    there = lies_there(cluster, host)
    site = str(cluster.path) if isinstance(host, Local) and cluster.path else SITE_FILE
    if site == SITE_FILE and not there:
        return f"{SITE_FILE} there is not the site file of {cluster.site.cluster}"
    if replaces:
        stop_guard(cluster, host)
    if there and has_systemd(host):
        return _start_unit(cluster, host, sms)
    command = (sms, "--quiet", "--site", site, "--state", str(cluster.site.state), "guard")
    host.run(*script_argv("start-daemon", str(cluster.places.guard_lock), str(cluster.places.guard_log), *command))
    return ""


def _start_unit(cluster: Cluster, host: Host, sms: str) -> str:
    """Start the guard's unit; return why no guard runs then, empty if one does."""
    name = guard_unit_name(cluster.site.cluster)
    text = guard_unit_text(cluster.site.cluster, sms=sms, site=SITE_FILE, state=str(cluster.site.state))
    if host.write(f"/etc/systemd/system/{name}", text.encode()):
        host.run("systemctl", "daemon-reload")
    host.run("systemctl", "start", "--no-block", name)
    deadline = cluster.env.clock.monotonic() + START_TIMEOUT_S
    while not is_guarded(cluster, host):
        if cluster.env.clock.monotonic() > deadline:
            return f"it did not start within {START_TIMEOUT_S} s; see `journalctl -u {name}`"
        cluster.env.clock.sleep(POLL_S)
    return ""


def stop_guard(cluster: Cluster, host: Host) -> None:
    """Stop the host's guard if one runs; one that does not stop is left running."""
    if has_systemd(host):
        host.run("systemctl", "stop", "--no-block", guard_unit_name(cluster.site.cluster), ok=None)
    host.run(*script_argv("stop-daemon", str(cluster.places.guard_lock), str(STOP_TIMEOUT_S)), ok=None)
