"""After a failed step of a migration: the target takes over from a failed source, or the source serves as before."""

from __future__ import annotations

from typing import NoReturn

from appliance.errors import RolledBack, SmsError, Unverified
from appliance.host.base import Unreachable
from appliance.operations.lease import query_lease
from appliance.operations.migration.agents import LONG_S
from appliance.operations.migration.fence import fence
from appliance.operations.migration.start import check_services, start_isolated
from appliance.operations.migration.state import Migration
from appliance.operations.migration.switch import activate, arm, commit, flush
from appliance.operations.services.unfinished import resume_migration
from appliance.plan.machine import PROBE, inside_argv
from appliance.plan.migration.lease import GENERATION_BUMP
from appliance.tools.move import Endpoint, receive_after

CONFIRM_S = 8.0
"""Longer than a live source keeps its ports off the bridges (agent/migration_source.py, RECLAIM_S) and queries take."""
TARGET_REPLIES = (
    "seen",
    "wanted",
    "verified",
    "placed",
    "started",
    "probed",
    "told",
    "seeded",
    "flushed",
    "armed",
    "up",
    "appended",
)
SOURCE_REPLIES = (
    *("offer", "parcels", "sent", "final", "connections", "released", "tails", "handed"),
    *("noted", "delta", "prepared", "stopped", "given", "finished"),  # of an old node (agent/adopt_leave.py)
)
ABORT_S = 10.0
"""Seconds that the target may take to stop its instance."""


def take_over_or_roll_back(migration: Migration, cause: BaseException | None) -> bool:
    """End a migration with a failed step; return True if the target has taken over.

    Raises:
        RolledBack, SmsError: as ``roll_back``.
    """
    assert cause
    if not take_over(migration, cause):
        roll_back(migration, cause)
    return True


def take_over(migration: Migration, cause: BaseException) -> bool:
    """Continue without the source if it has failed and the target has everything it wrote; return whether it did.

    A living source answers by SSH or for its addresses: it leaves the bridges only for a moment
    (agent/migration_source.py). A partitioned source steps down when it returns: the generation is bumped.
    """
    if not migration.complete or not isinstance(cause, Unreachable) or _source_answers(migration):
        return False
    source, target, result = migration.source.name, migration.target.name, migration.result
    activated = False
    try:
        if _is_source_alive(migration):
            return False
        _fence_source(migration)
        if not migration.started:
            start_isolated(migration, {})
        with migration.cluster.env.progress.step(f"take over on {target}"):
            flush(migration, LONG_S)  # there is no host to roll back to
            arm(migration)
            activate(migration, generation_bump=GENERATION_BUMP)
            result.generation += GENERATION_BUMP
            activated = True
            migration.count_outage(migration.cluster.env.clock.monotonic(), migration.stopped_at)
        if failures := check_services(migration):
            # There is no host to roll back to.
            result.notes.append(failures)
        commit(migration)
    except SmsError as error:
        if not activated:
            migration.cluster.env.progress.report(f"note: {target} could not take over: {error.message}")
            return False
        # There is no host to roll back to.
        result.notes.append(error.message)
    result.notes.append(f"{source} failed during the migration; {target} had all its data and took over")
    return True


def _is_source_alive(migration: Migration) -> bool:
    """Return whether the source answers for its addresses, or by SSH again."""
    with migration.cluster.env.progress.step(f"verify that {migration.source.name} is down") as step:
        migration.target.send("unseen", for_s=CONFIRM_S)
        # Replies to earlier requests may come first.
        reply = receive_after(migration.target, "seen", *TARGET_REPLIES)
        step.detail(f"{reply['mac']} answers for its addresses" if reply["mac"] else "its addresses are unused")
    return bool(reply["mac"]) or _source_answers(migration)


def _source_answers(migration: Migration) -> bool:
    try:
        migration.source.host.run("true", ok=None, timeout=5)
    except SmsError:
        return False
    return True


def _fence_source(migration: Migration) -> None:
    """Power off the source, if fencing is configured, before another host takes its addresses.

    Raises:
        SmsError: it is not known to be off.
    """
    admin = next(host for host in migration.cluster.site.admin_hosts if host.name == migration.source.name)
    if admin.fence:
        with migration.cluster.env.progress.step(f"fence {admin.name}"):
            fence(admin, migration.cluster.env.hosts.this)
    else:
        migration.result.notes.append(
            f"{admin.name} was not fenced, as no fencing is configured: if it was only partitioned, its guard "
            "stops it when it returns; set admin_hosts.fence"
        )


def roll_back(migration: Migration, cause: BaseException) -> NoReturn:
    """Roll back: abort the target first, so that the source need not wait to verify that it is down.

    Raises:
        RolledBack: the services container serves on the source as before.
        SmsError: it is not known which host serves now.
    """
    end_agents(migration, cause)
    _raise_outcome(migration, cause)


def end_agents(migration: Migration, cause: BaseException) -> None:
    """Abort the target, then the source, and wait until both agents have ended."""
    source, target = migration.source, migration.target
    why = str(cause) or type(cause).__name__
    with migration.cluster.env.progress.step(f"roll back to {source.name}"):
        confirmed, ended = _abort_target(target, why, gated=migration.gated)
        if ended:
            try:
                source.send("abort", why=why, sure=confirmed)
                receive_after(source, "back", *SOURCE_REPLIES)
            except SmsError:
                source.close()
        else:
            # The state of the target is unknown: the source verifies it before it resumes; the target aborts alone.
            source.close()
        target.close()
        source.wait()
        target.wait()


def _abort_target(target: Endpoint, why: str, *, gated: bool) -> tuple[bool, bool]:
    """Return whether the target confirmed that it was aborted, and whether its agent has ended."""
    try:
        target.send("abort", why=why, gated=gated)
        receive_after(target, "aborted", *TARGET_REPLIES, patience_s=ABORT_S)
    except SmsError:
        return False, target.ended_itself
    return True, True


def _raise_outcome(migration: Migration, cause: BaseException) -> NoReturn:
    """Probe the source and raise the outcome, which names the host that serves.

    Raises:
        RolledBack: the source serves as before.
        Unverified: the target serves.
        SmsError: the source does not, or it is not known which of them serves.
    """
    cluster, source = migration.cluster, migration.source.host
    message = cause.message if isinstance(cause, SmsError) else "the migration was interrupted"
    try:
        # The agent may have been killed, too: recover what it left.
        resume_migration(cluster, source)
        argv = inside_argv(
            cluster.site, cluster.services, PROBE, "--wait", "20", *(one.name for one in cluster.services)
        )
        answers = source.run(*argv, ok=None, timeout=60)
    except SmsError:
        raise _find_outcome(migration, message) from cause
    if not answers.status:
        hint = cause.hint if isinstance(cause, SmsError) else ""
        raise RolledBack(f"{message}\n  the services container serves on {source.name} as before", hint=hint) from cause
    if _target_holds(migration):
        raise target_serves(migration, message) from cause
    if silent := _find_silent_holder(migration, message):
        raise silent from cause
    raise SmsError(
        f"{message}\n  not every service answers on {source.name} again",
        hint=f"sms status --host {source.name}; if it runs nothing: sms start --host {source.name}",
    ) from cause


def target_serves(migration: Migration, message: str) -> Unverified:
    """Return the error for a migration that was interrupted after the switch: the target commits it on its own."""
    source, target = migration.source.name, migration.target.name
    if _target_holds(migration) is None:
        return Unverified(
            f"{message}\n  the services container serves on {target} since the switch, unless it has failed: "
            "it cannot be reached",
            hint=f"`sms status --host {target}` shows it, once it can be reached; if it has failed: "
            f"sms failover {source}",
        )
    return Unverified(
        f"{message}\n  the services container serves on {target}, but the end of the migration was not confirmed",
        hint=f"`sms migrate {target}` again verifies and records it; `sms status --host {target}` probes the services",
    )


def _find_outcome(migration: Migration, message: str) -> SmsError:
    """Return the error for a source that cannot be reached: what the target and the protocol show.

    Each agent decides on its own, and never so that both serve: the target serves if the order to take over has reached
    it in time, else the source serves again.
    """
    source, target = migration.source.name, migration.target.name
    if silent := _find_silent_holder(migration, message):
        return silent
    holds = _target_holds(migration)
    if holds or (holds is None and migration.serves):
        return target_serves(migration, message)
    failed = f"if {source} has failed: sms failover {target}"
    if holds is None and migration.ordered:
        return SmsError(
            f"{message}\n  neither {source} nor {target} can be reached; the services container serves on one of them",
            hint=f"`sms host list` shows on which, once they can be reached; then `sms migrate {target}` again",
        )
    return SmsError(
        f"{message}\n  the services container serves on {source} again, unless it has failed: it cannot be reached",
        hint=f"`sms status --host {source}` shows it, once it can be reached; {failed}",
    )


def _find_silent_holder(migration: Migration, message: str) -> SmsError | None:
    """Return the error for a target that cannot be reached and has the lease of a shared overlay; None otherwise.

    The source must not use the overlay again until it has the lease back.
    """
    source, target = migration.source, migration.target.name
    if not migration.result.shared or _target_holds(migration) is not None:
        return None
    try:
        if query_lease(source.host, migration.cluster).holder != target:
            return None
    except SmsError:
        return None
    if migration.serves:
        return target_serves(migration, message)
    return SmsError(
        f"{message}\n  {target} has the lease of the shared overlay and cannot be reached; "
        "if it has failed, no host serves",
        hint=f"if it has failed: sms failover {source.name}; else `sms migrate {target}` again, once it can be reached",
    )


def _target_holds(migration: Migration) -> bool | None:
    """Return whether the target holds the lease; None if it cannot be queried."""
    try:
        return query_lease(migration.target.host, migration.cluster).holder == migration.target.name
    except SmsError:
        return None
