"""Faults at every step of a migration: the lab that is watched, what can go wrong, a cell of the table.

Lines of the table go to the file ``SMS_MATRIX_OUT`` as they come.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import SmsError
from appliance.lab import Lab
from appliance.operations.lab.demo import wait_idle
from tests.real.clock import Clock, own_clock
from tests.real.conftest import Playground
from tests.real.labs import build_image, fresh_lab
from tests.real.moves import (
    CARRIERS,
    CONTROLLER,
    MARK,
    OUTSIDE,
    OVERLAY,
    Hosts,
    Prober,
    ShortJobs,
    Stepping,
    Watch,
    other,
    ssh_cut,
)
from tests.real.power import power_off, power_on
from tests.real.processes import below
from tests.waiting import soon, wait_until

NODES = 2
SAVED_S = 15
"""slurmctld writes its state down every few seconds."""
RECORDED = "it has now been recorded"
WRITTEN = "/var/lib/.written"
"""A file in the overlay."""
EARLY = ("inspect_hosts", "copy_file", "trust", "offer", "build", "send", "round", "verify", "hand")
"""Steps after which nothing has been stopped."""
NOTICED_S = 45
"""Seconds until a command ends whose target has lost its power: about 20 on an idle machine. TCP takes a minute."""
SETTLE_S = 150
"""Both ends know what to do by themselves long before."""


@dataclass
class Row:
    """One cell of the table, as it came out."""

    fault: str
    step: str
    serves: str
    away_s: tuple[float, float]
    status: int | None
    history: str
    again: str

    @property
    def line(self) -> str:
        """Of a table in Markdown."""
        away = ", ".join(f"{seconds:.1f}" for seconds in self.away_s)
        words = (self.fault, self.step, self.serves, away, str(self.status), self.history, self.again)
        return f"| {' | '.join(words)} |"


HEAD = """
| fault | step | serves | slurmctld, NAT away (s) | status | the histories | run again |
|---|---|---|---|---|---|---|"""


@dataclass
class World:
    """The lab, and all that watches it. ``shared``: both hosts use one overlay."""

    hosts: Hosts
    watch: Watch
    jobs: ShortJobs
    probers: tuple[Prober, Prober]
    shared: bool = False
    rows: list[Row] = field(default_factory=list)
    power_lost: bool = False
    own_disks: set[str] = field(default_factory=set)
    """Hosts whose journal is a file system of its own for now."""

    @property
    def lab(self) -> Lab:
        return self.hosts.lab

    def where(self) -> str:
        """The one host that serves.

        Raises:
            AssertionError: none does, or two do, or the one not on both networks.
        """
        serving = self.watch.serving()
        assert list(serving.values()) == [["br-prov", "br-pub"]], serving
        return next(iter(serving))

    def answers(self) -> bool:
        """Whether a node's question is answered."""
        node = self.hosts.host("node1")
        return "is UP" in node.run("timeout", "3", "scontrol", "ping", ok=None).text

    def make_whole(self) -> str:
        """The services container serves on one host, both hosts are alive; where."""
        for host in CARRIERS:
            if not Path(f"/proc/{self.lab.host(host).pid}").exists():
                power_on(self.lab, host)
        with suppress(AssertionError, SmsError):
            if self.answers() and not any(self.marked(host) for host in CARRIERS):
                return self.where()
        served = next(iter(self.watch.serving()), "host-a")
        for host in CARRIERS:
            self.hosts.sms("-q", "stop", on=host, ok=None)
            for name in () if self.shared else ("incoming", "partial", "moved"):
                self.hosts.host(host).remove(f"{OVERLAY}.{name}")
            self.hosts.host(host).remove(MARK)
        self.hosts.sms("-q", "start", "--host", served, on="admin")
        return served

    def marked(self, host: str) -> bool:
        """Whether a move is under way there, or was when it was killed."""
        if host in self.own_disks:  # which this machine does not see
            return self.hosts.host(host).works("test", "-e", MARK)
        return (self.hosts.disk(host) / "journal" / "lab.move").exists()

    def at_work(self, host: str) -> bool:
        """Whether an agent runs there; one of a shared overlay is ended with its command, and leaves its mark."""
        return self.hosts.host(host).works("sh", "-c", "ps -eo args | grep -q '[a]gent-'")

    def settle(self, serving: set[str], hosts: tuple[str, ...] = CARRIERS) -> str:
        """Wait until the ends on these hosts have made up their minds; who serves then, or "none"."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            marked, found = [host for host in hosts if self.marked(host)], self.watch.serving()
            if not found and "none" in serving and not any(self.at_work(host) for host in marked):
                return "none"
            if not marked and list(found.values()) == [["br-prov", "br-pub"]] and self.answers():
                return next(iter(found))
            time.sleep(0.1)
        marks = {host: self.marked(host) for host in hosts}
        events = {host: [line["event"] for line in self.hosts.history(host)[-8:]] for host in hosts}
        script = "losetup --list; ps -eo pid,etimes,args | grep [a]gent-"
        busy = self.hosts.host(hosts[0]).run("sh", "-c", script, ok=None)
        pytest.fail(f"not settled in {SETTLE_S} s: {self.watch.serving()}, {marks=}, {events=}\n{busy.text}")


@contextmanager
def watched_world(name: str, directory: str = "") -> Iterator[World]:
    """A lab of two nodes whose services container is probed all the time; ``directory``: of a shared overlay."""
    with ExitStack() as stack:
        hosts = Hosts(stack.enter_context(fresh_lab(name, NODES)))
        if directory:
            hosts.variant("sms.yaml", lambda document: document.setdefault("overlay", {}).update(directory=directory))
        build_image(hosts.lab)
        hosts.sms("-q", "start", "--host", "host-a", on="admin")
        wait_idle(hosts.host("node1"), NODES)
        # The image is brought once, before all.
        hosts.sms("-q", "migrate", "host-b", on="admin")
        probers = (Prober(hosts.lab, "node1", CONTROLLER), Prober(hosts.lab, "node2", OUTSIDE))
        for prober in probers:
            stack.callback(prober.end)
        watch = stack.enter_context(Watch(hosts.lab))
        yield World(hosts, watch, stack.enter_context(ShortJobs(hosts.lab)), probers, bool(directory))


def show(request: pytest.FixtureRequest, rows: list[Row]) -> None:
    """The table, for people; markdown, so that it can be kept."""
    lines = [HEAD, *(row.line for row in rows)]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n".join(lines))


@dataclass
class Scene:
    """One move with a fault in it."""

    world: World
    source: str
    target: str
    run: Stepping
    stack: ExitStack
    clocks: dict[str, Clock]
    gone: list[str] = field(default_factory=list)

    @property
    def hosts(self) -> Hosts:
        return self.world.hosts


Fault = Callable[[Scene], None]


def kill(scene: Scene) -> None:
    """SIGKILL of the command."""
    scene.run.kill()


def kill_all(scene: Scene) -> None:
    """SIGKILL of the command with all that it has begun on its host, the agent there included."""
    for pid in reversed(below(scene.run.process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def interrupt(scene: Scene) -> None:
    """Ctrl-C of the person who called it."""
    scene.run.interrupt()


def cut(scene: Scene) -> None:
    """Both lines are dropped, not closed, until both ends have settled."""
    scene.stack.enter_context(ssh_cut(scene.world.lab, *CARRIERS))


def cut_source(scene: Scene) -> None:
    """The line to the source."""
    scene.stack.enter_context(ssh_cut(scene.world.lab, scene.source))


def cut_target(scene: Scene) -> None:
    """The line to the target."""
    scene.stack.enter_context(ssh_cut(scene.world.lab, scene.target))


def target_gone(scene: Scene) -> None:
    """The target's power fails."""
    power_off(scene.world.lab, scene.target)
    scene.gone.append(scene.target)


def source_gone(scene: Scene) -> None:
    """The source's power fails."""
    power_off(scene.world.lab, scene.source)
    scene.gone.append(scene.source)


FILL = """\
cd /var/lib/sms/overlays
head -c 999M /dev/zero >fill 2>/dev/null
head -c 1M /dev/zero >>fill.rest 2>/dev/null
:
"""


def disk_full(scene: Scene) -> None:
    """Not a byte more goes into the target's folder of overlays."""
    scene.hosts.host(scene.target).run("sh", "-c", FILL)
    scene.stack.callback(scene.hosts.host(scene.target).run, "sh", "-c", "rm -f /var/lib/sms/overlays/fill*", ok=None)


FILL_INODES = """\
cd /var/lib/sms/overlays
number=0
while touch fill.$number; do number=$((number + 1)); done 2>/dev/null
:
"""


def inodes_full(scene: Scene) -> None:
    """Not a file more fits into the target's folder of overlays."""
    scene.stack.callback(scene.hosts.host(scene.target).run, "sh", "-c", "rm -f /var/lib/sms/overlays/fill*", ok=None)
    scene.hosts.host(scene.target).run("sh", "-c", FILL_INODES)


def small_disk(world: World, target: str, stack: ExitStack) -> None:
    """The target's folder of overlays is a small file system of its own for now."""
    script = """
    set -e
    mkdir -m 0700 /run/small; truncate -s 256M /run/small.img
    mke2fs -q -t ext4 -O ^has_journal -m 0 -N 128 /run/small.img
    mount -o loop /run/small.img /run/small
    rmdir /run/small/lost+found
    rm -f /var/lib/sms/overlays/lab.img*
    cp -a /var/lib/sms/overlays/. /run/small/
    mount --bind /run/small /var/lib/sms/overlays
    """
    world.hosts.host(target).run("sh", "-c", script)
    back = """
    umount /var/lib/sms/overlays && cp -a /run/small/. /var/lib/sms/overlays/ && umount /run/small
    rm -rf /run/small.img; rmdir /run/small
    """

    def away() -> None:
        if Path(f"/proc/{world.lab.host(target).pid}").exists():
            if world.watch.serving().get(target):
                world.hosts.sms("-q", "migrate", "--force", other(target), on="admin")
            world.hosts.host(target).run("sh", "-c", back)

    stack.callback(away)


def read_only_target(scene: Scene) -> None:
    """What the target records takes no more writes."""
    make_read_only(scene.hosts, scene.target, JOURNAL, scene.stack)


def read_only_source(scene: Scene) -> None:
    """The same on the source."""
    make_read_only(scene.hosts, scene.source, JOURNAL, scene.stack)


def make_read_only(hosts: Playground, host: str, folder: str, stack: ExitStack) -> None:
    """A file system that ``own_disk`` has made takes no writes until the end of the stack."""
    # Refused while somebody writes a file there.
    soon(lambda: hosts.host(host).works("mount", "-o", "remount,ro", folder), f"{folder} can be made read-only")
    stack.callback(hosts.host(host).run, "mount", "-o", "remount,rw", folder, ok=None)
    assert not hosts.host(host).works("touch", f"{folder}/x")


def own_disk(hosts: Playground, host: str, folder: str, stack: ExitStack, *, size_mb: int = 16) -> None:
    """A host's folder is a file system of its own, with what is there; what was opened there before stays as it is."""
    script = """
    set -e
    own=/run/own-disk; mkdir -m 0700 "$own"; truncate -s "$2M" "$own.img"
    mke2fs -q -t ext4 -m 0 "$own.img"; mount -o loop "$own.img" "$own"; rmdir "$own/lost+found"
    mkdir -p "$1"; cp -a "$1/." "$own/"; mount --bind "$own" "$1"
    """
    back = """
    own=/run/own-disk
    umount -l "$1"; cp -a "$own/." "$1/"; umount -l "$own"; rm -f "$own.img"; rmdir "$own"
    """
    hosts.host(host).run("sh", "-c", script, "own-disk", folder, str(size_mb))
    stack.callback(hosts.host(host).run, "sh", "-c", back, "own-disk", folder)


JOURNAL = "/var/lib/sms/journal"

FLIP = """\
import os, sys
path, at = sys.argv[1], int(sys.argv[2])
with open(path, "r+b") as stream:
    if at < 0:
        at = os.lseek(stream.fileno(), 1 << 16, os.SEEK_DATA) + 1080
    stream.seek(at)
    byte = stream.read(1)
    stream.seek(at)
    stream.write(bytes([byte[0] ^ 1]))
"""


def tampered_image(scene: Scene) -> None:
    """One bit of the image's copy on the target is another."""
    host = scene.hosts.host(scene.target)
    path = host.run("sh", "-c", "ls -S /var/lib/sms/images/*.sif | head -n 1").text
    size = int(host.run("stat", "-c", "%s", path).text)
    host.run("python3", "-c", FLIP, path, str(size // 2))


def damaged_copy(scene: Scene) -> None:
    """One bit of the overlay's copy on the target is another."""
    scene.hosts.host(scene.target).run("python3", "-c", FLIP, OVERLAY + ".incoming", "-1")


def service_down(name: str) -> Fault:
    """A service that does not come up on the target."""

    def work(scene: Scene) -> None:
        host = scene.hosts.host(scene.target)
        pid = host.run("sh", "-c", "apptainer instance list --json | grep -o '\"pid\": [0-9]*' | grep -o '[0-9]*'").text
        supervisorctl = ("nsenter", "-t", pid, "-a", "supervisorctl", "-c", "/etc/sms/supervisord.conf")
        deadline = time.monotonic() + 60
        while "RUNNING" not in (said := host.run(*supervisorctl, "status", name, ok=None).text):
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
        host.run(*supervisorctl, "stop", name)

    return work


def no_bridge(scene: Scene) -> None:
    """The bridge of the provisioning network is not there any more."""
    host = scene.hosts.host(scene.target)
    host.run("sh", "-c", "ip link set br-prov down && ip link set br-prov name br-away")
    scene.stack.callback(host.run, "sh", "-c", "ip link set br-away name br-prov && ip link set br-prov up")


HOUR_S, DAY_S = 3600, 86400


def clock_off(scene: Scene) -> None:
    """The target's clock jumps ten minutes ahead."""
    scene.clocks[scene.target].jump(600)


def clocks_apart(scene: Scene) -> None:
    """The target's clock jumps an hour ahead, the source's an hour back; that of the command's host, a day ahead."""
    jump_all(scene, target=HOUR_S, source=-HOUR_S, admin=DAY_S)


def clocks_apart_again(scene: Scene) -> None:
    """The other way round."""
    jump_all(scene, target=-HOUR_S, source=HOUR_S, admin=-DAY_S)


def jump_all(scene: Scene, **ahead_s: int) -> None:
    for host, ahead in zip((scene.target, scene.source, "admin"), ahead_s.values(), strict=True):
        scene.clocks[host].jump(ahead)


@dataclass(frozen=True)
class Cell:
    """What is done when, and who may serve then, without anybody's doing: ``source``, ``target`` or ``none``."""

    fault: str
    do: Fault
    step: str
    serves: frozenset[str]
    sample: bool = False
    small: bool = False
    clocks: bool = False
    wait_s: float = 60.0
    noticed_s: float = NOTICED_S
    journal: str = ""
    """Whose journal is a file system of its own: the source's or the target's."""
    here: bool = False
    """Whether it is called on the source, not from the admin's machine."""

    @property
    def at(self) -> str:
        """The step as the command names it; a mark before it: before or after it."""
        mark, name = (self.step[0], self.step[1:]) if self.step[0] in "<>" else (">", self.step)
        return f"{mark}probe 2" if name == "check" else f"{mark}{name}"

    @property
    def early(self) -> bool:
        """Whether no end has anything to settle yet, because nothing was stopped."""
        return self.step.lstrip("<>") in EARLY


def as_parameters(cells: Iterable[Cell]) -> list[Any]:
    """Every cell, for ``parametrize``; all but the sample are for full runs."""
    return [
        pytest.param(
            cell, id=f"{cell.fault} at {cell.step}".replace(" ", "_"), marks=() if cell.sample else pytest.mark.full
        )
        for cell in cells
    ]


def run_cell(world: World, cell: Cell) -> None:
    """Do it, and check all that holds whatever the fault is."""
    source = world.make_whole()
    target = other(source)
    before = {host: len(world.hosts.history(host)) for host in CARRIERS}
    world.watch.twice.clear()
    since = time.time()
    with ExitStack() as around, ExitStack() as healing:
        if cell.small:
            small_disk(world, target, around)
        if cell.journal:
            host = {"source": source, "target": target}[cell.journal]
            own_disk(world.hosts, host, JOURNAL, around)
            world.own_disks = {host}
            around.callback(world.own_disks.clear)
        hosts = (*CARRIERS, "admin") if cell.clocks else ()
        clocks = {host: around.enter_context(own_clock(world.lab, host)) for host in hosts}
        run = Stepping(world.lab, "migrate", target, on=source if cell.here else "admin", wait_s=cell.wait_s)
        around.callback(run.kill)
        assert run.to(cell.at), run.end(60)
        scene = Scene(world, source, target, run, healing, clocks)
        for clock in clocks.values():
            healing.callback(clock.jump, 0)
        cell.do(scene)
        began = time.time()
        run.let_go()
        living = tuple(host for host in CARRIERS if host not in scene.gone)
        expected = {{"source": source, "target": target}.get(name, name) for name in cell.serves}
        # A cut that ends at once would be no fault.
        if not scene.gone and (cell.early or "cut" not in cell.fault.lower()):
            run.end(200)
        if cell.journal:
            # What cannot be removed stays until the disk takes writes again: the next verb ends it.
            assert world.answers() and world.where() in expected, cell
            hint = run.end(200).stderr.decode()
            assert run.process.returncode in (0, 4) or "findmnt" in hint, hint
            healing.close()
            for host in CARRIERS:
                world.hosts.sms("-q", "start", "--boot", on=host, ok=None)
        found = world.settle(expected, living)
        settled = time.time()
        healing.close()
        ended = run.end(200)
        took = time.time() - began
        row = Row(
            cell.fault,
            cell.step,
            {source: "source", target: "target"}.get(found, found),
            tuple(prober.away_s(began - 3, settled) for prober in world.probers),  # type: ignore[arg-type]
            ended.status,
            tell_history(world, source, target, before),
            "",
        )
        world.rows.append(row)
        world.power_lost |= bool(scene.gone)
        said = ended.stderr.decode(errors="replace")[-1500:]
        check_message(said, ended.status, served=found, target=target)
        assert found in expected, (found, said)
        assert cell.do is not target_gone or took < cell.noticed_s, (took, said)
        for host in scene.gone:
            power_on(world.lab, host)
        restarted = cell.small and found != "none" and restart_unwritable(world, found)
        # Who interrupts it politely leaves nothing to a later run: the host that serves is guarded.
        interrupted = cell.do is interrupt and ended.status != 0
        assert not interrupted or world.hosts.status(found)["guarded"], said
        recorded = interrupted or (ended.status == 0 and not cell.journal)
        row.again = run_again(world, found, source, target, recorded=recorded)
    if out := os.environ.get("SMS_MATRIX_OUT"):
        with Path(out).open("a") as stream:
            stream.write(f"{row.line}\n")
    assert world.watch.twice == []
    assert world.jobs.given_twice == []
    # What a controller had not saved when its host's power failed, or could not save, is unknown.
    unsaved = (began - SAVED_S, time.time() if restarted else began) if restarted or found == "none" else (0.0, 0.0)
    lost = world.jobs.not_completed(since - 1, forgiven=unsaved)
    assert not lost, (lost, world.jobs.states())
    assert world.power_lost or restarted or not world.jobs.resumed
    check_overlays(world, moved=row.again == "moved")


def check_message(said: str, status: int | None, *, served: str, target: str) -> None:
    """A command that fails says who serves, in its own words."""
    for inner in ('{"', ".pyz", "nsenter", "too early"):
        assert inner not in said, said
    if status not in (0, 3, -signal.SIGKILL):
        assert f"serves on {served}" in said or "be reached" in said, said
        assert (status == 4) <= (served in (target, "none")), said
    assert said.count("chunk ") <= 1, said


def tell_history(world: World, source: str, target: str, before: dict[str, int]) -> str:
    """What the hosts have written down since, in short."""
    reported = []
    for name, host in (("source", source), ("target", target)):
        events = [line["event"] for line in world.hosts.history(host)[before[host] :]]
        reported.append(f"{name}: {', '.join(events) or '-'}")
    return "; ".join(reported)


def restart_unwritable(world: World, host: str) -> bool:
    """A disk that is full below the overlay may stop writes for good; status says so, a stop and a start repair it."""
    # Flushed: until then, the kernel has not met the full disk.
    write = f"echo x >{WRITTEN} && sync {WRITTEN}"
    if not world.hosts.sms("-q", "exec", "--", "sh", "-c", write, on=host, ok=None).status:
        return False
    assert any("cannot be written" in line for line in world.hosts.status(host)["warnings"])
    world.hosts.sms("-q", "stop", on=host)
    world.hosts.sms("-q", "start", on=host)
    return True


def run_again(world: World, found: str, source: str, target: str, *, recorded: bool) -> str:
    """The command once more, after all is repaired: it ends with the services container on the target."""
    if found == "none":
        # A host that was switched off starts what it has held, as its unit does.
        for host in CARRIERS:
            world.hosts.sms("-q", "start", "--boot", on=host, ok=None)
        found = world.settle(set(CARRIERS))
    done = world.hosts.sms("-q", "migrate", "--force", target, on="admin", ok=(0, 3))
    words = (done.stdout + done.stderr).decode()
    if found == target and not recorded and RECORDED in words:
        assert done.status == 0, words  # it had not got so far as to write down that it runs there
    else:
        assert (done.status == 3) == (found == target), words
    assert world.settle({target}) == target
    status: dict[str, Any] = {}

    def healthy() -> bool:  # after the power of a host has failed, nodes have to register again
        status.update(world.hosts.status(target))
        return bool(status["healthy"])

    with suppress(SmsError):
        wait_until(healthy, timeout_s=30)
    assert status["healthy"], (status["warnings"], status["services"], status["nodes"])
    return "was done" if found == target else "moved"


def check_overlays(world: World, *, moved: bool) -> None:
    """What served when the fault was over is clean: left behind by the move away from there, or by a snapshot."""
    host = world.where()
    if not moved or world.shared:
        world.hosts.sms("-q", "overlay", "snapshot", on=host)
    script = '[ ! -e "$1" ] || e2fsck -fn "$1"'
    done = world.hosts.host(other(host)).run("sh", "-c", script, "check", OVERLAY + ".moved", ok=None)
    assert done.status == 0, done.text
