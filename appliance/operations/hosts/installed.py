"""Where sms and its site file are on a host, and whether systemd runs there."""

from __future__ import annotations

import shutil
import sys
from pathlib import PurePosixPath

from appliance.config.document import read_document
from appliance.errors import ConfigError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.tools.programs import find_program

SITE_FILE = "/etc/sms/sms.yaml"
"""The site file that a unit uses: the only path that does not depend on a session."""


def lies_there(cluster: Cluster, host: Host) -> bool:
    """Return whether ``SITE_FILE`` on the host is a site file of this cluster with the same overlay folder.

    One that cannot be read is none; the limits of size, depth and number are those of every site file.
    """
    try:
        text = (host.read(SITE_FILE) or b"").decode(errors="replace")
        site = read_document(text, f"{host.name}:{SITE_FILE}").data
    except ConfigError:
        return False
    if not isinstance(site, dict) or site.get("cluster") != cluster.site.cluster:
        return False
    overlay = site.get("overlay")
    folder = overlay.get("directory") if isinstance(overlay, dict) else None
    # Units and guards must use the same lease, which is beside the overlay.
    overlays = PurePosixPath(SITE_FILE).parent / folder if isinstance(folder, str) else cluster.site.state / "overlays"
    return str(overlays) == str(cluster.places.overlay.parent)


def find_sms(host: Host) -> str:
    """Return the path of sms on the host; empty if it is not installed."""
    if isinstance(host, Local):
        return shutil.which("sms") or shutil.which(sys.argv[0]) or ""
    return find_program(host, "sms")


def has_systemd(host: Host) -> bool:
    """Return whether the host runs systemd."""
    return host.works("test", "-d", "/run/systemd/system")
