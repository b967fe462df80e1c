"""``sms migrate``: moves the running services container to another admin host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from appliance.errors import Refused, RolledBack, SmsError
from appliance.host.base import Host
from appliance.operations import history
from appliance.operations.context import Cluster
from appliance.operations.hosts.guarded import stop_guard
from appliance.operations.image.copy import HostFile
from appliance.operations.image.deliver import Image, fetch_image, image_name, verify
from appliance.operations.lease import query_lease
from appliance.operations.migration.inspection import inspect_hosts, record_serving, unreachable_is_refused
from appliance.operations.migration.state import Inspected, MigrationResult
from appliance.operations.migration.steps import run_steps
from appliance.operations.networks import remove_isolated, write_networks
from appliance.operations.preflight import check_confinement, find_instance, lock_host
from appliance.operations.services.unfinished import close_idle_mirror
from appliance.plan.migration.plan import Plan
from appliance.tools import files

GONE_S = 10.0
"""Seconds until a silent host counts as gone. Its agent has ended by then (agent/channel.py): no use to wait longer."""


def migrate(cluster: Cluster, name: str, *, force: bool = False) -> MigrationResult:
    """Move the running services container to the admin host ``name``.

    Args:
        force: ignore exceeded outage budgets and differing versions.

    Raises:
        Refused: a check failed; nothing was changed.
        RolledBack: a step failed; the services container serves on the source as before.
        SmsError: a step failed; the message says which host serves now.
    """
    with ExitStack() as stack:
        for admin in cluster.site.admin_hosts:
            stack.enter_context(cluster.host(admin.name).limit_silence(GONE_S))
        inspected = inspect_hosts(cluster, name, recover=True, force=force)
        if isinstance(inspected, MigrationResult):
            return inspected
        refuse_over_budget(inspected.plan, force=force)
        result, failures = execute(cluster, inspected)
        if failures:
            migrate_back(cluster, result, failures)
        return result


def execute(cluster: Cluster, inspected: Inspected) -> tuple[MigrationResult, str]:
    """Execute the plan; return the result, and the messages about services that do not answer on the target.

    Raises:
        SmsError: as ``migrate``.
    """
    hosts, source = (inspected.source, inspected.target), inspected.source.name
    facts: dict[str, Any] = {"from": source, "to": inspected.target.name, "generation": inspected.lease.generation}
    with unreachable_is_refused(source):  # once agents have begun, an outcome is another error
        image = prepare(cluster, inspected)
        for host in hosts:
            history.note(cluster, host, "migrate", "begun", **facts, image=image.key)
        try:
            result, failures = run_steps(cluster, inspected, image)
        except BaseException as error:
            _note_all(cluster, hosts, "failed", why=str(error) or type(error).__name__)
            for host in hosts:
                with suppress(SmsError):  # a host that cannot be reached; the next verb there closes it
                    close_idle_mirror(cluster, host)
            serves = _record_target(cluster, inspected, image)
            if serves and isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(serves) from None
            raise
    try:
        result.notes += finish(cluster, inspected, image, result)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_record_target(cluster, inspected, image)) from None
    return result, failures


def migrate_back(cluster: Cluster, result: MigrationResult, failures: str) -> NoReturn:
    """Migrate back after a partial success, so that nothing is lost that the target has received meanwhile.

    Raises:
        RolledBack: the services container serves on the source as before.
        SmsError: it does not; the message says what is known.
    """
    for message in (*result.notes, failures):
        cluster.env.progress.report(f"note: {message}")
    hosts = [cluster.host(name) for name in (result.source, result.target)]
    _note_all(cluster, hosts, "failed", why=failures)
    try:
        inspected = inspect_hosts(cluster, result.source, recover=False, force=True, back=True)
        assert isinstance(inspected, Inspected)  # a result is for ``recover``
        _, still_failing = execute(cluster, inspected)
    except SmsError as error:
        raise SmsError(
            f"{failures}\n  it could not be migrated back to {result.source}: {error.message}",
            hint=error.hint or f"sms status --host {result.target}",
        ) from error
    if still_failing:
        raise SmsError(f"{failures}\n  after the rollback: {still_failing}", hint=f"sms status --host {result.source}")
    raise RolledBack(f"{failures}\n  the services container serves on {result.source} as before")


def rehearse_migrate(cluster: Cluster, name: str) -> Plan:
    """Run the checks of a migration and return its plan; changes nothing. The image is verified where it runs.

    Raises:
        Refused: as for a migration.
    """
    inspected = inspect_hosts(cluster, name, recover=False, force=True)
    assert isinstance(inspected, Inspected)  # a result is for ``recover``
    with cluster.env.progress.step("verify the image") as step:
        step.detail(verify(cluster, inspected.source, inspected.plan.image))
    return inspected.plan


def refuse_over_budget(plan: Plan, *, force: bool) -> None:
    """Refuse a plan whose predicted outages exceed their budgets.

    Raises:
        Refused: with all such services.
    """
    if plan.over and not force:
        outages = "; ".join(f"{one.name} {one.predicted_s:g} s, tolerated {one.budget_s:g} s" for one in plan.over)
        raise Refused(f"predicted outages exceed their budgets: {outages}", hint="`sms migrate --force` ignores them")


def prepare(cluster: Cluster, inspected: Inspected) -> Image:
    """Copy the running image to the target's store, verify it there, and write the network configuration.

    Raises:
        Refused: the image cannot be trusted there; nothing of it stays.
    """
    where = cluster.places
    folders = (where.images, where.overlay.parent, where.journal, where.public_keys)
    files.make_folders(inspected.target, *map(str, folders))
    running = HostFile(inspected.source, inspected.plan.image, inspected.plan.sha256)
    # What the source calls its image decides about no other file of the target.
    path = f"{where.images}/{image_name(running.path)}"
    image = fetch_image(cluster, running, inspected.target, path)
    if image.sha256 != inspected.plan.sha256:
        raise Refused(f"{image.path} on {inspected.target.name} is not the image that is running")
    check_confinement(cluster, inspected.target, image.path)
    for isolated in (True, False):
        write_networks(cluster, inspected.target, isolated=isolated)
    return image


def finish(cluster: Cluster, inspected: Inspected, image: Image, result: MigrationResult) -> list[str]:
    """Record which host runs the instance after a migration; return notes about what failed."""
    notes = []
    try:
        remove_isolated(cluster, inspected.target)
        record_serving(cluster, inspected.target, image, query_lease(inspected.target, cluster))
    except SmsError as error:
        notes.append(f"the migration to {inspected.target.name} could not be recorded: {error.message}")
    try:
        stop_guard(cluster, inspected.source)
    except SmsError as error:  # it may have failed meanwhile
        notes.append(f"the guard on {inspected.source.name} could not be stopped: {error.message}")
    try:
        close_idle_mirror(cluster, inspected.source)
    except SmsError as error:
        notes.append(f"the mirror on {inspected.source.name} is still open: {error.message}")
    facts = {
        "from": result.source,
        "to": result.target,
        "parts": result.parts,
        "outage": result.outage,
        "shared": result.shared,
    }
    counts = {"generation": result.generation, "last_bytes": result.last_bytes, "lost_datagrams": result.lost_datagrams}
    _note_all(cluster, (inspected.source, inspected.target), "moved", **facts, **counts)
    return notes


def _record_target(cluster: Cluster, inspected: Inspected, image: Image) -> str:
    """Record that the target serves, if it does after all, so that it is guarded; return that as text, else nothing.

    What is not recorded here, such as while its agent is still at work, `sms migrate` again records.
    """
    target = inspected.target
    with suppress(SmsError):
        with lock_host(cluster, target):
            lease = query_lease(target, cluster)
            serves = lease.holder == target.name and find_instance(cluster, target)
        if serves:  # without the lock: the start of the unit takes it
            record_serving(cluster, target, image, lease)
            return f"the services container serves on {target.name}"
    return ""


def _note_all(cluster: Cluster, hosts: Sequence[Host], event: str, **facts: Any) -> None:
    """Record the event on all hosts that can be reached: a failed host must not hide what happened."""
    for host in hosts:
        try:
            history.note(cluster, host, "migrate", event, **facts)
        except SmsError:
            continue
