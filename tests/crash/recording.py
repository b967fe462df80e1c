"""Run a workload under the recorder: in a process of its own, into which recorder.c is loaded.

These processes are forks of one that has imported all workloads: that takes longer than most of them run.
"""

from __future__ import annotations

import atexit
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


@lru_cache(maxsize=1)
def start_child(library: Path) -> subprocess.Popen[str]:
    """Start the process that forks for each workload; it ends with this one."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library)}
    argv = [sys.executable, "-m", "tests.crash.child"]
    child = subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    atexit.register(child.communicate)
    return child


def run_recorded(name: str, folder: Path, library: Path, samples: int | None = None) -> str:
    """Run a workload in ``folder/root``; return its output. ``folder/log`` has the records.

    Args:
        samples: None to run it once; else on a full disk as often, 0 for all ways.
    """
    (folder / "root").mkdir(parents=True)
    (folder / "log").touch()
    (folder / "state").write_bytes(bytes(40))
    child, output = start_child(library), folder / "output"
    assert child.stdin and child.stdout
    child.stdin.write(json.dumps([name, str(folder.resolve()), samples]) + "\n")
    status = child.stdout.readline().strip()
    assert status == "0", f"{name}: {status}\n{output.read_text()[-4000:]}"
    return output.read_text()


def record(name: str, folder: Path, library: Path) -> list[Record]:
    """Return the changes that a workload makes to ``folder/root``."""
    run_recorded(name, folder, library)
    return read_records(folder / "log")


def run_full(name: str, folder: Path, library: Path, samples: int = 0) -> list[Refused]:
    """Run a workload on a full or failing disk, once for each change that may fail, in each of the ways of child.py.

    Args:
        samples: how many of these runs; 0 for all.
    """
    lines = run_recorded(name, folder, library, samples).splitlines()
    found = [Refused(**json.loads(line.removeprefix(RESULT))) for line in lines if line.startswith(RESULT)]
    return [one._replace(marks=tuple(one.marks)) for one in found]
