"""Speed and memory use of `sms classify` with a large capture."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.errors import SmsError
from bench.rig import Rig, Variants, find_program, result, traffic, wall, work_folder

SMS = str(Path(sys.prefix) / "bin" / "sms")
SIZE = 1600 << 20
"""Size of the capture in bytes."""
CAT_TIMES, NFPCAPD_TIMES, ZSTD_TIMES, HELP_S = 5.0, 0.35, 1.2, 0.2
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

        def nfpcapd() -> float:
            made = Path(folder) / "nfpcapd"
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            return watched.run("nfpcapd", "nfpcapd", "-r", str(file), "-w", str(made))

        ours, cat = variants(watched, file)
        watched.run("cat", "cat", str(file))  # warm up the page cache
        samples = rig.interleave(ours, {**cat, "nfpcapd": nfpcapd})
    about: dict[str, Any] = {"megabytes": file.stat().st_size >> 20, "memory_mb": watched.memory["sms"]}
    yield result("classify/cat", samples["sms"], "cat FILE", samples["cat"], ratio_below=CAT_TIMES, **about)
    about["peer_memory_mb"] = watched.memory.get("nfpcapd")
    yield result(
        "classify/nfpcapd", samples["sms"], "nfpcapd -r FILE", samples["nfpcapd"], ratio_below=NFPCAPD_TIMES, **about
    )
    yield _zstd(rig, watched, file)
    helps = rig.interleave(
        {"sms": lambda: wall(SMS, "classify", "--help")}, {"python": lambda: wall(sys.executable, "-c", "pass")}, 11
    )
    yield result("classify/help", helps["sms"], "python -c pass", helps["python"], below=HELP_S)


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
