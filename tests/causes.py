"""What the tests of a run waited for: seconds of the main thread by cause, the outermost alone."""

from __future__ import annotations

import functools
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.cli import VERBS

PROGRAMS = {
    "borg",
    "apptainer",
    "mksquashfs",
    "e2fsck",
    "debugfs",
    "qemu-system-x86_64",
    "srun",
    "sbatch",
    "btrfs",
    "cp",
}
seconds: Counter[str] = Counter()
counts: Counter[str] = Counter()
_inside = threading.local()


def name_of(words: Any) -> str:
    """A command's cause: the verb of `sms`, or the program, below whatever enters a namespace or a host."""
    if isinstance(words, str):
        return "other commands"
    names = [Path(str(word)).name for word in words]
    for place, name in enumerate(names):
        if name in ("sms", "appliance"):
            rest = [word for word in names[place + 1 :] if word in VERBS]
            verb = rest[0] if rest else "-"
            action = names[names.index(verb) + 1 :][:1] if verb in ("vm", "node", "image", "overlay", "files") else []
            return " ".join(["sms", verb, *(word for word in action if word.isalpha())])
        if name in PROGRAMS:
            return name
    return "other commands"


def timed(function: Callable[..., Any], cause: Callable[..., str]) -> Callable[..., Any]:
    """The function, whose time counts for a cause where it is the outermost one in the main thread."""

    @functools.wraps(function)
    def run(*words: Any, **more: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() or getattr(_inside, "it", False):
            return function(*words, **more)
        _inside.it = True
        began = time.monotonic()
        try:
            return function(*words, **more)
        finally:
            _inside.it = False
            name = cause(*words)
            seconds[name] += time.monotonic() - began  # type: ignore[assignment]  # a counter of fractions
            counts[name] += 1

    return run


def watch() -> None:
    """Count from now on."""
    from appliance.operations.image import build
    from appliance.operations.lab import lab

    for name in ("wait", "communicate"):
        method = getattr(subprocess.Popen, name)
        setattr(subprocess.Popen, name, timed(method, lambda process, *_: name_of(process.args)))
    time.sleep = timed(time.sleep, lambda *_: "sleep, between two looks")
    lab.lab_up = timed(lab.lab_up, lambda *_: "a lab up")
    lab.lab_down = timed(lab.lab_down, lambda *_: "a lab down")
    build.build = timed(build.build, lambda *_: "an image of the services, if only its versions")


def table(spent: Counter[str], often: Counter[str]) -> list[str]:
    """Lines, the longest first."""
    return [f"{took:7.1f} {often[name]:6}  {name}" for name, took in spent.most_common() if took >= 1]
