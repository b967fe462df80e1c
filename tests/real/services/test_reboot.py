"""A host with systemd: its reboot restarts the services container. systemd is real, booted in a lab host."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from appliance.host.base import Host
from appliance.operations.image.build import Built
from appliance.share import share
from tests.real.conftest import Playground, give_image
from tests.waiting import wait_until

pytestmark = pytest.mark.real

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
# nspawn mounts the cgroups read-only; a machine of its own has them writable.
OPEN_CGROUPS = """\
awk '$3 ~ /^cgroup/ { print $2 }' /proc/mounts | while read -r point; do mount -o remount,rw,bind "$point"; done
"""


class Booted(Host):
    """Commands inside the booted system."""

    def __init__(self, outer: Host, leader: str) -> None:
        self.name = outer.name
        self.outer = outer
        self.enter = ("nsenter", "-t", leader, "-m", "-u", "-i", "-p", "-r", "-w", "--")

    def run(self, *argv, **options):  # type: ignore[no-untyped-def]
        return self.outer.run(*self.enter, *argv, **options)

    send = fetch = hold = interact = stream = None  # type: ignore[assignment]


@contextmanager
def booted(outer: Host) -> Iterator[Booted]:
    """Boot systemd in the host, as its init, on the host's own networks; power it off at the end."""
    code = sorted({Path(sys.prefix).resolve(), share()})
    binds = ["/var/lib/sms", "/etc/sms", *(str(path) for path in code), "/dev/loop-control"]
    binds += [f"/dev/loop{number}" for number in range(LOOPS)]
    words = ["systemd-nspawn", "--register=no", "--keep-unit", f"--directory={ROOT}/root", f"--hostname={outer.name}"]
    words += ["--capability=all", "--system-call-filter=@mount", *(f"--bind={path}" for path in binds), "--boot"]
    # nspawn wants a terminal; script(1) gives it one.
    inner = " ".join(words)
    process = subprocess.Popen(
        [*outer.prefix, "script", "-qec", inner, "/dev/null"],  # type: ignore[attr-defined]
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


def test_the_unit_stops_it_in_order_and_brings_it_back(
    stopped: Playground, built: Built, need: Callable[[str], str]
) -> None:
    for program in ("systemd-nspawn", "script"):
        need(program)
    outer = stopped.host(HOST)
    give_image(stopped, built, HOST)
    outer.run("sh", "-c", PREPARE)
    unit = "sms-lab.service"
    try:
        with booted(outer) as system:
            told = system.run("sms", "start", timeout=120)
            assert b"nothing starts the services container after a reboot" not in told.stderr
            assert system.run("systemctl", "is-enabled", unit).text == "enabled"
            assert system.run("systemctl", "is-active", unit).text == "active"
            guarded = ("systemctl", "is-active", "-q", "sms-lab-guard")
            wait_until(lambda: system.works(*guarded), "the guard runs")
            state = json.loads(system.run("sms", "status", "--json").stdout)
            assert state["healthy"] and not [words for words in state["warnings"] if "guard" in words]
        # The host is down: every daemon ended cleanly, and the lease says that it is to come back.
        assert "Saving all slurm state" in stopped.sms("logs", "slurmctld", on=HOST).text
        lease = stopped.lease(HOST)
        assert lease["holder"] == HOST and not stopped.loops(HOST)
        with booted(outer) as system:

            def back() -> bool:
                status = system.run("sms", "status", "--json", ok=None)
                return status.status == 0 and bool(json.loads(status.stdout)["healthy"])

            # nspawn's read-only cgroups let its first try fail; the unit tries again by itself.
            wait_until(back, "the services container is back")
            assert stopped.lease(HOST)["generation"] > lease["generation"]
            assert system.works(*guarded)
            system.run("sms", "stop", timeout=120)
            assert not system.works("systemctl", "is-active", "-q", "sms-lab-guard")
        with booted(outer) as system:
            time.sleep(3)
            state = json.loads(system.run("sms", "status", "--json", ok=None).stdout)
            assert not state["running"], "an administrator had stopped it"
    finally:
        outer.run("umount", f"{ROOT}/root", ok=None)
        outer.run("umount", ROOT, ok=None)
