"""Every fault at every step of a move: one host serves afterwards, no job is lost, the next run finishes or undoes it.

A sample runs always; all cells, or those of some faults, with their table:

    SMS_MATRIX_OUT=table.md tests/machine .venv/bin/python -m pytest tests/real/migration/test_migrate_faults.py
    tests/machine .venv/bin/python -m pytest tests/real/migration/test_migrate_faults.py -s -k "SIGKILL or cut"

Lines of the table go to the file ``SMS_MATRIX_OUT`` as they come.

Time has no namespace, so the clock that is off is a `date` which says so.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from appliance.errors import SmsError
from appliance.lab import Lab
from appliance.operations.lab.demo import wait_idle
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

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NAME = "t-faults"
NODES = 2
STEPS = (
    "offer build send round verify stop place start probe arm release up check given tails commit finish".split()  # noqa: SIM905
)
"""Words that the ends of a move get, in their order; ``check`` is the second ``probe``."""
SAVED_S = 15
"""slurmctld writes its state down every few seconds."""
RECORDED = "it has now been recorded"
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
    """The lab, and all that watches it."""

    hosts: Hosts
    watch: Watch
    jobs: ShortJobs
    probers: tuple[Prober, Prober]
    rows: list[Row] = field(default_factory=list)
    power_lost: bool = False

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
            for name in ("incoming", "partial", "moved"):
                self.hosts.host(host).remove(f"{OVERLAY}.{name}")
            self.hosts.host(host).remove(MARK)
        self.hosts.sms("-q", "start", "--host", served, on="admin")
        return served

    def marked(self, host: str) -> bool:
        """Whether a move is under way there, or was when it was killed."""
        return (self.hosts.disk(host) / "journal" / "lab.move").exists()

    def settle(self, serving: set[str], hosts: tuple[str, ...] = CARRIERS) -> str:
        """Wait until the ends on these hosts have made up their minds; who serves then, or "none"."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            if not any(self.marked(host) for host in hosts):
                found = self.watch.serving()
                if not found and "none" in serving:
                    return "none"
                if list(found.values()) == [["br-prov", "br-pub"]] and self.answers():
                    return next(iter(found))
            time.sleep(0.1)
        marks = {host: self.marked(host) for host in hosts}
        events = {host: [line["event"] for line in self.hosts.history(host)[-8:]] for host in hosts}
        script = "losetup --list; ps -eo pid,etimes,args | grep [a]gent-"
        busy = self.hosts.host(hosts[0]).run("sh", "-c", script, ok=None)
        pytest.fail(f"not settled in {SETTLE_S} s: {self.watch.serving()}, {marks=}, {events=}\n{busy.text}")


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A lab of two nodes whose services container is probed all the time."""
    with ExitStack() as stack:
        hosts = Hosts(stack.enter_context(fresh_lab(NAME, NODES)))
        build_image(hosts.lab)
        hosts.sms("-q", "start", "--host", "host-a", on="admin")
        wait_idle(hosts.host("node1"), NODES)
        # The image is brought once, before all.
        hosts.sms("-q", "migrate", "host-b", on="admin")
        probers = (Prober(hosts.lab, "node1", CONTROLLER), Prober(hosts.lab, "node2", OUTSIDE))
        for prober in probers:
            stack.callback(prober.end)
        watch = stack.enter_context(Watch(hosts.lab))
        made = World(hosts, watch, stack.enter_context(ShortJobs(hosts.lab)), probers)
        yield made
        show(request, made.rows)


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
    since: float
    gone: list[str] = field(default_factory=list)

    @property
    def hosts(self) -> Hosts:
        return self.world.hosts


Fault = Callable[[Scene], None]


def kill(scene: Scene) -> None:
    """SIGKILL of the command."""
    scene.run.kill()


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


def small_disk(world: World, target: str, stack: ExitStack) -> None:
    """The target's folder of overlays is a small file system of its own for now."""
    script = """
    set -e
    mkdir /run/small; mount -t tmpfs -o size=256m,mode=700 tmpfs /run/small
    rm -f /var/lib/sms/overlays/lab.img*
    cp -a /var/lib/sms/overlays/. /run/small/
    mount --bind /run/small /var/lib/sms/overlays
    """
    world.hosts.host(target).run("sh", "-c", script)
    back = """
    umount /var/lib/sms/overlays && cp -a /run/small/. /var/lib/sms/overlays/ && umount /run/small; rmdir /run/small
    """

    def away() -> None:
        if Path(f"/proc/{world.lab.host(target).pid}").exists():
            if world.watch.serving().get(target):
                world.hosts.sms("-q", "migrate", "--force", other(target), on="admin")
            world.hosts.host(target).run("sh", "-c", back)

    stack.callback(away)


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


DATE = '#!/bin/sh\n[ "$*" = +%s.%N ] || exec /bin/date "$@"\nexec /bin/date -d "+10 minutes" +%s.%N\n'


def clock_off(scene: Scene) -> None:
    """The target's clock is ten minutes ahead."""
    host = scene.hosts.host(scene.target)
    host.write("/usr/local/bin/date", DATE.encode(), mode=0o755)
    scene.stack.callback(host.remove, "/usr/local/bin/date")


@dataclass(frozen=True)
class Cell:
    """What is done when, and who may serve then, without anybody's doing: ``source``, ``target`` or ``none``."""

    fault: str
    do: Fault
    step: str
    serves: frozenset[str]
    sample: bool = False
    small: bool = False
    wait_s: float = 60.0

    @property
    def at(self) -> str:
        """The step as the command names it; a mark before it: before or after it."""
        mark, name = (self.step[0], self.step[1:]) if self.step[0] in "<>" else (">", self.step)
        return f"{mark}probe 2" if name == "check" else f"{mark}{name}"


def cells() -> Iterator[Cell]:
    """All of them."""
    up = STEPS.index("up")
    given = STEPS.index("given")
    source, target, either, none = (
        frozenset(names) for names in (("source",), ("target",), ("source", "target"), ("none",))
    )
    for number, step in enumerate(STEPS):
        # At the very word to go up both may come out; never both at once.
        mine = source if number < up else target if number > up else either
        for name, work, sample in (
            ("SIGKILL", kill, ("stop",)),
            ("SSH cut", cut, ("release",)),
        ):
            # With the network interrupted, a target that was requested to go up does; the command may not learn of it.
            yield Cell(name, work, step, mine, step in sample)
        # A target that has been handed the addresses and dies then has died after the move.
        yield Cell("target gone", target_gone, step, source if number < given else none, step == "send")
        # Not running on any other host yet: the host returns, or `sms failover` is needed.
        without = none if number < STEPS.index("stop") else target if step != "stop" else none | target
        yield Cell("source gone", source_gone, step, without, step == "release")
    for step in ("arm", "release", "up"):
        for name, work in (("SSH to the source cut", cut_source), ("SSH to the target cut", cut_target)):
            yield Cell(name, work, step, source if step != "up" else either)
    for step in ("<build", "build", "send", "round", "<stop", "stop", "place", "<start", "start"):
        yield Cell("disk full", disk_full, step, either, step == "<start", small=True, wait_s=15)
    yield Cell("tampered image", tampered_image, "<inspect_hosts", target)  # it is sent again
    yield Cell("tampered image", tampered_image, "<trust", source, True)
    for step in ("<round", "<verify"):
        yield Cell("damaged copy", damaged_copy, step, source, step == "<verify")
    for name in ("munge", "slurmctld", "rsyslog", "postfix"):
        yield Cell(f"{name} not up", service_down(name), "<probe", source, name == "munge", wait_s=6)
    for name in ("chrony", "slurmctld"):
        yield Cell(f"{name} not up", service_down(name), "<check", source, name == "chrony", wait_s=30)
    for step in ("<start", "<arm", "<up"):
        yield Cell("bridge missing", no_bridge, step, source, step == "<up")
    yield Cell("clock 10 min off", clock_off, "<inspect_hosts", source)
    yield Cell("clock 10 min off", clock_off, "<start", target)  # known to be right when it began


PARAMETERS = [
    pytest.param(
        cell, id=f"{cell.fault} at {cell.step}".replace(" ", "_"), marks=() if cell.sample else (pytest.mark.full,)
    )
    for cell in cells()
]
"""Every cell; all but the sample are for full runs."""


@pytest.mark.parametrize("cell", PARAMETERS)
def test_a_fault(world: World, cell: Cell) -> None:
    source = world.make_whole()
    target = other(source)
    before = {host: len(world.hosts.history(host)) for host in CARRIERS}
    world.watch.twice.clear()
    since = time.time()
    with ExitStack() as around, ExitStack() as healing:
        if cell.small:
            small_disk(world, target, around)
        run = Stepping(world.lab, "migrate", target, wait_s=cell.wait_s)
        around.callback(run.kill)
        assert run.to(cell.at), run.end(60)
        scene = Scene(world, source, target, run, healing, since)
        cell.do(scene)
        began = time.time()
        run.let_go()
        living = tuple(host for host in CARRIERS if host not in scene.gone)
        expected = {{"source": source, "target": target}.get(name, name) for name in cell.serves}
        # Before the service is stopped neither end has anything to settle: a cut that ends at once would be no fault.
        early = STEPS.index(cell.step.lstrip("<")) < STEPS.index("stop") if cell.step.lstrip("<") in STEPS else True
        if not scene.gone and (early or "cut" not in cell.fault.lower()):
            run.end(200)
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
        assert cell.do is not target_gone or took < NOTICED_S, (took, said)
        for host in scene.gone:
            power_on(world.lab, host)
        row.again = run_again(world, found, source, target, ended=ended.status == 0)
    if out := os.environ.get("SMS_MATRIX_OUT"):
        with Path(out).open("a") as stream:
            stream.write(f"{row.line}\n")
    assert world.watch.twice == []
    assert world.jobs.given_twice == []
    # What a controller had not saved when its host's power failed is unknown.
    unsaved = (began - SAVED_S, began) if found == "none" else (0.0, 0.0)
    assert world.jobs.not_completed(since - 1, forgiven=unsaved) == {}
    assert world.power_lost or not world.jobs.resumed
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


def run_again(world: World, found: str, source: str, target: str, *, ended: bool) -> str:
    """The command once more, after all is repaired: it ends with the services container on the target."""
    if found == "none":
        # A host that was switched off starts what it has held, as its unit does.
        for host in CARRIERS:
            world.hosts.sms("-q", "start", "--boot", on=host, ok=None)
        found = world.settle(set(CARRIERS))
    done = world.hosts.sms("-q", "migrate", "--force", target, on="admin", ok=(0, 3))
    words = (done.stdout + done.stderr).decode()
    if found == target and not ended and RECORDED in words:
        assert done.status == 0, words  # it had not got so far as to write down that it runs there
    else:
        assert (done.status == 3) == (found == target), words
    assert world.settle({target}) == target
    assert world.hosts.status(target)["healthy"]
    return "was done" if found == target else "moved"


def check_overlays(world: World, *, moved: bool) -> None:
    """What served when the fault was over is clean: left behind by the move away from there, or by a snapshot."""
    host = world.where()
    if not moved:
        world.hosts.sms("-q", "overlay", "snapshot", on=host)
    script = '[ ! -e "$1" ] || e2fsck -fn "$1"'
    done = world.hosts.host(other(host)).run("sh", "-c", script, "check", OVERLAY + ".moved", ok=None)
    assert done.status == 0, done.text
