"""Rows about snapshots, as ``sms status`` and ``sms vm status`` show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.operations.snapshots.status import SnapshotStatus


def snapshot_facts(snapshots: SnapshotStatus, what: str = "") -> Iterator[tuple[str, str]]:
    """Yield rows about the newest verified snapshot and the schedule; ``what``: beginning of their titles."""
    from appliance.units import format_age, format_size, format_time

    newest, run = snapshots.newest, snapshots.last_run
    if snapshots.problem:
        yield f"{what}snapshots", f"not known: {snapshots.problem}"
        return
    parts = [f"{snapshots.count} in all"]
    if newest:
        frozen = f", writers waited {newest['frozen_ms']:.0f} ms" if newest["running"] else ""
        parts.insert(0, f"{newest['number']}, {format_age(newest['age_s'])} ago, by {newest['method']}{frozen}")
    if snapshots.bytes is not None:
        parts.append(format_size(snapshots.bytes))
    yield f"{what}snapshots", "; ".join(parts) if snapshots.count else "none"
    if run and run.push_waits_since is not None:
        yield f"{what}pushes wait", f"since {format_time(run.push_waits_since)}: newer snapshots are on this host only"
    if not snapshots.schedule:
        yield f"{what}schedule", "none: `sms overlay schedule install` installs one"
        return
    last = "no run yet" if not run else f"last run {format_time(run.started)} {'succeeded' if run.ok else 'failed'}"
    yield f"{what}schedule", f"every {snapshots.every_minutes} min, by {snapshots.schedule}; {last}"
    if drill := snapshots.last_drill:
        verdict = "succeeded" if drill.ok else "failed"
        yield f"{what}restore drill", f"{format_time(drill.started)} {verdict}, with snapshot {drill.number or '-'}"
