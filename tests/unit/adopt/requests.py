"""Requests to the agent of the old node of an adoption, as they are on the wire."""

from __future__ import annotations

from typing import Any

INTERFACE: dict[str, Any] = {
    "name": "bond0",
    "inside": "eth0",
    "mac": "02:00:00:00:00:01",
    "spare_mac": "02:00:00:00:00:f1",
    "moves": ["10.1.0.1/16"],
    "keeps": ["10.1.0.9/16"],
    "witnesses": ["10.1.0.254"],
}
ADOPT: dict[str, Any] = {
    "cluster": "c",
    "host": "old",
    "peer": "a",
    "mark": "/var/lib/sms-adopt/c.json",
    "away": "/var/lib/sms-adopt/c.away",
    "lock": "/run/sms/adopt-c.lock",
    "interfaces": [INTERFACE],
    "controller": ["slurmctld.service"],
    "accounting": ["slurmdbd.service"],
    "stop_wait_s": 60,
    "state": "/var/spool/slurmctld",
    "state_inside": "/var/lib/slurm/state",
}
