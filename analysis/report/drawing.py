"""Geometry of the report's charts: positions in per cent of the width, heights in pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise, zip_longest

from analysis.model import Classification, Service
from analysis.units import later, span

DAY = 86_400.0
BUDGET_TICKS = (1.0, 10.0, 60.0, 600.0, 3600.0, 6 * 3600.0, DAY, 7 * DAY, 30 * DAY, 365 * DAY)
MAX_LANES = 24
"""Services drawn in the traffic diagram; the others are only counted."""

_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200)
_DAYS = (1, 2, 7, 14, 30, 60, 90, 180, 365)
_MAX_TICKS = 10
_LEAST = 4.0
"""Minimum height of a bar in a timeline, in per cent."""
_HAIR = 0.003
"""Minimum width of a gap, as part of the width: a minute in a day is still visible."""
_FIRST = 2.0
"""Position of one second on the budget scale, in per cent; shorter budgets are a mark at the left."""


@dataclass(frozen=True)
class Tick:
    """A mark on an axis. ``anchor`` keeps the label in the chart; a minor tick has no label on narrow screens."""

    at: float
    label: str
    note: str = ""
    anchor: str = "middle"
    minor: bool = False


def _tick(at: float, label: str, *, index: int, note: str = "") -> Tick:
    anchor = "start" if at < 3 else "end" if at > 96 else "middle"
    return Tick(round(at, 3), label, note, anchor, bool(index % 2))


def _step(length_s: float) -> float:
    """Return the seconds between two ticks, for at most about ten ticks."""
    below = [10.0**power * part for power in range(-9, 0) for part in (1, 2, 5)]
    for step in (*below, *_STEPS, *(days * DAY for days in _DAYS)):
        if length_s / step <= _MAX_TICKS:
            return float(step)
    return length_s / _MAX_TICKS


def time_ticks(start: datetime | None, length_s: float) -> list[Tick]:
    """Return ticks at round clock times from ``start`` on; without a start, at seconds since the beginning."""
    if not math.isfinite(length_s) or length_s <= 0:
        return []
    start = start if later(start, length_s) else None
    step = _step(length_s)
    offset = start.timestamp() % max(step, DAY) if start else 0.0
    # A capture that begins just after the full hour still gets the tick of that hour, at the left edge.
    first = math.ceil(offset / step - length_s / step * 0.005) * step - offset
    ticks: list[Tick] = []
    previous = ""
    for index in range(_MAX_TICKS + 1):
        at_s = first + index * step
        if at_s > length_s * (1 + 1e-9):
            break
        when = later(start, at_s + step * 1e-6)
        note = _time_note(when, step) if index % 2 == 0 else previous
        at = max(at_s, 0) / length_s * 100
        ticks.append(_tick(at, _time_label(when, at_s, step), index=index, note=note if note != previous else ""))
        previous = note
    return ticks


def _time_note(when: datetime | None, step: float) -> str:
    """Return what the label omits: the day, or for fractions of a second the minute."""
    if when is None or step >= DAY:
        return ""
    return f"{when.day} {when:%b}" if step >= 1 else f"{when:%H:%M}"


def _time_label(when: datetime | None, at_s: float, step: float) -> str:
    if when is None:
        return span(round(at_s, 9))
    if step >= DAY:
        return f"{when.day} {when:%b}"
    if step >= 1:
        return f"{when:%H:%M}" if step >= 60 else f"{when:%H:%M:%S}"
    digits = min(max(math.ceil(-math.log10(step)), 1), 6)
    return f"{when:%S}.{when.microsecond:06d}"[: 3 + digits] + " s"


@dataclass(frozen=True)
class Strip:
    """A service's contacts over time: steady state above the line, boots below it.

    Attributes:
        steady: outline of the bars, one unit wide each, in a box of ``parts`` by 100; "" without any.
        boot: (begin, width, height) of the bars below the line, in per cent.
        line: position of the line between the two, in per cent from the top.
        peak, total, total_boot: contacts in the busiest part, and in total.
    """

    service: Service
    number: int
    parts: int
    steady: str
    boot: tuple[tuple[float, float, float], ...]
    line: float
    peak: int
    total: int
    total_boot: int


def strip(service: Service, number: int, parts: int) -> Strip:
    """Return the timeline of a service. Both directions share one scale."""
    pairs = list(zip_longest(service.timeline, service.timeline_boot, fillvalue=0))[:parts]
    pairs += [(0, 0)] * (parts - len(pairs))
    most, most_boot = (max((pair[side] for pair in pairs), default=0) for side in (0, 1))
    scale = 96 / (most + most_boot) if most + most_boot else 0.0
    # A single contact next to a thousand others must still be visible.
    up, down = ([max(pair[side] * scale, _LEAST) if pair[side] > 0 else 0.0 for pair in pairs] for side in (0, 1))
    line, width = round(100 - max(down, default=0.0), 2), 100 / max(len(pairs), 1)
    return Strip(
        service,
        number,
        max(len(pairs), 1),
        "".join(f"M{at + 0.07:g} {line:g}v{-tall:.4g}h.86v{tall:.4g}z" for at, tall in enumerate(up) if tall),
        tuple(
            (round((at + 0.07) * width, 3), round(0.86 * width, 3), round(tall, 2))
            for at, tall in enumerate(down)
            if tall
        ),
        line,
        max((sum(pair) for pair in pairs), default=0),
        sum(service.timeline),
        sum(service.timeline_boot),
    )


def gaps_outline(found: Classification, parts: int) -> str:
    """Return the outline of the gaps over the timelines, in a box of 1 by 1; "" without any."""
    length_s = found.bin_s * parts
    if not 0 < length_s < math.inf:
        return ""
    drawn = [(begin / length_s, end / length_s) for begin, end in found.capture.gaps if 0 <= begin < end < math.inf]
    return "".join(
        f"M{begin:.4g} 0h{max(min(end, 1) - begin, _HAIR):.4g}v1H{begin:.4g}z" for begin, end in drawn if begin < 1
    )


@dataclass(frozen=True)
class Budget:
    """The tolerated outage of a service, as a bar."""

    service: Service
    number: int
    width: float
    label: str


def budget_label(service: Service) -> str:
    """Describe the budget: a zero without a reason is an unknown budget, not "none"."""
    if service.budget_s != 0:
        return span(service.budget_s) if service.budget_s > 0 else "unknown"
    return "none" if service.budget_why or service.verdict == "time-critical" else "unknown"


def budgets(services: Sequence[tuple[int, Service]]) -> tuple[list[Budget], list[Tick]]:
    """Return the bars, shortest first, and the ticks of their logarithmic scale."""
    finite = [one.budget_s for _, one in services if math.isfinite(one.budget_s)]
    longest = max(finite, default=0.0)
    most = next((tick for tick in BUDGET_TICKS[4:] if tick >= longest), longest)
    order = sorted(services, key=lambda pair: (pair[1].budget_s, pair[1].verdict != "time-critical", pair[1].name))
    bars = [Budget(one, number, _budget_at(one.budget_s, most), budget_label(one)) for number, one in order]
    # Leave room for the label of the last tick.
    marks = [tick for tick in BUDGET_TICKS if tick == most or _budget_at(tick, most) < 88]
    return bars, [_tick(_budget_at(tick, most), span(tick), index=index) for index, tick in enumerate(marks)]


def _budget_at(seconds: float, most: float) -> float:
    if not seconds > 0:
        return 0.0
    return round(_FIRST + (100 - _FIRST) * min(math.log(max(seconds, 1.0)) / math.log(most), 1.0), 3)


@dataclass(frozen=True)
class Lane:
    """A service between the nodes and the management node; ``y`` is the middle of its band."""

    name: str
    verdict: str
    booting: bool
    toward: str
    bytes: int
    y: int = 0
    height: float = 0.0


@dataclass(frozen=True)
class Talk:
    """The diagram of who talks to whom."""

    lanes: tuple[Lane, ...]
    heads: tuple[tuple[int, str], ...]
    height: int
    more: int
    more_bytes: int


_PITCH, _TOP, _HEAD = 44, 66, 30
_TOWARD = {"node": "sms", "sms": "nodes", "both": "both"}


def talk(found: Classification, services: Sequence[tuple[int, Service]]) -> Talk:
    """Return the diagram of the busiest services, time-critical ones first; thickness is logarithmic in bytes."""
    router = routing(found)
    drawn = [pair for pair in services if pair[1] is not router]
    most = sorted(drawn, key=lambda pair: -pair[1].bytes)
    kept, left = {number for number, _ in most[:MAX_LANES]}, most[MAX_LANES:]
    through = [_routed(found, router)] if found.routed.packets > 0 else []
    lanes: list[Lane] = []
    heads: list[tuple[int, str]] = []
    y = _TOP
    for verdict, title in (("time-critical", "must never stop"), ("deferrable", "can wait")):
        group = [_lane(pair[1]) for pair in most if pair[0] in kept and pair[1].verdict == verdict]
        group += [one for one in through if one.verdict == verdict]
        if group:
            heads.append((y, title))
            y += _HEAD
        for one in group:
            lanes.append(replace(one, y=y + 18))
            y += _PITCH
    sizes = [one.bytes for _, one in drawn] + [one.bytes for one in through]
    lanes = [replace(one, height=thickness(one.bytes, sizes)) for one in lanes]
    return Talk(tuple(lanes), tuple(heads), y + 8, len(left), sum(one.bytes for _, one in left))


def _lane(one: Service) -> Lane:
    return Lane(one.name, one.verdict, one.phase == "boot", _TOWARD[one.initiator], one.bytes)


def _routed(found: Classification, one: Service | None) -> Lane:
    """Return the arrow to the outside, in the group of the routing service; time-critical if none is known."""
    name, verdict = (one.name, one.verdict) if one else ("routed", "time-critical")
    return Lane(name, verdict, False, "outside", found.routed.bytes)


def routing(found: Classification) -> Service | None:
    """Find the service that routes: it has the packets, the bytes and most ports of the routed traffic."""
    same = (found.routed.packets, found.routed.bytes)
    alike = [one for one in found.services if found.routed.packets and (one.packets, one.bytes) == same]
    ports = {port for destination in found.routed.destinations for port in destination.ports}
    return max(alike, key=lambda one: len(ports & set(one.ports)), default=None)


def thickness(size: float, sizes: Sequence[float]) -> float:
    """Return 2 to 16 pixels for a number of bytes, relative to the others."""
    low, high = (math.log10(max(edge(sizes), 1)) for edge in (min, max))
    return 9.0 if high - low < 0.01 else round(2 + 14 * (math.log10(max(size, 1)) - low) / (high - low), 1)


def shares(values: Sequence[int]) -> list[tuple[float, float]]:
    """Return adjacent (begin, width) segments in per cent."""
    whole = sum(values)
    edges = [0.0]
    for value in values:
        edges.append(edges[-1] + (value / whole * 100 if whole else 0.0))
    return [(round(begin, 3), round(end - begin, 3)) for begin, end in pairwise(edges)]
