"""Rehearses an adoption: the services start isolated on the target, with a copy of the live state, and are removed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from appliance.errors import Refused, SmsError
from appliance.operations.adopt.carry import copy_database, read_state
from appliance.operations.adopt.inspection import VERB, Inspected
from appliance.operations.adopt.isolated import find_controller, start_held, wait_for_held
from appliance.operations.context import Cluster
from appliance.operations.image.deliver import Image
from appliance.operations.migration.agents import QUICK_S, target_request
from appliance.operations.migration.start import compare_jobs
from appliance.operations.migration.state import Inspected as MigrationFacts
from appliance.operations.migration.state import Migration, MigrationResult
from appliance.operations.preflight import query_confinement
from appliance.plan.adopt.adoption import AdoptPlan, find_database, free_argv, predict_adoption
from appliance.plan.machine import inside_argv
from appliance.plan.migration.move import ENDED
from appliance.plan.migration.plan import Plan
from appliance.plan.services.jobs import JOBS, JOBS_BYTES, read_jobs
from appliance.progress import Silent
from appliance.text import printable
from appliance.tools.scripts import script_argv

SAVED_S = 10
"""Seconds within which slurmctld writes a new job to its state: 5 s (SAVE_MAX_WAIT in slurmctld/state_save.c), and what
a slow disk takes. Where no job has changed, it writes none."""
QUEUED = "PENDING"


def migration_facts(cluster: Cluster, inspected: Inspected, image: Image) -> MigrationFacts:
    """Return what the steps of a migration need that an adoption shares with it."""
    old, target, plan = inspected.old, inspected.target, inspected.plan
    confinement = query_confinement(cluster, target)
    how = Plan(
        old.name, target.name, image.path, image.sha256, inspected.lease.generation, False, plan.state_bytes, 0, 0.0,
        {}, plan.measured, list(plan.outages),
    )  # fmt: skip
    return MigrationFacts(old, target, 0, inspected.lease, how, confinement, confinement)


def rehearse(cluster: Cluster, inspected: Inspected, image: Image, place: str) -> AdoptPlan:
    """Start the services isolated with a copy of the live state, probe them, compare the jobs; then end and remove it.

    The old node only reads its state and its database.

    Args:
        place: of the state in the container.

    Returns:
        The plan, with outages that are predicted from what was measured.

    Raises:
        Refused: a service does not answer with this state, or a job is missing.
    """
    owner, target = inspected.owner, inspected.target
    overlay = str(cluster.places.overlay)
    new = not target.works("test", "-e", overlay)
    try:
        jobs = read_jobs(inspected.old.run(*JOBS, ok=None, timeout=60, limit=JOBS_BYTES).text)
        with cluster.env.progress.step("rehearse: copy the live state") as step:
            inspected.old.run(*script_argv("wait-until-saved", inspected.plan.state, str(SAVED_S)), timeout=60)
            owner.prepare()
            measured, database = dict[str, float](), find_database(cluster.services)
            if inspected.plan.database and database:
                began = cluster.env.clock.monotonic()
                copy_database(inspected, database.setup or "", step)
                measured["database"] = cluster.env.clock.monotonic() - began
            began = cluster.env.clock.monotonic()
            read_state(inspected, place, step)
            measured["last changes"] = cluster.env.clock.monotonic() - began
        facts = migration_facts(cluster, inspected, image)
        request = replace(target_request(cluster, facts), verb=f"{VERB} rehearsal", prepared=owner.moving)
        # At its end, the overlay of before returns.
        with cluster.env.agents.open_endpoint(target, "arrive", request, Silent()) as arrive:
            arrive.receive("ready", patience_s=QUICK_S)
            result = MigrationResult(inspected.old.name, target.name, image.path, 0)
            migration = Migration(cluster, facts, image, arrive, arrive, result)
            measured["isolated"] = start_held(cluster, owner, migration)
            free = inside_argv(cluster.site, cluster.services, *free_argv(find_controller(cluster)))
            target.run(*free, timeout=60)
            wait_for_held(cluster, migration)
            # Only whether they are there: what the backfill scheduler starts, slurmctld saves with the next change.
            compare_jobs(migration, {job: state if state in ENDED else QUEUED for job, state in jobs.items()})
            _compare_cluster(cluster, inspected, place)
            measured |= result.parts
            arrive.send("abort", why="it was a rehearsal")
            arrive.receive("aborted", patience_s=QUICK_S)
    except Refused:
        raise
    except SmsError as error:
        raise Refused(f"the rehearsal failed; nothing was changed: {error.message}", hint=error.hint) from error
    finally:
        with suppress(SmsError):
            owner.discard()
            target.remove(f"{owner.overlay}.partial")
            if new and not target.works("test", "-L", overlay):  # on a mirror it is a link
                target.remove(overlay)
    outages = predict_adoption(cluster.services, [measured], database=inspected.plan.database)
    return replace(inspected.plan, outages=outages, rehearsed=True)


def _compare_cluster(cluster: Cluster, inspected: Inspected, place: str) -> None:
    """Check that the controller has kept the cluster's name, and the ClusterID that newer versions store with it.

    Raises:
        SmsError: it has not; nodes and slurmdbd would take it for another cluster.
    """
    argv = ("head", "-c", "300")
    before = inspected.old.run(*argv, f"{inspected.plan.state}/clustername").stdout
    inside = inside_argv(cluster.site, cluster.services, *argv, f"{place}/clustername")
    if (now := inspected.target.run(*inside).stdout) != before:
        raise SmsError(
            f"the state is of cluster {_show(before)}, and became that of {_show(now)}", hint="set `cluster`"
        )


def _show(data: bytes) -> str:
    """Return what the file clustername has, for a message."""
    return printable(data.decode(errors="replace").strip(), 80)
