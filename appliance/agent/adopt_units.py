"""systemd units of the old node of an adoption: prevented from starting, stopped, started."""

import os
import re
import time
from contextlib import suppress
from typing import Dict, Iterable, List, Sequence, Tuple

from appliance.agent.protocol import Problem
from appliance.agent.system import SYSTEM
from appliance.shared.files import remove_state, replace_file

FOLDER = "/etc/systemd/system"
NAME = re.compile(r"[A-Za-z0-9:_.@\\-]{1,200}\.service")
DROP_IN = """\
# The services of this host are moving to the services container (sms adopt). The file is removed when they are back.
[Unit]
ConditionPathExists=!%s
"""
POLL_S = 0.005
RELOAD_S = 60.0
"""Seconds that systemd may take to read its units again."""
LISTEN_S = 3.0
"""Seconds that the start of a unit waits until the one before it can be reached."""
LISTENS = "0A"
"""State of a socket in /proc/net/tcp (linux/net/tcp_states.h)."""


def systemctl(*argv: str, timeout: float = RELOAD_S) -> str:
    """Run systemctl; return its standard output.

    Raises:
        Problem: it failed, or took longer than ``timeout`` seconds.
    """
    return SYSTEM.run("systemctl", *argv, timeout=timeout).decode(errors="replace")


def drop_in(unit: str) -> str:
    """Return the path of the file that prevents a unit from starting."""
    return "%s/%s.d/sms-adopt.conf" % (FOLDER, unit)


def check_units(units: Iterable[str]) -> Tuple[str, ...]:
    """Return the units that run.

    Raises:
        Problem: there is none of a name.
    """
    for unit in units:
        if not NAME.fullmatch(unit):
            raise Problem("invalid name of a unit: %s" % unit[:80], status=2)
    shown = _show(units, "LoadState", "ActiveState")
    missing = [unit for unit, facts in shown.items() if facts.get("LoadState") != "loaded"]
    if missing:
        raise Problem("there is no unit %s" % ", ".join(missing), "systemctl list-units", 3)
    return tuple(unit for unit, facts in shown.items() if facts.get("ActiveState") not in ("inactive", "failed"))


def prevent(units: Sequence[str], away: str) -> None:
    """Make units start only while the file ``away`` does not exist."""
    for unit in units:
        replace_file(drop_in(unit), (DROP_IN % away).encode(), 0o644)
    systemctl("daemon-reload")


def allow(units: Sequence[str]) -> None:
    """Undo ``prevent``."""
    there = [unit for unit in units if os.path.exists(drop_in(unit))]
    for unit in there:
        remove_state(drop_in(unit))
        if not os.listdir(os.path.dirname(drop_in(unit))):
            os.rmdir(os.path.dirname(drop_in(unit)))
    if there:
        systemctl("daemon-reload")


def stop(units: Sequence[str], wait_s: float) -> None:
    """Stop units, and wait until their main processes have ended.

    Raises:
        Problem: one runs after ``wait_s`` seconds.
    """
    if not units:
        return
    end = time.monotonic() + wait_s
    pids = [int(facts["MainPID"]) for facts in _show(units, "MainPID").values() if facts.get("MainPID", "0").isdigit()]
    running = {pid: _start_time(pid) for pid in pids if pid}
    systemctl("stop", *units, timeout=wait_s)
    for pid, started in running.items():
        while started and _start_time(pid) == started:
            if time.monotonic() > end:
                raise Problem("process %d of %s runs still" % (pid, ", ".join(units)), "ps %d" % pid)
            time.sleep(POLL_S)


def start(units: Sequence[str], wait_s: float) -> None:
    """Start units one after the other, and wait until each one is active.

    A unit waits until the one before it can be reached: slurmctld 22.05 sometimes serves nobody if slurmdbd begins to
    listen in the milliseconds of its own start ("plugin_load_and_link: No plugin dir given" in its log).

    Raises:
        Problem: one is not within ``wait_s`` seconds; the others were started.
    """
    failed = []
    for number, unit in enumerate(units):
        try:
            if number:
                with suppress(Problem):
                    _wait_until_listens(units[number - 1])
            systemctl("start", unit, timeout=wait_s)
            state = _show([unit], "ActiveState")[unit].get("ActiveState")
            if state != "active":  # a condition that does not hold is not an error of systemctl
                raise Problem("%s is %s after its start" % (unit, state), "journalctl -u %s" % unit)
        except Problem as problem:
            failed.append(problem)
    if failed:
        raise failed[0]


def _wait_until_listens(unit: str) -> None:
    """Wait until the main process of a unit listens on a TCP port, not longer than ``LISTEN_S``."""
    end = time.monotonic() + LISTEN_S
    pid = _show([unit], "MainPID")[unit].get("MainPID", "0")
    while pid != "0" and _start_time(int(pid)) and not _listens(pid) and time.monotonic() < end:
        time.sleep(POLL_S)


def _listens(pid: str) -> bool:
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            with open("/proc/%s/net/%s" % (pid, name)) as table:
                found |= {"socket:[%s]" % row[9] for row in map(str.split, table) if row[3] == LISTENS}
        except OSError:
            continue
    folder = "/proc/%s/fd" % pid
    try:
        for name in os.listdir(folder):
            try:
                if os.readlink("%s/%s" % (folder, name)) in found:
                    return True
            except OSError:
                continue  # closed meanwhile
    except OSError:
        pass  # it has ended
    return False


def disable(units: Sequence[str]) -> None:
    """Disable units: they do not start at boot any more."""
    systemctl("disable", *units)


def _show(units: Iterable[str], *names: str) -> Dict[str, Dict[str, str]]:
    """Return properties of units, as ``systemctl show`` prints them: a paragraph for each."""
    asked = list(dict.fromkeys(units))
    if not asked:
        return {}
    words = ["--property=" + name for name in names]
    found: List[Dict[str, str]] = []
    for paragraph in systemctl("show", *words, "--", *asked).strip("\n").split("\n\n"):
        pairs = [line.partition("=") for line in paragraph.splitlines()]
        found.append({key: value for key, _, value in pairs})
    if len(found) != len(asked):
        raise Problem("systemctl show printed %d units, not %d" % (len(found), len(asked)))
    return {unit: found[number] for number, unit in enumerate(asked)}


def _start_time(pid: int) -> str:
    """Return when a process started, in ticks since the boot; empty if it has ended."""
    try:
        with open("/proc/%d/stat" % pid) as stream:
            words = stream.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] in "ZX" else words[19]
