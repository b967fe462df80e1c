"""A live migration between two real machines without a guest: a completed migration is never rolled back."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from appliance.catalog import read_bases
from appliance.errors import Refused, RolledBack, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.site.keys import create_pair
from appliance.operations.vm.image import deliver_vm, fetch_vm, find_vm_image
from appliance.operations.vm.live import Handover, move_memory, resolve_interrupted
from appliance.plan.vm.holder import Holder, read_holder
from appliance.plan.vm.vm import VmPlaces
from appliance.progress import Silent
from appliance.share import share
from appliance.tools.qemu import end_machine, find_machine, launch
from appliance.tools.qmp import open_qmp
from appliance.tools.sealed import seal
from tests.sites import make_site

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the second host has mounts of its own")
HOLDER = Holder("target", 2)


@dataclass
class Pair:
    """Two hosts, each with a machine; the paths lead to different folders on each, except for the record."""

    source: Host
    target: Host
    where: VmPlaces

    def status(self, host: Host) -> str:
        """Return the state of a machine."""
        with open_qmp(host, str(self.where.qmp)) as qmp:
            return str(qmp.execute("query-status")["status"])

    def holder(self) -> Holder | None:
        """Return the record of the disks' holder."""
        return read_holder(self.source.read(str(self.where.holder)))

    def undo(self) -> ExitStack:
        """Return a stack that kills the target's machine, as the rollback of its start does."""
        stack = ExitStack()
        stack.callback(end_it, self.target, self.where)
        return stack


def end_it(host: Host, where: VmPlaces) -> None:
    if process := find_machine(host, str(where.pid), "t-live"):
        end_machine(host, process, patience_s=2)


@pytest.fixture
def pair(tmp_path: Path, need: Callable[[str], str]) -> Iterator[Pair]:
    """Start a machine that runs its firmware, and one that waits for a migration."""
    need("qemu-system-x86_64")
    for name in ("run", "other", "disks"):
        (tmp_path / name).mkdir()
    argv = ["unshare", "-m", "sh", "-c", 'mount --bind "$1" "$2" && echo ready && exec sleep 300', "mount"]
    argv += [str(tmp_path / "other"), str(tmp_path / "run")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as mounts:
        assert mounts.stdout and mounts.stdout.readline() == b"ready\n"
        run = PurePosixPath(tmp_path / "run")
        where = VmPlaces(make_site(tmp_path))
        for name in vars(where):
            setattr(where, name, run / name)
        where.run, where.holder = run, PurePosixPath(tmp_path / "disks" / "holder.json")
        found = Pair(Local(), Local(prefix=("nsenter", "-t", str(mounts.pid), "-m", "--")), where)
        try:
            for host, more in ((found.source, []), (found.target, ["-incoming", f"unix:{where.incoming}"])):
                argv = ["qemu-system-x86_64", "-name", "t-live,debug-threads=on", "-M", "pc", "-nodefaults", "-m", "16"]
                argv += ["-display", "none", "-qmp", f"unix:{where.qmp},server=on,wait=off", "-pidfile", str(where.pid)]
                launch(host, [*argv, *more], qmp=str(where.qmp), log=f"{run}/log")
            yield found
        finally:
            for host in (found.source, found.target):
                end_it(host, where)
            mounts.kill()


class Steps:
    """Receives the progress; calls ``stop`` each time."""

    def __init__(self, stop: Callable[[], None] = lambda: None) -> None:
        self.stop = stop

    def moved(self, *_: Any) -> None:
        self.stop()

    def detail(self, *_: Any) -> None:
        """Ignore it."""


def pause_before_switchover(pair: Pair) -> None:
    """Pause the migration before its last step: so small a machine would be transferred at once."""
    with open_qmp(pair.source, str(pair.where.qmp)) as qmp:
        capability = {"capability": "pause-before-switchover", "state": True}
        qmp.execute("migrate-set-capabilities", capabilities=[capability])


def interrupt(pair: Pair, steps: Steps, handover: Handover, undo: ExitStack) -> BaseException:
    """Return the error of a failed migration."""
    with pytest.raises(BaseException) as found:
        move_memory(pair.source, pair.target, pair.where, steps, handover)
    return resolve_interrupted(pair.source, pair.target, pair.where, handover, undo, found.value)


def test_a_completed_migration_updates_the_record(pair: Pair) -> None:
    """The target runs, the source does not."""
    handover = Handover(pair.source, pair.target, pair.where, HOLDER)
    move_memory(pair.source, pair.target, pair.where, Steps(), handover)
    assert handover.done and pair.holder() == HOLDER
    assert (pair.status(pair.source), pair.status(pair.target)) == ("postmigrate", "running")


def test_a_failed_migration_resumes_the_source(pair: Pair) -> None:
    """The target is killed first; if that fails, the source is resumed anyway."""

    def stop() -> None:
        raise SmsError("broken")

    undo = pair.undo()

    def fail() -> None:
        raise SmsError("no way there")

    undo.callback(fail)
    pause_before_switchover(pair)
    handover = Handover(pair.source, pair.target, pair.where, HOLDER)
    error = interrupt(pair, Steps(stop), handover, undo)
    assert isinstance(error, SmsError) and "keeps running on" in error.message and "no way there" in error.message
    assert not handover.done and pair.holder() is None
    assert pair.status(pair.source) == "running"
    assert find_machine(pair.target, str(pair.where.pid), "t-live") is None


class Interrupted(Handover):
    """Simulates Ctrl-C right after the record was updated."""

    def commit(self) -> None:
        was = self.done
        super().commit()
        if not was:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("seen", [True, False])
def test_a_completed_migration_is_not_rolled_back(pair: Pair, seen: bool) -> None:
    """Also if the completion was not yet noticed: QEMU is queried."""

    def stop() -> None:
        if not seen:
            time.sleep(4)  # the transfer has completed by then
            raise SmsError("broken")

    undo = pair.undo()
    handover = (Interrupted if seen else Handover)(pair.source, pair.target, pair.where, HOLDER)
    error = interrupt(pair, Steps(stop), handover, undo)
    assert isinstance(error, KeyboardInterrupt) if seen else "had already moved to" in str(error)
    assert not isinstance(error, RolledBack)
    undo.close()
    assert handover.done and pair.holder() == HOLDER
    assert pair.status(pair.source) == "postmigrate"
    assert find_machine(pair.target, str(pair.where.pid), "t-live") is not None
    assert seen or pair.status(pair.target) == "running"


def test_no_machine_is_stopped_if_the_source_is_unreachable(pair: Pair) -> None:
    """The source's QEMU is gone: the target may have everything or nothing."""

    def stop() -> None:
        end_it(pair.source, pair.where)

    undo = pair.undo()
    pause_before_switchover(pair)
    error = interrupt(pair, Steps(stop), Handover(pair.source, pair.target, pair.where, HOLDER), undo)
    assert "it is unknown" in str(error)
    undo.close()
    assert pair.holder() is None


def test_a_migration_fetches_the_image_of_the_source(tmp_path: Path) -> None:
    """This machine has no image: that of the source is fetched, but not without a valid seal."""
    site, (there, key) = make_site(tmp_path, directory=str(tmp_path / "vm")), (tmp_path / "there", "abc")
    create_pair(tmp_path / "sign.pem", tmp_path / "sign.pub")
    signing = site.signing.model_copy(update={"public_keys": (tmp_path / "sign.pub",)})
    site = site.model_copy(update={"state": tmp_path / "state", "signing": signing})
    cluster = Cluster(site, (), read_bases(share("definitions", "bases"))["debian-12"])
    images = Path(VmPlaces(site).images)
    for folder in (images, there / key):
        folder.mkdir(parents=True)
    bind = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    source = Local("source", prefix=("unshare", "-m", "sh", "-c", bind, "bind", str(there), str(images)))
    with pytest.raises(Refused, match="nor source has the VM's image"):
        find_vm_image(cluster, source, Local("target"), key)
    (there / key / "disk.qcow2").write_bytes(b"a disk")
    digest = seal(there / key, tmp_path / "sign.pem", about={"kind": "provisioning-vm", "key": key})
    host, found = find_vm_image(cluster, source, Local("target"), key)
    assert (host.name, found) == ("source", digest)
    fetch_vm(cluster, source, key, Silent())
    assert (images / key / "disk.qcow2").read_bytes() == b"a disk"
    assert deliver_vm(cluster, Local("target"), Silent(), chosen=key).digest == digest
    (there / key / "manifest.sig").unlink()
    with pytest.raises(Refused, match="not signed"):
        fetch_vm(cluster, source, key, Silent())
    assert [path.name for path in images.iterdir()] == [key]
