"""Compare a classification with an earlier one: which services moved, came or went, and what else changed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from analysis import units
from analysis.classification import Classified, Report
from analysis.model import LOW_CONFIDENCE, Change, Classification, Comparison, Service

BUDGETS_APART = 1.25
"""Tolerated outages that differ by this factor are different: observed ones vary a little from day to day."""
CONFIDENCE_APART = 0.1
USERS_APART = 0.2
"""Shares of the nodes that use a service."""
KINDS = ("verdict", "appeared", "gone", "changed")
"""In the order in which they matter."""


def compare(before: Report, name: str, found: Classification) -> Comparison:
    """Return what is different from ``before``, a file of this name."""
    earlier = {one.name: one for one in before.services}
    now = {one.name: one for one in found.services}
    changes = [_changed(earlier[name], one, before, found) for name, one in now.items() if name in earlier]
    changes += [_appeared(one, before) for name, one in now.items() if name not in earlier]
    changes += [_gone(one, found) for name, one in earlier.items() if name not in now]
    kept = [one for one in changes if one.kind]
    kept.sort(key=lambda one: (KINDS.index(one.kind), "time-critical" not in (one.before, one.after), one.name))
    return Comparison(name, tuple(_context(before, found)), tuple(kept), len(changes) - len(kept))


def _changed(before: Classified, now: Service, report: Report, found: Classification) -> Change:
    """Return the differences of a service that both have; without any, the kind is ""."""
    details = []
    if before.budget_s is not None and _apart(before.budget_s, now.budget_s):
        details.append(f"tolerated outage {_budget(now.budget_s)}, was {_budget(before.budget_s)}")
    if before.overridden != now.overridden:
        details.append("now set by the site" if now.overridden else "no longer set by the site")
    elif report.whole and not now.overridden and _differs(before.confidence, now.confidence):
        details.append(f"confidence {_percent(now.confidence)}, was {_percent(before.confidence)}")
    nodes = found.nodes.count
    if (
        before.clients is not None
        and report.count
        and nodes
        and abs(now.clients / nodes - before.clients / report.count) >= USERS_APART
    ):
        was = f"{units.number(before.clients)} of {units.number(report.count)}"
        details.append(f"{units.number(now.clients)} of {units.counted(nodes, 'node')}, was {was}")
    moved = before.verdict != now.verdict
    return Change(
        now.name, "verdict" if moved else "changed" if details else "", before.verdict, now.verdict, tuple(details)
    )


def _appeared(now: Service, before: Report) -> Change:
    details = [f"confidence {_percent(now.confidence)}"]
    if now.name in before.undetermined:
        details.append("the earlier capture was too short to show it")
    return Change(now.name, "appeared", "", now.verdict, tuple(details))


def _gone(before: Classified, found: Classification) -> Change:
    """Return a service that was seen only earlier; a capture may be too short to show it."""
    unseen = next((one for one in found.unseen if one.name == before.name), None)
    if unseen is None:
        return Change(before.name, "gone", before.verdict, "")
    means = {
        "too short": f"this capture is too short: {units.span(unseen.needed_capture_s)} would show it",
        "not shown": "this capture cannot show it, whatever its length",
        "hardly used": "hardly used now (95 % confidence)",
        "elsewhere": "nodes use it at other machines now",
    }
    return Change(before.name, "gone", before.verdict, "", (means[unseen.finding],))


def _context(before: Report, found: Classification) -> Iterator[str]:
    """Describe differences of the captures themselves."""
    if before.lasted_s:
        lasted = found.capture.covered_s or found.capture.duration_s
        if _apart(before.lasted_s, lasted):
            yield f"captured {units.span(lasted)}, was {units.span(before.lasted_s)}"
    if before.count is not None and before.count != found.nodes.count:
        yield f"{units.counted(found.nodes.count, 'node')}, was {units.number(before.count)}"
    if before.sms and not set(before.sms) & set(found.sms.addresses):
        now = ", ".join(found.sms.addresses[:2]) or "unknown"
        yield f"management node {now}, was {', '.join(before.sms[:2])}"
    if before.version and found.made.version and before.version != found.made.version:
        yield f"sms {found.made.version}, was {before.version}"


def _apart(one: float, other: float) -> bool:
    low, high = sorted((one, other))
    if not (math.isfinite(low) and math.isfinite(high)):
        return one != other
    return low < high and (low <= 0 or high / low >= BUDGETS_APART)


def _differs(one: float, other: float) -> bool:
    return abs(one - other) >= CONFIDENCE_APART or (one < LOW_CONFIDENCE) != (other < LOW_CONFIDENCE)


def _budget(seconds: float) -> str:
    return units.span(seconds) if seconds >= 1 else "none"


def _percent(value: float) -> str:
    return f"{units.part(value) * 100:.0f} %"
