"""Services of the catalogue that were not seen, and how long a capture must be to show them with 95 % probability."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from analysis.context import EXPECTED, CaptureContext
from analysis.model import Unseen
from analysis.signatures import Signature
from analysis.units import counted, span

DEFAULT_EVERY_S = 86400.0
"""Assumed seconds between two uses by a node if the catalogue does not say."""


def needed_capture_s(every_s: float, nodes: int) -> float:
    """Return the seconds after which a service that each node uses at random every ``every_s`` was seen (95 %).

    T = -ln(0.05) * every_s / nodes: n nodes use it n / every_s times a second, and exp(-T * n / every_s) = 0.05
    (see `context.EXPECTED` for the source).
    """
    return EXPECTED * every_s / max(nodes, 1)


def find_unseen(
    signatures: Sequence[Signature],
    seen: Collection[str],
    context: CaptureContext,
    *,
    others: Mapping[str, int] | None = None,
    limit: str = "",
) -> tuple[Unseen, ...]:
    """Return the services with traffic of their own that were not seen, shortest needed capture first.

    Args:
        others: packets of services that nodes, or the management node, use at other machines.
        limit: why the capture cannot show that a service is not used; "" if it can (`visibility.find_limit`).
    """
    found = [_unseen(one, context, limit) for one in signatures if one.name not in seen and not one.silent]
    found = [_elsewhere(one, others[one.name]) if others and one.name in others else one for one in found]
    return tuple(sorted(found, key=lambda one: (one.needed_capture_s, one.name)))


def _unseen(signature: Signature, context: CaptureContext, limit: str) -> Unseen:
    every_s = signature.every_s or DEFAULT_EVERY_S
    needed_s = needed_capture_s(every_s, context.nodes)
    nodes = counted(max(context.nodes, 1), "node")
    often = "boots" if signature.boot else "uses it"
    why = f"if a node {often} every {span(every_s)}, {nodes} show it within {span(needed_s)} (95 %)"
    lasted = f"the capture covers {span(context.duration_s)}"
    if not context.nodes or context.duration_s < needed_s:
        return Unseen(signature.name, needed_s, f"{why}; {lasted}, too short to decide", "too short")
    if limit:
        return Unseen(signature.name, needed_s, f"{why}; {lasted}, but cannot show it: {limit}", "not shown")
    return Unseen(signature.name, needed_s, f"{why}; {lasted}: nodes hardly use it", "hardly used")


def _elsewhere(unseen: Unseen, packets: int) -> Unseen:
    why = f"it is used at other machines than the management node: {counted(packets, 'packet')}"
    return replace(unseen, why=why, finding="elsewhere")
