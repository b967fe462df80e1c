"""Services of the catalogue that were not seen, and how long one has to look to be nearly sure to see them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from analysis.model import Unseen
from analysis.scene import EXPECTED, Scene
from analysis.signatures import Signature
from analysis.units import counted, span

RARELY_S = 86400.0
"""How often a node uses a service of which the catalogue does not say."""


def needed_capture_s(every_s: float, nodes: int) -> float:
    """Seconds after which a service that each node uses every ``every_s``, by chance, was seen with 95 % probability.

    T = -ln(0.05) * every_s / nodes: n nodes use it n / every_s times a second, and exp(-T * n / every_s) = 0.05
    (see `scene.EXPECTED` for the source).
    """
    return EXPECTED * every_s / max(nodes, 1)


def find_unseen(signatures: Sequence[Signature], seen: Collection[str], scene: Scene) -> tuple[Unseen, ...]:
    """Those that have traffic of their own and showed none, the soonest to be seen first."""
    found = [_unseen(one, scene) for one in signatures if one.name not in seen and not one.silent]
    return tuple(sorted(found, key=lambda one: (one.needed_capture_s, one.name)))


def _unseen(signature: Signature, scene: Scene) -> Unseen:
    every_s = signature.every_s or RARELY_S
    needed_s = needed_capture_s(every_s, scene.nodes)
    nodes = counted(max(scene.nodes, 1), "node")
    often = "boots" if signature.boot else "uses it"
    why = f"where a node {often} every {span(every_s)}, {nodes} show it within {span(needed_s)} (95 %)"
    if scene.nodes and scene.duration_s >= needed_s:
        return Unseen(signature.name, needed_s, f"{why}; {span(scene.duration_s)} were seen: nodes hardly use it")
    return Unseen(signature.name, needed_s, f"{why}; {span(scene.duration_s)} were seen, too little to tell")
