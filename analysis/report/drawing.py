"""Where things stand in the report's pictures: places in per cent of the width, heights in pixels."""

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
MOST_LANES = 24
"""Services that the picture of who talks to whom draws; the rest is named as a number."""

_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200)
_DAYS = (1, 2, 7, 14, 30, 60, 90, 180, 365)
_MOST_TICKS = 10
_LEAST = 4.0
"""Height of the lowest bar in a timeline, in per cent."""
_FIRST = 2.0
"""Where one second stands on the scale of budgets, in per cent; a shorter one is a mark at the left."""


@dataclass(frozen=True)
class Tick:
    """A mark on an axis. ``anchor`` keeps its label inside; a minor one has no label where room is scarce."""

    at: float
    label: str
    note: str = ""
    anchor: str = "middle"
    minor: bool = False


def _tick(at: float, label: str, *, index: int, note: str = "") -> Tick:
    anchor = "start" if at < 3 else "end" if at > 96 else "middle"
    return Tick(round(at, 3), label, note, anchor, bool(index % 2))


def _step(length_s: float) -> float:
    """Seconds between two marks, so that hardly more than ten come out."""
    below = [10.0**power * part for power in range(-9, 0) for part in (1, 2, 5)]
    for step in (*below, *_STEPS, *(days * DAY for days in _DAYS)):
        if length_s / step <= _MOST_TICKS:
            return float(step)
    return length_s / _MOST_TICKS


def time_ticks(start: datetime | None, length_s: float) -> list[Tick]:
    """Marks at whole times of the clock from ``start`` on; without one, times since the beginning."""
    if not math.isfinite(length_s) or length_s <= 0:
        return []
    start = start if later(start, length_s) else None
    step = _step(length_s)
    offset = start.timestamp() % max(step, DAY) if start else 0.0
    # A capture that begins a moment after the full hour has its mark at the very left.
    first = math.ceil(offset / step - length_s / step * 0.005) * step - offset
    ticks: list[Tick] = []
    said = ""
    for index in range(_MOST_TICKS + 1):
        at_s = first + index * step
        if at_s > length_s * (1 + 1e-9):
            break
        when = later(start, at_s + step * 1e-6)
        note = _time_note(when, step) if index % 2 == 0 else said
        at = max(at_s, 0) / length_s * 100
        ticks.append(_tick(at, _time_label(when, at_s, step), index=index, note=note if note != said else ""))
        said = note
    return ticks


def _time_note(when: datetime | None, step: float) -> str:
    """What the label leaves out: the day, or the minute of fractions of a second."""
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
    """A service's contacts over time: what is steady above the line, what is boot below it.

    Attributes:
        steady: outline of the bars, one unit wide each, in a box of ``parts`` by 100; "" without any.
        boot: (begin, width, height) of the bars below the line, in per cent.
        line: height of the line between the two, in per cent from above.
        peak, total, total_boot: contacts in the fullest part, and in all.
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


def parts_shown(found: Classification) -> int:
    """Parts of the timelines that the capture lasted; it may have ended before the last of them."""
    longest = max((len(line) for one in found.services for line in (one.timeline, one.timeline_boot)), default=0)
    begun = found.capture.duration_s / found.bin_s if found.bin_s > 0 else math.inf
    return min(longest, math.floor(begun) + 1) if 0 <= begun < longest else longest


def strip(service: Service, number: int, parts: int) -> Strip:
    """Both directions have one scale: bars of the same length are as many contacts."""
    pairs = list(zip_longest(service.timeline, service.timeline_boot, fillvalue=0))[:parts]
    pairs += [(0, 0)] * (parts - len(pairs))
    most, most_boot = (max((pair[side] for pair in pairs), default=0) for side in (0, 1))
    scale = 96 / (most + most_boot) if most + most_boot else 0.0
    # What is there is seen: a contact beside a thousand others is still a mark.
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


@dataclass(frozen=True)
class Budget:
    """How long a service can be away, as a bar."""

    service: Service
    number: int
    width: float
    label: str


def budget_label(service: Service) -> str:
    """In words: nothing at all is no span, and a span that nobody reckoned is not nothing."""
    if service.budget_s != 0:
        return span(service.budget_s) if service.budget_s > 0 else "not known"
    return "at once" if service.budget_why or service.verdict == "time-critical" else "not known"


def budgets(services: Sequence[tuple[int, Service]]) -> tuple[list[Budget], list[Tick]]:
    """Bars, the shortest first, and the marks of their scale: each ten times as long is as far again."""
    finite = [one.budget_s for _, one in services if math.isfinite(one.budget_s)]
    longest = max(finite, default=0.0)
    most = next((tick for tick in BUDGET_TICKS[4:] if tick >= longest), longest)
    order = sorted(services, key=lambda pair: (pair[1].budget_s, pair[1].verdict != "time-critical", pair[1].name))
    bars = [Budget(one, number, _budget_at(one.budget_s, most), budget_label(one)) for number, one in order]
    # Beside the last mark there is no room for another label.
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
    """The picture of who talks to whom."""

    lanes: tuple[Lane, ...]
    heads: tuple[tuple[int, str], ...]
    height: int
    more: int
    more_bytes: int


_PITCH, _TOP, _HEAD = 44, 66, 30
_TOWARD = {"node": "sms", "sms": "nodes", "both": "both"}


def talk(found: Classification, services: Sequence[tuple[int, Service]]) -> Talk:
    """The services with most bytes, what must never stop first; thickness goes with the logarithm of bytes."""
    router = routing(found)
    drawn = [pair for pair in services if pair[1] is not router]
    most = sorted(drawn, key=lambda pair: -pair[1].bytes)
    kept, left = {number for number, _ in most[:MOST_LANES]}, most[MOST_LANES:]
    through = [_routed(found, router)] if found.routed.packets > 0 else []
    lanes: list[Lane] = []
    heads: list[tuple[int, str]] = []
    y = _TOP
    for verdict, words in (("time-critical", "must never stop"), ("deferrable", "can wait")):
        group = [_lane(pair[1]) for pair in most if pair[0] in kept and pair[1].verdict == verdict]
        group += [one for one in through if one.verdict == verdict]
        if group:
            heads.append((y, words))
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
    """The arrow to the outside, in the group of the service that routes; nodes need it where nobody is known to."""
    name, verdict = (one.name, one.verdict) if one else ("routed", "time-critical")
    return Lane(name, verdict, False, "outside", found.routed.bytes)


def routing(found: Classification) -> Service | None:
    """The service whose traffic is what is routed: it has the same packets and bytes; its name decides between two."""
    same = (found.routed.packets, found.routed.bytes)
    alike = [one for one in found.services if found.routed.packets and (one.packets, one.bytes) == same]
    return max(alike, key=lambda one: one.name == "nat", default=None)


def thickness(size: float, sizes: Sequence[float]) -> float:
    """Pixels between 2 and 16 for a number of bytes among others."""
    low, high = (math.log10(max(edge(sizes), 1)) for edge in (min, max))
    return 9.0 if high - low < 0.01 else round(2 + 14 * (math.log10(max(size, 1)) - low) / (high - low), 1)


def shares(values: Sequence[int]) -> list[tuple[float, float]]:
    """(begin, width) in per cent of parts of a whole, side by side."""
    whole = sum(values)
    edges = [0.0]
    for value in values:
        edges.append(edges[-1] + (value / whole * 100 if whole else 0.0))
    return [(round(begin, 3), round(end - begin, 3)) for begin, end in pairwise(edges)]
