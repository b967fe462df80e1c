"""A live move between two real machines without a guest: a move that is completed is never taken back."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from appliance.operations.vm.live import Handover, end_move, move_memory
from appliance.plan.vm.holder import Holder, read_holder
from appliance.plan.vm.vm import VmPlaces, vm_places
from appliance.progress import Silent
from appliance.share import share
from appliance.tools.qemu import end_machine, find_machine, launch
from appliance.tools.qmp import open_qmp
from appliance.tools.sealed import seal
from tests.unit.vm.test_vm_plan import make_site

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the second host has mounts of its own")
HOLDER = Holder("target", 2)


@dataclass
class Pair:
    """Two hosts, each with a machine; ``where`` is another folder on each, but for the record."""

    source: Host
    target: Host
    where: VmPlaces

    def status(self, host: Host) -> str:
        """What a machine does."""
        with open_qmp(host, str(self.where.qmp)) as qmp:
            return str(qmp.ask("query-status")["status"])

    def holder(self) -> Holder | None:
        """Who has the disks."""
        return read_holder(self.source.read(str(self.where.holder)))

    def undo(self) -> ExitStack:
        """Ends the target's machine, as the undoing of its start does."""
        stack = ExitStack()
        stack.callback(end_it, self.target, self.where)
        return stack


def end_it(host: Host, where: VmPlaces) -> None:
    if process := find_machine(host, str(where.pid), "t-live"):
        end_machine(host, process, patience_s=2)


@pytest.fixture
def pair(tmp_path: Path, need: Callable[[str], str]) -> Iterator[Pair]:
    """A machine that runs its firmware, and one that waits for it."""
    need("qemu-system-x86_64")
    for name in ("run", "other", "disks"):
        (tmp_path / name).mkdir()
    argv = ["unshare", "-m", "sh", "-c", 'mount --bind "$1" "$2" && echo ready && exec sleep 300', "mount"]
    argv += [str(tmp_path / "other"), str(tmp_path / "run")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as mounts:
        assert mounts.stdout and mounts.stdout.readline() == b"ready\n"
        run = PurePosixPath(tmp_path / "run")
        names = {name: run / name for name in VmPlaces.__dataclass_fields__}
        where = replace(VmPlaces(**names), run=run, holder=PurePosixPath(tmp_path / "disks" / "holder.json"))
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
    """Hears of the progress; ``stop`` is called each time."""

    def __init__(self, stop: Callable[[], None] = lambda: None) -> None:
        self.stop = stop

    def moved(self, *_: Any) -> None:
        self.stop()

    def detail(self, *_: Any) -> None:
        """Nothing."""


def hold_it(pair: Pair) -> None:
    """So small a machine is over there at once: hold it before its last step."""
    with open_qmp(pair.source, str(pair.where.qmp)) as qmp:
        hold = {"capability": "pause-before-switchover", "state": True}
        qmp.ask("migrate-set-capabilities", capabilities=[hold])


def broken_off(pair: Pair, steps: Steps, handover: Handover, undo: ExitStack) -> BaseException:
    """What is raised of a move that does not go well."""
    with pytest.raises(BaseException) as found:
        move_memory(pair.source, pair.target, pair.where, steps, handover)
    return end_move(pair.source, pair.target, pair.where, handover, undo, found.value)


def test_a_move_hands_the_record_over_once_it_is_completed(pair: Pair) -> None:
    """The target runs, the source does not."""
    handover = Handover(pair.source, pair.target, pair.where, HOLDER)
    move_memory(pair.source, pair.target, pair.where, Steps(), handover)
    assert handover.done and pair.holder() == HOLDER
    assert (pair.status(pair.source), pair.status(pair.target)) == ("postmigrate", "running")


def test_a_move_that_breaks_before_goes_on_at_the_source(pair: Pair) -> None:
    """The target is ended first; and where that fails, the source goes on all the same."""

    def stop() -> None:
        raise SmsError("broken")

    undo = pair.undo()

    def fail() -> None:
        raise SmsError("no way there")

    undo.callback(fail)
    hold_it(pair)
    handover = Handover(pair.source, pair.target, pair.where, HOLDER)
    error = broken_off(pair, Steps(stop), handover, undo)
    assert isinstance(error, SmsError) and "goes on on" in error.message and "no way there" in error.message
    assert not handover.done and pair.holder() is None
    assert pair.status(pair.source) == "running"
    assert find_machine(pair.target, str(pair.where.pid), "t-live") is None


class Interrupted(Handover):
    """Somebody presses Ctrl-C just after the record went over."""

    def commit(self) -> None:
        was = self.done
        super().commit()
        if not was:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("seen", [True, False])
def test_a_move_that_breaks_after_it_was_completed_is_not_taken_back(pair: Pair, seen: bool) -> None:
    """Also where nobody had seen yet that it was: QEMU is asked."""

    def stop() -> None:
        if not seen:
            time.sleep(4)  # what there is to move has moved by then
            raise SmsError("broken")

    undo = pair.undo()
    handover = (Interrupted if seen else Handover)(pair.source, pair.target, pair.where, HOLDER)
    error = broken_off(pair, Steps(stop), handover, undo)
    assert isinstance(error, KeyboardInterrupt) if seen else "had gone to" in str(error)
    assert not isinstance(error, RolledBack)
    undo.close()
    assert handover.done and pair.holder() == HOLDER
    assert pair.status(pair.source) == "postmigrate"
    assert find_machine(pair.target, str(pair.where.pid), "t-live") is not None
    assert seen or pair.status(pair.target) == "running"


def test_nobody_is_ended_where_the_source_cannot_be_asked(pair: Pair) -> None:
    """Its QEMU is gone: the target may have all of it, or nothing."""

    def stop() -> None:
        end_it(pair.source, pair.where)

    undo = pair.undo()
    hold_it(pair)
    error = broken_off(pair, Steps(stop), Handover(pair.source, pair.target, pair.where, HOLDER), undo)
    assert "nobody can tell" in str(error)
    undo.close()
    assert pair.holder() is None


def test_a_move_takes_the_image_that_the_source_has(tmp_path: Path) -> None:
    """This machine has none: that of the source comes over, whole; without its seal it does not, and nothing stays."""
    site, (there, key) = make_site(tmp_path, directory=str(tmp_path / "vm")), (tmp_path / "there", "abc")
    create_pair(tmp_path / "sign.pem", tmp_path / "sign.pub")
    signing = site.signing.model_copy(update={"public_keys": (tmp_path / "sign.pub",)})
    site = site.model_copy(update={"state": tmp_path / "state", "signing": signing})
    cluster = Cluster(site, (), read_bases(share("definitions", "bases"))["debian-12"])
    images = Path(vm_places(site).images)
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
