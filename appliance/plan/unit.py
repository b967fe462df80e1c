"""The systemd unit that brings the appliance back after a reboot of its host."""

from __future__ import annotations

from appliance.plan.machine import STOP_TIMEOUT_S

TEMPLATE = """\
# Written by `sms start`.
[Unit]
Description=sms services container of cluster {cluster}
Documentation=man:sms(1)
Wants=network-online.target
After=network-online.target remote-fs.target time-sync.target
RequiresMountsFor={overlays}

[Service]
Type=oneshot
RemainAfterExit=yes
# Starts only what ran here when the host went down: the lease says so.
ExecStart={sms} --quiet --site {site} start --boot
ExecStop={sms} --quiet --site {site} stop --keep-lease
TimeoutStartSec=600
TimeoutStopSec={stop_timeout}
KillMode=none

[Install]
WantedBy=multi-user.target
"""


def unit_name(cluster: str) -> str:
    """The unit's name."""
    return f"sms-{cluster}.service"


def unit_text(cluster: str, *, sms: str, site: str, overlays: str) -> str:
    """The unit's text; ``sms`` and ``site`` are paths on the host."""
    return TEMPLATE.format(cluster=cluster, sms=sms, site=site, overlays=overlays, stop_timeout=STOP_TIMEOUT_S + 30)
