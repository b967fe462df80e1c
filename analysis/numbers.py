"""Statistics of weighted samples."""

from __future__ import annotations

from collections.abc import Sequence


def quantiles(samples: Sequence[tuple[float, float]], shares: Sequence[float]) -> list[float]:
    """Return the quantiles of (value, weight) samples for ascending ``shares`` of the weight; 0 without samples."""
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
    """Return the total weight."""
    return sum([one for _, one in samples])
