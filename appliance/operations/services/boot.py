"""Installs the systemd unit that starts the services container after a reboot."""

from __future__ import annotations

import os

from appliance.errors import SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.hosts.installed import SITE_FILE, find_sms, has_systemd, lies_there
from appliance.plan.machine import stop_timeout
from appliance.plan.services.unit import unit_name, unit_text


def install_unit(cluster: Cluster, host: Host) -> bool:
    """Install, enable and start the unit; return whether the host has one now. Reports why if it cannot.

    The unit is started although the instance runs already: only an active unit stops it at shutdown.
    """
    why = _why_not(cluster, host)
    try:
        if not why:
            _install(cluster, host)
    except SmsError as error:
        why = error.message
    if why:
        cluster.env.progress.report(f"note: nothing starts the services container after a reboot of {host.name}: {why}")
    return not why


def _why_not(cluster: Cluster, host: Host) -> str:
    """Return why the host cannot have a unit; empty when it can."""
    if not has_systemd(host):
        return "it does not run systemd"
    if not find_sms(host):
        return "sms is not installed there"
    if not lies_there(cluster, host):
        return f"{SITE_FILE} there is not the site file of {cluster.site.cluster}"
    return ""


def _install(cluster: Cluster, host: Host) -> None:
    name = unit_name(cluster.site.cluster)
    text = unit_text(
        cluster.site.cluster,
        sms=find_sms(host),
        site=SITE_FILE,
        state=str(cluster.site.state),
        overlays=str(cluster.places.overlay.parent),
        stop_timeout=stop_timeout(cluster.services),
    )
    if host.write(f"/etc/systemd/system/{name}", text.encode()):
        host.run("systemctl", "daemon-reload")
    if not host.works("systemctl", "is-enabled", "--quiet", name):
        host.run("systemctl", "enable", "--quiet", name)
    if not host.works("systemctl", "is-active", "--quiet", name) and "SMS_UNIT" not in os.environ:
        host.run("systemctl", "start", name, timeout=120)
