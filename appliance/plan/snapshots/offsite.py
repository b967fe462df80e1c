"""Snapshots at other targets: archive names and comments, and which snapshots a target should have. Pure."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from appliance.config.model import Retention
from appliance.plan.snapshots.retention import LAST_DAY, RESTORE, Candidate, decide
from appliance.shared.identity import UUID, uuid_of
from appliance.shared.order import order
from appliance.text import whole_number

Manifest = dict[str, Any]
"""The manifest of a snapshot."""

ANY_NUMBER = "[0-9]" * 6
ANY_UUID = "-".join("?" * length for length in (8, 4, 4, 4, 12))
LATEST = "latest"
"""Selects the newest verified snapshot."""
BORG = "borg"
"""The push target that is not a host: the site's Borg repository."""
ORDERED_BY: dict[str, Any] = {"generation": int, "number": int, "taken": (int, float), "uuid": str, "host": str}
"""Fields that an archive's manifest must have before it is used."""


@dataclass(frozen=True)
class KnownArchives:
    """Record of the archives that a prune of the repository has found and left there: borg's id of each, by name.

    ``cluster_uuid``: whose they are; the machine that prunes has no lease.
    """

    archives: dict[str, str] = field(default_factory=dict)
    cluster_uuid: str = ""


@dataclass(frozen=True)
class KeyNote:
    """Record on a host that a copy of the repository's key has been exported or compared.

    Attributes:
        sha256: digest of the key, as ``borg key export`` prints it; it is encrypted with the passphrase.
        path: the copy.
        at: when, in Unix seconds.
    """

    sha256: str
    path: str
    at: float


def find_vanished(known: KnownArchives, there: Mapping[str, str]) -> list[str]:
    """Return the known archives that are missing in the repository, or are others of the same name.

    Args:
        there: ids of the archives in the repository, by name.
    """
    return sorted(name for name, archive_id in known.archives.items() if there.get(name) != archive_id)


def archive_name(manifest: Manifest) -> str:
    """Return the name of a snapshot's archive in a Borg repository; of earlier versions, it has no cluster's UUID."""
    name = f"sms-{manifest['cluster']}-{manifest['number']:06d}-{manifest['uuid']}"
    return f"{name}-{uuid_of(manifest)}" if uuid_of(manifest) else name


def archive_glob(cluster: str, uuid: str = "") -> str:
    """Return the glob of a cluster's archives; it matches no checkpoints and no cluster with the same prefix.

    Args:
        uuid: of the cluster; empty: archives without one, as of earlier versions.
    """
    return f"sms-{cluster}-{ANY_NUMBER}-{ANY_UUID}" + (f"-{uuid}" if uuid else "")


def is_archive(name: str, cluster: str) -> bool:
    """Return whether an archive's name is one of a cluster of this name, whatever its UUID."""
    return any(fnmatchcase(name, archive_glob(cluster, uuid)) for uuid in ("", ANY_UUID))


def comment(manifest: Manifest) -> str:
    """Return a manifest as an archive's comment; braces are doubled because borg expands placeholders."""
    kept = {key: value for key, value in manifest.items() if key != "health"}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).replace("{", "{{").replace("}", "}}")


def read_comment(text: str, name: str) -> Manifest | None:
    """Return the manifest in an archive's comment; None where it is not valid or does not match the archive's name.

    Only the fields for ordering and pruning are validated here; the import validates all of it.
    """
    try:
        manifest = json.loads(text)
        valid = archive_name(manifest) == name and all(
            isinstance(manifest[key], kind) and not isinstance(manifest[key], bool) for key, kind in ORDERED_BY.items()
        )
        valid = valid and 0 <= manifest["taken"] <= LAST_DAY and isinstance(manifest.get("reason", ""), str)
        valid = valid and type(manifest.get("sequence", 0)) is int
        valid = valid and (not uuid_of(manifest) or UUID.fullmatch(uuid_of(manifest)) is not None)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return manifest if valid else None


def archive_time(manifest: Manifest, others: Iterable[tuple[Manifest, float]]) -> str:
    """Return an archive's timestamp: when the snapshot was taken, but later than those of earlier snapshots.

    ``borg list`` and a manual ``borg prune`` sort by it; the latter would remove the newest after a clock was set back.
    """
    earlier = [at for other, at in others if order(other) < order(manifest)]
    at = max([manifest["taken"], *(one + 1 for one in earlier)])
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def missing(here: Sequence[Manifest], there: Sequence[Manifest], retention: Retention, *, now: float) -> list[Manifest]:
    """Return verified snapshots that the target lacks, oldest first; without those that it would prune again.

    Args:
        here: manifests of the source, with ``health``.
        there: manifests of the target.
    """
    known = {one["uuid"] for one in there}
    ours = [one for one in here if one["uuid"] not in known and one["health"].get("ok")]
    both = [*there, *ours]
    doomed = {one["uuid"] for one in not_kept(both, retention, now=now)}
    return [one for one in sorted(both, key=order) if one["uuid"] not in known | doomed]


def not_kept(there: Sequence[Manifest], retention: Retention, *, now: float) -> list[Manifest]:
    """Return the manifests that no rule keeps, oldest first; all of them are assumed to be verified.

    The rules are those of ``sms overlay prune``, not of ``borg prune``, which does not know the reasons of snapshots.
    """
    ordered = sorted(there, key=order)
    candidates = [
        Candidate(at, one["taken"], True, one.get("reason", ""), one["host"]) for at, one in enumerate(ordered)
    ]
    return [ordered[one.number] for one in decide(candidates, retention, now=now) if not one.keep]


def find(selector: str, there: Sequence[Manifest]) -> list[Manifest]:
    """Return the manifests that an archive name, a number, a uuid prefix or ``latest`` selects.

    A uuid can begin with digits only: from eight of them on they are a prefix, where no snapshot has that number.
    """
    if selector == LATEST:
        # As on a host: a snapshot that a restore took holds the state that the user wanted to leave.
        chosen = [one for one in there if not one.get("reason", "").startswith(RESTORE)]
        return sorted(chosen or there, key=order)[-1:]
    named = [one for one in there if selector in (archive_name(one), one["uuid"])]
    if named:
        return named
    numbered = [one for one in there if one["number"] == whole_number(selector)]
    if numbered or (selector.isdecimal() and len(selector) < 8):
        return numbered
    if re.fullmatch(r"[0-9a-f-]{4,36}", selector):
        return [one for one in there if one["uuid"].startswith(selector)]
    return []
