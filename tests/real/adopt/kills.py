"""Faults at the steps of an adoption and of its undo: what happens, who serves at each moment, and what is left."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from appliance.host.base import Result
from appliance.host.netns import Netns
from appliance.operations.lab.demo import as_alice, wait_idle
from tests.real.conftest import Playground
from tests.real.labs import cables_out
from tests.real.moves import BRIDGES, CARRIERS, Stepping, Watch, ssh_cut
from tests.real.power import power_off, power_on
from tests.waiting import wait_until

OLD, TARGET, NODES = "sms-old", "host-a", 2
MOVED = {"br-prov": "10.77.0.1", "br-pub": "10.78.0.2"}
"""What moves, by the bridge of an admin host to which the container that has it is attached."""
UNIT = "sys/fs/cgroup/system.slice/slurmctld.service/cgroup.events"
ADOPT = (OLD, "--to", TARGET, "--capture", "0")
LATE_S = 3.0
"""Longer than the target may take the addresses after it was armed (agent/migration_target.py, ARMED_S)."""
ENDS_S = 240.0
"""Seconds until a command ends whose host is silent."""
ADDRESSES = 'ip -o -4 address; for pid; do nsenter -t "$pid" -n ip -o -4 address || :; done'


class OneServes(Watch):
    """Looks all the time whether sms-old has what an instance on an admin host has: an address, or the controller."""

    def runs_controller(self) -> bool:
        """Whether a process of slurmctld's unit is there on sms-old."""
        with suppress(OSError):
            return "populated 1" in Path(f"/proc/{self.lab.host(OLD).pid}/root/{UNIT}").read_text()
        return False

    def on_old(self) -> set[str]:
        """The bridges whose address sms-old has."""
        table = Path(f"/proc/{self.lab.host(OLD).pid}/net/fib_trie").read_text()
        return {bridge for bridge, address in MOVED.items() if f"-- {address}\n" in table}

    def both(self) -> set[str]:
        """The bridges whose address, or the controller, sms-old has, and an instance as well; or two instances."""
        there, here = self.serving(), self.on_old()
        if self.runs_controller():
            here.add("br-prov")
        both = here.intersection(*there.values()) if len(there) == 1 else set(there)
        return both if self.serving() == there else set()  # it has moved between the two looks

    def work(self) -> None:
        while not self._ended.wait(0.01):
            there = self.serving()
            if both := self.both():
                self.twice.append(f"{time.time():.3f}: {', '.join(sorted(both))}: {OLD} and {', '.join(there)}")
            self.looked += 1


@dataclass(frozen=True)
class Cell:
    """What happens at which step, and who may serve afterwards, without anybody's doing.

    ``serves``: names of hosts; none, if somebody has to start it. ``undo``: `sms adopt --undo` is run before it is
    adopted again, which is refused where sms-old serves. ``on``: where the command runs.
    """

    fault: str
    step: str
    serves: tuple[str, ...]
    sample: bool = False
    undo: bool = False
    on: str = "admin"

    @property
    def name(self) -> str:
        """As words of ``pytest -k``."""
        when = {"<": "before", ">": "after"}[self.step[0]]
        where = f" on {self.on}" * (self.on != "admin")
        return f"{self.fault} {when} {self.step[1:]}{where}".replace(",", "").replace(" ", "_")


@dataclass(frozen=True)
class Scene:
    """A lab with a legacy node, and what watches it."""

    play: Playground
    watch: OneServes

    @property
    def node(self) -> Netns:
        return self.play.host("node1")

    def serving(self) -> list[str]:
        """Who has both addresses and runs the controller: one, always but for a moment."""
        found = [host for host, held in self.watch.serving().items() if held == list(BRIDGES)]
        return found + [OLD] * (self.watch.on_old() == set(MOVED) and self.watch.runs_controller())

    def wait_served(self) -> str:
        """Return who serves, once one does and a node reaches it; each address is on that host only."""
        wait_until(lambda: len(self.serving()) == 1, "one of both serves", 60, 0.5)
        wait_until(lambda: self.node.works("scontrol", "ping"), "the controller answers", 60, 0.5)
        served = self.serving()[0]
        # An instance that is detached has them still, until its agent has ended it.
        wait_until(lambda: self.holders() == {one: [served] for one in MOVED.values()}, "nobody else has them", 60, 0.5)
        return served

    def holders(self) -> dict[str, list[str]]:
        """The hosts that have each address, themselves or in an instance."""
        found: dict[str, list[str]] = {address: [] for address in MOVED.values()}
        for name in (OLD, *CARRIERS):
            host, pids = self.play.host(name), []
            if name != OLD:
                listed = json.loads(host.run("apptainer", "instance", "list", "--json").stdout)
                pids = [str(one["pid"]) for one in listed["instances"] or []]
            shown = host.run("sh", "-c", ADDRESSES, "addresses", *pids).text
            for address, hosts in found.items():
                hosts += [name] * shown.count(f" {address}/")
        return found

    def adopt(self, *words: str, ok: tuple[int, ...] = (0,)) -> Result:
        """`sms adopt` of sms-old, or with other words."""
        return self.play.sms("adopt", *(words or ADOPT), on="admin", ok=ok, timeout=300)

    def begin(self, served: str) -> str:
        """Make ``served`` serve, whatever was before, and start a job; return its number."""
        if self.serving() != [served]:
            self.adopt(*(("--undo",) if served == OLD else ()))
        assert self.wait_served() == served
        self.node.run("scancel", "--user=alice")  # that of a cell that has failed
        wait_idle(self.node, NODES)
        return as_alice(self.node, "sbatch", "--parsable", "--output=/dev/null", "--wrap=sleep 1200")

    def check(self, served: str, job: str) -> None:
        """This host serves, and no other has; the same job runs."""
        assert self.wait_served() == served
        wait_until(lambda: job_of(self.node, job) == "RUNNING", "the job runs", 60)
        assert self.watch.twice == [] and self.watch.looked

    def strike(self, fault: str, run: Stepping) -> Result:
        """Let the fault happen until the command has ended, then repair it; how it ended."""
        if fault == "kill":
            run.kill()
            return run.end(10)
        if fault == "late":
            time.sleep(LATE_S)
        with _lasting(self.play, fault):
            run.let_go()
            ended = run.end(ENDS_S)
            if fault.startswith("network"):
                wait_until(lambda: not self.watch.both(), "it is isolated before it is plugged in", 30)
                self.watch.twice.clear()  # unplugged, it had what nobody could reach
        print(fault, ended.status, ended.stderr.decode(errors="replace")[-1500:])
        return ended


@contextmanager
def _lasting(play: Playground, fault: str) -> Iterator[None]:
    """A fault, and its repair."""
    lab = play.lab
    if fault == "network":
        with cables_out(lab, OLD):
            yield
    elif fault == "network of the target":
        with cables_out(lab, TARGET):
            yield
    elif fault.startswith("ssh"):
        with ssh_cut(lab, OLD if fault.endswith("old") else TARGET):
            yield
    elif fault.startswith("power"):
        power_off(lab, TARGET)
        try:
            yield
        finally:
            power_on(lab, TARGET)
        if fault == "power":  # it has a unit, of an earlier adoption
            play.sms("-q", "start", "--boot", on=TARGET, ok=None)
    else:
        yield


def job_of(node: Netns, job: str) -> str:
    """State of a job, as the controller knows it."""
    shown = node.run("scontrol", "-o", "show", "job", job, ok=None).text
    return next((word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")), "")


@contextmanager
def scene_of(play: Playground) -> Iterator[Scene]:
    """Watched for as long as the context lasts."""
    with OneServes(play.lab) as watch:
        yield Scene(play, watch)


def run_adoption(play: Playground, cell: Cell) -> None:
    """The fault at a step of an adoption: one serves, as the command reports; the next run goes on."""
    with scene_of(play) as scene:
        if cell.on == TARGET:
            scene.begin(TARGET)  # it gets the image
        job = scene.begin(OLD)
        served = _strike_at(scene, cell, job, "adopt", *ADOPT, says={0: TARGET, 4: TARGET, 5: OLD})
        if cell.undo:
            scene.adopt("--undo", ok=(3,))  # sms-old serves, or the services container has to be started
        # Refused if the command itself has completed it.
        scene.adopt(ok=(0, 3) if served == TARGET else (0,))
        scene.check(TARGET, job)
        scene.node.run("scancel", job)


def run_undo(play: Playground, cell: Cell) -> None:
    """The fault at a step of an undo: one serves, as the command reports; the next run goes on."""
    with scene_of(play) as scene:
        job = scene.begin(TARGET)
        served = _strike_at(scene, cell, job, "adopt", "--undo", says={0: OLD, 4: OLD, 5: TARGET})
        scene.adopt("--undo", ok=(0,) if served == TARGET else (3,))
        scene.check(OLD, job)
        scene.node.run("scancel", job)


def _strike_at(scene: Scene, cell: Cell, job: str, *words: str, says: dict[int, str]) -> str:
    """Run `sms` as far as the step of the cell, and let the fault happen; return who serves then, or none."""
    run = Stepping(scene.play.lab, "-q", *words, on=cell.on, options=())
    assert run.to(cell.step), run.end(10).stderr.decode()
    ended = scene.strike(cell.fault, run)
    if cell.serves == ("none",):
        assert scene.serving() == []
        served = "none"
    else:
        served = scene.wait_served()
        scene.check(served, job)
    print(cell.step, cell.fault, served)
    assert served in cell.serves
    assert served in ("none", says.get(ended.status or 0, served)) or cell.fault == "kill", ended.stderr
    return served
