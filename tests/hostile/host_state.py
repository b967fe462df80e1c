"""What of a host an attacker must not have changed: its files, processes, network and keys, read before and after.

``read_state`` reads all that a lab's host has changed in its root file system since it was started. What a verb of sms
writes there is named by the caller.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.host.netns import Netns

OWN = ("/var/lib/sms/", "/run/", "/tmp/", "/var/tmp/", "/var/log/", "/root/.apptainer/", "/root/.cache/", "/lab/")
"""Folders in which verbs, and the daemons of a lab's host, write."""
WALK = r"""
import hashlib, json, os, stat, sys
root, *own = sys.argv[1:]

def facts(path):
    found = os.lstat(path)
    what = [stat.filemode(found.st_mode), found.st_uid, found.st_gid]
    if stat.S_ISLNK(found.st_mode):
        what.append(os.readlink(path))
    elif stat.S_ISREG(found.st_mode):
        what += [found.st_size, found.st_mtime_ns]
        if found.st_size < 1 << 22:
            with open(path, "rb") as stream:
                what.append(hashlib.sha256(stream.read()).hexdigest())
    elif not stat.S_ISDIR(found.st_mode):
        what.append(found.st_rdev)
    return what

files = {}
for top, folders, names in os.walk(root):
    for name in [*folders, *names]:
        path = os.path.join(top, name)
        if not (path[len(root):] + "/").startswith(tuple(own)):
            try:
                files[path[len(root):]] = facts(path)
            except OSError:
                pass
json.dump(files, sys.stdout)
"""
"""$1: the folder with the changes to a lab host's root file system."""
READ = r"""
import json, os, stat, subprocess, sys, time

def run(*argv):
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace")
    return done.stdout.splitlines() if done.returncode == 0 else ["status %d" % done.returncode]

files = {}
for name in os.listdir("/dev"):
    found = os.lstat("/dev/" + name)
    files["/dev/" + name] = [stat.filemode(found.st_mode), found.st_uid, found.st_gid, found.st_rdev]

processes = []
mine = os.stat("/proc/self/ns/pid").st_ino
for number in filter(str.isdigit, os.listdir("/proc")):
    try:
        if os.stat("/proc/%s/ns/pid" % number).st_ino != mine or int(number) == os.getpid():
            continue
        with open("/proc/%s/cmdline" % number, "rb") as stream:
            words = stream.read().split(b"\0")[:-1]
        if words:  # else it has ended, and nobody has waited for it
            processes.append([os.stat("/proc/" + number).st_uid, *(word.decode(errors="replace") for word in words)])
    except OSError:
        pass

for _ in range(50):  # a new address is not used for a second or two
    if not any("tentative" in line for line in run("ip", "-o", "address")):
        break
    time.sleep(0.1)
network = {
    "links": sorted(line.partition(": ")[2] for line in run("ip", "-o", "link")),
    "addresses": sorted(line.partition(": ")[2] for line in run("ip", "-o", "address")),
    "routes": run("ip", "route", "show", "table", "all"),
    "routes of IPv6": run("ip", "-6", "route", "show", "table", "all"),
    "rules": run("ip", "rule"),
    "nftables": run("nft", "-s", "list", "ruleset"),
    "sockets": sorted({" ".join(line.split()[:5]) for line in run("ss", "-Hlntu")}),
    "settings": [],
}
for top, _, names in os.walk("/proc/sys/net"):
    for name in names:
        try:
            with open(os.path.join(top, name)) as stream:
                network["settings"].append("%s %s" % (os.path.join(top, name), stream.read().strip()))
        except OSError:
            pass
network["settings"].sort()
with open("/proc/self/mountinfo") as stream:
    mounts = sorted({line.split()[4] for line in stream} - {"/run/netns"})  # ip-netns(8) makes it, for a rehearsal
json.dump([files, processes, network, mounts], sys.stdout)
"""
CHANGES = ("/proc/sys/net/netfilter/nf_conntrack_count", "/proc/sys/net/ipv4/neigh/", "expires ")


@dataclass(frozen=True)
class HostState:
    """Of one host at one time."""

    files: dict[str, list[Any]]
    processes: list[list[Any]]
    network: dict[str, list[str]]
    mounts: list[str]


def read_state(host: Netns, own: Sequence[str] = OWN) -> HostState:
    """What is there now; files below the folders ``own`` are left out."""
    files, *rest = json.loads(host.run("python3", "-c", READ, timeout=120).stdout)
    text = Path(f"/proc/{host.pid}/mountinfo").read_text()
    root = re.search(r" / / .*[, ]upperdir=([^,]+)", text)
    assert root, "a host of a lab has an overlay on this machine's root file system"
    # Seen from the host's mount namespace, outside of its root folder.
    walk = ("nsenter", "-t", str(host.pid), "-m", "--", "python3", "-c", WALK, root[1], *own)
    files.update(json.loads(subprocess.run(walk, check=True, capture_output=True).stdout))
    return HostState(files, *rest)


def differences(before: HostState, after: HostState) -> list[str]:
    """Return what another program than a verb has done, a line each; order and times that pass do not count."""
    return [
        *_between("file", before.files, after.files),
        *(f"process {words}" for words in after.processes if words not in before.processes),
        *(f"mount {path}" for path in after.mounts if path not in before.mounts),
        *(line for name in after.network for line in _lines(name, before.network[name], after.network[name])),
    ]


def _between(kind: str, before: dict[str, list[Any]], after: dict[str, list[Any]]) -> Iterator[str]:
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            yield f"{kind} {path}: {before.get(path)} -> {after.get(path)}"


def _lines(name: str, before: list[str], after: list[str]) -> Iterator[str]:
    for sign, lines, others in (("-", before, after), ("+", after, before)):
        there = set(others)
        for line in lines:
            if line not in there and not any(word in line for word in CHANGES):
                yield f"{name} {sign}{line}"
