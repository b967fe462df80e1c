"""Requests to the agents of a migration, as they are on the wire."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "cluster": "c",
    "host": "a",
    "peer": "b",
    "verb": "migrate",
    "overlay": "/o/c.img",
    "lease": "/l/c.lease",
    "history": "/j/c.log",
    "mark": "/j/c.move",
    "lock": "/run/c.lock",
    "instance": "sms-c",
    "generation": 4,
    "bridges": {"eth0": "br-prov"},
    "addresses": {"eth0": "10.1.0.1"},
    "macs": ["02:00:00:00:00:01"],
    "shared": False,
    "stop_argv": ["apptainer", "instance", "stop"],
}
SOURCE: dict[str, Any] = {
    **COMMON,
    "pid": 77,
    "mac": "02:00:00:00:00:01",
    "stop": [["slurmctld"]],
    "stop_wait_s": 90,
    "live": ["rsyslog"],
    "loggers": ["rsyslog"],
    "tails": ["/var/log/messages"],
    "compress": True,
    "frozen_mark": "/s/frozen",
    "start_argv": ["apptainer", "instance", "start"],
}
TARGET = {**COMMON, "store": "/s", "holds": ["sms-hold-0"], "ask_nodes": [], "inside": ["apptainer", "exec"]}
