"""The confidence of a verdict: what its evidence is worth, by what the catalogue says of the service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Relation = Literal["agrees", "decides", "contradicts", "unknown", "proved"]
"""What the catalogue says of a verdict: the same; it decides, because too little was seen; the opposite; nothing. Or
packets prove the verdict, whatever it says."""

MAX_CONFIDENCE = 0.99
"""Maximum confidence: what was not seen may still happen."""
MIN_CONFIDENCE = 0.01
NOT_A_CLUSTER = 0.5
"""Maximum confidence where the capture does not look like that of a cluster: the rules are about clusters."""


@dataclass(frozen=True)
class Scale:
    """Confidence without any evidence, and with all of it; between them it is proportional to the evidence."""

    none: float
    all: float


SCALES: dict[Relation, Scale] = {
    # 2,070 verdicts, of which 99.7 % are right: an agreement hardly needs evidence.
    "agrees": Scale(0.96, 1.0),
    # 278 verdicts, 90 % right.
    "decides": Scale(0.65, 0.94),
    # 69 verdicts, all of them right, most with much evidence.
    "contradicts": Scale(0.31, 1.0),
    # 266 verdicts, 75 % right.
    "unknown": Scale(0.38, 1.0),
    # 41 verdicts, all of them right, most with much evidence.
    "proved": Scale(0.14, 1.0),
}
"""From `python -m bench.calibration`: the least squared error on 280 generated clusters of 14 families (the comments
count their verdicts), with 60 verdicts of the scales that were set by hand before (docs/classify-rules.md)."""


class Bin(NamedTuple):
    """Verdicts with a confidence from ``low`` to ``high``: their number, mean confidence, and share of right ones."""

    low: float
    high: float
    verdicts: int
    stated: float
    right: float


BINS: tuple[Bin, ...] = (
    Bin(0.0, 0.5, 68, 0.396, 0.603),
    Bin(0.5, 0.6, 23, 0.535, 0.696),
    Bin(0.6, 0.7, 44, 0.653, 0.864),
    Bin(0.7, 0.8, 23, 0.756, 0.913),
    Bin(0.8, 0.9, 68, 0.868, 0.926),
    Bin(0.9, 0.95, 30, 0.923, 1.0),
    Bin(0.95, 1.0, 555, 0.98, 0.993),
)
"""From the same program: 811 verdicts on 80 clusters of four families that the fit never saw."""


@dataclass(frozen=True)
class Grounds:
    """What the confidence of a verdict is computed from. ``evidence``: the amount of it, 0..1."""

    relation: Relation
    evidence: float


def confidence(grounds: Grounds, scales: Mapping[Relation, Scale] = SCALES) -> float:
    """Return the confidence, MIN_CONFIDENCE to MAX_CONFIDENCE."""
    scale = scales[grounds.relation]
    found = scale.none + (scale.all - scale.none) * grounds.evidence
    return round(min(max(found, MIN_CONFIDENCE), MAX_CONFIDENCE), 3)
