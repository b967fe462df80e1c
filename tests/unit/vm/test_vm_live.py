"""A live migration between two real machines: complete memory, and one of them runs whatever fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from appliance.catalog import read_bases
from appliance.errors import Refused, RolledBack, SmsError
from appliance.host.base import Host, OnLine
from appliance.host.local import Local
from appliance.host.stream import Stream
from appliance.operations.context import Cluster
from appliance.operations.site.keys import create_pair
from appliance.operations.vm import live
from appliance.operations.vm.image import deliver_vm, fetch_vm, find_vm_image, make_current
from appliance.operations.vm.interrupted import continue_paused
from appliance.operations.vm.live import Handover, continue_there, move_live, move_memory, resolve_interrupted
from appliance.operations.vm.vm import find_running
from appliance.plan.vm.holder import Holder, read_holder
from appliance.plan.vm.vm import Machine, Opened, VmPlaces, machine_name
from appliance.share import share
from appliance.tools.files import make_folders
from appliance.tools.qemu import Run, end_machine, launch
from appliance.tools.qmp import NotResponding, open_qmp
from appliance.tools.sealed import seal
from tests.sites import make_site
from tests.support.env import fake_env
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: each host has mounts of its own")
OLD, HOLDER = Holder("source", 1), Holder("target", 2)

# cli; again: mov bx, 0x1000; next: mov es, bx; inc dword [es:0]; add bx, 0x100; cmp bx, 0x9000; jb next; jmp again
COUNT = bytes.fromhex("fa bb0010 8ec3 6626ff060000 81c30001 81fb0090 72ee ebe9")
"""Boot code that counts in 128 pages, one after the other: two of them never differ by more than one."""
PAGES = range(0x10000, 0x90000, 0x1000)
ARGV = (
    *("qemu-system-x86_64", "-name", "sms-vm-one,debug-threads=on", "-M", "pc", "-nodefaults", "-m", "16"),
    *("-display", "none", "-device", "virtio-blk-pci,drive=boot"),
)
DISK = "driver=raw,node-name=boot,read-only=on,file.driver=file,file.read-only=on,file.filename="


@dataclass
class Pair:
    """Two hosts, each with a machine and a folder /run of its own; they share the disks and their record."""

    source: Host
    target: Host
    cluster: Cluster

    @property
    def where(self) -> VmPlaces:
        """The paths on each host."""
        return VmPlaces(self.cluster.site)

    def runs(self, host: Host) -> bool:
        """Return whether a host has a machine, in whatever state."""
        return find_running(self.cluster, host) is not None

    def status(self, host: Host) -> str:
        """Return the state of a machine."""
        with open_qmp(host, str(self.where.qmp)) as qmp:
            return str(qmp.execute("query-status")["status"])

    def counts(self, host: Host) -> list[int]:
        """Return what a machine has counted in its pages; it is paused for that."""
        with open_qmp(host, str(self.where.qmp)) as qmp:
            qmp.execute("stop")
            shown = [qmp.execute("human-monitor-command", **{"command-line": f"xp /1dw {page}"}) for page in PAGES]
            qmp.execute("cont")
        return [int(re.findall(r": *(-?[0-9]+)", text)[0]) for text in shown]

    def counts_on(self, host: Host) -> bool:
        """Return whether a machine runs, and does not only report it."""
        if self.status(host) != "running":
            return False
        first = self.counts(host)
        time.sleep(0.2)
        return self.counts(host)[0] != first[0]

    def holder(self) -> Holder | None:
        """Return the record of the disks' holder."""
        return read_holder(self.source.read(str(self.where.holder)))

    def undo(self) -> ExitStack:
        """Return a stack that kills the target's machine, as the rollback of its start does."""
        stack = ExitStack()
        stack.callback(end_it, self.cluster, self.target)
        return stack

    def handover(self) -> Handover:
        """Return a pending change of the record."""
        return Handover(self.source, self.target, self.where, HOLDER, time)


def end_it(cluster: Cluster, host: Host) -> None:
    if process := find_running(cluster, host):
        end_machine(host, process, patience_s=2)


def start(host: Host, where: VmPlaces, disk: Path, *more: str) -> None:
    """Start a machine as the product does."""
    argv: tuple[str, ...] = (*ARGV, "-blockdev", f"{DISK}/dev/fdset/11", "-add-fd", "fd=11,set=11")
    argv += ("-chardev", "socket,id=qmp,fd=10,server=on,wait=off", "-mon", "chardev=qmp,mode=control", *more)
    opened = (Opened("socket", str(where.qmp)), Opened("read", str(disk)))
    launch(host, Machine(argv, opened), Run("nobody", str(where.pid), str(where.qmp), str(where.run / "qemu.log")))


def start_as_before(host: Host, where: VmPlaces, disk: Path) -> None:
    """Start a machine as 519381b did: as root, which opens everything itself."""
    argv = (*ARGV, "-blockdev", f"{DISK}{disk}", "-qmp", f"unix:{where.qmp},server=on,wait=off")
    script = 'qmp=$1; shift; setsid "$@" </dev/null >/dev/null 2>&1 & until [ -S "$1" ]; do sleep 0.1; done'
    script = script.replace('[ -S "$1" ]', '[ -S "$qmp" ]')
    host.run("sh", "-c", script, "launch", str(where.qmp), *argv, "-pidfile", str(where.pid))


@pytest.fixture
def pair(tmp_path: Path, need: Callable[[str], str], request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Start a machine that counts, and one that waits for a migration."""
    need("qemu-system-x86_64")
    site = make_site(tmp_path, directory=str(tmp_path / "disks"))
    named = [site.admin_hosts[0].model_copy(update={"name": name}) for name in ("source", "target")]
    site = site.model_copy(update={"admin_hosts": tuple(named)})
    disk = tmp_path / "boot"
    disk.write_bytes((COUNT.ljust(510, b"\0") + b"\x55\xaa").ljust(1 << 20, b"\0"))
    with ExitStack() as stack:
        hosts = {name: stack.enter_context(own_run(name, tmp_path / name)) for name in ("source", "target")}
        cluster = Cluster(site, (), read_bases(share("definitions", "bases"))["debian-12"], env=fake_env(hosts))
        found = Pair(hosts["source"], hosts["target"], cluster)
        assert ARGV[2] == f"{machine_name(site)},debug-threads=on"
        for host in hosts.values():
            make_folders(host, str(found.where.run), str(found.where.disks))
        found.source.write(str(found.where.holder), b'{"holder": "source", "generation": 1}', mode=0o600)
        getattr(request, "param", start)(found.source, found.where, disk)
        start(found.target, found.where, disk, "-S", "-incoming", "defer")
        wait_until(lambda: found.counts(found.source)[-1], "the last page is counted", timeout_s=10)
        yield found


@contextmanager
def own_run(name: str, folder: Path) -> Iterator[Local]:
    """Start a host with processes of its own, which end with it, and whose /run is a folder of the test."""
    folder.mkdir()
    argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv += ["sh", "-c", 'mount --bind "$1" /run && echo ready && exec sleep 300', "mount", str(folder)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as spaces:
        try:
            assert spaces.stdout and spaces.stdout.readline() == b"ready\n"
            first = Path(f"/proc/{spaces.pid}/task/{spaces.pid}/children").read_text().strip()
            yield Local(name, prefix=("nsenter", "-t", first, "-m", "-p", "--"))
        finally:
            spaces.kill()


class Steps:
    """Receives the progress; calls ``stop`` each time."""

    def __init__(self, stop: Callable[[], None] = lambda: None) -> None:
        self.stop = stop

    def moved(self, *_: Any) -> None:
        self.stop()

    def detail(self, *_: Any) -> None:
        """Ignore it."""


def fail(message: str = "broken") -> None:
    raise SmsError(message)


def interrupt(pair: Pair, steps: Steps, handover: Handover, undo: ExitStack) -> BaseException:
    """Return the error of a failed migration."""
    with pytest.raises(BaseException) as found:
        move_memory(pair.source, pair.target, pair.where, steps, handover)
    return resolve_interrupted(pair.source, pair.target, pair.where, handover, undo, found.value)


class Changed:
    """A stream of which a subclass changes something."""

    def __init__(self, opened: Stream) -> None:
        self.opened = opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opened, name)


class Slow(Changed):
    """It is read at 0.5 MB/s."""

    def read(self, size: int = 0) -> bytes:
        time.sleep(0.016)
        return self.opened.read(8 << 10)


class Damaged(Changed):
    """Of the memory, the beginning of a migration's stream, only 64 bytes are what was sent."""

    def read(self, size: int = 0) -> bytes:
        found = self.opened.read()
        return found[:64] + b"\xff" * 4096 if found.startswith(b"QEVM") else found


class Killing(Changed):
    """The process is killed before QEMU gets the command to migrate."""

    def write(self, data: bytes) -> int:
        if b'"migrate"' in data:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.opened.write(data)


class Through(Local):
    """A host whose streams are changed."""

    def __init__(self, host: Host, change: type[Changed]) -> None:
        assert isinstance(host, Local)
        super().__init__(host.name, host.prefix)
        self.change = change

    @contextmanager
    def stream(self, *argv: str, on_line: OnLine | None = None) -> Iterator[Any]:
        with super().stream(*argv, on_line=on_line) as opened:
            yield self.change(opened)


class Hurried:
    """A clock on which a thousand seconds pass in one."""

    sleep = staticmethod(time.sleep)
    time = staticmethod(time.time)

    def monotonic(self) -> float:
        return time.monotonic() * 1000


@pytest.mark.parametrize(("pair", "as_root"), [(start, False), (start_as_before, True)], indirect=["pair"])
def test_memory_that_is_written_meanwhile_arrives_complete(pair: Pair, as_root: bool) -> None:
    """QEMU before 9.0 loses writes of an emulated machine. Also of a machine that an earlier version started."""
    # So slow that QEMU would have to go over the memory more than once.
    pair = replace(pair, source=Through(pair.source, Slow))
    handover = pair.handover()
    paused = move_memory(pair.source, pair.target, pair.where, Steps(), handover)
    assert handover.done and pair.holder() == HOLDER and paused > 0
    assert (pair.status(pair.source), pair.status(pair.target)) == ("postmigrate", "running")
    counts = pair.counts(pair.target)
    assert max(counts) - min(counts) <= 1 and pair.counts_on(pair.target)
    process = find_running(pair.cluster, pair.source)
    assert process and (pair.source.run("stat", "-c", "%u", f"/proc/{process.pid}").text == "0") == as_root


def test_a_failed_migration_resumes_the_source(pair: Pair) -> None:
    """The target is killed first; if that fails, the source is resumed anyway."""
    pair = replace(pair, source=Through(pair.source, Slow))
    undo = pair.undo()
    undo.callback(fail, "no way there")
    handover = pair.handover()
    error = interrupt(pair, Steps(fail), handover, undo)
    assert isinstance(error, SmsError) and "keeps running on" in error.message and "no way there" in error.message
    assert not handover.done and pair.holder() == OLD
    assert pair.counts_on(pair.source)
    assert not pair.runs(pair.target)


def test_a_target_that_ends_gives_its_reason(pair: Pair) -> None:
    """QEMU there cannot load what it gets: the error is in its log; the source goes on."""
    pair = replace(pair, source=Through(pair.source, Damaged))
    error = interrupt(pair, Steps(), pair.handover(), pair.undo())
    assert isinstance(error, RolledBack) and "keeps running on" in error.message
    assert "QEMU there: " in error.message and "load of migration failed" in error.message
    assert pair.counts_on(pair.source) and pair.holder() == OLD


class Unwritable(Handover):
    """Its record cannot be written once the memory is on the target."""

    def commit(self) -> None:
        fail("no space left")


class Interrupted(Handover):
    """Simulates Ctrl-C right after the record was written."""

    def commit(self) -> None:
        super().commit()
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [Unwritable, Interrupted])
def test_a_source_whose_memory_has_gone_goes_on(pair: Pair, kind: type[Handover]) -> None:
    """The target has everything, but was not requested to run: it is ended, and the record is as before."""
    handover = kind(pair.source, pair.target, pair.where, HOLDER, time)
    error = interrupt(pair, Steps(), handover, pair.undo())
    assert isinstance(error, KeyboardInterrupt if kind is Interrupted else RolledBack)
    assert not handover.done and pair.holder() == OLD
    assert pair.counts_on(pair.source)
    assert not pair.runs(pair.target)


def test_a_machine_that_arrived_and_cannot_leave_again_goes_on(pair: Pair) -> None:
    """Its QEMU reports its arrival as a completed migration; that must not count as its departure."""
    move_memory(pair.source, pair.target, pair.where, Steps(), pair.handover())
    back = replace(pair, source=pair.target, target=pair.source)
    error = interrupt(back, Steps(), back.handover(), ExitStack())  # the old source does not wait for a migration
    assert isinstance(error, RolledBack)
    assert pair.counts_on(pair.target)


def test_a_target_that_was_told_to_run_is_not_stopped(pair: Pair) -> None:
    """An error after that: it runs, or it has ended, or nobody knows."""
    handover = pair.handover()
    move_memory(pair.source, pair.target, pair.where, Steps(), handover)
    undo, lost = pair.undo(), SmsError("connection lost")
    handover.done = False
    error = resolve_interrupted(pair.source, pair.target, pair.where, handover, undo, lost)
    assert handover.done and "the VM has moved to" in str(error) and not isinstance(error, RolledBack)
    undo.close()
    assert pair.status(pair.target) == "running" and pair.status(pair.source) == "postmigrate"
    end_it(pair.cluster, pair.target)
    handover.done = False
    error = resolve_interrupted(pair.source, pair.target, pair.where, handover, pair.undo(), lost)
    assert handover.done and "its state there: ended" in str(error)
    handover.done = False
    pair.target.remove(str(pair.where.pid))
    error = resolve_interrupted(pair.source, pair.target, pair.where, handover, pair.undo(), lost)
    assert not handover.done and "it is unknown" in str(error)
    assert pair.status(pair.source) == "postmigrate"


@pytest.mark.parametrize(("error", "begun"), [(SmsError("no lock"), False), (NotResponding("gone"), True)])
def test_a_refused_continuation_can_be_undone(pair: Pair, error: SmsError, begun: bool) -> None:
    """QEMU's refusal is certain; a lost connection is not."""

    class There:
        def execute(self, command: str) -> None:
            raise error

    handover = pair.handover()
    with pytest.raises(SmsError):
        continue_there(There(), handover)  # type: ignore[arg-type]
    assert handover.begun == begun and not handover.done


def test_a_source_that_has_ended_is_reported(pair: Pair) -> None:
    """There is nothing to resume; the target, whose memory is incomplete, is ended."""
    pair = replace(pair, source=Through(pair.source, Slow))
    error = interrupt(pair, Steps(lambda: end_it(pair.cluster, pair.source)), pair.handover(), pair.undo())
    assert "was not resumed on" in str(error) and not isinstance(error, RolledBack)
    assert not pair.runs(pair.target) and pair.holder() == OLD


def test_a_source_whose_sms_was_killed_goes_on(pair: Pair) -> None:
    """In the middle of the transfer: nobody is left to resume it but what runs on its host."""
    pair = replace(pair, source=Through(pair.source, Slow))
    child = os.fork()
    if not child:
        # Held pipes of this process would keep the commands of the child alive.
        move_memory(
            pair.source, pair.target, pair.where, Steps(lambda: os.kill(os.getpid(), signal.SIGKILL)), pair.handover()
        )
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    wait_until(lambda: pair.status(pair.source) == "running", "the source runs", timeout_s=20)
    assert pair.counts_on(pair.source)
    assert not pair.runs(pair.target) or pair.status(pair.target) != "running"


def test_a_source_whose_sms_was_killed_before_the_transfer_goes_on(pair: Pair) -> None:
    """It is paused already, and QEMU does not use the channel yet: only its relay can see that sms has ended."""
    killed = replace(pair, source=Through(pair.source, Killing))
    child = os.fork()
    if not child:
        move_memory(killed.source, pair.target, pair.where, Steps(), killed.handover())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    wait_until(lambda: pair.status(pair.source) == "running", "the source runs", timeout_s=10)
    assert pair.counts_on(pair.source)
    # It got no memory.
    wait_until(lambda: not pair.runs(pair.target), "the target ends", timeout_s=10)


def test_a_pause_without_kvm_is_limited(pair: Pair) -> None:
    """The connection is too slow: the VM goes on on the source."""
    pair = replace(pair, source=Through(pair.source, Slow))
    handover = Handover(pair.source, pair.target, pair.where, HOLDER, Hurried())
    error = interrupt(pair, Steps(), handover, pair.undo())
    assert isinstance(error, RolledBack) and f"not transferred within {live.PAUSED_S:g} s" in error.message
    assert "--stopped" in error.hint and pair.counts_on(pair.source)


def test_old_memory_is_not_resumed_by_a_second_migration(pair: Pair) -> None:
    """The source's machine was left there after its memory had moved; the target has written to the disks since."""
    move_memory(pair.source, pair.target, pair.where, Steps(), pair.handover())
    assert pair.status(pair.source) == "postmigrate"
    with pytest.raises(Refused, match="is postmigrate: it cannot move live"):
        move_live(pair.cluster, pair.source, pair.target, Holder("source", 3))
    assert (pair.status(pair.source), pair.status(pair.target)) == ("postmigrate", "running")
    end_it(pair.cluster, pair.source)
    with pytest.raises(Refused, match="is ended: it cannot"):
        move_live(pair.cluster, pair.source, pair.target, Holder("source", 3))


@pytest.mark.parametrize("committed", [True, False])
def test_a_start_continues_what_was_left_paused(pair: Pair, committed: bool) -> None:
    """sms was killed at the switch, before or after the record was written: it says which host continues."""
    handover = (Interrupted if committed else Unwritable)(pair.source, pair.target, pair.where, HOLDER, time)
    with pytest.raises(BaseException, match=None if committed else "no space"):
        move_memory(pair.source, pair.target, pair.where, Steps(), handover)
    assert (pair.status(pair.source), pair.status(pair.target)) == ("postmigrate", "paused")
    chosen, other = (pair.target, pair.source) if committed else (pair.source, pair.target)
    with pytest.raises(Refused, match=f"its disks are on {chosen.name}"):
        continue_paused(pair.cluster, other)
    continue_paused(pair.cluster, chosen)
    assert pair.counts_on(chosen) and not pair.runs(other)
    continue_paused(pair.cluster, chosen)


@pytest.mark.parametrize("moved", [True, False])
def test_a_start_ends_what_was_left_beside_the_running_machine(pair: Pair, moved: bool) -> None:
    """sms was killed after the switch, or before the transfer; the record says which machine is the VM."""
    if moved:
        move_memory(pair.source, pair.target, pair.where, Steps(), pair.handover())
    runs, left = (pair.target, pair.source) if moved else (pair.source, pair.target)
    with pytest.raises(Refused):
        continue_paused(pair.cluster, left)
    assert pair.runs(left)
    continue_paused(pair.cluster, runs)
    assert pair.counts_on(runs) and not pair.runs(left)


def test_a_start_ends_nothing_beside_a_machine_without_the_disks(pair: Pair) -> None:
    """The record names the other host."""
    pair.handover().commit()
    continue_paused(pair.cluster, pair.source)
    assert (pair.status(pair.source), pair.status(pair.target)) == ("running", "inmigrate")


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
    with pytest.raises(Refused, match="is not the key of an image"):
        find_vm_image(cluster, source, Local("target"), f"../images/{key}")
    (there / key / "disk.qcow2").write_bytes(b"a disk")
    digest = seal(there / key, tmp_path / "sign.pem", about={"kind": "provisioning-vm", "key": key})
    host, found = find_vm_image(cluster, source, Local("target"), key)
    assert (host.name, found) == ("source", digest)
    fetch_vm(cluster, source, key)
    assert (images / key / "disk.qcow2").read_bytes() == b"a disk"
    assert deliver_vm(cluster, Local("target"), chosen=key).digest == digest
    (there / key / "manifest.sig").unlink()
    with pytest.raises(Refused, match="not signed"):
        fetch_vm(cluster, source, key)
    assert [path.name for path in images.iterdir()] == [key]
    for _ in range(2):
        make_current(cluster, Local("target"), f"{images}/{key}/disk.qcow2")
        assert (images / "current").readlink() == Path(key)
