"""What describes a snapshot, held against what it may be: it comes from other hosts too, and people read it."""

import re
from typing import Any, Callable, Dict, List

from appliance.agent.store import FORMAT
from appliance.agent.words import Problem
from appliance.text import one_line

LARGEST = 1 << 44
"""Bytes of the largest overlay that a site file allows (overlay.size_mb)."""
LAST_NUMBER = 999999
"""Six digits: as the folder's name in a store, and the archive's in a repository, have them."""
LAST_GENERATION = 1000000
"""One start a minute for two years; who says more would be the latest one for ever."""
LAST_DAY = 253000000000
"""A time in the year 9987: what lies beyond it is no date."""
LONGEST_TEXT = 4000
MOST = 1000
"""Entries of a list."""

UUID = r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
WORD = r"[a-z0-9-]{0,40}"

Check = Callable[[Any], bool]


def _text(longest: int, pattern: str = "") -> Check:
    """Text that may be printed."""

    def fine(value: Any) -> bool:
        if not isinstance(value, str) or len(value) > longest or not value.isprintable():
            return False
        return not pattern or re.fullmatch(pattern, value) is not None

    return fine


def _prose(value: Any) -> bool:
    """Text that may have lines: ``clean`` makes one of them."""
    return isinstance(value, str) and len(value) <= LONGEST_TEXT


def _whole(least: int, most: int) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _amount(most: float) -> Check:
    """A number from 0 on; not-a-number and infinity are in no range."""
    kinds = (int, float)
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value <= most


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _many(each: Check) -> Check:
    return lambda value: isinstance(value, list) and len(value) <= MOST and all(each(one) for one in value)


def _parts(**wanted: Check) -> Check:
    """An object; of those named what is there must be right, others must not be."""

    def fine(value: Any) -> bool:
        return isinstance(value, dict) and all(name in wanted and wanted[name](part) for name, part in value.items())

    return fine


CAME = _parts(**{"from": _text(300), "number": _whole(1, LAST_NUMBER), "at": _amount(LAST_DAY)})
CHECKS = _parts(
    e2fsck=_text(300),
    state_files=_whole(0, 1 << 40),
    state_bytes=_whole(0, 1 << 60),
    state_unread=_flag,
    heads=_many(_text(LONGEST_TEXT)),
)
KEYS: Dict[str, Check] = {
    "format": _whole(FORMAT, FORMAT),
    "uuid": _text(36, UUID),
    "number": _whole(1, LAST_NUMBER),
    "cluster": _text(253, NAME),
    "slurm_cluster": _text(253, NAME),
    "host": _text(253, NAME),
    "generation": _whole(0, LAST_GENERATION),
    "image": _parts(key=_text(200), sha256=_text(200)),
    "taken": _amount(LAST_DAY),
    "running": _flag,
    "frozen_ms": _amount(1e9),
    "method": _text(40, WORD),
    "found_by": _text(40, WORD),
    "size": _whole(1, LARGEST),
    "used_bytes": _whole(0, LARGEST),
    "new_bytes": _whole(0, LARGEST),
    "digests": _text(64, "[0-9a-f]{64}"),
    "checks": CHECKS,
    "notes": _many(_prose),
    "reason": _prose,
}
"""What every manifest has."""


def find_wrong(manifest: Dict[str, Any]) -> List[str]:
    """Names of keys that are missing, or hold what they must not."""
    wrong = [name for name, fine in KEYS.items() if name not in manifest or not fine(manifest[name])]
    if "came" in manifest and not CAME(manifest["came"]):
        wrong.append("came")
    return wrong


def check_manifest(manifest: Any, cluster: str = "") -> Dict[str, Any]:
    """What is known of the manifest, if it is right: other keys are left out, texts of people are one line.

    Args:
        cluster: whose it must be; empty: anybody's.

    Raises:
        Problem: it is not.
    """
    if not isinstance(manifest, dict):
        raise Problem("what comes is no snapshot that is known here", "is `sms` the same version on both sides?")
    wrong = find_wrong(manifest)
    if wrong:
        raise Problem(
            "what comes is no snapshot that is known here: no good %s" % ", ".join(wrong),
            "is `sms` the same version on both sides?",
        )
    if cluster and manifest["cluster"] != cluster:
        raise Problem(
            "what comes is a snapshot of cluster %s, not of %s" % (manifest["cluster"], cluster),
            "do two clusters share one store?",
        )
    kept = {name: manifest[name] for name in (*KEYS, "came") if name in manifest}
    return dict(kept, reason=one_line(manifest["reason"]), notes=[one_line(note) for note in manifest["notes"]])
