"""Speed and memory use of `sms classify` with a large capture."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.errors import SmsError
from bench.rig import Rig, Samples, Variants, find_program, result, traffic, wall, work_folder

SMS = str(Path(sys.prefix) / "bin" / "sms")
SIZE, SMALL_SIZE = 1600 << 20, 300_000_000
"""Sizes of the captures in bytes."""
CAT_TIMES, NFPCAPD_TIMES, SMALL_TIMES, CORE_TIMES, ZSTD_TIMES, HELP_S = 3.5, 0.3, 1.0, 1.5, 1.2, 0.2
PACKAGES = {"nfpcapd": "nfdump", "cat": "coreutils"}
"""Debian packages whose name differs from their program's."""

# A small process starts the command: the maximum RSS of a child includes the memory of its parent at the fork.
WATCH = """
import json, os, sys, time
null = os.open(os.devnull, os.O_WRONLY)
began = time.monotonic()
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, null, 1)])
_, status, used = os.wait4(pid, 0)
print(json.dumps([time.monotonic() - began, used.ru_maxrss / 1024, os.waitstatus_to_exitcode(status)]))
"""


# What the core itself takes, without Python's start: seconds, and those of the processors.
CORE = """
import os, resource, sys, time
from analysis.reading import make_counter
from appliance.operations.classify.signatures import make_signatures, open_catalogue
counter, file = make_counter(make_signatures(open_catalogue(None))), os.open(sys.argv[1], os.O_RDONLY)
began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
counter.read(file)
counter.finish()
took, used = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
print(took, used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime)
"""


class Watched:
    """Runs commands and records their memory use."""

    def __init__(self) -> None:
        self.memory: dict[str, float] = defaultdict(float)

    def run(self, name: str, *argv: str) -> float:
        """Run a command without output; return its seconds and record its maximum RSS in MiB.

        Raises:
            SmsError: the command failed.
        """
        program = find_program(argv[0], PACKAGES.get(argv[0], argv[0]))
        command = (sys.executable, "-I", "-S", "-c", WATCH, program, *argv[1:])
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise SmsError(f"{argv[0]}: {done.stderr.strip()}")
        took, memory, status = json.loads(done.stdout)
        if status:
            raise SmsError(f"{argv[0]} ended with status {status}: {done.stderr.strip()}")
        self.memory[name] = max(self.memory[name], round(memory, 1))
        return float(took)


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Compare with cat and nfpcapd on the same file, with zstd, and `--help` with Python's start."""
    file = capture(rig, SIZE)
    watched = Watched()
    with work_folder() as folder:
        ours, cat = variants(watched, file)
        watched.run("cat", "cat", str(file))  # warm up the page cache
        samples = rig.interleave(ours, {**cat, "nfpcapd": lambda: nfpcapd(watched, file, Path(folder) / "made")})
    about: dict[str, Any] = {"megabytes": file.stat().st_size >> 20, "memory_mb": watched.memory["sms"]}
    yield result("classify/cat", samples["sms"], "cat FILE", samples["cat"], ratio_below=CAT_TIMES, **about)
    about["peer_memory_mb"] = watched.memory.get("nfpcapd")
    yield result(
        "classify/nfpcapd", samples["sms"], "nfpcapd -r FILE", samples["nfpcapd"], ratio_below=NFPCAPD_TIMES, **about
    )
    yield _small(rig, watched)
    yield from _core(rig, file)
    yield _zstd(rig, watched, file)
    helps = rig.interleave(
        {"sms": lambda: wall(SMS, "classify", "--help")}, {"python": lambda: wall(sys.executable, "-c", "pass")}, 11
    )
    yield result("classify/help", helps["sms"], "python -c pass", helps["python"], below=HELP_S)


def nfpcapd(watched: Watched, file: Path, made: Path) -> float:
    """Count a capture with nfpcapd, into a new folder; return its seconds."""
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    return watched.run("nfpcapd", "nfpcapd", "-r", str(file), "-w", str(made))


def _small(rig: Rig, watched: Watched) -> dict[str, Any]:
    """Compare with nfpcapd on a capture for which the start of Python counts."""
    file = capture(rig, SMALL_SIZE)
    ours, _ = variants(watched, file)
    watched.run("cat", "cat", str(file))
    with work_folder() as folder:
        peers = {"nfpcapd": lambda: nfpcapd(watched, file, Path(folder) / "made")}
        samples = rig.interleave(ours, peers, max(rig.runs, 5))
    return result(
        "classify/300 MB", samples["sms"], "nfpcapd -r FILE", samples["nfpcapd"], ratio_below=SMALL_TIMES,
        megabytes=file.stat().st_size >> 20,
    )  # fmt: skip


def _core(rig: Rig, file: Path) -> Iterator[dict[str, Any]]:
    """Compare the core alone with a bare flow counter (flows.c): time, and time of the processors."""
    used: dict[str, Samples] = {"core": Samples(), "flows": Samples()}

    def core() -> float:
        printed = subprocess.run([sys.executable, "-c", CORE, str(file)], capture_output=True, text=True, check=True)
        took, cpu = map(float, printed.stdout.split())
        used["core"].append(cpu)
        return took

    with work_folder() as folder:
        program = str(Path(folder) / "flows")
        source = str(Path(__file__).parent / "rig" / "flows.c")

        def flows() -> float:
            if not Path(program).exists():
                wall(find_program("gcc", "gcc"), "-O3", "-D_GNU_SOURCE", "-o", program, source)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            took = wall(program, str(file))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used["flows"].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            return took

        samples = rig.interleave({"core": core}, {"flows": flows}, max(rig.runs, 5))
    used["flows"].reason = samples["flows"].reason
    for name, found in (("classify/core", samples), ("classify/core, processors", used)):
        yield result(name, found["core"], "a bare flow counter", found["flows"], ratio_below=CORE_TIMES)


def capture(rig: Rig, size: int) -> Path:
    """Return a capture of this size; reuse an existing one."""
    with rig.progress.step(f"make the capture of {size / 1e9:.1f} GB"):
        return traffic.capture(size)


def variants(watched: Watched, file: Path, name: str = "sms") -> tuple[Variants, Variants]:
    """Return the variants that read a capture: `sms`, and cat as the peer."""
    return (
        {"sms": lambda: watched.run(name, SMS, "classify", str(file))},
        {"cat": lambda: watched.run("cat", "cat", str(file))},
    )


def _zstd(rig: Rig, watched: Watched, file: Path) -> dict[str, Any]:
    """Compare with zstd on the compressed capture."""
    packed = file.with_suffix(".pcap.zst")
    if not packed.exists():
        with rig.progress.step("compress the capture"):
            watched.run("zstd", "zstd", "-q", "-f", str(file), "-o", f"{packed}.new")
            Path(f"{packed}.new").rename(packed)
    samples = rig.interleave(
        {"sms": lambda: watched.run("sms-zstd", SMS, "classify", str(packed))},
        {"zstd": lambda: watched.run("zstd", "zstd", "-q", "-dc", str(packed))},
    )
    megabytes = packed.stat().st_size >> 20
    return result(
        "classify/zstd", samples["sms"], "zstd -dc", samples["zstd"], ratio_below=ZSTD_TIMES, megabytes=megabytes
    )
