"""Power a lab host off and on: its disk is kept, everything else is lost."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.netns import Netns
from appliance.lab.down import kill_all, loops_below
from appliance.lab.journal import Journal, busy, changing, hosts_off, read_journal
from appliance.lab.layout import LabHost
from appliance.lab.up import ENGINE_READY_S, READY_S, start_host, wait_ready
from appliance.tools.scripts import script_argv


def power_off(name: str, host: str) -> bool:
    """End a host of a lab abruptly; return whether it was on.

    Its cables go down first, so that peers see no packets of dying processes.

    Raises:
        ConfigError: the lab has no such host.
        Refused: there is no such lab.
    """
    with changing(name):
        journal, known = _find(name, host)
        layout, local = journal.layout, busy(name)
        was_on = host not in hosts_off(journal)
        cables = "".join(f"link set {known.port(network)} down\n" for network in known.addresses)
        local.run("ip", "-n", layout.namespace("switch"), "-batch", "-", input=cables.encode())
        kill_all(name, layout.namespace(host))
        _free_overlay(journal, host)
    return was_on


def power_on(name: str, host: str) -> int:
    """Start a host that is off, and wait until its daemons answer; return its first process.

    Raises:
        ConfigError: the lab has no such host.
        Refused: there is no such lab.
        SmsError: the host does not start.
    """
    with changing(name):
        journal, known = _find(name, host)
        if host not in hosts_off(journal):
            return journal.pids[host]
        layout, local = journal.layout, busy(name)
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
        wait_ready(Netns(host, pid), ENGINE_READY_S if layout.engines else READY_S)
        replace(journal, pids={**journal.pids, host: pid}).write()
    return pid


def _find(name: str, host: str) -> tuple[Journal, LabHost]:
    journal = read_journal(name)
    if not journal:
        raise Refused(f"there is no lab {name}", hint=f"sms lab up --name {name}")
    for known in journal.layout.hosts:
        if known.name == host:
            return journal, known
    names = ", ".join(one.name for one in journal.layout.hosts)
    raise ConfigError(f"lab {name} has no host {host}", hint=f"it has {names}")


def _free_overlay(journal: Journal, host: str) -> None:
    """Wait until the kernel has released the loop devices of the host's mounts."""
    disk = journal.layout.disk
    for tried in range(100):
        # On a shared folder the other host may have one, which is mounted.
        loops = [*loops_below(disk / host), *(loop for loop in loops_below(disk / "shared") if not _is_mounted(loop))]
        if not loops:
            return
        if tried == 40:
            for loop in loops:  # the kernel keeps a file system frozen that was frozen by what has just ended
                busy(journal.name).run("unshare", "-m", *script_argv("thaw-device", loop), ok=None)
        time.sleep(0.1)
    raise SmsError(f"loop devices of {host} are in use: {' '.join(loops)}", hint="`losetup -l` lists them")


def _is_mounted(loop: str) -> bool:
    """Return whether a living process has the loop device's file system mounted."""
    for table in Path("/proc").glob("[0-9]*/mountinfo"):
        with suppress(OSError):
            if f" {loop} " in table.read_text():
                return True
    return False
