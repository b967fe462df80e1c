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
"""Captures and unpacked images: they stay from one run to the next."""
Ways = Mapping[str, Callable[[], float]]
"""What is measured, each by its name: it runs once and gives the seconds."""


class Samples(list[float]):
    """What the runs of one way took. Those of a peer that failed are none, and ``reason`` says why."""

    reason: str | None = None

    @classmethod
    def failed(cls, reason: str) -> Self:
        """Those of a peer that failed."""
        samples = cls()
        samples.reason = reason
        return samples

    @classmethod
    def tried(cls, take: Callable[[], Iterable[float]]) -> Self:
        """Those of a peer; where its values cannot be had, none."""
        try:
            return cls(take())
        except Exception as error:  # whatever it is, the project's own figure does not depend on it
            return cls.failed(f"{type(error).__name__}: {error}")

    @property
    def median(self) -> float:
        """The middle one."""
        return round(median(self), 4)


def interleave(
    own: Ways, peers: Ways, runs: int, report: Callable[[str], None] = lambda text: None
) -> dict[str, Samples]:
    """Run every way ``runs`` times, all of them in each round: what disturbs one disturbs the others.

    Each round begins with another way, so that none always pays for a cold cache. A peer that fails is not run
    again and has no samples; an error of the project's own ways is raised.
    """
    ways = {**own, **peers}
    names = list(ways)
    samples = {name: Samples() for name in names}
    for number in range(runs):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if samples[name].reason:
                continue
            report(f"round {number + 1} of {runs}: {name}")
            try:
                samples[name].append(ways[name]())
            except Exception as error:
                if name in own:
                    raise
                samples[name] = Samples.failed(explain(error))
    return samples


def explain(error: Exception) -> str:
    """Why something failed, with the last lines of what its program printed."""
    if isinstance(error, SmsError):
        return error.message
    printed = error.stderr if isinstance(error, subprocess.CalledProcessError | subprocess.TimeoutExpired) else None
    text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed or ""
    return "\n    ".join([f"{type(error).__name__}: {error}", *text.strip().splitlines()[-8:]])


def need(program: str, package: str) -> str:
    """The path of a peer's program.

    Raises:
        SmsError: it is not installed.
    """
    path = shutil.which(program)
    if not path:
        raise SmsError(f"{program} is not installed; Debian has it in the package {package}")
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
    """One result. Its goal is a value ``below`` or ``above`` so many units, or a ratio to the peer below so much.

    Where the peer failed, its fields are null and ``reason`` says why; so is ``holds`` for a goal that is a ratio.

    Args:
        more: further keys, such as what the value is made of.
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
        "value": value,
        "unit": unit,
        "peer": peer,
        "peer_value": peer_value,
        "ratio": None if ratio is None else round(ratio, 5 if ratio < 0.1 else 3),
        "goal": goal,
        "holds": holds,
        "runs": len(samples),
        "spread": _spread(samples),
        "peer_spread": _spread(peer_samples),
        "reason": peer_samples.reason,
        **more,
    }


def _spread(samples: Samples) -> list[float] | None:
    return [round(min(samples), 4), round(max(samples), 4)] if samples else None


def wall(*argv: str) -> float:
    """Seconds that a command of this machine takes.

    Raises:
        CommandError: it failed.
    """
    began = time.monotonic()
    Local().run(*argv, timeout=1800)
    return time.monotonic() - began


def work_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder on disk for as long as it is used; that of a run that was killed goes with its machine."""
    return tempfile.TemporaryDirectory(prefix="sms-bench-", dir=os.environ.get("SMS_MACHINE") or "/var/tmp")
