"""Format numbers, time spans and untrusted text for output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

LONGEST = 600
"""Maximum characters of a text; text from a capture may be of any length."""

_SIZES = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")
_SPANS = ((172_800, 86_400, "days"), (7_200, 3_600, "h"), (120, 60, "min"), (1, 1, "s"))
"""(from this many seconds on, seconds per unit, unit); exactly one hour and one minute use their unit, too."""

BUDGETS = {
    "observed": "observed in this capture",
    "catalogue": "the catalogue; this capture does not show it",
    "protocol": "a rule of the protocol",
}
"""Description of an outage budget's source."""


def plain(text: str, longest: int = LONGEST) -> str:
    """Return text on one line, with unprintable and direction-changing characters escaped.

    HTML allows no control characters (Living Standard, 13.2.3.5), UTF-8 no surrogates (RFC 3629, 3).
    """
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return "".join(one if one.isprintable() else " " if one in "\t\r\n" else _escape(one) for one in text)


def _escape(one: str) -> str:
    return f"\\x{ord(one):02x}" if ord(one) < 0x100 else f"\\u{ord(one):04x}"


def _three(value: float) -> str:
    """Format with three significant digits, without an exponent: 0.21, 41.7, 1,024."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or not value else "0"


def number(value: float) -> str:
    """Format a whole number with thousands separators."""
    return f"{value:,.0f}" if math.isfinite(value) else "unknown"


def size(value: float) -> str:
    """Format bytes with decimal units (IEC 80000-13), as for disks and links."""
    power = 0
    while abs(value) >= 999.5 and power < len(_SIZES) - 1:
        value, power = value / 1000, power + 1
    return f"{_three(value)} {_SIZES[power]}" if math.isfinite(value) else "unknown"


def span(seconds: float) -> str:
    """Format a duration with a suitable unit: 0.21 ms, 41.7 s, 17.1 min, 24 h, 5 days."""
    if not math.isfinite(seconds):
        return "unlimited" if seconds > 0 else "unknown"
    for least, unit, name in _SPANS:
        if seconds >= least or seconds == unit < 86_400:
            return f"{_three(seconds / unit)} {name}"
    if seconds >= 0.001:
        return f"{_three(seconds * 1e3)} ms"
    return f"{_three(seconds * 1e6)} µs" if seconds > 0 else "0 s"


def part(value: float) -> float:
    """Clamp a number to 0..1."""
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def share(value: float) -> str:
    """Format a fraction in per cent; a tiny but positive one is not shown as 0."""
    if not math.isfinite(value):
        return "unknown"
    percent = part(value) * 100
    if 0 < percent < 0.1:
        return "under 0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 10 or 99 < percent < 100 else f"{percent:.0f} %"


def counted(count: int, what: str, plural: str = "") -> str:
    """Format a count with its noun: ``1 node``, ``450 nodes``."""
    return f"{number(count)} {what if count == 1 else plural or what + 's'}"


def listed(items: Sequence[str], most: int = 0) -> str:
    """Join items: ``a``, ``a and b``, ``a, b and c``; of more than ``most`` the first ones, and ``394 others``."""
    more = len(items) - most if most else 0
    items = [*items[:most], counted(more, "other")] if more > 0 else list(items)
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def read_time(text: str) -> datetime | None:
    """Parse an RFC 3339 time as UTC; None if it is invalid."""
    try:
        found = datetime.fromisoformat(text)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def later(start: datetime | None, seconds: float) -> datetime | None:
    """Return ``start`` plus ``seconds``; None beyond the supported range."""
    try:
        return start + timedelta(seconds=seconds) if start else None
    except (OverflowError, ValueError):
        return None


def clock(when: datetime | None) -> str:
    """Format a time to the second, ISO 8601 order; "" for None."""
    return f"{when:%Y-%m-%d %H:%M:%S} UTC" if when else ""
