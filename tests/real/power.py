"""Power a lab host off and on: its disk is kept, everything else is lost."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.lab.down import kill_all, loops_below
from appliance.lab.journal import Journal, busy, changing, read_journal
from appliance.lab.layout import LabHost
from appliance.lab.up import start_host, wait_ready

THAW = """
folder=$(mktemp -d) && mount -t ext3 "$1" "$folder" && fsfreeze -u "$folder"
umount "$folder"; rmdir "$folder"
"""
"""Shell: thaw a file system that was frozen when its host was powered off; the kernel keeps it frozen otherwise."""


def power_off(lab: Lab, host: str) -> None:
    """End a host abruptly; its cables go down first, so that peers see no packets of dying processes."""
    with changing(lab.name):
        journal, known = _find(lab.name, host)
        layout, local = journal.layout, busy(lab.name)
        cables = "".join(f"link set {known.port(network)} down\n" for network in known.addresses)
        local.run("ip", "-n", layout.namespace("switch"), "-batch", "-", input=cables.encode())
        kill_all(lab.name, layout.namespace(host))
        _free_overlay(journal, host)


def power_on(lab: Lab, host: str) -> None:
    """Start a powered-off host, and wait until its daemons answer."""
    with changing(lab.name):
        journal, known = _find(lab.name, host)
        layout, local = journal.layout, busy(lab.name)
        inside = ("ip", "-n", layout.namespace(host))
        cables = {known.interface(network) for network in known.addresses}
        links = json.loads(local.run(*inside, "-json", "link", "show").stdout)
        gone = [link["ifname"] for link in links if link["ifname"] not in {"lo", *cables}]
        lines = [*(f"link delete {link}" for link in gone), *(f"addr flush dev {cable}" for cable in cables)]
        lines += [f"link set {cable} down" for cable in cables]
        local.run(*inside, "-force", "-batch", "-", input="\n".join([*lines, ""]).encode(), ok=None)
        up = "".join(f"link set {known.port(network)} up\n" for network in known.addresses)
        local.run("ip", "-n", layout.namespace("switch"), "-batch", "-", input=up.encode())
        pid = start_host(layout, known)
        wait_ready(Netns(host, pid))
        replace(journal, pids={**journal.pids, host: pid}).write()
        lab._pids[host] = pid


def _find(name: str, host: str) -> tuple[Journal, LabHost]:
    journal = read_journal(name)
    assert journal
    return journal, next(one for one in journal.layout.hosts if one.name == host)


def _free_overlay(journal: Journal, host: str) -> None:
    """Wait until the kernel has released the loop devices of the host's mounts."""
    disk = journal.layout.disk
    for tried in range(100):
        # On a shared folder the other host may have one, which is mounted.
        loops = [*loops_below(disk / host), *(loop for loop in loops_below(disk / "shared") if not _is_mounted(loop))]
        if not loops:
            return
        if tried == 40:
            for loop in loops:
                busy(journal.name).run("unshare", "-m", "sh", "-c", THAW, "thaw", loop, ok=None)
        time.sleep(0.1)
    pytest.fail(f"loop devices of {host} are in use: {' '.join(loops)}")


def _is_mounted(loop: str) -> bool:
    """Whether a living process has the loop device's file system mounted."""
    for table in Path("/proc").glob("[0-9]*/mountinfo"):
        with suppress(OSError):
            if f" {loop} " in table.read_text():
                return True
    return False
