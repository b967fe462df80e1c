"""Run a workload under the recorder: in a process of its own, into which recorder.c is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tests.conftest import find_tool
from tests.crash.replay import Record, read_records
from tests.places import ROOT

HERE = Path(__file__).parent
RESULT = "result: "
"""What a line of a result begins with; the program prints others."""


@lru_cache(maxsize=1)
def compile_recorder(folder: Path) -> Path:
    """Compile the recorder."""
    library = folder / "recorder.so"
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    subprocess.run([find_tool("cc"), *flags, "-o", str(library), str(HERE / "recorder.c"), "-lpthread"], check=True)
    return library


class Refused(NamedTuple):
    """A run in which a change failed.

    ``error``: the class of the exception, empty if there was none; ``hint``: what the user is advised to do.
    ``again``: the class of the exception of a second run, in which none fails.
    """

    folder: str
    marks: tuple[str, ...]
    error: str
    hint: str
    again: str


def run_recorded(name: str, folder: Path, library: Path, *more: str) -> str:
    """Run a workload in ``folder/root``; return its output. ``folder/log`` has the records."""
    root = folder / "root"
    root.mkdir(parents=True)
    (folder / "log").touch()
    (folder / "state").write_bytes(bytes(40))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SMS_CRASH_ROOT": str(root.resolve()),
        "SMS_CRASH_LOG": str(folder / "log"),
        "SMS_CRASH_STATE": str(folder / "state"),
        "LD_PRELOAD": str(library),
    }
    argv = [sys.executable, "-m", "tests.crash.child", name, str(root.resolve()), *more]
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def record(name: str, folder: Path, library: Path) -> list[Record]:
    """Return the changes that a workload makes to ``folder/root``."""
    run_recorded(name, folder, library)
    return read_records(folder / "log")


def run_full(name: str, folder: Path, library: Path, samples: int = 0) -> list[Refused]:
    """Run a workload on a full or failing disk, once for each change that may fail, in each of the ways of child.py.

    Args:
        samples: how many of these runs; 0 for all.
    """
    lines = run_recorded(name, folder, library, "full", *([str(samples)] if samples else [])).splitlines()
    found = [Refused(**json.loads(line.removeprefix(RESULT))) for line in lines if line.startswith(RESULT)]
    return [one._replace(marks=tuple(one.marks)) for one in found]
