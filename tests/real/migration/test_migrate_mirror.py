"""`sms migrate` with the overlay on a mirror: the target gets one of its own, the source's keeps a stale copy."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from appliance.operations.lab.demo import as_alice, wait_for, wait_idle
from tests.real.conftest import NODES
from tests.real.labs import build_image, fresh_lab
from tests.real.migration.conftest import where
from tests.real.moves import CARRIERS, OVERLAY, Hosts, Stepping
from tests.real.power import power_off, power_on

pytestmark = [pytest.mark.real, pytest.mark.full]

MIRROR = "/var/lib/sms/overlays/lab.mirror"
DISKS = {"host-a": ("/mnt/disk1", "/mnt/disk2"), "host-b": ("/mnt/disk3", "/mnt/disk4")}
MOUNT = 'for disk; do mkdir -p "$disk" && mount -t tmpfs -o size=4G "$disk" "$disk"; done'
SETTLE_S = 150


def set_disks(hosts: Hosts, folders: dict[str, tuple[str, str]]) -> None:
    """Write the folders of each host's mirror to the site file of the lab; none if ``folders`` has none."""

    def change(document: dict[str, object]) -> None:
        for admin in document["admin_hosts"]:  # type: ignore[attr-defined]
            admin.pop("mirror", None)
            if admin["name"] in folders:
                admin["mirror"] = list(folders[admin["name"]])

    hosts.variant("sms.yaml", change)


@contextmanager
def mirrored(hosts: Hosts, folders: dict[str, tuple[str, str]], *words: str) -> Iterator[Hosts]:
    """Run on host-a, on a mirror in its folders; afterwards no host has a mirror."""
    source, _ = where(hosts)
    hosts.sms("-q", "stop", on=source)
    if source != "host-a":
        for host in CARRIERS:
            hosts.host(host).run("sh", "-c", f"rm -f {OVERLAY}*")
        hosts.sms("-q", "overlay", "create")
    set_disks(hosts, folders)
    try:
        hosts.sms("-q", "overlay", "mirror", "create", *words)
        hosts.sms("-q", "start")
        wait_idle(hosts.host("node1"), NODES)
        yield hosts
    finally:
        for host in CARRIERS:
            hosts.sms("-q", "stop", on=host, ok=None)
        for host in CARRIERS:
            hosts.sms("-q", "overlay", "mirror", "remove", on=host, ok=None)
        set_disks(hosts, {})
        for host in CARRIERS:
            hosts.host(host).run("sh", "-c", f"umount {MIRROR}; rm -rf {OVERLAY}* {MIRROR}*", ok=None)
        hosts.sms("-q", "start", "--host", "host-a", on="admin")


@pytest.fixture
def disks(hosts: Hosts, need: Callable[[str], str]) -> Iterator[Hosts]:
    """Each host has two disks of its own, and the services container runs on a mirror."""
    need("mkfs.btrfs")
    for host, folders in DISKS.items():
        hosts.host(host).run("sh", "-c", MOUNT, "mount", *folders)
    with mirrored(hosts, DISKS):
        yield hosts
    for host, folders in DISKS.items():
        hosts.host(host).run("umount", *folders)


def is_open(hosts: Hosts, host: str) -> bool:
    return hosts.host(host).works("mountpoint", "-q", MIRROR)


def check_mirrored(hosts: Hosts, serves: str, other: str) -> None:
    """One serves on its mirror; the other's is closed, has a stale copy and no overlay."""
    found = hosts.status(serves)
    assert found["healthy"] and found["mirror"]["open"], found["warnings"]
    assert hosts.host(serves).run("readlink", OVERLAY).text == "lab.mirror/lab.img"
    assert not hosts.host(other).works("test", "-L", OVERLAY) and not hosts.host(other).works("test", "-e", OVERLAY)
    assert not is_open(hosts, other)
    stale = json.loads(hosts.sms("overlay", "mirror", "status", "--json", on=other).stdout)
    assert [member["state"] for member in stale["members"]] == ["whole", "whole"] and not stale["problems"]


def migrate(hosts: Hosts) -> tuple[str, str]:
    """To the other host; where it runs now, and where it ran."""
    source, target = where(hosts)
    reported = json.loads(hosts.sms("-q", "migrate", "--force", "--json", target, on="admin").stdout)
    assert reported["notes"] == []
    return target, source


def test_it_migrates_to_a_mirror(disks: Hosts) -> None:
    planned = json.loads(disks.sms("migrate", "--force", "--dry-run", "--json", "host-b", on="admin").stdout)
    assert planned["mirror"] == list(DISKS["host-b"])
    assert not disks.host("host-b").works("test", "-e", f"{MIRROR}.json")
    check_mirrored(disks, *migrate(disks))


def test_there_and_back_under_a_job_and_a_lost_disk(disks: Hosts) -> None:
    node = disks.host("node1")
    job = as_alice(node, "sbatch", "--parsable", "--output=/home/alice/%j", "--wrap=sleep 45; echo done")
    disks.sms("-q", "exec", "--", "sh", "-c", "echo here >/root/kept; sync /root/kept")
    for _ in range(2):
        check_mirrored(disks, *migrate(disks))
    assert where(disks)[0] == "host-a"
    assert migrate(disks)[0] == "host-b"
    # A disk of the target is lost: it continues, and says so.
    host = disks.host("host-b")
    member = f"{DISKS['host-b'][1]}/lab.member-2.img"
    noise = 'dd if=/dev/urandom of="$1" bs=1M count=$(($(stat -c %s "$1") >> 20)) conv=notrunc,fsync'
    host.run("sh", "-c", f"{noise}; echo 3 >/proc/sys/vm/drop_caches", "noise", member, timeout=300)
    assert disks.sms("exec", "--", "cat", "/root/kept", on="host-b").text == "here"
    wait_for("the job", lambda: "" if as_alice(node, "squeue", "-h") else "yes", 120)
    assert node.run("cat", f"/home/alice/{job}").text == "done"
    # As after a reboot, without that disk.
    pid = json.loads(host.run("apptainer", "instance", "list", "--json", "sms-lab").stdout)["instances"][0]["pid"]
    host.run("kill", "-KILL", str(pid))
    wait_for("its end", lambda: "" if disks.loops("host-b") else "yes")
    host.run("umount", MIRROR)
    host.run("rm", member)
    started = disks.sms("start", "--boot", on="host-b")
    assert b"the mirror has lost" in started.stderr
    assert disks.sms("exec", "--", "cat", "/root/kept", on="host-b").text == "here"
    disks.sms("-q", "overlay", "mirror", "rebuild", on="host-b")
    check_mirrored(disks, "host-b", "host-a")


def wait_until_stopped(hosts: Hosts, host: str) -> None:
    wait_for("the end of the instance", lambda: "" if hosts.instances(host) else "yes", 60)


STEPS = (">build", ">place", ">start", ">release", ">up", ">commit")


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_migration_is_resumed_or_undone(disks: Hosts, step: str) -> None:
    source, target = where(disks)
    run = Stepping(disks.lab, "-q", "migrate", target)
    try:
        assert run.to(step), run.end(60)
        run.kill()
        run.end(60)
    finally:
        run.kill()
    marks = [disks.disk(host) / "journal" / "lab.move" for host in CARRIERS]
    wait_for("the end of both agents", lambda: "" if any(mark.exists() for mark in marks) else "yes", SETTLE_S)
    serves, _ = where(disks)
    assert serves == source or step in (">release", ">up", ">commit")
    if serves == source:
        check_mirrored(disks, *migrate(disks))
    else:
        disks.sms("-q", "migrate", "--force", target, on="admin")
        check_mirrored(disks, target, source)
    check_mirrored(disks, *migrate(disks))


def test_a_mirror_that_cannot_be_created_is_refused(disks: Hosts) -> None:
    host, disk = disks.host("host-b"), DISKS["host-b"][1]
    host.run("sh", "-c", 'umount "$1" && rmdir "$1"', "lose", disk)
    try:
        before = disks.files("host-b")
        refused = disks.sms("migrate", "--force", "host-b", on="admin", ok=(3,)).stderr.decode()
        assert f"there is no folder {disk}" in refused
        assert disks.files("host-b").keys() == before.keys()
        assert not [name for name in before if "mirror" in name or "member" in name]
    finally:
        host.run("sh", "-c", MOUNT, "mount", disk)
    # Folders with the members of another mirror, as on storage that both hosts share.
    host.run("touch", f"{disk}/lab.member-2.img")
    assert "exists already" in disks.sms("migrate", "--force", "host-b", on="admin", ok=(3,)).stderr.decode()
    assert host.run("stat", "-c", "%s", f"{disk}/lab.member-2.img").text == "0"
    host.remove(f"{disk}/lab.member-2.img")


def test_a_target_whose_power_fails_recovers_its_mirror(need: Callable[[str], str]) -> None:
    """At its boot the mirror is closed, and its part of the migration is not done."""
    need("mkfs.btrfs")
    folders = dict.fromkeys(CARRIERS, ("/var/lib/sms/disk1", "/var/lib/sms/disk2"))
    with ExitStack() as stack:
        hosts = Hosts(stack.enter_context(fresh_lab("t-mirrored", NODES)))
        build_image(hosts.lab)
        for host in CARRIERS:
            hosts.host(host).run("mkdir", "-p", *folders[host])
        hosts.sms("-q", "start", "--host", "host-a", on="admin")
        stack.enter_context(mirrored(hosts, folders, "--same-fs"))
        for step, serves in ((">start", "host-a"), (">commit", "host-b")):
            source, target = where(hosts)
            run = Stepping(hosts.lab, "-q", "migrate", target)
            assert run.to(step), run.end(60)
            power_off(hosts.lab, target)
            run.let_go()
            run.end(300)
            time.sleep(1)
            power_on(hosts.lab, target)
            hosts.sms("-q", "start", "--boot", on=target, ok=None)
            assert where(hosts)[0] == serves
            assert not (hosts.disk(target) / "journal" / "lab.move").exists()
            if serves == source:
                assert not is_open(hosts, target)
                check_mirrored(hosts, *migrate(hosts))
                check_mirrored(hosts, *migrate(hosts))
            else:
                wait_until_stopped(hosts, source)
                assert hosts.status(target)["mirror"]["open"]
                check_mirrored(hosts, *migrate(hosts))
