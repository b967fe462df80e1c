"""Numbers, spans and foreign text as people read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

LONGEST = 600
"""Characters of a text that are shown; what comes out of a capture may be of any length."""

_SIZES = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")
_SPANS = ((172_800, 86_400, "days"), (7_200, 3_600, "h"), (120, 60, "min"), (1, 1, "s"))
"""From so many seconds on, in parts of so many seconds, called so; one hour and one minute are that."""

BUDGETS = {
    "observed": "what this capture shows",
    "catalogue": "the catalogue: nothing in this capture says how long",
    "protocol": "the protocol's own rule",
}
"""What an outage budget rests on, in words."""


def plain(text: str, longest: int = LONGEST) -> str:
    """Text on one line, with what cannot be seen or turns the direction of writing as its escape.

    HTML allows no control characters (Living Standard, 13.2.3.5), UTF-8 no surrogates (RFC 3629, 3).
    """
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return "".join(one if one.isprintable() else " " if one in "\t\r\n" else _escape(one) for one in text)


def _escape(one: str) -> str:
    return f"\\x{ord(one):02x}" if ord(one) < 0x100 else f"\\u{ord(one):04x}"


def _three(value: float) -> str:
    """Three digits that count, without an exponent: 0.21, 41.7, 1,024."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or not value else "0"


def number(value: float) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,.0f}" if math.isfinite(value) else "unknown"


def size(value: float) -> str:
    """Bytes in powers of a thousand (IEC 80000-13), as disks and links are measured."""
    power = 0
    while abs(value) >= 999.5 and power < len(_SIZES) - 1:
        value, power = value / 1000, power + 1
    return f"{_three(value)} {_SIZES[power]}" if math.isfinite(value) else "unknown"


def span(seconds: float) -> str:
    """How long something takes, in the unit that fits: 0.21 ms, 41.7 s, 17.1 min, 24 h, 5 days."""
    if not math.isfinite(seconds):
        return "no end" if seconds > 0 else "unknown"
    for least, unit, name in _SPANS:
        if seconds >= least or seconds == unit < 86_400:
            return f"{_three(seconds / unit)} {name}"
    if seconds >= 0.001:
        return f"{_three(seconds * 1e3)} ms"
    return f"{_three(seconds * 1e6)} µs" if seconds > 0 else "0 s"


def part(value: float) -> float:
    """A number held between nothing and one."""
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def share(value: float) -> str:
    """A part of one in per cent; what is there but hardly so is not called nothing."""
    if not math.isfinite(value):
        return "unknown"
    percent = part(value) * 100
    if 0 < percent < 0.1:
        return "under 0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 10 or 99 < percent < 100 else f"{percent:.0f} %"


def counted(count: int, what: str, plural: str = "") -> str:
    """``1 node``, ``450 nodes``."""
    return f"{number(count)} {what if count == 1 else plural or what + 's'}"


def listed(words: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def read_time(text: str) -> datetime | None:
    """An RFC 3339 time in UTC; None where it is none."""
    try:
        found = datetime.fromisoformat(text)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def later(start: datetime | None, seconds: float) -> datetime | None:
    """``seconds`` after ``start``; None beyond what a calendar has."""
    try:
        return start + timedelta(seconds=seconds) if start else None
    except (OverflowError, ValueError):
        return None


def clock(when: datetime | None) -> str:
    """A time to the second, in the order that sorts."""
    return f"{when:%Y-%m-%d %H:%M:%S} UTC" if when else ""
