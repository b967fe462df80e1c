"""Runs one workload: ``python -m tests.crash.child NAME ROOT [full]``, under the recorder."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from tests.crash.recording import RESULT
from tests.crash.replay import BEGIN
from tests.crash.workload import Workload
from tests.crash.workloads import WORKLOADS, WRONG

WAYS = {"once": (0, 0), "for good": (1, 0), "partly": (0, 1)}
"""How a disk is full: (for_good, partly) of struct control in recorder.c."""


def main() -> None:
    name, root, *full = sys.argv[1:]
    mark = ctypes.CDLL(None).crash_mark
    workload = {**WORKLOADS, **WRONG}[name]
    if not full:
        workload.prepare(Path(root))
        mark(BEGIN.encode())
        workload.run(Path(root), lambda text: mark(text.encode()))
        return
    with Path(os.environ["SMS_CRASH_STATE"]).open("r+b") as stream:
        control = mmap.mmap(stream.fileno(), 32)
    for way in WAYS:
        number = 1
        while run_once(workload, Path(root, f"{way[:4].strip()}{number}"), control, number, way):
            number += 1


def run_once(workload: Workload, folder: Path, control: mmap.mmap, number: int, way: str) -> bool:
    """Run it with failure ``number``; print what came of it; return whether there was such a change."""
    folder.mkdir()
    workload.prepare(folder)
    marks: list[str] = []
    control[:32] = struct.pack("4l", 0, number, *WAYS[way])
    error = attempt(workload, folder, marks.append)
    count = struct.unpack("4l", control[:32])[0]
    control[:32] = bytes(32)
    again = ""
    if error and workload.again:
        copy = folder.with_name(folder.name + "-again")
        shutil.copytree(folder, copy)
        again = attempt(workload, copy, lambda text: None)
    result = {"folder": str(folder), "marks": marks, "error": error, "again": again}
    print(RESULT + json.dumps(result), flush=True)
    return bool(count >= number)


def attempt(workload: Workload, folder: Path, mark: Callable[[str], None]) -> str:
    """Run it; return the class of its exception."""
    try:
        workload.run(folder, mark)
    except Exception as error:
        return type(error).__name__
    return ""


if __name__ == "__main__":
    main()
