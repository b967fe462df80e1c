"""Remove a lab, whatever its state."""

from __future__ import annotations

import os
import time
from pathlib import Path

from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.lab.engines.cgroups import remove_cgroups
from appliance.lab.engines.keys import kubeconfig
from appliance.lab.engines.members import cgroup
from appliance.lab.journal import Journal, busy, changing, read_journal
from appliance.lab.layout import CACHE, DISK, LOCKS, RUNNING, WORKER, Layout
from appliance.lab.waiting import wait_until

# Finds processes by network namespace, because recorded pids may have been reused. PID and mount
# namespaces end with their first processes.
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


def down(name: str, everything: bool = False) -> bool:
    """Remove the lab: processes, namespaces, mounts, loop devices, its folder under /run; return whether it was up.

    Args:
        everything: also its files on disk, and the cached root file system if no other lab is up.
    """
    Layout(name, 0)  # validates the name
    with changing(name):
        journal = read_journal(name)
        if journal:
            take_down(journal)
        else:
            # A run that was killed before its record was complete has used none of the names in it.
            Local().run("rm", "-rf", "--one-file-system", str(RUNNING / name))
        if everything:
            Local().run("rm", "-rf", "--one-file-system", str(DISK / name), timeout=300)
            _remove_cache()
    return journal is not None


def take_down(journal: Journal) -> None:
    """Remove everything in the journal. The caller holds the lab's lock."""
    layout = journal.layout
    local = busy(layout.name)
    kill_all(layout.name, *layout.namespaces)
    for space in layout.namespaces:
        # A reboot or a killed `ip netns add` leaves a plain file.
        if Path("/run/netns", space).exists() and not local.works("ip", "netns", "del", space):
            local.run("rm", f"/run/netns/{space}")
    _remove_engines(layout)
    _remove_disks(layout)
    _free_loops(layout)
    local.run("rm", "-rf", "--one-file-system", str(layout.running))
    Local().run("rmdir", "--ignore-fail-on-non-empty", str(RUNNING), ok=(0, 1))


def _remove_engines(layout: Layout) -> None:
    """Remove the disks of engine hosts, and the cgroups of pods; the machine's own ones are as they were."""
    if not layout.engines:
        return
    paths = (str(layout.engines_disk), str(kubeconfig(layout)))
    busy(layout.name).run("rm", "-rf", "--one-file-system", *paths, timeout=300)
    names = [cgroup(layout, host) for host in layout.hosts_of(WORKER)]
    wait_until(lambda: remove_cgroups(*names), "the cgroups of pods are gone", 30)


def _remove_disks(layout: Layout) -> None:
    """Remove the disks of hosts that keep them only while the lab is up, and the cgroups of their systemd."""
    hosts = [host for host in layout.hosts if layout.disk_of(host)]
    if hosts:
        paths = [str(layout.disk_of(host)) for host in hosts]
        busy(layout.name).run("rm", "-rf", "--one-file-system", *paths, timeout=300)
        names = [cgroup(layout, host) for host in hosts]
        wait_until(lambda: remove_cgroups(*names), "the cgroups of systemd are gone", 30)


def kill_all(name: str, *namespaces: str) -> None:
    """End all processes in network namespaces of a lab."""
    busy(name).run("sh", "-c", KILL, "kill", *namespaces)


def loops_below(folder: Path) -> list[str]:
    """Return the loop devices on files below a folder of this machine, such as a lab's on disk.

    They are identified by device and inode of their backing file, because its path is one in the
    host's mount namespace. Most are released asynchronously with the last mount.
    """
    columns = ("--noheadings", "--output", "NAME,BACK-MAJ:MIN,BACK-INO")
    rows = [line.split() for line in Local().run("losetup", "--list", *columns).text.splitlines()]
    states = [path.stat() for path in folder.rglob("*") if path.is_file()]
    files = {(f"{os.major(state.st_dev)}:{os.minor(state.st_dev)}", str(state.st_ino)) for state in states}
    return [row[0] for row in rows if tuple(row[1:3]) in files]


def _free_loops(layout: Layout) -> None:
    for _ in range(50):
        loops = loops_below(layout.disk)
        if not loops:
            return
        Local().run("losetup", "--detach", *loops, ok=None)
        time.sleep(0.1)
    raise SmsError(f"loop devices of lab {layout.name} are in use: {' '.join(loops)}", hint="`losetup -l` lists them")


def empty_folder(folder: Path, lock: str) -> None:
    """Remove a folder under a lock; if a file system is mounted there, only what is in it."""
    if folder.is_dir():
        argv = ("find", str(folder), "-xdev", "-mindepth", "1", "-delete")
        Local().run("flock", lock, *argv, timeout=900)
        Local().run("rmdir", str(folder), ok=None if folder.is_mount() else (0,))


def _remove_cache() -> None:
    # Who uses the folder from another mount namespace, whose labs are not below this /run, has a lock on it.
    used = CACHE.is_dir() and not Local().works("flock", "--nonblock", str(CACHE), "true")
    if not used and not any(RUNNING.glob("*/journal.json")):
        lock = str(LOCKS / "sms-lab-root.lock")  # not during a build
        empty_folder(CACHE, lock)
        Local().run("rmdir", "--ignore-fail-on-non-empty", str(DISK), ok=(0, 1))
