"""How long each service is away while the appliance moves, as a compute node sees it, and what that is made of."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from appliance.host.base import Host
from appliance.plan.machine import inside_argv
from bench.rig import Rig, Samples, need, result
from bench.rig.bed import Bed, open_bed
from tests.real.outage import Seen, read_log, watching

LAB = "bench-move"
SIZE_MB = 3072
USED_MB = 2048
OVERLAY = "/var/lib/sms/overlays/lab.img"
BUDGETS_S = {"slurmctld": 3.0, "scontrol ping": 3.0, "nat": 0.3, "chrony": 0.3, "rsyslog": 0.3}
RATES_KB = (256, 2048)
"""What the writer writes a second, in KiB: twice the same move, to see what is sent in the outage grow with it."""
PARTS = ("stop", "last changes", "start", "switch")
PEER = "stop, rsync -S over SSH, start"

# Random pages all over a file, each on the disk before the next; the number of bytes lies in memory.
WRITER = """
import os, random, sys, time
rate = int(sys.argv[1]) << 10
os.makedirs("/var/lib/bench", exist_ok=True)
file = os.open("/var/lib/bench/written", os.O_WRONLY | os.O_CREAT)
done, began = 0, time.monotonic()
while True:
    for _ in range(8):
        os.pwrite(file, os.urandom(4096), random.randrange(64 << 8) << 12)
        done += 4096
    os.fdatasync(file)
    time.sleep(max(0, began + done / rate - time.monotonic()))
"""
FILL = 'mkdir -p /var/lib/bench && head -c "$1M" /dev/urandom >/var/lib/bench/ballast && sync -f /var/lib/bench'
# In a connection that is dead curl would wait for ever.
DOWNLOAD = "curl -sS --speed-time 45 --speed-limit 1 --limit-rate 1M -o /dev/null -w '%{http_code} %{size_download}' "
DOWNLOAD += "http://10.78.0.254/big"
DOWNLOADED = f"200 {50 << 20}"


@dataclass
class Way:
    """What the runs of one way showed."""

    away: dict[str, Samples] = field(default_factory=lambda: defaultdict(Samples))
    stalled: Samples = field(default_factory=Samples)
    parts: dict[str, Samples] = field(default_factory=lambda: defaultdict(Samples))
    last_bytes: dict[int, Samples] = field(default_factory=lambda: defaultdict(Samples))
    lost_lines: Samples = field(default_factory=Samples)
    counted: Samples = field(default_factory=Samples)
    downloads: list[bool] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, seen: Seen) -> None:
        """One more run."""
        for service, seconds in seen.away.items():
            self.away[service].append(seconds)
        self.stalled.append(seen.stalled_s)
        self.lost_lines.append(seen.lost_lines)


class Pair:
    """A lab with the appliance on one of two hosts; ``here`` is the one."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.here, self.there = "host-a", "host-b"
        self.admin = bed.lab.host("admin")
        self.rate_kb = RATES_KB[0]
        self.told: dict[str, Any] = {}
        """What the last move said of itself."""

    def inside(self, *argv: str, timeout: float | None = 300) -> str:
        """Run a command in the container, give what it prints."""
        return self.host.run(*inside_argv(self.bed.cluster.site, *argv), timeout=timeout).text

    @property
    def host(self) -> Host:
        """The host that carries it."""
        return self.bed.lab.host(self.here)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Somebody writes in the container, for as long as it lives."""
        argv = inside_argv(self.bed.cluster.site, "python3", "-c", WRITER, str(self.rate_kb))
        host = self.host
        pid = host.run("sh", "-c", '"$@" </dev/null >/dev/null 2>&1 & echo $!', "writer", *argv).text
        try:
            yield
        finally:
            host.run("kill", pid, ok=None)

    def watched(self, work: Callable[[], None], way: Way) -> None:
        """Do it with a writer in the container, a download through it, and a node that looks."""
        node, outside = self.bed.lab.host("node1"), self.bed.lab.host("outside")
        done: list[str] = []

        def fetch() -> None:
            done.append(node.run("sh", "-c", DOWNLOAD, ok=None, timeout=None).text)

        download = threading.Thread(target=fetch)
        with self.busy(), watching(node, outside) as seen:
            download.start()
            time.sleep(2)
            work()
            self.here, self.there = self.there, self.here
            time.sleep(2)
        download.join()
        time.sleep(1)  # rsyslog may keep a line for a moment
        read_log(seen, self.inside("cat", "/var/log/messages"))
        way.add(seen)
        way.downloads.append(done == [DOWNLOADED])

    def migrate(self, way: Way) -> float:
        """``sms migrate``: seconds of the whole command."""

        def work() -> None:
            began = time.monotonic()
            told = json.loads(
                self.admin.run("sms", "-q", "migrate", self.there, "--force", "--json", timeout=400).stdout
            )
            took.append(time.monotonic() - began)
            self.told = told
            for part, seconds in told["parts"].items():
                way.parts[part].append(seconds)
            way.last_bytes[self.rate_kb].append(told["last_bytes"])
            way.counted.append(told["lost_datagrams"])
            way.notes += told["notes"]

        took: list[float] = []
        self.watched(work, way)
        return took[0]

    def by_hand(self, way: Way) -> float:
        """What one would do without it: seconds from the first command to the end of the last."""

        def work() -> None:
            began = time.monotonic()
            source, target = self.host, self.bed.lab.host(self.there)
            need("rsync", "rsync")
            self.admin.run("sms", "-q", "stop", "--host", self.here, timeout=100)
            stopped = time.monotonic()
            argv = ("rsync", "-S", "--inplace", "-e", "ssh", OVERLAY, f"{target.name}:{OVERLAY}")
            source.run(*argv, timeout=400)
            copied = time.monotonic()
            source.run("mv", OVERLAY, f"{OVERLAY}.moved")
            self.admin.run("sms", "-q", "start", "--host", self.there, timeout=100)
            ended = time.monotonic()
            times = {"stop": stopped - began, "rsync": copied - stopped, "start": ended - copied}
            for part, seconds in times.items():
                way.parts[part].append(seconds)
            took.append(ended - began)

        took: list[float] = []
        # As an older copy may lie there: with it rsync has less to send.
        script = '[ ! -e "$1.moved" ] || mv -f "$1.moved" "$1"'
        self.bed.lab.host(self.there).run("sh", "-c", script, "base", OVERLAY)
        self.watched(work, way)
        return took[0]


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """There and back, and the plain way there and back, with a writer, a download and questions every 10 ms."""
    with ExitStack() as stack:
        bed = stack.enter_context(open_bed(rig.progress, LAB, nodes=2, size_mb=SIZE_MB))
        ours, theirs = Way(), Way()
        pair = Pair(bed)
        with rig.progress.step(f"fill the overlay with {USED_MB} MiB"):
            pair.admin.run("sms", "-q", "start", "--host", pair.here, timeout=100)
            stack.callback(lambda: pair.admin.run("sms", "-q", "stop", "--host", pair.here, ok=None, timeout=100))
            pair.inside("sh", "-c", FILL, "fill", str(USED_MB))
        first = pair.migrate(Way())  # the only one that finds nothing on its target
        samples = rounds(rig, pair, ours, theirs)
    failed = samples["rsync"].reason
    yield from results(ours, theirs, failed)
    sent = {f"{rate} KiB/s written": round(median(values) / 1024) for rate, values in ours.last_bytes.items()}
    whole = result(
        "migrate/whole", samples["sms"], PEER, samples["rsync"], ratio_below=2,
        parts=medians(ours.parts), peer_parts=None if failed else medians(theirs.parts),
        first_s=round(first, 2), last_kib=sent,
        downloads=went_on(ours), peer_downloads=None if failed else went_on(theirs),
    )  # fmt: skip
    # A download that broke in a move is a goal missed, however short the outage was.
    yield whole if all(ours.downloads) else {**whole, "holds": False}


def went_on(way: Way) -> str:
    """How many of its downloads."""
    return f"{way.downloads.count(True)} of {len(way.downloads)} went on"


def rounds(rig: Rig, pair: Pair, ours: Way, theirs: Way) -> dict[str, Samples]:
    """Each run there and back; the writer is a quick one in every second.

    Both take minutes, so that there are half as many runs as of others. Those by hand come last: one that fails leaves
    the overlay between two hosts.
    """

    def both(work: Callable[[Way], float], way: Way) -> Callable[[], float]:
        def once() -> float:
            took = []
            for rate in RATES_KB:
                pair.rate_kb = rate
                took.append(work(way))
            return median(took)

        return once

    runs = max(1, rig.runs // 2)
    samples = rig.interleave({"sms": both(pair.migrate, ours)}, runs=runs)
    return {**samples, **rig.interleave({}, {"rsync": both(pair.by_hand, theirs)}, runs)}


def results(ours: Way, theirs: Way, failed: str | None) -> Iterator[dict[str, Any]]:
    """One result a service; ``failed`` says why the peer did, if it did."""
    for service, budget in BUDGETS_S.items():
        more: dict[str, Any] = {"not_asked_for_s": ours.stalled.median}
        peer = Samples.failed(failed) if failed else theirs.away[service]
        if service == "rsyslog":
            more |= {"lost_lines": ours.lost_lines.median}
            more |= {"peer_lost_lines": None if failed else theirs.lost_lines.median}
            more |= {"counted_lines": ours.counted.median}
        yield result(
            f"migrate/away, {service}", ours.away[service], PEER, peer, below=budget, **more
        )  # fmt: skip


def medians(parts: dict[str, Samples]) -> dict[str, float]:
    """The middle one of each."""
    return {part: values.median for part, values in parts.items()}
