"""Brings the appliance back after a reboot, where the host has systemd."""

from __future__ import annotations

import os
import shutil
import sys

from appliance.flow.context import Cluster
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.plan.unit import unit_name, unit_text
from appliance.progress import Progress

SITE_FILE = "/etc/sms/sms.yaml"
"""Where a unit looks for the site file: the one place that outlives a session."""


def install_unit(cluster: Cluster, host: Host, progress: Progress) -> bool:
    """Install and enable the unit; say whether the host has one now. Says so when it cannot."""
    if not host.works("test", "-d", "/run/systemd/system"):
        progress.say(f"note: {host.name} does not run systemd; nothing starts the appliance after a reboot")
        return False
    sms = _find_sms(host)
    if not sms or not host.works("test", "-f", SITE_FILE):
        progress.say(
            f"note: no {'sms' if not sms else SITE_FILE} on {host.name}; nothing starts the appliance after a reboot"
        )
        return False
    name = unit_name(cluster.site.cluster)
    text = unit_text(cluster.site.cluster, sms=sms, site=SITE_FILE, overlays=str(cluster.places.overlay.parent))
    if host.write(f"/etc/systemd/system/{name}", text.encode()):
        host.run("systemctl", "daemon-reload")
    if not host.works("systemctl", "is-enabled", "--quiet", name):
        host.run("systemctl", "enable", "--quiet", name)
    return True


def _find_sms(host: Host) -> str:
    """Where sms is on the host."""
    if isinstance(host, Local):
        return os.path.abspath(shutil.which(sys.argv[0]) or sys.argv[0])  # noqa: PTH100 - a link may be what stays
    return host.run("sh", "-c", "command -v sms", ok=None).text
