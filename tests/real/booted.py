"""systemd, booted in a host of the lab."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.host.base import Host, Result
from appliance.host.netns import Netns
from appliance.operations.image.build import Built
from appliance.share import share
from tests.real.conftest import Playground, begin_on, give_image
from tests.waiting import wait_until

HOST = "host-b"
ROOT = "/mnt/booted"
LOOPS = 64
"""Loop devices that it may use: other machines of these tests have theirs among them."""
PREPARE = f"""\
mkdir -p {ROOT}
mount -t tmpfs tmpfs {ROOT}
mkdir {ROOT}/upper {ROOT}/work {ROOT}/root
mount -t overlay -o lowerdir=/,upperdir={ROOT}/upper,workdir={ROOT}/work overlay {ROOT}/root
# Only what this test is about is started.
rm -f {ROOT}/root/etc/systemd/system/multi-user.target.wants/*
: >{ROOT}/root/etc/machine-id
# Loop devices come as they are needed, the booted host has only those that are there when it starts.
for number in $(seq 0 {LOOPS - 1}); do [ -e /dev/loop$number ] || mknod -m 660 /dev/loop$number b 7 $number; done
"""
# nspawn mounts the cgroups and /proc/sys read-only; a machine of its own has them writable.
OPEN_CGROUPS = """\
awk '$3 ~ /^cgroup/ || $2 == "/proc/sys" { print $2 }' /proc/mounts |
while read -r point; do mount -o remount,rw,bind "$point"; done
"""


class Booted(Host):
    """Commands inside the booted system."""

    def __init__(self, outer: Host, leader: str) -> None:
        self.name = outer.name
        self.outer = outer
        self.enter = ("nsenter", "-t", leader, "-m", "-u", "-i", "-p", "-r", "-w", "--")

    def run(self, *argv: str, **options: Any) -> Result:
        return self.outer.run(*self.enter, *argv, **options)

    send = fetch = hold = interact = stream = None  # type: ignore[assignment]


@contextmanager
def booted(outer: Netns) -> Iterator[Booted]:
    """Boot systemd in the host, as its init, on the host's own networks; power it off at the end."""
    code = sorted({Path(sys.prefix).resolve(), share()})
    binds = ["/var/lib/sms", "/etc/sms", *(str(path) for path in code), "/dev/loop-control"]
    binds += [f"/dev/loop{number}" for number in range(LOOPS)]
    words = ["systemd-nspawn", "--register=no", "--keep-unit", f"--directory={ROOT}/root", f"--hostname={outer.name}"]
    words += ["--capability=all", "--system-call-filter=@mount", *(f"--bind={path}" for path in binds), "--boot"]
    # nspawn wants a terminal; script(1) gives it one.
    inner = " ".join(words)
    process = subprocess.Popen(
        [*outer.prefix, "script", "-qec", inner, "/dev/null"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        leader = wait_until(lambda: outer.run("pgrep", "-xo", "systemd", ok=None).text, "systemd")
        system = Booted(outer, leader)
        system.works("systemctl", "is-system-running", "--wait")
        system.run("sh", "-c", OPEN_CGROUPS)
        yield system
        system.run("systemctl", "poweroff", ok=None)
        process.wait(90)
    finally:
        if process.poll() is None:
            outer.run("pkill", "-KILL", "-f", "^systemd-nspawn ", ok=None)
            process.kill()
            process.wait()


@contextmanager
def bootable(playground: Playground, built: Built, need: Callable[[str], str]) -> Iterator[Netns]:
    """HOST with the image, and with a root file system that ``booted`` boots."""
    for program in ("systemd-nspawn", "script"):
        need(program)
    outer = playground.host(HOST)
    give_image(playground, built, HOST)
    begin_on(playground, HOST)
    outer.run("sh", "-c", PREPARE)
    try:
        yield outer
    finally:
        outer.run("umount", f"{ROOT}/root", ok=None)
        outer.run("umount", ROOT, ok=None)
