"""The steps of a migration, in their order."""

from __future__ import annotations

from contextlib import ExitStack

from appliance.errors import SmsError
from appliance.operations.context import Cluster
from appliance.operations.image.deliver import Image
from appliance.operations.migration.agents import open_agents
from appliance.operations.migration.copy import catch_up, copy_overlay, open_mirror, stop_services
from appliance.operations.migration.rollback import take_over_or_roll_back, target_serves
from appliance.operations.migration.start import check_services, list_jobs, start_isolated
from appliance.operations.migration.state import Inspected, Migration, MigrationResult
from appliance.operations.migration.switch import activate_addresses, clean_up, hand_over, switch_addresses


def run_steps(cluster: Cluster, inspected: Inspected, image: Image) -> tuple[MigrationResult, str]:
    """Run all steps; return the result, and the messages about services that do not answer on the target.

    They are no reason to roll back: that would lose what the services have received on the target.

    Raises:
        Busy, Refused: as ``open_agents``; nothing was changed.
        RolledBack: a step failed; the services container serves on the source as before.
        Unverified: a step after the switch failed; it serves on the target.
        SmsError: a step failed; the message says which host serves now.
    """
    began, failures = cluster.env.clock.monotonic(), ""
    with ExitStack() as agents:
        migration = open_agents(cluster, inspected, image, agents)
        with ExitStack() as undo:
            undo.push(lambda _, error, __: take_over_or_roll_back(migration, error))
            failures = migrate_shared(migration) if inspected.plan.shared else migrate_copy(migration)
            undo.pop_all()
            try:
                clean_up(migration)
            except SmsError as error:
                raise target_serves(migration, error.message) from error
    migration.result.seconds = round(cluster.env.clock.monotonic() - began, 3)
    return migration.result, failures


def migrate_copy(migration: Migration) -> str:
    """Migrate with one overlay per host: stateless services serve on the source until the switch.

    Returns:
        The messages about services that do not answer on the target.
    """
    open_mirror(migration)
    copy_overlay(migration)
    jobs = list_jobs(migration)
    catch_up(migration)
    stop_services(migration)
    start_isolated(migration, jobs)
    switch_addresses(migration)
    return check_services(migration)


def migrate_shared(migration: Migration) -> str:
    """Migrate with a shared overlay: the source must close it before the target opens it.

    Returns:
        An empty string: a rollback loses nothing, as the source uses the same overlay.

    Raises:
        SmsError: a service does not answer on the target.
    """
    jobs = list_jobs(migration)
    hand_over(migration)
    start_isolated(migration, jobs)
    activate_addresses(migration)
    if failures := check_services(migration):
        raise SmsError(failures)
    return ""
