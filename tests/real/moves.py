"""What tests of a move share: a lab whose hosts can die, who serves at each moment, a command that stops at a step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from appliance.errors import SmsError
from appliance.host.base import Result
from appliance.lab import Lab
from appliance.operations.lab.demo import as_alice
from tests.real.conftest import Playground
from tests.real.processes import kill_sms, sms_pids

CARRIERS = ("host-a", "host-b")
BRIDGES = {"br-prov": "prov0", "br-pub": "pub0"}
OVERLAY = "/var/lib/sms/overlays/lab.img"
HISTORY = "/var/lib/sms/journal/lab.history"
MARK = "/var/lib/sms/journal/lab.move"
CONTROLLER, OUTSIDE = ("10.77.0.1", 6817), ("10.78.0.254", 80)
PROBE_S = 0.1

PROBER = """\
import select, socket, sys, time
where, every = (sys.argv[1], int(sys.argv[2])), float(sys.argv[3])
while True:
    began = time.time()
    one = socket.socket()
    one.settimeout(0.15)
    try:
        one.connect(where)
        print("%.3f %.3f" % (began, time.time()), flush=True)
    except OSError:
        pass
    one.close()
    time.sleep(max(0, began + every - time.time()))
"""


def other(host: str) -> str:
    """The other admin host."""
    return CARRIERS[1 - CARRIERS.index(host)]


class Background:
    """Works in a thread of its own, until ``_ended`` is set at the end of the context."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self.work)

    def work(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


class Watch(Background):
    """Looks all the time which admin hosts have ports of an instance on their bridges."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.twice: list[str] = []
        self.looked = 0
        super().__init__()

    def serving(self) -> dict[str, list[str]]:
        """Bridges with an instance's port, by host; hosts without any are left out."""
        found = {}
        for host in CARRIERS:
            held = [bridge for bridge in BRIDGES if self._ports(host, bridge)]
            if held:
                found[host] = held
        return found

    def _ports(self, host: str, bridge: str) -> set[str]:
        folder = f"/proc/{self.lab.host(host).pid}/root/sys/class/net/{bridge}/brif"
        try:
            return {name for name in os.listdir(folder) if name.startswith("veth")}  # noqa: PTH208 - called often
        except OSError:
            return set()

    def work(self) -> None:
        while not self._ended.wait(0.004):
            found = self.serving()
            self.looked += 1
            for bridge in BRIDGES:
                if sum(bridge in held for held in found.values()) > 1:
                    self.twice.append(f"{time.time():.3f}: {bridge} on {', '.join(found)}")


class Prober:
    """Connects to an address from a node again and again; measures its outages."""

    def __init__(self, lab: Lab, node: str, where: tuple[str, int], every_s: float = PROBE_S) -> None:
        argv = ["nsenter", f"--net=/proc/{lab.host(node).pid}/ns/net", sys.executable, "-c", PROBER]
        self.process = subprocess.Popen([*argv, where[0], str(where[1]), str(every_s)], stdout=subprocess.PIPE)
        self.answers: list[tuple[float, float]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            began, ended = line.split()
            self.answers.append((float(began), float(ended)))

    def away_s(self, since: float, until: float) -> float:
        """The longest time without an answer."""
        inside = [one for one in self.answers if since <= one[0] <= until]
        ends = [since, *(end for _, end in inside)]
        begins = [*(begin for begin, _ in inside), until]
        return max(begin - end for end, begin in zip(ends, begins, strict=True))

    def end(self) -> None:
        """No more."""
        self.process.kill()
        self.process.wait()


class Stepping:
    """`sms migrate` from the admin's machine, stopped at every step until it may continue.

    Forced, as all moves whose subject is not the budget: after a slow one, on a busy machine, the next is refused.
    """

    def __init__(
        self, lab: Lab, *words: str, on: str = "admin", wait_s: float = 60.0, options: tuple[str, ...] = ("--force",)
    ) -> None:
        reported, telling = os.pipe()
        word, wording = os.pipe()
        argv = [*lab.host(on).prefix, sys.executable, str(Path(__file__).with_name("stepping.py"))]
        argv += [str(telling), str(word), str(wait_s), *words, *options]
        self.process = subprocess.Popen(
            argv,
            pass_fds=(telling, word),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        os.close(telling)
        os.close(word)
        self._told = os.fdopen(reported, "rb", buffering=0)
        self._word = wording
        self.steps: list[str] = []
        self._said: list[bytes] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        out, said = self.process.communicate()
        self._said += [out, said]

    def to(self, step: str) -> bool:
        """Let it continue as far as this step (`>stop`, `<probe`, `>probe 2` for the second); False: it never came."""
        name, _, times = step.partition(" ")
        while line := self._told.readline().decode().strip():
            self.steps.append(line)
            if line == name and self.steps.count(name) == int(times or 1):
                return True
            self.go()
        return False

    def go(self) -> None:
        """The next step."""
        with suppress(BrokenPipeError):
            os.write(self._word, b".")

    def free(self) -> None:
        """Let it continue to the end without waiting at steps."""
        self.go()
        while self._told.readline():
            self.go()

    def let_go(self) -> None:
        """As ``free``, beside this thread."""
        threading.Thread(target=self.free, daemon=True).start()

    def kill(self) -> None:
        """SIGKILL; nothing where it has ended."""
        if self.process.poll() is None:
            kill_sms(self.process.pid)

    def interrupt(self) -> None:
        """SIGINT, as Ctrl-C sends it."""
        for pid in sms_pids(self.process.pid):
            os.kill(pid, signal.SIGINT)

    def end(self, timeout: float) -> Result:
        """How it ended."""
        self._listener.join(timeout)
        assert not self._listener.is_alive(), f"it did not end within {timeout:g} s; {self.steps[-3:]}"
        if not self._told.closed:
            os.close(self._word)
            self._told.close()
        return Result("admin", ("migrate",), self.process.returncode, self._said[0], self._said[1])


@dataclass(frozen=True)
class Hosts(Playground):
    """A playground, with what a move leaves on its hosts."""

    def disk(self, host: str) -> Path:
        """What is /var/lib/sms there, as this machine has it."""
        return self.lab.layout.disk / host

    def history(self, host: str) -> list[dict[str, Any]]:
        """What happened on a host."""
        path = self.disk(host) / "journal" / "lab.history"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def files(self, host: str) -> dict[str, tuple[int, int]]:
        """All that lies there, with sizes and times of change."""
        root = self.disk(host)
        found = {}
        for path in root.rglob("*"):
            with suppress(FileNotFoundError):
                state = path.lstat()
                if path.is_file():
                    found[str(path.relative_to(root))] = (state.st_size, state.st_mtime_ns)
        return found


@contextmanager
def ssh_cut(lab: Lab, *hosts: str, reset: bool = False) -> Iterator[None]:
    """SSH to these hosts is dropped, both ways, without a word to anybody; or it is refused."""
    rules = (
        "table inet cut {\n"
        "chain in { type filter hook input priority -300; tcp dport 22 %s; }\n"
        "chain out { type filter hook output priority -300; tcp sport 22 %s; }\n"
        "}\n"
    ) % (("reject with tcp reset", "accept") if reset else ("drop", "drop"))
    for host in hosts:
        lab.host(host).run("nft", "-f", "-", input=rules.encode())
    try:
        yield
    finally:
        for host in hosts:
            lab.host(host).run("nft", "delete", "table", "inet", "cut", ok=None)


def read_jobs(text: str) -> list[dict[str, str]]:
    """The facts of each job that `scontrol -o show jobs` prints."""
    lines = [dict(word.partition("=")[::2] for word in line.split()) for line in text.splitlines()]
    return [reported for reported in lines if "JobId" in reported]


def job_states(text: str) -> dict[str, str]:
    """Job and state, of what `scontrol -o show jobs` prints."""
    return {reported["JobId"]: reported["JobState"] for reported in read_jobs(text)}


class ShortJobs(Background):
    """A stream of short jobs from a node; all of them are to complete, whatever happens."""

    EVERY_S = 3.0
    """Longer than Slurm takes to begin one: it looks every 3 s (batch_sched_delay)."""

    def __init__(self, lab: Lab, node: str = "node1", every_s: float = EVERY_S) -> None:
        self.node = lab.host(node)
        self.every_s = every_s
        self.submitted: dict[str, float] = {}
        self.ids: set[str] = set()
        self.given_twice: list[str] = []
        """Ids of two jobs: slurmctld drains a node that has the first one still."""
        self.resumed: list[str] = []
        """Nodes that were resumed: they had run a job that waited in the state of before a power loss."""
        self.refused = 0
        self.completed: set[str] = set()
        super().__init__()

    def work(self) -> None:
        number = 0
        while not self._ended.wait(self.every_s):
            number += 1
            name = f"short{number}"
            argv = ("sbatch", "--parsable", f"--job-name={name}", "--output=/dev/null", "--wrap=sleep 0.5")
            try:
                job = as_alice(self.node, *argv)
                self.submitted[name] = time.time()
                if job in self.ids:
                    self.given_twice.append(job)
                self.ids.add(job)
            except SmsError:
                self.refused += 1  # the user gets an error, and nothing is lost

    def resume_nodes(self) -> None:
        """What an administrator does after a power loss (docs/failover.md)."""
        for line in self.node.run("sinfo", "-hN", "-t", "drain", "-o", "%N %E", ok=None).text.splitlines():
            name, _, reason = line.partition(" ")
            if reason == "Duplicate jobid":
                self.node.run("scontrol", "update", f"nodename={name}", "state=resume", ok=None)
                self.resumed.append(name)

    def states(self) -> dict[str, str]:
        """Each job's state, by its name, as the controller knows it; with why, for one that waits."""
        found = {}
        for reported in read_jobs(self.node.run("scontrol", "-o", "show", "jobs", ok=None).text):
            waits = f" for {reported.get('Reason')}" if reported["JobState"] == "PENDING" else ""
            found[reported["JobName"]] = reported["JobState"] + waits
        return found

    def not_completed(
        self, since: float, *, forgiven: tuple[float, float] = (0.0, 0.0), patience_s: float = 60
    ) -> dict[str, str]:
        """Jobs that were submitted since then and do not complete, with their states.

        Args:
            forgiven: jobs that were submitted between these times may be lost.
            patience_s: how long no job completes, at most: on a slow machine many earlier ones may be ahead of these.
        """
        deadline = time.monotonic() + patience_s
        first, last = forgiven
        until_now = dict(self.submitted)
        mine = {name for name, at in until_now.items() if at >= since and not first <= at <= last}
        known = 0
        while True:
            self.resume_nodes()
            states = self.states()
            # The controller forgets a job 300 s after its end (MinJobAge of slurm.conf(5)).
            self.completed |= {name for name, state in states.items() if state == "COMPLETED"}
            bad = {name: states.get(name, "unknown") for name in mine - self.completed}
            if (done := len(self.completed & until_now.keys())) > known:
                known, deadline = done, time.monotonic() + patience_s
            if not bad or time.monotonic() > deadline:
                return bad
            time.sleep(0.5)
