"""The picture of how often verdicts are right, by the confidence that they state (`analysis.confidence.BINS`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from analysis.confidence import BINS, Bin

SIZE = 240
"""Width and height of the field of the picture, in pixels: 0 to 100 %."""
LARGEST = 11.0
"""Radius of the point with most verdicts; areas are proportional to verdicts."""


class Point(NamedTuple):
    """A bin in the picture: its centre, and its radius."""

    x: float
    y: float
    radius: float
    bin: Bin


def points(bins: Sequence[Bin] = BINS) -> list[Point]:
    """Return the points: to the right the confidence, upwards the share of right verdicts."""
    most = max(each.verdicts for each in bins)
    return [
        Point(
            round(SIZE * each.stated, 1),
            round(SIZE * (1 - each.right), 1),
            round(max(LARGEST * math.sqrt(each.verdicts / most), 2.5), 1),
            each,
        )
        for each in bins
    ]
