"""Snapshots of the VM's state, with the real programs and a VM that is off: taken, pushed, drilled, restored."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any
from uuid import uuid4

import pytest

from appliance.catalog import read_bases
from appliance.config.model import BorgRepository
from appliance.errors import Refused, SmsError
from appliance.host.base import Host, Result
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.env import Env
from appliance.operations.snapshots.list import list_snapshots, verify
from appliance.operations.snapshots.prune import prune
from appliance.operations.snapshots.pull import list_remote
from appliance.operations.snapshots.push import PUSHED, PushOptions, push
from appliance.operations.snapshots.scheduled import run_scheduled_vm
from appliance.operations.snapshots.status import vm_snapshot_status
from appliance.operations.snapshots.transfer import Offsite
from appliance.operations.snapshots.vm_restore import StateSource, restore_state
from appliance.operations.snapshots.vm_state import take_vm_state
from appliance.operations.upgrade.drill import DrillOptions
from appliance.operations.upgrade.vm_drill import clean_up_vm, drill_vm
from appliance.plan.snapshots.schedule import job, plan_schedule
from appliance.plan.vm.holder import Holder
from appliance.plan.vm.vm import PROGRAMS, VmPlaces, machine_name
from appliance.progress import Silent
from appliance.provision.store import Store
from appliance.share import share
from appliance.shared.lease import Lease
from appliance.shared.records import from_json, to_json
from appliance.tools.agent import Agents
from tests.sites import make_site
from tests.support.cron import AgentsWithCron
from tests.support.env import FakeHosts, with_env
from tests.waiting import wait_until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: its locks are in /run")
pytestmark = [pytest.mark.slow, needs_root]

KEY = b"a munge key of the test"
Need = Callable[[str], str]


class Twin(Local):
    """This machine as another host: it has the same files, but locks of its own."""

    def lock(self, path: str, **more: Any) -> Any:
        return super().lock(f"{path}.twin", **more)


@dataclass
class Place:
    """A host with the disks of a VM that is off. ``b``: an admin host with the same folders."""

    folder: Path
    cluster: Cluster
    host: Host

    @property
    def where(self) -> VmPlaces:
        return VmPlaces(self.cluster.site)

    def content(self) -> Path:
        """A new folder with an inventory of one node, and the content of a secret master file."""
        folder = self.folder / f"content-{token_hex(4)}"
        blob = folder / "files" / hashlib.sha256(KEY).hexdigest()[:2] / hashlib.sha256(KEY).hexdigest()
        blob.parent.mkdir(parents=True)
        blob.write_bytes(KEY)
        blob.chmod(0o600)
        store = Store(f"sqlite:///{folder}/inventory.db")
        with store.write() as connection:
            details = json.dumps({"mode": "0400", "owner": "munge", "group": "munge"})
            path = "/etc/munge/munge.key"
            connection.exec_driver_sql(
                "INSERT INTO master_versions (path, version, sha256, size, details, made) VALUES (?, 1, ?, ?, ?, 1.0)",
                (path, blob.name, len(KEY), details),
            )
            connection.exec_driver_sql("INSERT INTO masters (path, version) VALUES (?, 1)", (path,))
        store.close()
        (folder / "inventory.db").chmod(0o640)
        return folder

    def put(self, content: Path, *, disk: str = "") -> None:
        """Replace the state disk by one with these files."""
        raw = f"{self.folder}/raw"
        subprocess.run(["truncate", "-s", "64M", raw], check=True)
        subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", "-d", str(content), raw], check=True)
        target = disk or str(self.where.state)
        self.host.run("mkdir", "-p", "-m", "0700", str(PurePosixPath(target).parent))
        subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, target], check=True)

    def take(self) -> dict[str, Any]:
        taken = take_vm_state(self.cluster, self.host, reason="a test")
        assert taken
        return taken

    def numbers(self) -> list[int]:
        return [one["number"] for one in list_snapshots(self.cluster, self.host).snapshots]

    def run(self) -> Any:
        return run_scheduled_vm(self.cluster, self.host)

    def read(self, path: str) -> str:
        """A file of the state disk."""
        raw = f"{self.folder}/look"
        subprocess.run(["qemu-img", "convert", "-O", "raw", str(self.where.state), raw], check=True)
        return subprocess.run(
            ["debugfs", "-R", f"cat {path}", raw],
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ).stdout

    def leftovers(self) -> list[str]:
        store = Path(str(self.cluster.places.snapshots))
        found = [*store.parent.glob("*.part"), *store.glob("tmp/*"), *Path(str(self.where.disks)).glob("*.restored")]
        return [str(path) for path in [*found, *Path(self.cluster.site.state).glob("drills/*")]]


@pytest.fixture
def place(tmp_path: Path, need: Need) -> Place:
    for program in (*PROGRAMS, "debugfs"):
        need(program)
    base = read_bases(share("definitions", "bases"))["debian-12"]
    site = make_site(tmp_path, directory=str(tmp_path / "vm"))
    hosts = (site.admin_hosts[0], site.admin_hosts[0].model_copy(update={"name": "b"}))
    changes = {"cluster": f"t-vm-{token_hex(4)}", "admin_hosts": hosts, "state": PurePosixPath(tmp_path / "state")}
    env = Env(
        hosts=FakeHosts({"a": Local("a"), "b": Twin("b"), "drills": Local("drills")}, "drills"),
        agents=Agents(str(tmp_path / "run")),
    )
    cluster = Cluster(site.model_copy(update=changes), (), base, env=env).of_vm()
    made = Place(tmp_path, cluster, cluster.host("a"))
    lease = Path(str(cluster.places.lease))
    lease.parent.mkdir(parents=True)
    uuid = str(uuid4())
    lease.write_bytes(Lease(cluster.site.cluster, 1, None, 1.0, "a", cluster_uuid=uuid).text())
    made.put(made.content())
    made.host.write(str(made.where.holder), to_json(Holder("a", 2, 5, uuid)), mode=0o600)
    return made


def with_borg(place: Place, need: Need) -> Place:
    need("borg")
    (place.folder / "borg.pass").write_text("a passphrase of the test\n")
    (place.folder / "borg.pass").chmod(0o600)
    borg = BorgRepository(repository=str(place.folder / "repo"), passphrase=place.folder / "borg.pass")
    return changed(place, snapshots=place.cluster.site.snapshots.model_copy(update={"borg": borg}))


def changed(place: Place, **settings: Any) -> Place:
    """The same hosts with another site file."""
    return replace(place, cluster=replace(place.cluster, site=place.cluster.site.model_copy(update=settings)))


def test_a_run_takes_what_has_changed_only(place: Place) -> None:
    """In the order of the record of the disks; the second run finds nothing new, a written disk is taken again."""
    first = place.run()
    assert first.ok and first.number == 1, first.error
    (one,) = list_snapshots(place.cluster, place.host).snapshots
    assert (one["generation"], one["sequence"], one["running"], one["host"]) == (2, 6, False, "a")
    assert one["health"]["ok"] and one["cluster"].endswith(".vm") and one["checks"]["e2fsck"] == "clean"
    again = place.run()
    assert again.ok and again.number == 1 and "not changed" in again.notes[0] and place.numbers() == [1]
    place.put(place.content())
    assert place.run().number == 2 and place.numbers() == [1, 2]
    assert from_json(Holder, place.host.read(str(place.where.holder)) or b"").sequence == 7
    assert not place.leftovers()
    assert vm_snapshot_status(place.cluster, place.host).count == 2


def test_a_vm_that_runs_is_copied_without_a_stop(place: Place) -> None:
    """By QEMU itself, which has the disk locked; each run takes one. It has no guest agent here: nothing is frozen."""
    where = place.where
    Path(str(where.run)).mkdir(parents=True)
    alone = changed(place, admin_hosts=place.cluster.site.admin_hosts[:1])  # the other one sees the same process
    disk = {"driver": "qcow2", "node-name": "state", "file": {"driver": "file", "filename": str(where.state)}}
    name = f"{machine_name(place.cluster.site)},debug-threads=on"
    argv = ["qemu-system-x86_64", "-name", name, "-M", "none", "-nodefaults", "-display", "none"]
    argv += ["-blockdev", json.dumps(disk), "-qmp", f"unix:{where.qmp},server=on,wait=off"]
    try:
        with subprocess.Popen(argv) as qemu:
            try:
                wait_until(lambda: Path(str(where.qmp)).exists())
                Path(str(where.pid)).write_text(f"{qemu.pid}\n")
                for number in (1, 2):
                    run = alone.run()
                    assert run.ok and run.number == number, run.error
                assert qemu.poll() is None
            finally:
                qemu.kill()
    finally:
        shutil.rmtree(str(where.run))
    there = list_snapshots(place.cluster, place.host).snapshots
    assert [(one["running"], one["frozen_ms"]) for one in there] == [(True, 0.0), (True, 0.0)]
    assert there[1]["new_bytes"] < there[0]["new_bytes"] // 4 and not place.leftovers()
    assert drill_vm(place.cluster, DrillOptions("b")).ok


def test_a_host_without_the_vm_does_nothing(place: Place) -> None:
    place.host.write(str(place.where.holder), to_json(Holder("b", 3)), mode=0o600)
    assert place.run() is None and place.numbers() == []


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda path: path.unlink(), "no disks"),
        (lambda path: path.write_bytes(b"not a disk" * 1000), "is not a qcow2 disk"),
        (None, "is damaged"),
    ],
    ids=["no disk", "no qcow2", "file system"],
)
def test_what_cannot_be_taken_is_a_failed_run(place: Place, harm: Callable[[Path], Any] | None, why: str) -> None:
    """It is recorded, and nothing is left of it."""
    disk = Path(str(place.where.state))
    if harm:
        harm(disk)
    else:
        raw = place.folder / "raw"
        with raw.open("r+b") as stream:
            stream.seek(1024 + 56)
            stream.write(b"xx")
            stream.seek(32768 * 1024)
            stream.write(bytes(4096))
        subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), str(disk)], check=True)
    run = place.run()
    assert not run.ok and why in run.error, run.error
    assert place.numbers() == [] and not place.leftovers()
    status = vm_snapshot_status(place.cluster, place.host)
    assert status.last_run and not status.last_run.ok


def test_status_reports_late_and_failed_runs(place: Place) -> None:
    """Late ones where the VM runs; while it is off, a snapshot may be old, but a failure is one."""
    folder = place.folder / "cron"
    folder.mkdir()
    agents = AgentsWithCron(str(place.folder / "run"), cron=str(folder))
    place = replace(place, cluster=with_env(place.cluster, agents=agents))
    planned = plan_schedule(place.cluster.label, "cron", 15, argv=job("/usr/bin/sms", "/s", "/t", "--vm"), folders=())
    ((path, text),) = planned.files.items()
    (folder / Path(path).name).write_text(text)
    day_ago = time.time() - 86400
    os.utime(folder / Path(path).name, (day_ago, day_ago))

    class Serving(Local):
        """A host on which the VM has run for a day."""

        def run(self, *argv: str, **options: Any) -> Result:
            answers = {
                ("cat", "--", str(place.where.pid)): "1",
                ("cat", "/proc/1/cmdline"): f"{machine_name(place.cluster.site)},debug-threads=on",
                ("stat", "-c", "%Y", "/proc/1"): str(day_ago),
            }
            if argv in answers:
                return Result(self.name, argv, 0, answers[argv].encode(), b"")
            return super().run(*argv, **options)

    def warnings(host: Host = place.host) -> list[str]:
        found = vm_snapshot_status(place.cluster, host).judgement
        assert found.healthy is not bool(found.warnings)
        return list(found.warnings)

    assert warnings() == [], "the VM is off"
    missing, late = warnings(Serving("a"))
    assert (
        missing == "the VM's state: there is no verified snapshot" and "no scheduled snapshot has run for 24 h" in late
    )
    Path(str(place.where.state)).unlink()
    assert not place.run().ok
    (failed,) = warnings()
    assert failed.startswith("the VM's state: the last scheduled run failed: the VM has no disks on a")


def test_a_chunk_that_has_changed_is_found(place: Place) -> None:
    place.take()
    (chunk, *_) = sorted(Path(str(place.cluster.places.snapshots)).glob("chunks/??/*"))
    chunk.write_bytes(b"x" + chunk.read_bytes()[1:])
    (found,) = verify(place.cluster, place.host, ["1"])
    assert not found.ok
    status = vm_snapshot_status(place.cluster, place.host)
    assert status.damaged == [1] and "sms overlay snapshot --vm" in status.judgement.warnings[0]


def test_in_one_repository_with_the_overlays_snapshots_neither_sees_the_other(place: Place, need: Need) -> None:
    """Pushed, pruned; archives of the overlay stay, and the other way round."""
    place = with_borg(place, need)
    place.take()
    for _ in range(2):
        place.put(place.content())
        place.take()
    done = push(place.cluster, place.host, PushOptions(all_missing=True), ["borg"])
    assert [one.state for one in done] == [PUSHED] * 3
    overlay = replace(place.cluster, vm=False)
    identity = list_snapshots(place.cluster, place.host).identity
    assert [one["number"] for one in list_remote(place.cluster, place.host, "borg", identity).snapshots] == [1, 2, 3]
    assert list_remote(overlay, place.host, "borg", identity).snapshots == []
    offsite = Offsite(overlay, place.host, identity)
    assert offsite.open() == [] and not offsite.ids and offsite.prune([], Silent()) == []
    retention = place.cluster.site.retention.model_copy(
        update=dict.fromkeys(("hourly", "daily", "weekly", "monthly"), 0) | {"last": 1}
    )
    few = replace(place.cluster, site=place.cluster.site.model_copy(update={"retention": retention}))
    assert prune(few, place.host, ()).removed == (1, 2)
    there = Offsite(few, place.host, identity)
    assert len(there.prune([one for one, _ in there.open()], Silent())) == 2
    assert [one["number"] for one in list_remote(place.cluster, place.host, "borg", identity).snapshots] == [3]


def test_all_that_is_lost_is_restored_from_the_repository(place: Place, need: Need) -> None:
    """Without disks, record and store; later snapshots are newer than all that the repository has."""
    place = with_borg(place, need)
    content = place.content()
    (content / "mark").write_text("as it was")
    place.put(content)
    place.take()
    push(place.cluster, place.host, PushOptions(all_missing=True), ["borg"])
    shutil.rmtree(str(place.where.disks))
    shutil.rmtree(str(place.cluster.places.snapshots))
    done = restore_state(place.cluster, place.host, StateSource("borg", "latest"))
    assert done.kept == "" and place.read("/mark") == "as it was"
    holder = from_json(Holder, place.host.read(str(place.where.holder)) or b"")
    assert (holder.holder, holder.generation) == ("a", 3)
    assert place.take()["generation"] == 3 and place.numbers() == [1, 2] and not place.leftovers()


def test_snapshots_of_a_vm_that_was_started_anew_are_newer_than_all_copies(place: Place, need: Need) -> None:
    """Otherwise the repository would prune them first. A target that does not answer is a failed run."""
    place = with_borg(place, need)
    place.take()
    push(place.cluster, place.host, PushOptions(all_missing=True), ["borg"])
    shutil.rmtree(str(place.where.disks))
    shutil.rmtree(str(place.cluster.places.snapshots))
    place.put(place.content())
    uuid = list_snapshots(place.cluster, place.host).identity.uuid
    place.host.write(str(place.where.holder), to_json(Holder("a", 1, 0, uuid)), mode=0o600)
    moved = place.folder / "repo.away"
    (place.folder / "repo").rename(moved)
    (place.folder / "repo").mkdir()
    (place.folder / "repo" / "not-borg").touch()
    failed = place.run()
    assert not failed.ok and failed.number == 1 and "order of the copies" in failed.error
    shutil.rmtree(place.folder / "repo")
    moved.rename(place.folder / "repo")
    place.put(place.content())
    again = place.run()
    assert again.ok and again.number == 2 and "are of generation 2" in again.notes[0], again
    identity = list_snapshots(place.cluster, place.host).identity
    there = list_remote(place.cluster, place.host, "borg", identity).snapshots
    assert there[-1]["uuid"] == list_snapshots(place.cluster, place.host).snapshots[-1]["uuid"]
    assert (there[-1]["generation"], place.run().notes[0].startswith("the VM is off")) == (3, True)


def test_old_disks_are_kept_by_a_restore(place: Place) -> None:
    place.take()
    content = place.content()
    (content / "mark").write_text("newer")
    place.put(content)
    shutil.copy(str(place.where.state), str(place.where.root))
    done = restore_state(place.cluster, place.host, StateSource("a", "1"))
    assert place.read("/mark") == ""
    kept = Path(str(place.where.snapshots)) / done.kept
    assert {path.name for path in kept.iterdir()} == {"root.qcow2", "state.qcow2", "snapshot.json"}
    assert not place.leftovers()
    with pytest.raises(Refused, match="no snapshot 7"):
        restore_state(place.cluster, place.host, StateSource("a", "7"))


def test_a_restore_is_refused_where_another_host_has_the_disks(place: Place) -> None:
    place.take()
    place.host.write(str(place.where.holder), to_json(Holder("b", 3)), mode=0o600)
    for force in (False, True):
        with pytest.raises(Refused, match="disks are on b"):
            restore_state(place.cluster, place.host, StateSource("a", "1", force))


def test_a_drill_checks_the_copy(place: Place, need: Need) -> None:
    place = with_borg(place, need)
    place.take()
    push(place.cluster, place.host, PushOptions(all_missing=True), ["borg"])
    before = Path(str(place.where.state)).stat()
    done = drill_vm(place.cluster, DrillOptions("borg"))
    assert done.ok, done.failed
    seen = {one.what: one.seen for one in done.checks}
    assert "integrity_check ok" in seen["the inventory"] and "1, 1 of them secret" in seen["master files"]
    assert "the VM does not run" in "".join(done.notes) and not place.leftovers()
    after = Path(str(place.where.state)).stat()
    assert (before.st_mtime_ns, before.st_ctime_ns) == (after.st_mtime_ns, after.st_ctime_ns)


def remove_blob(content: Path) -> None:
    next(content.glob("files/??/*")).unlink()


def open_blob(content: Path) -> None:
    next(content.glob("files/??/*")).chmod(0o644)


def change_blob(content: Path) -> None:
    next(content.glob("files/??/*")).write_bytes(b"another")


def remove_inventory(content: Path) -> None:
    (content / "inventory.db").unlink()


def damage_inventory(content: Path) -> None:
    path = content / "inventory.db"
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * (path.stat().st_size - 4096))


@pytest.mark.parametrize(
    ("harm", "what", "why"),
    [
        (remove_blob, "master files", "the content of /etc/munge/munge.key is missing"),
        (open_blob, "master files", "others can read the content of /etc/munge/munge.key: mode 0644"),
        (change_blob, "master files", "the content of /etc/munge/munge.key has changed"),
        (remove_inventory, "the inventory", "there is no inventory"),
        (damage_inventory, "the inventory", ""),
    ],
)
def test_a_drill_finds_what_is_wrong(place: Place, harm: Callable[[Path], None], what: str, why: str) -> None:
    content = place.content()
    harm(content)
    place.put(content)
    place.take()
    done = drill_vm(place.cluster, DrillOptions("b"))
    assert [one.what for one in done.failed] == [what] and why in done.failed[0].seen
    assert not place.leftovers()


def test_a_killed_drill_is_removed(place: Place) -> None:
    left = Path(place.cluster.site.state) / "drills" / place.cluster.label
    left.mkdir(parents=True)
    assert clean_up_vm(place.cluster) == [place.cluster.label] and clean_up_vm(place.cluster) == []
    with pytest.raises(SmsError):
        drill_vm(place.cluster, DrillOptions("nobody"))
