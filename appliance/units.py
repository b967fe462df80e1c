"""Parse and format sizes, durations and times."""

from __future__ import annotations

import re
import time

LARGEST_OVERLAY = 1 << 40
"""1 TiB, in bytes: what another host sends as the digests of its chunks, 512 MiB, fits into memory. ext3 with blocks of
4 KiB has 16 TiB at most."""
YEAR_S = 366 * 86400
LAST_DAY = 253000000000
"""A time in the year 9987, the largest that can be shown as a date."""
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "": 1}
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"


def format_size(count: float) -> str:
    """Format bytes in powers of 1024 (IEC 80000-13): 512 B, 1.3 MiB, 48 MiB."""
    amount, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1000 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.1f} {unit}" if unit != "B" and amount < 9.95 else f"{amount:.0f} {unit}"


def format_age(seconds: float) -> str:
    """Format seconds as one number: 40 s, 12 min, 5 h, 3 d. Negative ages (the clock was set back) count as 0."""
    if not -LAST_DAY <= seconds <= LAST_DAY:
        return "an unknown time"
    for limit, each, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, int(seconds // each))} {unit}"
    return f"{int(seconds // 86400)} d"


def format_uptime(seconds: int) -> str:
    """Format seconds for the user: 3 d 4 h, 12 min."""
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{rest} s"


def format_time(stamp: float) -> str:
    """Format Unix time as local date and time; the number may be anything."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


def read_time(value: object) -> float:
    """Return a Unix time that another machine has recorded; 0 if it is none that can be shown."""
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= LAST_DAY else 0.0


def read_duration(text: str) -> float:
    """Parse ``60s``, ``10m``, ``1h30m``, ``2d`` into seconds; a number without unit is seconds.

    Raises:
        ValueError: it is not a duration, zero, or longer than a year.
    """
    if not re.fullmatch(rf"{_NUMBER}|(?:{_NUMBER}[dhms])+", text, re.ASCII):
        raise ValueError(f"invalid duration {text!r}: write it as 60s, 10m, 1h30m or 2d")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(rf"{_NUMBER}([dhms]?)", text))
    if not 0 < seconds <= YEAR_S:
        raise ValueError(f"invalid duration {text!r}: it must be more than zero and at most a year")
    return seconds
