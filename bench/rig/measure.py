"""Medians of interleaved runs, and a result as one flat JSON object."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from appliance.host.local import Local


class Skip(Exception):
    """A benchmark, or a peer, cannot run here; the words say why."""


class Samples(list[float]):
    """What the runs of one way took."""

    @property
    def median(self) -> float:
        """The middle one."""
        return round(median(self), 4)


def interleave(
    ways: Mapping[str, Callable[[], float]], runs: int, say: Callable[[str], None] = lambda text: None
) -> dict[str, Samples]:
    """Run every way ``runs`` times, all of them in each round: what disturbs one disturbs the others.

    Each round begins with another way, so that none always pays for a cold cache.
    """
    names = list(ways)
    samples = {name: Samples() for name in names}
    for number in range(runs):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            say(f"round {number + 1} of {runs}: {name}")
            samples[name].append(ways[name]())
    return samples


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

    Args:
        more: further keys, such as what the value is made of.
    """
    value, peer_value = samples.median, peer_samples.median
    ratio = value / peer_value
    if above is not None:
        goal, holds = f"> {above:g} {unit}", value > above
    elif below is not None:
        goal, holds = f"< {below:g} {unit}", value < below
    else:
        goal, holds = f"ratio < {ratio_below:g}", ratio < (ratio_below or 0)
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "peer": peer,
        "peer_value": peer_value,
        "ratio": round(ratio, 3),
        "goal": goal,
        "holds": holds,
        "runs": len(samples),
        "spread": [round(min(samples), 4), round(max(samples), 4)],
        "peer_spread": [round(min(peer_samples), 4), round(max(peer_samples), 4)],
        **more,
    }


def wall(*argv: str) -> float:
    """Seconds that a command of this machine takes.

    Raises:
        CommandError: it failed.
    """
    began = time.monotonic()
    Local().run(*argv, timeout=1800)
    return time.monotonic() - began
