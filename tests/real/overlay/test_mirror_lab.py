"""The mirror under a running appliance: noise over a member while jobs run, a member lost, a rebuild, a reboot."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest

from appliance.operations.lab import demo
from appliance.tools import ext3
from tests.real.conftest import NODES, Playground

pytestmark = [pytest.mark.real, pytest.mark.full]

OVERLAYS = "/var/lib/sms/overlays"
LINES = "/var/log/numbered"
JOBS = 12
DONE = "/home/alice/beside-noise"
"""What jobs print, a file each."""
WRITER = (
    f"i=0; while [ ! -e /tmp/enough ]; do echo $i >>{LINES}; sync {LINES}; i=$((i+1)); echo $i >/tmp/written; done; "
    "touch /tmp/ended"
)
"""Numbered lines, each on the disk before the next; how many is said outside of the overlay's disk."""


@pytest.fixture
def disks(stopped: Playground, need: Callable[[str], str]) -> Iterator[Playground]:
    """host-a has three more disks and a fresh overlay."""
    need("mkfs.btrfs")
    host = stopped.host("host-a")
    for number in (1, 2, 3):
        script = 'mkdir -p "$1" && mount -t tmpfs -o size=4G "disk$2" "$1"'
        host.run("sh", "-c", script, "disk", f"/mnt/disk{number}", str(number))
    stopped.sms("-q", "overlay", "create")
    try:
        yield stopped
    finally:
        # The writer, if it still writes, would hold the stop up.
        stopped.sms("exec", "--", "touch", "/tmp/enough", ok=None)
        stopped.sms("-q", "stop")
        if stopped.sms("-q", "overlay", "mirror", "remove", ok=None).status:
            stopped.sms("-q", "overlay", "mirror", "remove", "--abandon", ok=None)
        for number in (1, 2, 3):
            host.run("umount", f"/mnt/disk{number}")


def members(playground: Playground) -> list[str]:
    found = json.loads(playground.sms("overlay", "mirror", "status", "--json", ok=(0, 4)).stdout)
    return [member["file"] for member in found["members"]]


def lines(playground: Playground) -> int:
    """Lines of the writer, which must be all there and in order."""
    said = playground.sms("exec", "--", "cat", LINES).text.split()
    assert said == [str(number) for number in range(len(said))]
    return len(said)


def in_background(playground: Playground, script: str) -> None:
    playground.sms("exec", "--", "sh", "-c", f"rm -f /tmp/enough /tmp/ended; setsid sh -c '{script}' >/dev/null 2>&1 &")


def test_noise_over_a_member_while_jobs_run(disks: Playground) -> None:
    host, node = disks.host("host-a"), disks.host("node1")
    disks.sms("-q", "overlay", "mirror", "create", "--on", "/mnt/disk1", "--on", "/mnt/disk2")
    assert disks.loops() == [] and host.run("readlink", f"{OVERLAYS}/lab.img").text == "lab.mirror/lab.img"
    disks.sms("-q", "start")
    assert disks.status()["healthy"] and disks.status()["mirror"]["open"]
    demo.wait_idle(node, NODES)
    in_background(disks, WRITER)
    one, two = members(disks)
    submit = (
        f"mkdir {DONE} && for i in $(seq {JOBS}); do sbatch --parsable -o {DONE}/%j --wrap 'sleep 1; echo done'; done"
    )
    jobs = demo.as_alice(node, "bash", "-c", submit).split()
    assert len(jobs) == JOBS
    began = time.monotonic()
    noise = 'dd if=/dev/urandom of="$1" bs=1M count=$(($(stat -c %s "$1") >> 20)) conv=notrunc,fsync'
    host.run("sh", "-c", noise, "noise", two, timeout=300)
    host.run("sh", "-c", "echo 3 >/proc/sys/vm/drop_caches")

    def seen() -> str:
        # Damage in unread blocks is found by a scrub only: the services container reads its own files here.
        disks.sms(
            "exec",
            "--",
            "sh",
            "-c",
            "cat /var/log/sms/*.log /var/log/messages /var/spool/slurmctld/* >/dev/null 2>&1 || true",
        )
        host.run("sh", "-c", "echo 3 >/proc/sys/vm/drop_caches")
        return "\n".join(word for word in disks.status()["warnings"] if "mirror" in word)

    said = demo.wait_for("status to tell of it", seen)
    assert two in said and one not in said and "rebuild" in said
    assert disks.sms("status", ok=None).status == 4
    print(f"reported after {time.monotonic() - began:.1f} s")
    assert json.loads(disks.sms("overlay", "mirror", "rebuild", "--json").stdout)["mended"] > 0
    assert disks.status()["healthy"]
    demo.wait_for("all jobs", lambda: "" if demo.as_alice(node, "squeue", "-h") else "yes", 300)
    # The controller forgets a job 300 s after its end.
    assert node.run("sh", "-c", 'cd "$1" && grep -xc done *', "count", DONE).text.split() == [
        f"{job}:1" for job in sorted(jobs)
    ]
    disks.sms("exec", "--", "sh", "-c", "touch /tmp/enough; until [ -e /tmp/ended ]; do sleep 0.1; done")
    written = int(disks.sms("exec", "--", "cat", "/tmp/written").text)
    assert lines(disks) == written > 100
    disks.sms("-q", "stop")
    assert not host.works("mountpoint", "-q", f"{OVERLAYS}/lab.mirror")
    assert [ext3.users_of(host, member) for member in (one, two)] == [[], []]
    # The one that was noise is all that is left.
    host.run("rm", one)
    started = disks.sms("start")
    assert b"WARNING: the mirror has lost" in started.stderr and b"on one disk only" in started.stderr
    assert lines(disks) == written
    assert "the overlay is on one disk only" in "\n".join(disks.status()["warnings"])
    # Onto another disk, while it runs; and once more the old one goes.
    disks.sms("-q", "overlay", "mirror", "rebuild", "--on", "/mnt/disk3")
    assert disks.status()["healthy"]
    assert "is redundant" in disks.sms("overlay", "mirror", "rebuild").text
    disks.sms("-q", "stop")
    host.run("rm", two)
    disks.sms("-q", "start")
    assert lines(disks) == written
    disks.sms("-q", "stop")
    disks.sms("-q", "overlay", "mirror", "remove")
    host.run("e2fsck", "-fn", f"{OVERLAYS}/lab.img")
    disks.sms("-q", "start")
    assert lines(disks) == written and disks.status()["mirror"] is None


def test_a_reboot_and_verbs_on_a_mirrored_overlay(disks: Playground) -> None:
    host = disks.host("host-a")
    disks.sms("-q", "overlay", "mirror", "create", "--on", "/mnt/disk1", "--on", "/mnt/disk2")
    disks.sms("-q", "start")
    disks.sms("-q", "overlay", "snapshot")
    # The host goes down without a word: mounts and loop devices are gone, the lease is kept.
    pid = json.loads(host.run("apptainer", "instance", "list", "--json", "sms-lab").stdout)["instances"][0]["pid"]
    host.run("kill", "-KILL", str(pid))
    demo.wait_for("its end", lambda: "" if disks.loops() else "yes")
    host.run("umount", f"{OVERLAYS}/lab.mirror")
    disks.sms("-q", "start", "--boot")
    assert disks.status()["healthy"]
    disks.sms("-q", "stop")
    # Stopped, the mirror is closed; verbs open it for as long as they need it.
    disks.sms("-q", "overlay", "snapshot")
    assert "slurmctld" in disks.sms("logs", "supervisor").text
    disks.sms("-q", "overlay", "grow", "+256M")
    disks.sms("-q", "overlay", "restore", "latest")
    assert host.run("readlink", f"{OVERLAYS}/lab.img").text == "lab.mirror/lab.img"
    assert not host.works("mountpoint", "-q", f"{OVERLAYS}/lab.mirror")
    disks.sms("-q", "overlay", "mirror", "scrub")
    disks.sms("-q", "start", "--dry-run")
    disks.sms("-q", "start")
    assert disks.status()["healthy"]
