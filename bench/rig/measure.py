"""Medians of interleaved runs, and a result as one flat JSON object."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Self

from appliance.errors import SmsError
from appliance.host.local import Local

CACHE = Path("/var/cache/sms-bench")
"""Captures and unpacked images, kept between runs."""
Variants = Mapping[str, Callable[[], float]]
"""Functions to measure, by name: each runs once and returns seconds."""


class Samples(list[float]):
    """Measurements of one variant. Those of a failed peer are empty, with a ``reason``."""

    reason: str | None = None

    @classmethod
    def failed(cls, reason: str) -> Self:
        """Return empty samples with a reason."""
        samples = cls()
        samples.reason = reason
        return samples

    @classmethod
    def tried(cls, take: Callable[[], Iterable[float]]) -> Self:
        """Return the samples that ``take`` returns; if it fails, empty ones with the reason."""
        try:
            return cls(take())
        except Exception as error:  # must not affect the product's own result
            return cls.failed(f"{type(error).__name__}: {error}")

    @property
    def median(self) -> float:
        """The median, rounded."""
        return round(median(self), 4)


def interleave(
    own: Variants, peers: Variants, runs: int, report: Callable[[str], None] = lambda text: None
) -> dict[str, Samples]:
    """Run every variant ``runs`` times, all of them in each round, so that disturbances affect all.

    Each round starts with another variant, so that none always has the cold cache. A failed peer is not run
    again and has no samples; an error of the product's own variants is raised.
    """
    variants = {**own, **peers}
    names = list(variants)
    samples = {name: Samples() for name in names}
    for number in range(runs):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if samples[name].reason:
                continue
            report(f"round {number + 1} of {runs}: {name}")
            try:
                samples[name].append(variants[name]())
            except Exception as error:
                if name in own:
                    raise
                samples[name] = Samples.failed(explain(error))
    return samples


def explain(error: Exception) -> str:
    """Return why something failed, with the last lines of the program's output."""
    if isinstance(error, SmsError):
        return error.message
    printed = error.stderr if isinstance(error, subprocess.CalledProcessError | subprocess.TimeoutExpired) else None
    text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed or ""
    return "\n    ".join([f"{type(error).__name__}: {error}", *text.strip().splitlines()[-8:]])


def find_program(program: str, package: str) -> str:
    """Return the path of a peer's program.

    Raises:
        SmsError: the program is not installed.
    """
    path = shutil.which(program)
    if not path:
        raise SmsError(f"{program} is not installed; it is in Debian package {package}")
    return path


def result(
    name: str,
    samples: Samples,
    peer: str,
    peer_samples: Samples,
    *,
    below: float | None = None,
    above: float | None = None,
    ratio_below: float | None = None,
    unit: str = "s",
    **more: Any,
) -> dict[str, Any]:
    """Return a result. Its goal is a value ``below`` or ``above`` a limit, or a ratio to the peer below a limit.

    If the peer failed, its fields are null and ``reason`` is set; ``holds`` is null too if the goal is a ratio.

    Args:
        more: further keys, such as the parts of the value.
    """
    value = samples.median
    peer_value = peer_samples.median if peer_samples else None
    ratio = value / peer_value if peer_value else None
    holds: bool | None
    if above is not None:
        goal, holds = f"> {above:g} {unit}", value > above
    elif below is not None:
        goal, holds = f"< {below:g} {unit}", value < below
    else:
        goal, holds = f"ratio < {ratio_below:g}", None if ratio is None else ratio < (ratio_below or 0)
    return {
        "name": name,
        # First: one tree takes twice the time on another machine.
        "ratio": None if ratio is None else round(ratio, 5 if ratio < 0.1 else 3),
        "goal": goal,
        "holds": holds,
        "value": value,
        "unit": unit,
        "peer": peer,
        "peer_value": peer_value,
        "runs": len(samples),
        "spread": _spread(samples),
        "peer_spread": _spread(peer_samples),
        "reason": peer_samples.reason,
        **more,
    }


def _spread(samples: Samples) -> list[float] | None:
    return [round(min(samples), 4), round(max(samples), 4)] if samples else None


def wall(*argv: str) -> float:
    """Run a command on this machine; return its seconds.

    Raises:
        CommandError: the command failed.
    """
    began = time.monotonic()
    Local().run(*argv, timeout=1800)
    return time.monotonic() - began


def work_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder on disk; a killed run's folder is removed with its machine."""
    return tempfile.TemporaryDirectory(prefix="sms-bench-", dir=os.environ.get("SMS_MACHINE") or "/var/tmp")
