"""Outage of each service during a migration, as seen by a compute node, and its phases."""

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
from bench.rig import Rig, Samples, find_program, result
from bench.rig.bed import Bed, open_bed
from tests.real.outage import Seen, read_log, watching

LAB = "bench-move"
SIZE_MB = 3072
USED_MB = 2048
OVERLAY = "/var/lib/sms/overlays/lab.img"
BUDGETS_S = {"slurmctld": 3.0, "scontrol ping": 3.0, "nat": 0.3, "chrony": 0.3, "rsyslog": 0.3}
RATES_KB = (256, 2048)
"""Rates of the writer in KiB/s: the data sent during the outage grows with them."""
PEER = "stop, rsync -S over SSH, start"

# Write random pages of a file with fdatasync, at a given rate.
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
# Without a speed limit curl would wait forever on a dead connection.
DOWNLOAD = "curl -sS --speed-time 45 --speed-limit 1 --limit-rate 1M -o /dev/null -w '%{http_code} %{size_download}' "
DOWNLOAD += "http://10.78.0.254/big"
DOWNLOADED = f"200 {50 << 20}"


@dataclass
class RunLog:
    """Measurements of the runs of one variant."""

    outages: dict[str, Samples] = field(default_factory=lambda: defaultdict(Samples))
    stalled: Samples = field(default_factory=Samples)
    parts: dict[str, Samples] = field(default_factory=lambda: defaultdict(Samples))
    last_bytes: dict[int, Samples] = field(default_factory=lambda: defaultdict(Samples))
    lost_lines: Samples = field(default_factory=Samples)
    counted: Samples = field(default_factory=Samples)
    downloads: list[bool] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, seen: Seen) -> None:
        """Add a run."""
        for service, seconds in seen.away.items():
            self.outages[service].append(seconds)
        self.stalled.append(seen.stalled_s)
        self.lost_lines.append(seen.lost_lines)


class Pair:
    """A lab with the services container on one of two hosts, ``here``."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.here, self.there = "host-a", "host-b"
        self.admin = bed.lab.host("admin")
        self.rate_kb = RATES_KB[0]
        self.report: dict[str, Any] = {}
        """JSON output of the last migration."""

    def inside(self, *argv: str, timeout: float | None = 300) -> str:
        """Run a command in the container; return its output."""
        return self.host.run(
            *inside_argv(self.bed.cluster.site, self.bed.cluster.services, *argv), timeout=timeout
        ).text

    @property
    def host(self) -> Host:
        """The host that runs the container."""
        return self.bed.lab.host(self.here)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Run the writer in the container for the duration of the context, or until the container stops."""
        argv = inside_argv(self.bed.cluster.site, self.bed.cluster.services, "python3", "-c", WRITER, str(self.rate_kb))
        host = self.host
        pid = host.run("sh", "-c", '"$@" </dev/null >/dev/null 2>&1 & echo $!', "writer", *argv).text
        try:
            yield
        finally:
            host.run("kill", pid, ok=None)

    def watched(self, work: Callable[[], None], log: RunLog) -> None:
        """Run ``work`` with a writer in the container, a download through it, and a node that monitors the services."""
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
        time.sleep(1)  # rsyslog may buffer a line briefly
        read_log(seen, self.inside("cat", "/var/log/messages"))
        log.add(seen)
        log.downloads.append(done == [DOWNLOADED])

    def migrate(self, log: RunLog) -> float:
        """Run ``sms migrate``; return the seconds of the whole command."""

        def work() -> None:
            began = time.monotonic()
            report = json.loads(
                self.admin.run("sms", "-q", "migrate", self.there, "--force", "--json", timeout=400).stdout
            )
            took.append(time.monotonic() - began)
            self.report = report
            for part, seconds in report["parts"].items():
                log.parts[part].append(seconds)
            log.last_bytes[self.rate_kb].append(report["last_bytes"])
            log.counted.append(report["lost_datagrams"])
            log.notes += report["notes"]

        took: list[float] = []
        self.watched(work, log)
        return took[0]

    def manual(self, log: RunLog) -> float:
        """Migrate manually with stop, rsync and start; return the seconds of all commands."""

        def work() -> None:
            began = time.monotonic()
            source, target = self.host, self.bed.lab.host(self.there)
            find_program("rsync", "rsync")
            self.admin.run("sms", "-q", "stop", "--host", self.here, timeout=100)
            stopped = time.monotonic()
            folder, mark = OVERLAY.rpartition("/")[0], f"{OVERLAY}.generation"
            argv = ("rsync", "-S", "--inplace", "-e", "ssh", OVERLAY, mark, f"{target.name}:{folder}/")
            source.run(*argv, timeout=400)
            copied = time.monotonic()
            source.run("mv", OVERLAY, f"{OVERLAY}.moved")
            self.admin.run("sms", "-q", "start", "--host", self.there, timeout=100)
            ended = time.monotonic()
            times = {"stop": stopped - began, "rsync": copied - stopped, "start": ended - copied}
            for part, seconds in times.items():
                log.parts[part].append(seconds)
            took.append(ended - began)

        took: list[float] = []
        # Use an older copy on the target as a basis, so that rsync sends less.
        script = '[ ! -e "$1.moved" ] || mv -f "$1.moved" "$1"'
        self.bed.lab.host(self.there).run("sh", "-c", script, "base", OVERLAY)
        self.watched(work, log)
        return took[0]


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Migrate back and forth, with sms and manually, with a writer, a download and probes every 10 ms."""
    with ExitStack() as stack:
        bed = stack.enter_context(open_bed(rig.progress, LAB, nodes=2, size_mb=SIZE_MB))
        ours, theirs = RunLog(), RunLog()
        pair = Pair(bed)
        with rig.progress.step(f"fill the overlay with {USED_MB} MiB"):
            pair.admin.run("sms", "-q", "start", "--host", pair.here, timeout=100)
            stack.callback(lambda: pair.admin.run("sms", "-q", "stop", "--host", pair.here, ok=None, timeout=100))
            pair.inside("sh", "-c", FILL, "fill", str(USED_MB))
        first = pair.migrate(RunLog())  # the only one without an old copy on the target
        samples = rounds(rig, pair, ours, theirs)
    failed = samples["rsync"].reason
    yield from results(ours, theirs, failed)
    sent = {f"{rate} KiB/s written": round(median(values) / 1024) for rate, values in ours.last_bytes.items()}
    whole = result(
        "migrate/whole", samples["sms"], PEER, samples["rsync"], ratio_below=2,
        parts=medians(ours.parts), peer_parts=None if failed else medians(theirs.parts),
        first_s=round(first, 2), last_kib=sent,
        downloads=completed_downloads(ours), peer_downloads=None if failed else completed_downloads(theirs),
    )  # fmt: skip
    # A broken download is a missed goal, regardless of the outage.
    yield whole if all(ours.downloads) else {**whole, "holds": False}


def completed_downloads(log: RunLog) -> str:
    """Return how many downloads were completed."""
    return f"{log.downloads.count(True)} of {len(log.downloads)} went on"


def rounds(rig: Rig, pair: Pair, ours: RunLog, theirs: RunLog) -> dict[str, Samples]:
    """Run each variant back and forth; the writer is fast in every second migration.

    Since both take minutes, only half of the runs are made. The manual ones come last: a failed one leaves the overlay
    in an inconsistent place.
    """

    def both(work: Callable[[RunLog], float], log: RunLog) -> Callable[[], float]:
        def once() -> float:
            took = []
            for rate in RATES_KB:
                pair.rate_kb = rate
                took.append(work(log))
            return median(took)

        return once

    runs = max(1, rig.runs // 2)
    samples = rig.interleave({"sms": both(pair.migrate, ours)}, runs=runs)
    return {**samples, **rig.interleave({}, {"rsync": both(pair.manual, theirs)}, runs)}


def results(ours: RunLog, theirs: RunLog, failed: str | None) -> Iterator[dict[str, Any]]:
    """Yield one result per service; ``failed`` is the reason if the peer failed."""
    for service, budget in BUDGETS_S.items():
        more: dict[str, Any] = {"not_asked_for_s": ours.stalled.median}
        peer = Samples.failed(failed) if failed else theirs.outages[service]
        if service == "rsyslog":
            more |= {"lost_lines": ours.lost_lines.median}
            more |= {"peer_lost_lines": None if failed else theirs.lost_lines.median}
            more |= {"counted_lines": ours.counted.median}
        yield result(
            f"migrate/away, {service}", ours.outages[service], PEER, peer, below=budget, **more
        )  # fmt: skip


def medians(parts: dict[str, Samples]) -> dict[str, float]:
    """Return the median of each part."""
    return {part: values.median for part, values in parts.items()}
