"""Steps of a migration with one overlay per host: the overlay is copied, at last after its writers have stopped."""

from __future__ import annotations

from appliance.operations.migration.agents import LONG_S, QUICK_S
from appliance.operations.migration.state import Migration
from appliance.operations.overlay.standby import open_standby
from appliance.progress import Step
from appliance.shared.wire import Message

ROUNDS = 6
"""Maximum passes over changed data before writers are stopped."""
CHUNK = 1 << 16
"""Bytes of a chunk (agent/store.py)."""


def open_mirror(migration: Migration) -> None:
    """Open the mirror that the target gets, if it gets one; its agent holds the lock of the host."""
    if folders := migration.inspected.plan.mirror:
        source, target = migration.source.host, migration.target.host
        with migration.cluster.env.progress.step(f"open the mirror on {target.name}") as step:
            open_standby(migration.cluster, source, target, folders)
            step.detail(" and ".join(folders))


def copy_overlay(migration: Migration) -> None:
    """Copy the overlay while it is in use, until few changes are left."""
    source, target, result = migration.source, migration.target, migration.result
    with migration.cluster.env.progress.step(f"copy the overlay to {target.name} while it runs") as step:
        step.detail("reading the overlay")
        source.send("offer")
        offer, digests = source.receive("offer", patience_s=LONG_S)
        result.overlay_bytes = offer["used"]
        step.detail("comparing with what the target has")
        target.send("build", digests, size=offer["size"])
        wanted, bits = target.receive("wanted", patience_s=LONG_S)
        source.send("send", bits)
        result.copied_bytes = _relay(migration, step, wanted["chunks"] * CHUNK)["sent_bytes"]
        _copy_changes(migration, step)
        step.detail("verifying the copy")
        target.send("verify")
        target.receive("verified", patience_s=LONG_S)
        reused = (wanted["used"] - wanted["chunks"]) * CHUNK
        step.detail(f"{result.copied_bytes >> 20} MiB sent, {reused >> 20} MiB reused")


def catch_up(migration: Migration) -> None:
    """Copy what was written while the copy was verified; writers stop in the next step."""
    with migration.cluster.env.progress.step("send the changes since then") as step:
        before = migration.result.copied_bytes
        _copy_changes(migration, step)
        step.detail(f"{(migration.result.copied_bytes - before) >> 10} KiB")


def stop_services(migration: Migration) -> None:
    """Stop the stateful services and copy the last changes."""
    source, target, result = migration.source, migration.target, migration.result
    with migration.cluster.env.progress.step("stop stateful services; send the last changes") as step:
        migration.stopped_at = migration.cluster.env.clock.monotonic()
        source.send("stop")
        sent = _relay(migration, step, 0)
        final, _ = source.receive("final", patience_s=QUICK_S)
        migration.neighbours = final["neighbours"]
        target.send("place", digests=final["digests"])
        target.receive("placed", patience_s=QUICK_S)
        migration.complete = True
        took = migration.cluster.env.clock.monotonic() - migration.stopped_at
        result.last_bytes = sent["sent_bytes"]
        result.frozen_ms = round(final["frozen_s"] * 1000, 1)
        result.measured("stop", final["stop_s"])
        result.measured("last changes", took - final["stop_s"])
        step.detail(f"{sent['sent_bytes'] >> 10} KiB, found by {final['found_by']}")


def _copy_changes(migration: Migration, step: Step) -> None:
    for number in range(ROUNDS):
        migration.source.send("round", anew=number == 0)
        sent = _relay(migration, step, 0)
        migration.result.rounds += 1
        migration.result.copied_bytes += sent["sent_bytes"]
        if sent["settled"]:
            return


def _relay(migration: Migration, step: Step, total: int) -> Message:
    """Forward chunks until the source reports the end; return that message.

    Args:
        total: uncompressed bytes of all chunks; 0 if not known.
    """
    done = 0
    while True:
        message, data = migration.source.receive("parcels", "sent")
        if message["kind"] == "sent":
            return message
        migration.target.send("parcels", data)
        done += message["chunks"] * CHUNK
        step.moved(done, total)
