"""Outage of each service during `sms adopt` and its undo, as seen by a compute node, beside a move by hand.

The peer is what an administrator does today: stop slurmctld and slurmdbd on the old node, rsync StateSaveLocation, dump
and load the database, remove the addresses there, add them on the other machine, start Slurm there. The other machine
is a second server with the same programs and configuration, natively (``bench.rig.second``). NAT, time, logs and
MariaDB run there already, and no time is lost with typing and logging in: nobody is faster by hand.
"""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from appliance.lab.layout import LEGACY_NAME
from appliance.operations.lab.demo import CARRIER, OUTSIDE, OVERLAY, as_alice, job_state, wait_for, wait_idle
from appliance.operations.lab.demo_engines import answers
from appliance.tools import ext3
from bench.rig import Rig, Samples, result
from bench.rig.bed import Bed, open_bed
from bench.rig.second import ByHand, second_server
from tests.real.moves import ShortJobs
from tests.real.outage import Seen, read_log, watching
from tests.real.senders import OVER_TCP, further_senders, numbered, steady_lines, wait_for_lines

LAB, NODES = "bench-adopt", 3
PEER = "stop, rsync, start by hand"
BUDGETS_S = {"slurmctld": 4.0, "nat": 0.5, "chrony": 0.5, "rsyslog": 0.5}
JOB_EVERY_S = 2.0
"""30 short jobs a minute."""
SETTLED_S = 2.0
"""Seconds of answers before the move, and after it."""
VERBS = {"adopt": (LEGACY_NAME, "--to", CARRIER, "--capture", "0"), "undo": ("--undo",)}
DOWNLOAD = """\
import select, socket, sys
one = socket.socket()
one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
one.settimeout(15)
one.connect((sys.argv[1], 80))
one.sendall(b"GET /big HTTP/1.0\\r\\n\\r\\n")
print("began", flush=True)
def read():
    if not one.recv(1 << 15):
        raise OSError("closed")
def report(text):
    with open("/tmp/download", "w") as file:
        file.write(text)
report("no packet came")
found = ""
try:
    while not select.select([0], [], [], 0.2)[0]:
        read()
    one.settimeout(4)
    for _ in range(64):
        read()
except OSError as error:
    found = str(error)
report(found)
"""
"""Slow, so that it goes on as long as the round, and with a small buffer: at the end more arrives than that holds."""


@dataclass
class RunLog:
    """What the moves of one variant did, by the verb of the direction. Lists of counts and flags have one per round."""

    away: dict[str, dict[str, Samples]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(Samples)))
    whole: dict[str, Samples] = field(default_factory=lambda: defaultdict(Samples))
    stalled: Samples = field(default_factory=Samples)
    lost_datagrams: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    lost_lines: list[int] = field(default_factory=list)
    doubled_lines: list[int] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)
    """Why each ended early; empty where it went on."""
    bad_jobs: list[dict[str, str]] = field(default_factory=list)

    @property
    def failings(self) -> dict[str, bool]:
        """What missed its goal regardless of the outage, by service."""
        return {
            "slurmctld": any(self.bad_jobs),
            "nat": any(self.downloads),
            "rsyslog": any(self.lost_lines) or any(self.doubled_lines),
        }

    def facts(self, verb: str, service: str, prefix: str = "") -> dict[str, Any]:
        """Return further keys of a service's result."""
        found: dict[str, Any] = {}
        if service == "slurmctld":
            found["whole_s"] = self.whole[verb].median
            found["scontrol_ping_s"] = self.away[verb]["scontrol ping"].median
            found["bad_jobs"] = sum(map(len, self.bad_jobs))
        elif service == "nat":
            found["downloads"] = f"{self.downloads.count('')} of {len(self.downloads)} went on"
            found["broken"] = [why for why in self.downloads if why]
        elif service == "rsyslog":
            found["lost_datagrams"] = self.lost_datagrams[verb]
            found |= {"lost_lines_tcp": self.lost_lines, "doubled_lines_tcp": self.doubled_lines}
        return {prefix + key: value for key, value in found.items()}


class Cluster:
    """A lab that its legacy node serves, with all that is to go on while its services move."""

    def __init__(self, bed: Bed, hand: ByHand, jobs: ShortJobs) -> None:
        self.lab = bed.lab
        self.hand = hand
        self.jobs = jobs
        self.admin, self.outside = (bed.lab.host(name) for name in ("admin", "outside"))
        self.first, self.second, self.third = (bed.lab.host(name) for name in bed.lab.nodes)
        self.long_job = self._submit()
        self.rounds = 0

    def _submit(self) -> str:
        job = as_alice(self.first, "sbatch", "--parsable", "--job-name=long", "--output=/dev/null", "--wrap=sleep 7200")
        wait_for("the start of the job", lambda: "yes" if job_state(self.first, job) == "RUNNING" else "")
        return job

    def by_sms(self, log: RunLog) -> float:
        """Adopt and undo; return the outage of slurmctld during the adoption."""

        def work(verb: str) -> Callable[[], object]:
            return lambda: self.admin.run("sms", "-q", "adopt", *VERBS[verb], "--json", timeout=600)

        return self._round(log, {verb: work(verb) for verb in VERBS})

    def by_hand(self, log: RunLog) -> float:
        """Move to the second server and back; like ``by_sms``."""
        try:
            return self._round(log, dict(zip(VERBS, (self.hand.move_there, self.hand.move_back), strict=True)))
        except BaseException:
            self.hand.restore()
            raise

    def _round(self, log: RunLog, moves: Mapping[str, Callable[[], object]]) -> float:
        self.rounds += 1
        began, seen, lines = time.time(), dict[str, Seen](), set[str]()
        with self._busy(log, lines):
            for verb, move in moves.items():
                with watching(self.first, self.outside) as seen[verb]:
                    time.sleep(SETTLED_S)
                    since = time.monotonic()
                    move()
                    log.whole[verb].append(time.monotonic() - since)
                    wait_for("a controller", lambda: "up" if answers(self.first) else "")
                    time.sleep(SETTLED_S)
        bad = self.jobs.not_completed(began)
        if (state := job_state(self.first, self.long_job)) != "RUNNING":
            bad["long"] = state
            self.long_job = self._submit()
        log.bad_jobs[-1] |= bad
        wait_for_lines(lambda: numbered(self._logs()), lines, 5)
        logs = self._logs()
        arrived = [line for line in numbered(logs) if line in lines]
        log.lost_lines.append(len(lines.difference(arrived)))
        log.doubled_lines.append(len(arrived) - len(set(arrived)))
        for verb, one in seen.items():
            read_log(one, logs)
            log.lost_datagrams[verb].append(one.lost_lines)
            log.stalled.append(one.stalled_s)
            for service, seconds in one.away.items():
                log.away[verb][service].append(seconds)
        return seen["adopt"].away["slurmctld"]

    @contextmanager
    def _busy(self, log: RunLog, lines: set[str]) -> Iterator[None]:
        """An interactive srun, a download, and log lines over TCP as long as the context lasts.

        Short jobs and a batch job run all the time.
        """
        argv = ["runuser", "-u", "alice", "--", "srun", "--job-name=interactive", "cat"]
        with ExitStack() as stack:
            pipe = subprocess.PIPE
            srun = subprocess.Popen([*self.third.prefix, *argv], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            stack.callback(_kill, srun)
            stack.enter_context(further_senders(self.lab, self.second.name))
            logged = steady_lines(self.lab, [self.second.name], OVER_TCP, f"in round {self.rounds}")
            with self.second.hold("python3", "-c", DOWNLOAD, OUTSIDE), logged as sent:
                yield
            lines |= sent
            log.downloads.append(self.second.run("cat", "/tmp/download").text)
            log.bad_jobs.append({} if _echoes(srun) else {"interactive": "broken"})

    def _logs(self) -> str:
        """Return the system logs of all hosts that had the services."""
        texts = [host.run("sh", "-c", "zcat -f /var/log/syslog*").text for host in (self.hand.old, self.hand.second)]
        carrier = self.lab.host(CARRIER)
        if carrier.works("test", "-e", OVERLAY):
            texts.append(ext3.read_inside(carrier, OVERLAY, "/upper/var/log/messages").decode(errors="replace"))
        return "\n".join(texts)


def _echoes(srun: subprocess.Popen[bytes]) -> bool:
    """Whether an interactive job gives back what is typed, and ends well."""
    with suppress(subprocess.TimeoutExpired, BrokenPipeError):
        return srun.communicate(b"there\n", timeout=30)[0] == b"there\n" and srun.returncode == 0
    return False


def _kill(process: subprocess.Popen[bytes]) -> None:
    with process:
        process.kill()


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Adopt and undo, by sms and by hand in turn, under load; a node probes every 10 ms."""
    ours, theirs = RunLog(), RunLog()
    with ExitStack() as stack:
        bed = stack.enter_context(open_bed(rig.progress, LAB, nodes=NODES, legacy=True))
        hand = stack.enter_context(second_server(bed, rig.progress))
        wait_idle(bed.lab.host(bed.lab.nodes[0]), NODES)
        jobs = stack.enter_context(ShortJobs(bed.lab, every_s=JOB_EVERY_S))
        cluster = Cluster(bed, hand, jobs)
        samples = rig.interleave({"sms": lambda: cluster.by_sms(ours)}, {"hand": lambda: cluster.by_hand(theirs)})
    yield from results(ours, theirs, samples["hand"].reason)


def results(ours: RunLog, theirs: RunLog, failed: str | None) -> Iterator[dict[str, Any]]:
    """Yield one result per direction and service; ``failed`` is the reason if the peer failed."""
    for verb in VERBS:
        for service, budget in BUDGETS_S.items():
            peer = Samples.failed(failed) if failed else theirs.away[verb][service]
            facts = {"not_asked_for_s": ours.stalled.median, **ours.facts(verb, service)}
            facts |= {} if failed else theirs.facts(verb, service, "peer_")
            one = result(f"{verb}/away, {service}", ours.away[verb][service], PEER, peer, below=budget, **facts)
            yield {**one, "holds": False} if ours.failings.get(service) else one
