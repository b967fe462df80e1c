"""The systemd units that start the services container after a reboot of its host, and that guard it there."""

from __future__ import annotations

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
# By this, sms recognizes that the unit runs it.
Environment=SMS_UNIT={cluster}
# Starts only if the lease is still held by this host.
ExecStart={sms} --quiet --site {site} --state {state} start --boot
ExecStop={sms} --quiet --site {site} --state {state} stop --keep-lease
# 4: the container serves, and a service of it does not answer: `sms status`.
SuccessExitStatus=4
Restart=on-failure
RestartSec=30
TimeoutStartSec=600
TimeoutStopSec={stop_timeout}
KillMode=none

[Install]
WantedBy=multi-user.target
"""

GUARD = """\
# Written by `sms start`.
[Unit]
Description=sms guard of cluster {cluster}: stops the services container here when another host has taken over
Documentation=man:sms(1)
After=network-online.target
PartOf={unit}

[Service]
ExecStart={sms} --quiet --site {site} --state {state} guard
Restart=always
RestartSec=5
# A stop that is under way must not be interrupted.
KillMode=process
"""


def unit_name(cluster: str) -> str:
    """Return the name of the unit."""
    return f"sms-{cluster}.service"


def unit_text(cluster: str, *, sms: str, site: str, state: str, overlays: str, stop_timeout: int) -> str:
    """Return the text of the unit; paths are those of the host, ``stop_timeout`` is in seconds."""
    return TEMPLATE.format(
        cluster=cluster, sms=sms, site=site, state=state, overlays=overlays, stop_timeout=stop_timeout + 60
    )


def guard_unit_name(cluster: str) -> str:
    """Return the name of the guard's unit; `sms start` starts it, so it is never enabled."""
    return f"sms-{cluster}-guard.service"


def guard_unit_text(cluster: str, *, sms: str, site: str, state: str) -> str:
    """Return the text of the guard's unit; paths are those of the host."""
    return GUARD.format(cluster=cluster, sms=sms, site=site, state=state, unit=unit_name(cluster))
