"""Takes a lab down, whatever state it is in."""

from __future__ import annotations

import os
import time
from pathlib import Path

from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.lab.journal import Journal, busy, changing, read_journal
from appliance.lab.layout import CACHE, DISK, LOCKS, RUNNING, Layout

# Every process in a network namespace of the lab is the lab's: no pid is trusted across time.
# The namespaces of pids and mounts end with their first processes.
KILL = """
for try in $(seq 200); do
    pids=$(for space; do [ -e "/run/netns/$space" ] && ip netns pids "$space"; done)
    [ -z "$pids" ] && exit 0
    kill -9 $pids 2>/dev/null
    sleep 0.05
done
echo "still there: $pids" >&2
exit 1
"""

# A plain file is what a restart of the machine or a killed `ip netns add` leaves.
UNNAME = 'for space; do [ -e "/run/netns/$space" ] || continue; ip netns del "$space" || rm "/run/netns/$space"; done'


def down(name: str, everything: bool = False) -> None:
    """Remove the lab: processes, namespaces, mounts, loop devices, its folder under /run.

    Args:
        everything: what it keeps on disk as well, and the cached root when no other lab is up.
    """
    Layout(name, 0)  # a name that is none ends here
    with changing(name):
        journal = read_journal(name)
        if journal:
            take_down(journal)
        if everything:
            Local().run("rm", "-rf", "--one-file-system", str(DISK / name), timeout=300)
            _remove_cache()


def take_down(journal: Journal) -> None:
    """Remove what the journal speaks of. The caller holds the lab."""
    layout = journal.layout
    local = busy(layout.name)
    local.run("sh", "-c", KILL, "kill", *layout.namespaces)
    local.run("sh", "-c", UNNAME, "unname", *layout.namespaces)
    _free_loops(layout)
    local.run("rm", "-rf", "--one-file-system", str(layout.running))
    Local().run("rmdir", "--ignore-fail-on-non-empty", str(RUNNING), ok=(0, 1))


def lab_loops(layout: Layout) -> list[str]:
    """Loop devices on files of the lab's folder on disk.

    They are told by the device and inode of the file behind them: its path is one that only the
    host saw. Most go by themselves with the last mount, which the kernel ends in its own time.
    """
    return loops_below(layout.disk)


def loops_below(folder: Path) -> list[str]:
    """Loop devices on files below a folder of this machine."""
    columns = ("--noheadings", "--output", "NAME,BACK-MAJ:MIN,BACK-INO")
    rows = [line.split() for line in Local().run("losetup", "--list", *columns).text.splitlines()]
    states = [path.stat() for path in folder.rglob("*") if path.is_file()]
    files = {(f"{os.major(state.st_dev)}:{os.minor(state.st_dev)}", str(state.st_ino)) for state in states}
    return [row[0] for row in rows if tuple(row[1:3]) in files]


def _free_loops(layout: Layout) -> None:
    for _ in range(50):
        loops = lab_loops(layout)
        if not loops:
            return
        Local().run("losetup", "--detach", *loops, ok=None)
        time.sleep(0.1)
    raise SmsError(f"loop devices of lab {layout.name} stay in use: {' '.join(loops)}", hint="`losetup -l` shows them")


def _remove_cache() -> None:
    if not Local().works("sh", "-c", 'ls "$1"/*/journal.json', "ls", str(RUNNING)):
        lock = str(LOCKS / "sms-lab-root.lock")  # not under the hands of one who builds
        Local().run("flock", lock, "rm", "-rf", "--one-file-system", str(CACHE), timeout=900)
        Local().run("rmdir", "--ignore-fail-on-non-empty", str(DISK), ok=(0, 1))
