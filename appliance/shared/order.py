"""The order of snapshots: by generation of the lease, then by sequence number; never by a clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Place = tuple[int, int, float, str]


def order(snapshot: Mapping[str, Any]) -> Place:
    """Return the sort key of a snapshot of the overlay or the VM, given its manifest.

    Clocks jump and differ between hosts. The sequence number counts the snapshots that a host takes, and in one
    generation only the holder of the lease takes any. Earlier versions recorded none: these snapshots sort before those
    of their generation that have one, by the recorded time. The last part gives ties the same order on every host.
    """
    sequence = snapshot.get("sequence") or 0
    name = snapshot.get("uuid") or snapshot.get("name", "")
    return snapshot["generation"], sequence, 0.0 if sequence else snapshot["taken"], name


def last_place(host: str, generation: int, known: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Return the generation of the next snapshot of ``host``, and the highest sequence number that it has used.

    The generation is that of the lease, but never below that of an earlier snapshot of the same host: its lease may
    have been lost. Received snapshots do not count: another host may have written anything into them.

    Args:
        known: manifests of the snapshots in the host's store.
    """
    own = [one for one in known if one["host"] == host and not one.get("came")]
    return (
        max([generation, *(one["generation"] for one in own)]),
        max([0, *(one.get("sequence") or 0 for one in own)]),
    )
