"""The confidence of a verdict: what its evidence is worth, by what the catalogue says of the service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Relation = Literal["agrees", "contradicts", "unknown", "proved"]
"""What the catalogue says of a verdict: the same, the opposite, or nothing; or packets prove it, whatever it says."""

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
    "agrees": Scale(0.4, 1.0),
    "contradicts": Scale(0.0, 0.8),
    "unknown": Scale(0.0, 1.0),
    "proved": Scale(0.0, 1.0),
}
"""Set by hand."""


@dataclass(frozen=True)
class Grounds:
    """What the confidence of a verdict is computed from. ``evidence``: the amount of it, 0..1."""

    relation: Relation
    evidence: float


def confidence(grounds: Grounds) -> float:
    """Return the confidence, MIN_CONFIDENCE to MAX_CONFIDENCE."""
    scale = SCALES[grounds.relation]
    found = scale.none + (scale.all - scale.none) * grounds.evidence
    return round(min(max(found, MIN_CONFIDENCE), MAX_CONFIDENCE), 3)
