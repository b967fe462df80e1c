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
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.catalog import read_bases
from appliance.errors import Refused, RolledBack, SmsError
from appliance.host.base import Host, OnLine
from appliance.host.local import Local
from appliance.host.stream import Stream
from appliance.operations.context import Cluster
from appliance.operations.site.keys import create_pair
from appliance.operations.vm import interrupted, live
from appliance.operations.vm.image import deliver_vm, fetch_vm, find_vm_image, make_current
from appliance.operations.vm.interrupted import continue_paused
from appliance.operations.vm.live import Handover, continue_there, move_memory, resolve_interrupted
from appliance.plan.vm.holder import Holder, HostView, read_holder
from appliance.plan.vm.vm import Machine, Opened, VmPlaces
from appliance.share import share
from appliance.tools.qemu import Run, end_machine, find_machine, launch
from appliance.tools.qmp import Channel, NotResponding, open_qmp
from appliance.tools.sealed import seal
from tests.sites import make_site
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the second host has mounts of its own")
OLD, HOLDER = Holder("source", 1), Holder("target", 2)

# cli; again: mov bx, 0x1000; next: mov es, bx; inc dword [es:0]; add bx, 0x100; cmp bx, 0x9000; jb next; jmp again
COUNT = bytes.fromhex("fa bb0010 8ec3 6626ff060000 81c30001 81fb0090 72ee ebe9")
"""Boot code that counts in 128 pages, one after the other: two of them never differ by more than one."""
PAGES = range(0x10000, 0x90000, 0x1000)
ARGV = (
    *("qemu-system-x86_64", "-name", "t-live,debug-threads=on", "-M", "pc", "-nodefaults", "-m", "16"),
    *("-display", "none", "-device", "virtio-blk-pci,drive=boot"),
)
DISK = "driver=raw,node-name=boot,read-only=on,file.driver=file,file.read-only=on,file.filename="


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
        stack.callback(end_it, self.target, self.where)
        return stack

    def handover(self) -> Handover:
        """Return a pending change of the record."""
        return Handover(self.source, self.target, self.where, HOLDER, time)


def end_it(host: Host, where: VmPlaces) -> None:
    if process := find_machine(host, str(where.pid), "t-live"):
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
    for name in ("run", "other", "disks"):
        (tmp_path / name).mkdir()
    disk = tmp_path / "boot"
    disk.write_bytes((COUNT.ljust(510, b"\0") + b"\x55\xaa").ljust(1 << 20, b"\0"))
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
        found.source.write(str(where.holder), b'{"holder": "source", "generation": 1}', mode=0o600)
        try:
            getattr(request, "param", start)(found.source, where, disk)
            start(found.target, where, disk, "-S", "-incoming", "defer")
            wait_until(lambda: found.counts(found.source)[-1], "the last page is counted", timeout_s=10)
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


def fail(message: str = "broken") -> None:
    raise SmsError(message)


def interrupt(pair: Pair, steps: Steps, handover: Handover, undo: ExitStack) -> BaseException:
    """Return the error of a failed migration."""
    with pytest.raises(BaseException) as found:
        move_memory(pair.source, pair.target, pair.where, steps, handover)
    return resolve_interrupted(pair.source, pair.target, pair.where, handover, undo, found.value)


def make_cluster(folder: Path) -> Cluster:
    return Cluster(make_site(folder), (), read_bases(share("definitions", "bases"))["debian-12"])


def view_pair(pair: Pair, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Let ``continue_paused`` find both machines, with the present record; return the cluster to pass to it."""
    hosts = {"source": pair.source, "target": pair.target}
    for name, host in hosts.items():
        host.name = name
    monkeypatch.setattr(interrupted, "VmPlaces", lambda site: pair.where)
    monkeypatch.setattr(
        interrupted, "all_hosts", lambda _, first: [first, *(hosts[n] for n in hosts if n != first.name)]
    )
    views = [HostView(name, running=True, holder=pair.holder()) for name in hosts]
    monkeypatch.setattr(interrupted, "view_hosts", lambda *_: views)
    monkeypatch.setattr(interrupted, "find_running", lambda _, host: find_machine(host, str(pair.where.pid), "t-live"))
    monkeypatch.setattr(interrupted, "tidy_run", lambda *_: None)
    return make_cluster(folder)


class Slow:
    """A stream that is read at 0.5 MB/s."""

    def __init__(self, opened: Stream) -> None:
        self.opened = opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opened, name)

    def read(self, size: int = 0) -> bytes:
        time.sleep(0.016)
        return self.opened.read(8 << 10)


class SlowHost(Local):
    """A host whose connection is slow."""

    @contextmanager
    def stream(self, *argv: str, on_line: OnLine | None = None) -> Iterator[Any]:
        with super().stream(*argv, on_line=on_line) as opened:
            yield Slow(opened)


class Hurried:
    """A clock on which a thousand seconds pass in one."""

    sleep = staticmethod(time.sleep)
    time = staticmethod(time.time)

    def monotonic(self) -> float:
        return time.monotonic() * 1000


@pytest.mark.parametrize(("pair", "as_root"), [(start, False), (start_as_before, True)], indirect=["pair"])
def test_memory_that_is_written_meanwhile_arrives_complete(
    pair: Pair, as_root: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QEMU before 9.0 loses writes of an emulated machine. Also of a machine that an earlier version started."""
    # Slow enough that QEMU has to go over the memory more than once.
    monkeypatch.setattr(live, "LIMITS", {"downtime-limit": 300, "max-bandwidth": 1 << 20})
    handover = pair.handover()
    paused = move_memory(pair.source, pair.target, pair.where, Steps(), handover)
    assert handover.done and pair.holder() == HOLDER and paused > 0
    assert (pair.status(pair.source), pair.status(pair.target)) == ("postmigrate", "running")
    counts = pair.counts(pair.target)
    assert max(counts) - min(counts) <= 1 and pair.counts_on(pair.target)
    process = find_machine(pair.source, str(pair.where.pid), "t-live")
    assert process and (Path(f"/proc/{process.pid}").stat().st_uid == 0) == as_root


def test_a_failed_migration_resumes_the_source(pair: Pair) -> None:
    """The target is killed first; if that fails, the source is resumed anyway."""
    pair = replace(pair, source=SlowHost())
    undo = pair.undo()
    undo.callback(fail, "no way there")
    handover = pair.handover()
    error = interrupt(pair, Steps(fail), handover, undo)
    assert isinstance(error, SmsError) and "keeps running on" in error.message and "no way there" in error.message
    assert not handover.done and pair.holder() == OLD
    assert pair.counts_on(pair.source)
    assert find_machine(pair.target, str(pair.where.pid), "t-live") is None


def test_a_target_that_ends_gives_its_reason(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """QEMU there cannot load what it gets: the error is in its log; the source goes on."""

    def damaged_pump(source: Stream, target: Stream, failed: list[BaseException]) -> None:
        try:
            target.write(source.read(1024)[:64] + b"\xff" * 4096)
            while source.read():
                pass
        except SmsError as error:
            failed.append(error)

    monkeypatch.setattr(live, "_pump", damaged_pump)
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
    assert find_machine(pair.target, str(pair.where.pid), "t-live") is None


def test_a_machine_that_arrived_and_cannot_leave_again_goes_on(pair: Pair) -> None:
    """Its QEMU reports its arrival as a completed migration; that must not count as its departure."""
    move_memory(pair.source, pair.target, pair.where, Steps(), pair.handover())
    back = Pair(pair.target, pair.source, pair.where)
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
    end_it(pair.target, pair.where)
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
    pair = replace(pair, source=SlowHost())
    error = interrupt(pair, Steps(lambda: end_it(pair.source, pair.where)), pair.handover(), pair.undo())
    assert "was not resumed on" in str(error) and not isinstance(error, RolledBack)
    assert find_machine(pair.target, str(pair.where.pid), "t-live") is None and pair.holder() == OLD


def test_a_source_whose_sms_was_killed_goes_on(pair: Pair) -> None:
    """In the middle of the transfer: nobody is left to resume it but what runs on its host."""
    pair = replace(pair, source=SlowHost())
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
    assert find_machine(pair.target, str(pair.where.pid), "t-live") is None or pair.status(pair.target) != "running"


def test_a_source_whose_sms_was_killed_before_the_transfer_goes_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is paused already, and QEMU does not use the channel yet: only its relay can see that sms has ended."""
    execute = Channel.execute

    def kill(channel: Channel, command: str, **arguments: Any) -> Any:
        if command == "migrate":
            os.kill(os.getpid(), signal.SIGKILL)
        return execute(channel, command, **arguments)

    child = os.fork()
    if not child:
        monkeypatch.setattr(Channel, "execute", kill)
        move_memory(pair.source, pair.target, pair.where, Steps(), pair.handover())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    wait_until(lambda: pair.status(pair.source) == "running", "the source runs", timeout_s=10)
    assert pair.counts_on(pair.source)
    # It got no memory.
    wait_until(lambda: not find_machine(pair.target, str(pair.where.pid), "t-live"), "the target ends", timeout_s=10)


def test_a_pause_without_kvm_is_limited(pair: Pair) -> None:
    """The connection is too slow: the VM goes on on the source."""
    pair = replace(pair, source=SlowHost())
    handover = Handover(pair.source, pair.target, pair.where, HOLDER, Hurried())
    error = interrupt(pair, Steps(), handover, pair.undo())
    assert isinstance(error, RolledBack) and f"not transferred within {live.PAUSED_S:g} s" in error.message
    assert "--stopped" in error.hint and pair.counts_on(pair.source)


def test_old_memory_is_not_resumed_by_a_second_migration(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source's machine was left there after its memory had moved; the target has written to the disks since."""
    move_memory(pair.source, pair.target, pair.where, Steps(), pair.handover())
    assert pair.status(pair.source) == "postmigrate"
    monkeypatch.setattr(live, "VmPlaces", lambda site: pair.where)
    for name in ("tidy_run", "stop_and_clean", "read_note", "deliver_vm", "make_note", "check_same_image"):
        monkeypatch.setattr(
            live, name, lambda *_, **__: SimpleNamespace(key="", digest="", accel="", why="", issuer_ends=1)
        )
    monkeypatch.setattr(live, "boot", lambda *_, **__: fail())
    with pytest.raises(Refused, match="is postmigrate: it cannot move live"):
        live.move_live(make_cluster(tmp_path), pair.source, pair.target, Holder("source", 3))
    assert (pair.status(pair.source), pair.status(pair.target)) == ("postmigrate", "running")
    end_it(pair.source, pair.where)
    with pytest.raises(Refused, match="is ended: it cannot"):
        live.move_live(make_cluster(tmp_path), pair.source, pair.target, Holder("source", 3))


@pytest.mark.parametrize("committed", [True, False])
def test_a_start_continues_what_was_left_paused(
    pair: Pair, committed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sms was killed at the switch, before or after the record was written: it says which host continues."""
    handover = (Interrupted if committed else Unwritable)(pair.source, pair.target, pair.where, HOLDER, time)
    with pytest.raises(BaseException, match=None if committed else "no space"):
        move_memory(pair.source, pair.target, pair.where, Steps(), handover)
    assert (pair.status(pair.source), pair.status(pair.target)) == ("postmigrate", "paused")
    cluster = view_pair(pair, tmp_path, monkeypatch)
    chosen, other = (pair.target, pair.source) if committed else (pair.source, pair.target)
    with pytest.raises(Refused, match=f"its disks are on {chosen.name}"):
        continue_paused(cluster, other)
    continue_paused(cluster, chosen)
    assert pair.counts_on(chosen) and find_machine(other, str(pair.where.pid), "t-live") is None
    continue_paused(cluster, chosen)


@pytest.mark.parametrize("moved", [True, False])
def test_a_start_ends_what_was_left_beside_the_running_machine(
    pair: Pair, moved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sms was killed after the switch, or before the transfer; the record says which machine is the VM."""
    if moved:
        move_memory(pair.source, pair.target, pair.where, Steps(), pair.handover())
    cluster = view_pair(pair, tmp_path, monkeypatch)
    runs, left = (pair.target, pair.source) if moved else (pair.source, pair.target)
    with pytest.raises(Refused):
        continue_paused(cluster, left)
    assert find_machine(left, str(pair.where.pid), "t-live")
    continue_paused(cluster, runs)
    assert pair.counts_on(runs) and find_machine(left, str(pair.where.pid), "t-live") is None


def test_a_start_ends_nothing_beside_a_machine_without_the_disks(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record names the other host."""
    pair.handover().commit()
    continue_paused(view_pair(pair, tmp_path, monkeypatch), pair.source)
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
