"""Starts and stops the guard of an admin host together with the services container."""

from __future__ import annotations

from pathlib import PurePath

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.hosts.installed import SITE_FILE, find_sms, has_systemd, lies_there
from appliance.plan.services.unit import guard_unit_name, guard_unit_text
from appliance.progress import Progress
from appliance.tools import files
from appliance.tools.scripts import script_argv

STOP_TIMEOUT_S = 5
"""Seconds that a guard may take to stop."""


def is_guarded(cluster: Cluster, host: Host) -> bool:
    """Return whether a guard of this cluster runs on the host."""
    return files.is_locked(host, str(cluster.places.guard_lock))


def start_guard(cluster: Cluster, host: Host, progress: Progress) -> bool:
    """Start the host's guard if there is another admin host; return whether it has one now.

    Reports why if it cannot.
    """
    if len(cluster.site.admin_hosts) < 2:
        return False
    if is_guarded(cluster, host):
        return True
    try:
        why = _start(cluster, host)
    except SmsError as error:
        why = error.message
    if why:
        progress.report(
            f"note: no guard on {host.name} stops the services container when another host takes over: {why}"
        )
    return not why


def _start(cluster: Cluster, host: Host) -> str:
    """Start the guard; return why it cannot be started, empty if it was."""
    sms = find_sms(host)
    if PurePath(sms).name != "sms":
        return "sms is not installed there"
    there = lies_there(cluster, host)
    if there and has_systemd(host):
        _start_unit(cluster, host, sms)
        return ""
    site = str(cluster.path) if isinstance(host, Local) and cluster.path else SITE_FILE
    if site == SITE_FILE and not there:
        return f"{SITE_FILE} there is not the site file of {cluster.site.cluster}"
    command = (sms, "--quiet", "--site", site, "--state", str(cluster.site.state), "guard")
    host.run(*script_argv("start-daemon", str(cluster.places.guard_lock), str(cluster.places.guard_log), *command))
    return ""


def _start_unit(cluster: Cluster, host: Host, sms: str) -> None:
    name = guard_unit_name(cluster.site.cluster)
    text = guard_unit_text(cluster.site.cluster, sms=sms, site=SITE_FILE, state=str(cluster.site.state))
    if host.write(f"/etc/systemd/system/{name}", text.encode()):
        host.run("systemctl", "daemon-reload")
    host.run("systemctl", "start", "--no-block", name)


def stop_guard(cluster: Cluster, host: Host) -> None:
    """Stop the host's guard if one runs; one that does not stop is left running."""
    if has_systemd(host):
        host.run("systemctl", "stop", "--no-block", guard_unit_name(cluster.site.cluster), ok=None)
    host.run(*script_argv("stop-daemon", str(cluster.places.guard_lock), str(STOP_TIMEOUT_S)), ok=None)
