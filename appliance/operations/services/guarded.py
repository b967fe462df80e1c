"""Starts the guard of an admin host with the appliance, and ends it with it."""

from __future__ import annotations

from pathlib import PurePath

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.services.boot import SITE_FILE, find_sms, has_systemd, lies_there
from appliance.plan.services.unit import guard_unit_name, guard_unit_text
from appliance.progress import Progress

ENDED_S = 5
"""Seconds that a guard gets to end."""
RUNS = '[ -e "$1" ] && ! flock -n -s "$1" true'
"""Shell: whether somebody holds lock $1."""
END = f"""\
{RUNS} || exit 0
kill "$(cat "$1")" && flock -w {ENDED_S} "$1" true
"""
"""Shell: end the process that holds lock $1 and has written its id into it."""
BEGIN = """\
umask 077
mkdir -p "$(dirname "$1")" && log=$1 && shift && exec setsid --fork "$@" </dev/null >>"$log" 2>&1
"""
"""Shell: run the command after $1 for itself, with log file $1."""


def is_guarded(cluster: Cluster, host: Host) -> bool:
    """Whether a guard of this cluster runs on the host."""
    return host.works("sh", "-c", RUNS, "runs", str(cluster.places.guard_lock))


def start_guard(cluster: Cluster, host: Host, progress: Progress) -> bool:
    """Start the host's guard, where there is another admin host to guard against; say whether it has one now.

    Says so when it cannot.
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
        progress.say(f"note: no guard on {host.name} stops the appliance should another host take over: {why}")
    return not why


def _start(cluster: Cluster, host: Host) -> str:
    """Start it; give why it cannot be."""
    sms = find_sms(host)
    if PurePath(sms).name != "sms":
        return "there is no sms"
    there = lies_there(cluster, host)
    if there and has_systemd(host):
        _start_unit(cluster, host, sms)
        return ""
    site = str(cluster.path) if isinstance(host, Local) and cluster.path else SITE_FILE
    if site == SITE_FILE and not there:
        return f"{SITE_FILE} there is not the site file of {cluster.site.cluster}"
    words = (sms, "--quiet", "--site", site, "--state", str(cluster.site.state), "guard")
    host.run("sh", "-c", BEGIN, "begin", str(cluster.places.guard_log), *words)
    return ""


def _start_unit(cluster: Cluster, host: Host, sms: str) -> None:
    name = guard_unit_name(cluster.site.cluster)
    text = guard_unit_text(cluster.site.cluster, sms=sms, site=SITE_FILE, state=str(cluster.site.state))
    if host.write(f"/etc/systemd/system/{name}", text.encode()):
        host.run("systemctl", "daemon-reload")
    host.run("systemctl", "start", "--no-block", name)


def stop_guard(cluster: Cluster, host: Host) -> None:
    """End the host's guard, if one runs; one that does not end is left."""
    if has_systemd(host):
        host.run("systemctl", "stop", "--no-block", guard_unit_name(cluster.site.cluster), ok=None)
    host.run("sh", "-c", END, "end", str(cluster.places.guard_lock), ok=None)
