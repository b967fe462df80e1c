"""How fast `sms classify` reads a big capture, and how little memory that takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.rig import Rig, Samples, Skip, result, traffic, wall

SMS = str(Path(sys.prefix) / "bin" / "sms")
SIZE, BIG = 1600 << 20, 10 << 30
"""Bytes of the two captures."""
GOALS = {"nfpcapd": 0.35, "tshark": 1 / 80, "cat": 5.0}
BIG_TIMES, BIG_MB, ZSTD_TIMES, HELP_S = 6.0, 150, 1.2, 0.2

# Its own small process starts the command: a child's highest memory use counts what its parent had at the fork.
WATCH = """
import json, os, sys, time
null = os.open(os.devnull, os.O_WRONLY)
began = time.monotonic()
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, null, 1)])
_, status, used = os.wait4(pid, 0)
print(json.dumps([time.monotonic() - began, used.ru_maxrss / 1024, os.waitstatus_to_exitcode(status)]))
"""


class Watched:
    """Commands that were run, and what they took."""

    def __init__(self) -> None:
        self.memory: dict[str, float] = defaultdict(float)

    def run(self, name: str, *argv: str) -> float:
        """Seconds of a command whose output goes nowhere; its highest resident memory (MiB) is kept.

        Raises:
            Skip: it failed.
        """
        program = shutil.which(argv[0])
        if not program:
            raise Skip(f"no {argv[0]}")
        command = (sys.executable, "-I", "-S", "-c", WATCH, program, *argv[1:])
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise Skip(f"{argv[0]}: {done.stderr.strip()}")
        took, memory, status = json.loads(done.stdout)
        if status:
            raise Skip(f"{argv[0]} ended with status {status}: {done.stderr.strip()}")
        self.memory[name] = max(self.memory[name], round(memory, 1))
        return float(took)


def peers(watched: Watched, file: Path, folder: Path) -> dict[str, Callable[[], float]]:
    """The ways to read a capture that are there, and `sms` itself."""

    def nfpcapd() -> float:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            return watched.run("nfpcapd", "nfpcapd", "-r", str(file), "-w", made)

    ways: dict[str, Callable[[], float]] = {
        "sms": lambda: watched.run("sms", SMS, "classify", str(file)),
        "cat": lambda: watched.run("cat", "cat", str(file)),
    }
    if shutil.which("nfpcapd"):
        ways["nfpcapd"] = nfpcapd
    return ways


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """The whole command against nfpcapd, tshark and cat on the same file; 10 GB; zstd; the help."""
    with rig.progress.step("make the capture"):
        file = traffic.capture(SIZE)
    watched = Watched()
    with tempfile.TemporaryDirectory(prefix="sms-bench-", dir="/var/tmp") as folder:
        ways = peers(watched, file, Path(folder))
        watched.run("cat", "cat", str(file))  # so that nobody reads a cold disk
        samples = rig.interleave(ways)
    about = {"megabytes": file.stat().st_size >> 20}
    yield _against("cat", "cat FILE", samples, **about, memory_mb=watched.memory["sms"])
    if "nfpcapd" in samples:
        yield _against("nfpcapd", "nfpcapd -r FILE", samples, **about, peer_memory_mb=watched.memory["nfpcapd"])
    else:
        yield {"name": "classify/nfpcapd", "skipped": "no nfpcapd; Debian has it in the package nfdump"}
    yield from _tshark(rig, watched, file, samples["sms"])
    yield from _zstd(rig, watched, file)
    yield from _big(rig, watched)
    helps = rig.interleave(
        {"sms": lambda: wall(SMS, "classify", "--help"), "python": lambda: wall(sys.executable, "-c", "pass")}, 11
    )
    yield result("classify/help", helps["sms"], "python -c pass", helps["python"], below=HELP_S)


def _against(peer: str, words: str, samples: dict[str, Samples], **more: Any) -> dict[str, Any]:
    return result(f"classify/{peer}", samples["sms"], words, samples[peer], ratio_below=GOALS[peer], **more)


def _tshark(rig: Rig, watched: Watched, file: Path, ours: Samples) -> Iterator[dict[str, Any]]:
    """Once: it takes minutes."""
    if not shutil.which("tshark"):
        yield {"name": "classify/tshark", "skipped": "no tshark"}
        return
    with rig.progress.step("tshark"):
        theirs = Samples([watched.run("tshark", "tshark", "-n", "-q", "-r", str(file), "-z", "conv,tcp")])
    found = result("classify/tshark", ours, "tshark -q -z conv,tcp", theirs, ratio_below=GOALS["tshark"])
    yield {**found, "ratio": round(ours.median / theirs.median, 5), "peer_memory_mb": watched.memory["tshark"]}


def _zstd(rig: Rig, watched: Watched, file: Path) -> Iterator[dict[str, Any]]:
    """The same capture compressed."""
    if not shutil.which("zstd"):
        yield {"name": "classify/zstd", "skipped": "no zstd"}
        return
    packed = file.with_suffix(".pcap.zst")
    if not packed.exists():
        with rig.progress.step("compress the capture"):
            watched.run("zstd", "zstd", "-q", "-f", str(file), "-o", str(packed))
    ways = {
        "sms": lambda: watched.run("sms-zstd", SMS, "classify", str(packed)),
        "zstd": lambda: watched.run("zstd", "zstd", "-q", "-dc", str(packed)),
    }
    samples = rig.interleave(ways)
    megabytes = packed.stat().st_size >> 20
    yield result(
        "classify/zstd", samples["sms"], "zstd -dc", samples["zstd"], ratio_below=ZSTD_TIMES, megabytes=megabytes
    )


def _big(rig: Rig, watched: Watched) -> Iterator[dict[str, Any]]:
    """10 GB: as fast, and in as little memory."""
    try:
        free = shutil.disk_usage(traffic.FOLDER).free
        if free < BIG * 2 and not (traffic.FOLDER / f"cluster-{BIG >> 20}M.pcap").exists():
            raise Skip(f"{free >> 30} GB are free; 20 are wanted")
        with rig.progress.step("make the capture of 10 GB"):
            file = traffic.capture(BIG)
        ways = {
            "sms": lambda: watched.run("sms-big", SMS, "classify", str(file)),
            "cat": lambda: watched.run("cat", "cat", str(file)),
        }
        ways["cat"]()
        samples = rig.interleave(ways, max(1, rig.runs // 2))
    except Skip as reason:
        yield {"name": "classify/10 GB", "skipped": str(reason)}
        return
    memory = Samples([watched.memory["sms-big"]])
    yield result("classify/10 GB", samples["sms"], "cat FILE", samples["cat"], ratio_below=BIG_TIMES)
    peer = "the same, 1.6 GB"
    yield result("classify/10 GB memory", memory, peer, Samples([watched.memory["sms"]]), below=BIG_MB, unit="MiB")
