"""Snapshots elsewhere: what an archive of one is called, and which of them another place is to have. Pure."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from appliance.config.model import Retention
from appliance.plan.snapshots.retention import LAST_DAY, Candidate, decide

Manifest = dict[str, Any]
"""What describes a snapshot."""

ANY_NUMBER = "[0-9]" * 6
ANY_UUID = "-".join("?" * length for length in (8, 4, 4, 4, 12))
LATEST = "latest"
ORDERED_BY: dict[str, Any] = {"generation": int, "number": int, "taken": (int, float), "uuid": str, "host": str}
"""What an archive's manifest must tell before any of it is read."""


def archive_name(manifest: Manifest) -> str:
    """What a snapshot's archive is called in a Borg repository."""
    return f"sms-{manifest['cluster']}-{manifest['number']:06d}-{manifest['uuid']}"


def archive_glob(cluster: str) -> str:
    """Matches the archives of a cluster: none of another cluster whose name begins like this one, no checkpoint."""
    return f"sms-{cluster}-{ANY_NUMBER}-{ANY_UUID}"


def order(manifest: Manifest) -> tuple[int, int]:
    """What comes after what: generations of the lease first, for clocks jump and hosts differ."""
    return (manifest["generation"], manifest["number"])


def comment(manifest: Manifest) -> str:
    """A manifest as an archive's comment; borg takes single braces for placeholders."""
    kept = {key: value for key, value in manifest.items() if key != "health"}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).replace("{", "{{").replace("}", "}}")


def read_comment(text: str, name: str) -> Manifest | None:
    """The manifest of an archive; None where it is not one of ours, or of another name.

    What it is ordered and thinned out by is looked at here; all of it is where the snapshot comes in.
    """
    try:
        manifest = json.loads(text)
        fine = archive_name(manifest) == name and all(
            isinstance(manifest[key], kind) and not isinstance(manifest[key], bool) for key, kind in ORDERED_BY.items()
        )
        fine = fine and 0 <= manifest["taken"] <= LAST_DAY and isinstance(manifest.get("reason", ""), str)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return manifest if fine else None


def archive_time(manifest: Manifest, others: Iterable[tuple[Manifest, float]]) -> str:
    """The time that an archive gets: when it was taken, but after those that come before it.

    ``borg list`` goes by it, and a ``borg prune`` by hand, which would take the newest one after a clock was set back.
    """
    earlier = [at for other, at in others if order(other) < order(manifest)]
    at = max([manifest["taken"], *(one + 1 for one in earlier)])
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def missing(here: Sequence[Manifest], there: Sequence[Manifest], retention: Retention, *, now: float) -> list[Manifest]:
    """Verified snapshots that the other place has not, the oldest first; without those that it would remove again.

    Args:
        here: with ``health``.
        there: what the other place has.
    """
    known = {one["uuid"] for one in there}
    ours = [one for one in here if one["uuid"] not in known and one["health"].get("ok")]
    both = [*there, *ours]
    going = {one["uuid"] for one in not_kept(both, retention, now=now)}
    return [one for one in sorted(both, key=order) if one["uuid"] not in known | going]


def not_kept(there: Sequence[Manifest], retention: Retention, *, now: float) -> list[Manifest]:
    """Those that no rule keeps, the oldest first; all of them are taken for verified.

    The rule of ``sms overlay prune``, not that of ``borg prune``: what is kept here for its reason is kept there.
    """
    ordered = sorted(there, key=order)
    candidates = [Candidate(at, one["taken"], True, one.get("reason", "")) for at, one in enumerate(ordered)]
    return [ordered[one.number] for one in decide(candidates, retention, now=now) if not one.keep]


def find(wanted: str, there: Sequence[Manifest]) -> list[Manifest]:
    """Those that a name, a number, or the beginning of a uuid means; of ``latest`` the one that is."""
    if wanted == LATEST:
        return sorted(there, key=order)[-1:]
    named = [one for one in there if wanted in (archive_name(one), one["uuid"])]
    if named:
        return named
    if wanted.isdecimal():
        return [one for one in there if one["number"] == int(wanted)]
    if re.fullmatch(r"[0-9a-f-]{4,36}", wanted):
        return [one for one in there if one["uuid"].startswith(wanted)]
    return []
