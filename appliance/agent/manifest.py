"""Validates the manifest of a snapshot that may come from another host, and is shown to people."""

import re
from typing import Any, Callable, Dict, List, Mapping

from appliance.agent.protocol import Problem
from appliance.shared import identity
from appliance.shared.lease import LAST_GENERATION, MAX_GENERATION
from appliance.shared.manifest import Manifest
from appliance.shared.records import from_value
from appliance.text import one_line
from appliance.units import LARGEST_OVERLAY, LAST_DAY

FORMAT = 1
LAST_NUMBER = 999999
"""Six digits, as in the folder names of a store and the archive names of a repository."""
LONGEST_TEXT = 4000
MOST = 1000
"""Entries of a list at most."""

UUID = r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
WORD = r"[a-z0-9-]{0,40}"

Check = Callable[[Any], bool]


def _text(longest: int, pattern: str = "") -> Check:
    """Return a check for printable text."""

    def is_valid(value: Any) -> bool:
        if not isinstance(value, str) or len(value) > longest or not value.isprintable():
            return False
        return not pattern or re.fullmatch(pattern, value) is not None

    return is_valid


def _prose(value: Any) -> bool:
    """Check text that may have several lines; ``check_manifest`` joins them."""
    return isinstance(value, str) and len(value) <= LONGEST_TEXT


def _whole(least: int, most: int) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _amount(most: float) -> Check:
    """Return a check for a number from 0 to ``most``; NaN and infinity fail it."""
    kinds = (int, float)
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value <= most


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _many(each: Check) -> Check:
    return lambda value: isinstance(value, list) and len(value) <= MOST and all(each(one) for one in value)


def _parts(**checks: Check) -> Check:
    """Return a check for an object: values of the keys named must be valid. Others are a newer version's."""

    def is_valid(value: Any) -> bool:
        return isinstance(value, dict) and all(check(value[name]) for name, check in checks.items() if name in value)

    return is_valid


NESTED = {"image": ("key", "sha256"), "came": ("from", "number", "at")}
"""Keys of objects that are kept as they are."""
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
    "size": _whole(1, LARGEST_OVERLAY),
    "used_bytes": _whole(0, LARGEST_OVERLAY),
    "new_bytes": _whole(0, LARGEST_OVERLAY),
    "digests": _text(64, "[0-9a-f]{64}"),
    "checks": CHECKS,
    "notes": _many(_prose),
    "reason": _prose,
}
"""Required keys of a manifest."""
OPTIONAL: Dict[str, Check] = {
    "came": CAME,
    "sequence": _whole(1, MAX_GENERATION),
    "cluster_uuid": _text(36, identity.UUID.pattern),
}


def find_invalid(manifest: Mapping[str, Any]) -> List[str]:
    """Return the names of keys that are missing or invalid."""
    invalid = [name for name, is_valid in KEYS.items() if name not in manifest or not is_valid(manifest[name])]
    return invalid + [name for name, is_valid in OPTIONAL.items() if name in manifest and not is_valid(manifest[name])]


def check_manifest(manifest: Any, cluster: str = "") -> Manifest:
    """Validate a manifest; return it without unknown keys, and with texts of people on one line.

    Args:
        cluster: the cluster that it must be of; empty: any.

    Raises:
        Problem: it is invalid.
    """
    invalid = find_invalid(manifest) if isinstance(manifest, dict) else []
    if invalid or not isinstance(manifest, dict):
        why = ": invalid %s" % ", ".join(invalid) if invalid else ""
        raise Problem(
            "the data received is not a snapshot of a known format" + why, "is `sms` the same version on both sides?"
        )
    if cluster and manifest["cluster"] != cluster:
        raise Problem(
            "the snapshot received is of cluster %s, not of %s" % (manifest["cluster"], cluster),
            "do two clusters share one store?",
        )
    texts = {"reason": one_line(manifest["reason"]), "notes": [one_line(note) for note in manifest["notes"]]}
    nested = {
        name: {key: manifest[name][key] for key in keys if key in manifest[name]}
        for name, keys in NESTED.items()
        if name in manifest
    }
    return from_value(Manifest, dict(manifest, **texts, **nested))
