"""Numbers of weighted samples, and numbers as people write them."""

from __future__ import annotations

from collections.abc import Sequence


def quantiles(samples: Sequence[tuple[float, float]], shares: Sequence[float]) -> list[float]:
    """The values below which each share of the weight of (value, weight) lies, ``shares`` rising; 0 without samples."""
    ordered = sorted(samples)
    total, passed, found = weight(ordered), 0.0, []
    places = iter(ordered)
    value = 0.0
    for share in shares:
        while passed < share * total and (place := next(places, None)):
            value, more = place
            passed += more
        found.append(value)
    return found


def weight(samples: Sequence[tuple[float, float]]) -> float:
    """How many samples these stand for."""
    return sum([one for _, one in samples])


def count(number: float, thing: str) -> str:
    """ "1 node", "12,031 nodes"."""
    many = {"boot": "boots", "address": "addresses"}.get(thing, f"{thing}s")
    return f"{number:,.0f} {thing if number == 1 else many}"


def span(seconds: float) -> str:
    """A span as people say it: "0.4 s", "300 s", "3.2 h", "30 days"."""
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 3600:
        return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 86400:,.3g} days"
