"""Steps of a migration: the addresses change hosts, and the source is cleaned up."""

from __future__ import annotations

from appliance.errors import SmsError
from appliance.host.base import Unreachable
from appliance.operations.migration.agents import LONG_S, QUICK_S
from appliance.operations.migration.state import Migration
from appliance.operations.services.unfinished import resume_migration
from appliance.tools.move import receive_after

SWITCH_S = 5.0
"""Timeout in seconds of requests during the switch: the target allows 2 s (agent/migration_target.py, ARMED_S)."""


def hand_over(migration: Migration) -> None:
    """With a shared overlay: end the instance on the source, so that the target can use the overlay."""
    source, result = migration.source, migration.result
    with migration.cluster.env.progress.step(f"stop on {source.name}") as step:
        began = migration.stopped_at = migration.cluster.env.clock.monotonic()
        source.send("hand")
        handed, migration.connections = source.receive("handed", patience_s=LONG_S)
        result.connections, migration.neighbours = handed["connections"], handed["neighbours"]
        result.measured("stop", migration.cluster.env.clock.monotonic() - began)
        result.measured("last changes", 0)
        step.detail("the overlay is free")
        migration.complete = True


def switch_addresses(migration: Migration) -> None:
    """Move the addresses from the source to the target."""
    source, result = migration.source, migration.result
    with migration.cluster.env.progress.step("switch the addresses") as step:
        flush(migration, QUICK_S)  # the source closes the sessions of log senders next
        source.send("connections")
        _, migration.connections = source.receive("connections", patience_s=QUICK_S)
        arm(migration, migration.connections)
        began = migration.cluster.env.clock.monotonic()
        source.send("release")
        released, migration.connections = source.receive("released", patience_s=SWITCH_S)
        result.connections = released["connections"]
        activate(migration)
        now = migration.cluster.env.clock.monotonic()
        result.measured("switch", now - began)
        migration.count_outage(now, began)
        step.detail(f"{(now - began) * 1000:.0f} ms; {result.connections} connections kept")


def activate_addresses(migration: Migration) -> None:
    """With a shared overlay: attach the target to the networks; the instance on the source has ended."""
    result = migration.result
    with migration.cluster.env.progress.step("activate the addresses") as step:
        began = migration.cluster.env.clock.monotonic()
        arm(migration)
        activate(migration)
        result.measured("switch", migration.cluster.env.clock.monotonic() - began)
        step.detail(f"{result.connections} connections kept")
    migration.count_outage(migration.cluster.env.clock.monotonic(), migration.stopped_at)


def flush(migration: Migration, patience_s: float) -> None:
    """Wait until the target's disk has the whole copy: the lease must not name one that a power failure takes away."""
    migration.target.send("flush")
    migration.target.receive("flushed", patience_s=patience_s)


def arm(migration: Migration, connections: bytes = b"") -> None:
    """Prepare the target for ``activate``, which must follow at once."""
    migration.target.send("arm", connections, neighbours=migration.neighbours)
    migration.target.receive("armed", patience_s=QUICK_S)


def activate(migration: Migration, *, generation_bump: int = 0) -> None:
    """Attach the target to the networks, with the connections tracked by the source."""
    migration.ordered = True
    migration.target.send("up", migration.connections, leap=generation_bump)
    up, _ = migration.target.receive("up", patience_s=SWITCH_S)
    migration.serves = True
    if up["trouble"]:
        migration.result.notes.append(f"connections could not be transferred: {up['trouble']}")


def clean_up(migration: Migration) -> None:
    """Copy the last lines of logs and stop what is left on the source; the target serves already.

    Errors on the source are only noted from here on.

    Raises:
        SmsError: the target does not confirm; it goes on serving.
    """
    with migration.cluster.env.progress.step(f"clean up on {migration.source.name}"):
        if not migration.result.shared:
            _copy_log_tails(migration)
        commit(migration)
        try:
            _finish_source(migration)
        except SmsError as error:
            migration.result.notes.append(f"{migration.source.name} could not be cleaned up: {error.message}")


def commit(migration: Migration) -> None:
    """Remove what only a rollback needs on the target."""
    migration.target.send("commit")
    receive_after(migration.target, "committed", "appended")


def _copy_log_tails(migration: Migration) -> None:
    source, target, result = migration.source, migration.target, migration.result
    try:
        source.send("given")
        tails, data = source.receive("tails")
        result.lost_datagrams = tails["lost"]
        result.notes += [f"the last lines of {path} are incomplete: they are too many" for path in tails.get("cut", ())]
        target.send("tails", data, files=tails["files"])
        target.receive("appended")
    except SmsError as error:
        result.notes.append(f"the last lines of logs may be missing: {error.message}")


def _finish_source(migration: Migration) -> None:
    """Make the source end its instance and retire its overlay.

    Raises:
        SmsError: it did not, in two attempts.
    """
    source = migration.source
    try:
        source.send("finish")
        # The reply to the request for the logs may come late.
        receive_after(source, "finished", "tails", patience_s=LONG_S)
    except Unreachable:
        raise
    except SmsError:
        # The agent has ended. What prevented it, such as a slow disk, may have passed; nothing else recovers its state.
        source.close()
        source.wait()
        resume_migration(migration.cluster, source.host)
