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
    # 2,117 verdicts, of which 99.9 % are right: an agreement hardly needs evidence.
    "agrees": Scale(0.97, 1.0),
    # 279 verdicts, 99 % right.
    "decides": Scale(0.78, 0.97),
    # 76 verdicts, all of them right, most with much evidence.
    "contradicts": Scale(0.51, 0.96),
    # 212 verdicts, 92 % right.
    "unknown": Scale(0.55, 1.0),
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
    Bin(0.0, 0.5, 6, 0.421, 1.0),
    Bin(0.5, 0.6, 66, 0.551, 0.818),
    Bin(0.6, 0.7, 49, 0.647, 0.796),
    Bin(0.7, 0.8, 88, 0.768, 0.886),
    Bin(0.8, 0.9, 77, 0.864, 0.974),
    Bin(0.9, 0.95, 112, 0.924, 1.0),
    Bin(0.95, 1.0, 1055, 0.983, 1.0),
)
"""From the same program: 1,453 verdicts on 140 clusters of seven families that the fit never saw."""


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
