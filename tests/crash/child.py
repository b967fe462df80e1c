"""Runs workloads under the recorder, each in a fork of its own: ``python -m tests.crash.child``.

A line of its input is a list in JSON: name, folder, and null or how many runs on a full disk (0: all). Its answer is a
line with the exit status; what was printed is in ``folder/output``.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import shutil
import struct
import sys
import traceback
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

from appliance.errors import disk_hint
from tests.crash.recording import RESULT
from tests.crash.replay import BEGIN, sample
from tests.crash.workload import Workload
from tests.crash.workloads import WORKLOADS, WRONG

WAYS = {
    "once": (0, 0, errno.ENOSPC),
    "for good": (1, 0, errno.ENOSPC),
    "partly": (0, 1, errno.ENOSPC),
    "quota": (1, 0, errno.EDQUOT),
    "disk": (0, 0, errno.EIO),
}
"""How a change fails: (for_good, partly, reason) of struct control in recorder.c."""
SPARSE = 7
"""Of the changes that fail for another reason than a full disk, one of so many is tried: the same code handles them."""
CONTROL = struct.Struct("5l")


def main() -> None:
    for line in sys.stdin:
        name, folder, samples = json.loads(line)
        if (pid := os.fork()) == 0:
            status = 1
            try:
                run_one({**WORKLOADS, **WRONG}[name], Path(folder), samples)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run_one(workload: Workload, folder: Path, samples: int | None) -> None:
    """Run it in this process, which ends afterwards."""
    with (folder / "output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    root = folder / "root"
    os.environ["SMS_CRASH_ROOT"] = str(root)
    os.environ["SMS_CRASH_LOG"], os.environ["SMS_CRASH_STATE"] = str(folder / "log"), str(folder / "state")
    recorder = ctypes.CDLL(None)
    recorder.crash_begin()
    if samples is None:
        workload.prepare(root)
        recorder.crash_mark(BEGIN.encode())
        workload.run(root, lambda text: recorder.crash_mark(text.encode()))
        return
    with (folder / "state").open("r+b") as stream:
        control = mmap.mmap(stream.fileno(), CONTROL.size)
    if samples:
        run_samples(workload, root, control, samples)
        return
    for way in WAYS:
        number = 1
        while run_once(workload, root / f"{way[:4].strip()}{number}", control, number, way):
            number += 1 if WAYS[way][-1] == errno.ENOSPC else SPARSE


def run_samples(workload: Workload, root: Path, control: mmap.mmap, samples: int) -> None:
    """Run it so often, each with another of its changes refused, spread over all of them; the ways take turns."""
    whole = root / "whole"
    whole.mkdir()
    workload.prepare(whole)
    control[: CONTROL.size] = bytes(CONTROL.size)
    workload.run(whole, lambda text: None)
    count = CONTROL.unpack(control[: CONTROL.size])[0]
    for number, way in zip(sample(range(1, count + 1), samples), cycle(WAYS), strict=False):
        run_once(workload, root / f"{way[:4].strip()}{number}", control, number, way)


def run_once(workload: Workload, folder: Path, control: mmap.mmap, number: int, way: str) -> bool:
    """Run it with failure ``number``; print what came of it; return whether there was such a change."""
    folder.mkdir()
    workload.prepare(folder)
    marks: list[str] = []
    control[: CONTROL.size] = CONTROL.pack(0, number, *WAYS[way])
    error, hint = attempt(workload, folder, marks.append)
    count = CONTROL.unpack(control[: CONTROL.size])[0]
    control[: CONTROL.size] = bytes(CONTROL.size)
    again = ""
    if error and workload.again:
        copy = folder.with_name(folder.name + "-again")
        shutil.copytree(folder, copy, symlinks=True)
        again = attempt(workload, copy, lambda text: None)[0]
    result = {"folder": str(folder), "marks": marks, "error": error, "hint": hint, "again": again}
    print(RESULT + json.dumps(result), flush=True)
    return bool(count >= number)


def attempt(workload: Workload, folder: Path, mark: Callable[[str], None]) -> tuple[str, str]:
    """Run it; return the class of its exception, and the hint that the user gets."""
    try:
        workload.run(folder, mark)
    except Exception as error:
        hint = disk_hint(error.strerror or "") if isinstance(error, OSError) else getattr(error, "hint", "")
        return type(error).__name__, hint
    return "", ""


if __name__ == "__main__":
    main()
