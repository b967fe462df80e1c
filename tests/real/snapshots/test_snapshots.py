"""`sms overlay` on real admin hosts: taken while it runs, listed, read again, healed, put back, refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.agent.store import ZERO
from appliance.operations.image.build import Built
from appliance.operations.lab import demo
from tests.cases import sample
from tests.real.conftest import NODES, Playground, give_image
from tests.real.processes import begin

pytestmark = pytest.mark.real

OVERLAYS = "/var/lib/sms/overlays"
OVERLAY = f"{OVERLAYS}/lab.img"
STORE = "/var/lib/sms/snapshots/lab"
SPOOL = "/var/spool/slurmctld"
HEADS = ("job_state", "node_state", "part_state", "resv_state", "trigger_state")


@pytest.fixture(autouse=True)
def no_snapshots(playground: Playground) -> Iterator[None]:
    """No snapshot of another test's, before and after."""
    script = f"rm -rf {STORE} {OVERLAYS}/lab.img.before-* {OVERLAYS}/tuesday.img"
    playground.host("host-a").run("sh", "-c", script)
    yield
    playground.host("host-a").run("sh", "-c", script)


def overlay(playground: Playground, *words: str, ok: tuple[int, ...] = (0,), on: str = "host-a") -> str:
    """What `sms overlay` prints: its result, then what it says besides."""
    reported = playground.sms("overlay", *words, ok=ok, on=on)
    return (reported.stdout + reported.stderr).decode()


def take(playground: Playground, *words: str) -> dict[str, Any]:
    """A snapshot, as --json prints it."""
    reported: dict[str, Any] = json.loads(playground.sms("overlay", "snapshot", "--json", *words).stdout)
    return reported


def listed(playground: Playground, ok: tuple[int, ...] = (0,)) -> dict[int, dict[str, Any]]:
    """Snapshots by number."""
    reported = json.loads(playground.sms("overlay", "list", "--json", ok=ok).stdout)
    return {one["number"]: one for one in reported["snapshots"]}


def inside(playground: Playground, script: str, ok: tuple[int, ...] = (0,)) -> str:
    """What a shell in the container prints."""
    return playground.sms("exec", "--", "sh", "-c", script, ok=ok).text


def steady_chunk(playground: Playground, content: bytes, *numbers: int) -> str:
    """The path of a chunk with a part of ``content`` that all of these snapshots need."""
    host = playground.host("host-a")
    sets = []
    for number in numbers:
        data = host.read(f"{STORE}/{number:06d}/digests") or b""
        sets.append({data[at : at + 32].hex() for at in range(0, len(data), 32)} - {ZERO.hex()})
    paths = (f"{STORE}/chunks/{name[:2]}/{name[2:]}" for name in sorted(set.intersection(*sets)))
    return next(path for path in paths if (host.read(path) or b"missing") in content)


def test_taken_while_it_runs_listed_shown_and_read_again(running: Playground) -> None:
    assert "no snapshots of lab on host-a" in overlay(running, "list")
    assert f"take {OVERLAY} into {STORE}: method auto" in overlay(running, "snapshot", "-n")
    assert listed(running) == {}, "a rehearsal takes none"
    said = overlay(running, "snapshot")
    assert "snapshot 1 of lab: " in said and " used, " in said and "writers waited " in said
    assert "checked: e2fsck, " in said
    inside(running, "dd if=/dev/urandom of=/root/new bs=64k count=16 status=none && sync")
    second = take(running, "--reason", "sixteen chunks")
    assert (1 << 20) <= second["new_bytes"] < (4 << 20), "what changed, and little else"
    third = take(running, "--reason", "the third")
    assert third["running"] and third["frozen_ms"] > 0
    assert third["generation"] == running.lease()["generation"]
    assert third["image"]["sha256"] == running.status()["image"]["sha256"]
    assert {number: one["reason"] for number, one in listed(running).items()} == {
        1: "",
        2: "sixteen chunks",
        3: "the third",
    }
    table = overlay(running, "list")
    assert max(len(line) for line in table.splitlines()) <= 100 and "sixteen chunks" in table
    assert "snapshot       3 of lab" in overlay(running, "show", "latest")
    assert json.loads(running.sms("overlay", "show", "2", "--json").stdout) == listed(running)[2]
    said = overlay(running, "verify", "--all")
    assert [said.count(f"snapshot {number} of lab: intact") for number in (1, 2, 3)] == [1, 1, 1]
    open_to_others = f"find {STORE} -perm /077"
    assert running.host("host-a").run("sh", "-c", open_to_others).text == "", "there are secrets in it"
    assert running.status()["healthy"]


def test_over_ssh(running: Playground) -> None:
    assert "snapshot 1 of lab: " in overlay(running, "snapshot", "--host", "host-a", on="admin")
    assert "verified" in overlay(running, "list", "--host", "host-a", on="admin")


@pytest.mark.parametrize("harm", sample(("a flipped byte", "a missing chunk"), "a flipped byte"))
def test_damage_is_found_named_and_healed_by_the_next(running: Playground, harm: str) -> None:
    host = running.host("host-a")
    # The next snapshot can heal only what does not change: logs and the journal of the file system do.
    inside(running, "dd if=/dev/urandom of=/root/steady bs=64k count=16 status=none && sync")
    content = base64.b64decode(inside(running, "base64 /root/steady"))
    for _ in range(2):
        take(running)
    chunk = steady_chunk(running, content, 1, 2)
    name = "".join(chunk.split("/")[-2:])[:16]
    if harm == "a flipped byte":
        data = bytearray(host.read(chunk) or b"")
        data[100] ^= 1
        host.write(chunk, bytes(data), mode=0o600)
    else:
        host.remove(chunk)
    said = overlay(running, "verify", "--all", ok=(4,))
    for number in (1, 2):
        assert f"snapshot {number} of lab: damaged" in said
    assert name in said and "hint: " in said
    assert "damaged" in overlay(running, "list", ok=(4,))
    assert "no snapshot on host-a is verified" in overlay(running, "show", "latest", ok=(3,))
    assert "snapshot 1 is damaged" in overlay(running, "restore", "1", "--as", "tuesday", ok=(1,))
    left = host.run("ls", OVERLAYS).text.split()
    assert left == ["lab.img", "lab.img.generation", "lab.lease", "lab.lease.lock"], "no half overlay"
    # The overlay still has what the store has lost.
    take(running)
    said = overlay(running, "verify", "--all")
    assert [said.count(f"snapshot {number} of lab: intact") for number in (1, 2, 3)] == [1, 1, 1]


def test_restored_and_back_again(running: Playground) -> None:
    host = running.host("host-a")
    inside(running, "echo one >/root/word && chmod 640 /root/word && chown munge:slurm /root/word && rm -f /root/later")
    inside(running, "rm -f /etc/motd && sync")
    first = take(running)
    inside(running, "echo two >/root/word && touch /root/later && sync")
    said = overlay(running, "restore", "1", ok=(3,))
    assert "the services container runs on host-a" in said and "hint: sms stop --host host-a" in said
    assert "tuesday.img on host-a" in overlay(running, "restore", "latest", "--as", "tuesday")
    assert "already exists" in overlay(running, "restore", "1", "--as", "tuesday", ok=(3,))
    assert running.instances() == ["sms-lab"] and running.status()["healthy"]
    running.sms("-q", "stop")
    steps = overlay(running, "restore", "1", "-n")
    assert "before restore of 1" in steps and len(listed(running)) == 1
    said = overlay(running, "restore", "1")
    assert "snapshot 1 of lab is " in said and "to undo: sms overlay restore 2" in said
    assert listed(running)[2]["reason"] == "before restore of 1" and not listed(running)[2]["running"]
    assert host.works("cmp", OVERLAY, f"{OVERLAYS}/tuesday.img")
    # Once more: there is nothing to do.
    inode = host.run("stat", "-c", "%i %Y", OVERLAY).text
    assert "is identical to snapshot" in overlay(running, "restore", str(first["number"]))
    assert host.run("stat", "-c", "%i %Y", OVERLAY).text == inode
    running.sms("-q", "start")
    reported = inside(running, "cat /root/word; stat -c '%a %U %G' /root/word")
    assert reported.split() == ["one", "640", "munge", "slurm"]
    assert inside(running, "ls /etc/motd 2>&1", ok=(0, 2)).endswith("No such file or directory"), "gone stays gone"
    assert "later" not in inside(running, "ls /root").split()
    running.sms("-q", "stop")
    overlay(running, "restore", "2")
    running.sms("-q", "start")
    assert inside(running, "cat /root/word").strip() == "two"
    assert running.lease()["holder"] == "host-a" and running.status()["healthy"]


@pytest.mark.full
def test_a_job_is_known_again(running: Playground) -> None:
    """slurmctld, restored, has the job that ran when the snapshot was taken, and not the one of after."""
    node = running.host("node1")
    demo.wait_idle(node, NODES)
    submit = ("sbatch", "--parsable", "--output=/dev/null", "--wrap", "sleep 300")
    first = demo.as_alice(node, *submit).strip()
    demo.wait_for("the job", lambda: demo.as_alice(node, "squeue", "-h", "-t", "R", "-j", first, "-o", "%i"))
    # slurmctld saves its state some seconds after a change: a snapshot has what it has saved, as after a power cut.
    inside(running, "touch /root/mark")
    demo.as_alice(node, "scontrol", "update", f"JobId={first}", "JobName=kept")
    demo.wait_for("its state", lambda: inside(running, f"find {SPOOL}/job_state -newer /root/mark", ok=(0, 1)))
    taken = take(running)
    there = inside(running, f"cd {SPOOL} && ls").split()
    # Slurm writes some of them when it has something to say.
    assert [path.rpartition("/")[2] for path in taken["checks"]["heads"]] == [one for one in HEADS if one in there]
    assert "job_state" in there and "node_state" in there
    second = demo.as_alice(node, *submit).strip()
    try:
        running.sms("-q", "stop")
        overlay(running, "restore", str(taken["number"]))
        running.sms("-q", "start")
        jobs = dict(line.split() for line in demo.as_alice(node, "squeue", "-h", "-o", "%i %T-%j").splitlines())
        assert jobs.get(first) == "RUNNING-kept", jobs
        assert second not in jobs
        assert running.status()["healthy"]
    finally:
        demo.as_alice(node, "scancel", "--user=alice")
        demo.wait_idle(node, NODES)


@pytest.mark.full
def test_a_file_that_is_not_what_slurm_writes_does_not_count(running: Playground) -> None:
    inside(running, f"cp {SPOOL}/resv_state /root/kept; head -c 4096 /dev/urandom >{SPOOL}/resv_state; sync", ok=(0, 1))
    try:
        said = overlay(running, "snapshot", ok=(1,))
        assert f"{SPOOL}/resv_state in it does not have its service's format" in said
        assert listed(running) == {}
    finally:
        inside(running, f"mv /root/kept {SPOOL}/resv_state || rm {SPOOL}/resv_state", ok=(0, 1))
    take(running)


@pytest.mark.full
def test_a_damaged_overlay_is_kept_as_a_file(running: Playground) -> None:
    host = running.host("host-a")
    take(running)
    running.sms("-q", "stop")
    host.run("sh", "-c", f"dd if=/dev/urandom of={OVERLAY} bs=4096 count=2000 conv=notrunc status=none")
    noise = host.run("sha256sum", OVERLAY).text.split()[0]
    said = overlay(running, "restore", "latest")
    assert "cannot be taken as a snapshot" in said and f"mv {OVERLAY}.before-1 {OVERLAY}" in said
    assert host.run("sha256sum", f"{OVERLAY}.before-1").text.split()[0] == noise
    assert list(listed(running)) == [1], "what is damaged does not count"
    running.sms("-q", "start")
    assert running.status()["healthy"]


def test_a_lost_overlay_comes_back(running: Playground) -> None:
    host = running.host("host-a")
    inside(running, "echo here >/root/word; sync")
    take(running)
    running.sms("-q", "stop")
    host.remove(OVERLAY)
    assert "the previous overlay" not in overlay(running, "restore", "latest")
    running.sms("-q", "start")
    assert inside(running, "cat /root/word").strip() == "here"


@pytest.mark.full
def test_made_and_seeded_and_not_started(stopped: Playground) -> None:
    host = stopped.host("host-a")
    host.remove(OVERLAY)
    assert "there is no overlay" in overlay(stopped, "snapshot", ok=(3,))
    assert "apptainer overlay create" in overlay(stopped, "create", "-n")
    assert not host.works("test", "-e", OVERLAY)
    assert "is created and seeded" in overlay(stopped, "create")
    inode = host.run("stat", "-c", "%i %Y", OVERLAY).text
    assert "exists and is seeded" in overlay(stopped, "create")
    assert host.run("stat", "-c", "%i %Y", OVERLAY).text == inode
    taken = take(stopped)
    assert not taken["running"] and taken["frozen_ms"] == 0
    stopped.assert_nothing_runs()
    assert host.run("stat", "-c", "%a", OVERLAYS).text == "700"
    stopped.sms("-q", "start")


@pytest.mark.full
def test_another_host_has_the_lease(stopped: Playground, built: Built) -> None:
    """On a shared folder: what host-b runs must neither be taken nor replaced by host-a."""
    give_image(stopped, built, "host-b")

    def change(document: dict[str, Any]) -> None:
        document["overlay"] = {"size_mb": 128, "directory": "/srv/shared/snapped"}

    site = ("--site", stopped.variant("snapped.yaml", change))
    stopped.sms(*site, "-q", "start", on="host-b")
    try:
        reported = stopped.sms(*site, "overlay", "snapshot", ok=(3,)).stderr.decode()
        assert "the services container runs on host-b" in reported and "sms overlay snapshot --host host-b" in reported
        stopped.sms(*site, "-q", "overlay", "snapshot", on="host-b")
        copied = "mkdir -p -m 700 /srv/shared/s && cp -a /var/lib/sms/snapshots/lab /srv/shared/s/"
        stopped.host("host-b").run("sh", "-c", copied)
        stopped.host("host-a").run("sh", "-c", f"mkdir -p {STORE} && cp -a /srv/shared/s/lab/. {STORE}/")
        for words in (("restore", "1"), ("restore", "1", "-n"), ("create",)):
            assert b"host-b holds the lease" in stopped.sms(*site, "overlay", *words, ok=(3,)).stderr
        assert stopped.instances("host-b") == ["sms-lab"]
    finally:
        stopped.sms(*site, "-q", "stop", on="host-b")
        stopped.host("host-b").run("rm", "-rf", "/var/lib/sms/snapshots", "/srv/shared/s", "/srv/shared/snapped")


@pytest.mark.full
def test_a_start_elsewhere_is_refused_while_the_lease_is_kept_as_it_is(stopped: Playground, built: Built) -> None:
    """As a snapshot of a stopped overlay and a restore do, on a shared folder; once let go, it is free at once."""
    give_image(stopped, built, "host-b")

    def change(document: dict[str, Any]) -> None:
        document["overlay"] = {"size_mb": 128, "directory": "/srv/shared/snapped"}

    site = ("--site", stopped.variant("snapped.yaml", change))
    host = stopped.host("host-a")
    try:
        stopped.sms(*site, "-q", "overlay", "create")
        with host.lock("/srv/shared/snapped/lab.lease.lock"):
            reported = stopped.sms(*site, "start", on="host-b", ok=(3,)).stderr.decode()
            assert "the lease is locked by another run" in reported
            stopped.assert_nothing_runs("host-b")
        stopped.sms(*site, "-q", "start", on="host-b")
        stopped.sms(*site, "-q", "stop", on="host-b")
    finally:
        host.run("rm", "-rf", "/srv/shared/snapped")


def test_two_at_once(running: Playground) -> None:
    runs = [begin(running, "overlay", "snapshot") for _ in range(3)]
    ended = [(process.communicate()[1].decode(), process.returncode) for process in runs]
    assert {status for _, status in ended} <= {0, 3} and 0 in {status for _, status in ended}
    assert all("another run is at work" in said and "hint:" in said for said, status in ended if status == 3)
    assert len(listed(running)) == [status for _, status in ended].count(0)


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_stop_is_not_refused_by_a_snapshot(running: Playground, times: int) -> None:
    for _ in range(times):
        running.sms("-q", "start")
        process = begin(running, "overlay", "snapshot")
        running.sms("-q", "stop")
        said = process.communicate()[1].decode()
        assert process.returncode in (0, 1, 3), said
        running.assert_nothing_runs()
    assert all(one["health"]["ok"] for one in listed(running).values())
    running.sms("-q", "start")


@pytest.mark.full
def test_a_full_disk_is_said_and_nothing_counts(running: Playground) -> None:
    host = running.host("host-a")
    host.run("mkdir", "-p", "/mnt/small")
    host.run("mount", "-t", "tmpfs", "-o", "size=512k,mode=755", "tmpfs", "/mnt/small")

    def change(document: dict[str, Any]) -> None:
        document["snapshots"] = {"directory": "/mnt/small/s"}

    site = ("--site", running.variant("small-store.yaml", change))
    try:
        reported = running.sms(*site, "overlay", "snapshot", ok=(1,)).stderr.decode()
        assert "is full" in reported and "hint: " in reported
        assert json.loads(running.sms(*site, "overlay", "list", "--json").stdout)["snapshots"] == []
        assert inside(running, "echo x >/root/word && sync && cat /root/word").strip() == "x", "nobody is held"
    finally:
        host.run("umount", "/mnt/small")
