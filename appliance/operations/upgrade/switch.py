"""The switch of an upgrade: a second instance with the new image takes over on a copy of the overlay.

Once it has served, it goes on: what it has received must not be lost. An interrupted switch is completed or undone by
the agents (``recover_migration``); then the overlay in place decides which image belongs to it.
"""

from __future__ import annotations

from pathlib import Path

from appliance.errors import Refused, RolledBack, SmsError, Unverified
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.image.deliver import Image, trust
from appliance.operations.migration.here import (
    NoSecond,
    Options,
    SwitchPlan,
    plan_switch,
    record_interrupted,
    switch_here,
)
from appliance.operations.preflight import find_instance
from appliance.operations.services.start import StartOptions, start
from appliance.operations.services.unfinished import has_switched, overlay_inode, write_phase
from appliance.operations.snapshots.snapshot import SnapshotOptions, snapshot
from appliance.operations.upgrade.image import make_current_here
from appliance.operations.upgrade.jobs import check_jobs, list_before
from appliance.operations.upgrade.state import UpgradeOptions, UpgradeResult
from appliance.plan.snapshots.retention import UPGRADE
from appliance.plan.upgrade.upgrade import DONE, RETURNED, SWITCHING, Side, Upgrade


def plan_way(cluster: Cluster, host: Host, side: Side, options: UpgradeOptions) -> tuple[SwitchPlan | None, str]:
    """Return the plan of a switch to an image; without one, why the container is stopped and started instead.

    Raises:
        Refused: a switch would be possible on this host, but not now.
    """
    if options.with_snapshot:
        return None, "the overlay is replaced by a snapshot"
    try:
        return plan_switch(cluster, host, Image(side.path, side.key, side.sha256, "")), ""
    except NoSecond as error:
        return None, error.message


def switch_over(cluster: Cluster, host: Host, options: UpgradeOptions, done: UpgradeResult) -> UpgradeResult:
    """Switch from the image ``done.before`` to ``done.after``.

    Raises:
        Refused: it is not possible; nothing was changed.
        RolledBack: the new image failed; the instance of before serves, as it did all the time.
        Unverified: the new image serves, but a service does not answer, or a job was lost.
        SmsError: neither serves; the next run resumes.
    """
    before, after = done.before, done.after
    jobs = list_before(cluster, host, options)
    taking = SnapshotOptions(reason=f"{UPGRADE} to {after.key[:12]}, before the switch")
    done.kept = snapshot(cluster, host, taking).snapshot["number"]
    inode = overlay_inode(cluster, host) or 0
    began, kept = cluster.env.clock.time(), (done.snapshot, done.kept)
    begun = Upgrade(cluster.site.cluster, SWITCHING, before, after, began, *kept, jobs=jobs, inode=inode)
    image = trust(cluster, host, after.path)
    now = write_phase(cluster, host, begun)
    try:
        switched = switch_here(cluster, host, image, Options("upgrade", options.wait_s))
    except (Refused, RolledBack) as error:
        write_phase(cluster, host, now.at(RETURNED, why=error.message[:2000]), why=error.message[:2000])
        if isinstance(error, Refused):
            raise
        hint = "`sms rehearse --keep` reproduces it without affecting production"
        raise RolledBack(f"{error.message}: image {before.key[:12]}", hint=hint) from error
    done.outage, done.exceeded, done.parts = switched.outage, switched.exceeded, switched.parts
    done.outage_s, done.notes = max(switched.outage.values(), default=0.0), switched.notes
    return _finish(cluster, host, now, done, switched.failures)


def resume_switch(cluster: Cluster, host: Host, options: UpgradeOptions, last: Upgrade) -> UpgradeResult | None:
    """Complete an interrupted switch that the agents have completed; None if they have undone it.

    The image that belongs to the overlay is started, if none runs.

    Raises:
        Unverified: the new image serves, but a service does not answer, or a job was lost.
        Refused, SmsError: the image does not start; the next run resumes.
    """
    if not has_switched(cluster, host, last):
        running = find_instance(cluster, host)
        if not running:
            start(cluster, host, StartOptions(Path(last.before.path), options.wait_s, judged=True))
        why = f"{running.image if running else last.before.path} serves"
        write_phase(cluster, host, last.at(RETURNED, why=why), why=why)
        return None
    done = UpgradeResult(host.name, last.before, last.after, resumed=True, snapshot=last.snapshot, kept=last.kept)
    try:
        started = start(cluster, host, StartOptions(Path(last.after.path), options.wait_s, keep=True, judged=True))
    except SmsError as error:
        back = f"`sms upgrade --undo --with-snapshot --force` returns to snapshot {last.kept}: newer jobs are lost"
        raise (Refused if isinstance(error, Refused) else SmsError)(
            f"{error.message}\n  the overlay is the one of the new image, {last.after.key[:12]}: the old one must not "
            "be started on it",
            hint=f"{error.hint}; if that does not help, {back}" if error.hint else back,
        ) from error
    assert started
    missing = started.missing(cluster.services)
    failures = f"no answer from {', '.join(missing)}" if missing else ""
    return _finish(cluster, host, last, done, failures)


def _finish(cluster: Cluster, host: Host, now: Upgrade, done: UpgradeResult, failures: str) -> UpgradeResult:
    """Check the jobs, and record that the new image serves.

    Raises:
        Unverified: a service does not answer, or a job was lost.
        SmsError: it could not be recorded; the next run does.
    """
    try:
        record_interrupted(cluster, host)
    except SmsError as error:
        raise Unverified(
            f"{error.message}\n  {now.after.key[:12]} serves on {host.name}, but that could not be recorded",
            hint=f"`sms upgrade --host {host.name}` again records it",
        ) from error
    undo = f"`sms upgrade --undo --host {host.name}` returns to {now.before.key[:12]} with the present jobs"
    try:
        done.jobs = check_jobs(cluster, host, now)
    except SmsError as error:
        undo += f", `--undo --with-snapshot` to the jobs of snapshot {now.kept}"
        failures = f"{failures}\n{error.message}".strip()
    # Before the end of the record, after which a start uses the current image.
    try:
        make_current_here(cluster, now.after)
    finally:
        facts = {"outage": done.outage, "exceeded": done.exceeded} if done.outage else {}
        write_phase(cluster, host, now.at(DONE, why=failures[:2000]), kept=now.kept, **facts)
    if failures:
        raise Unverified(
            f"{failures}\n  {now.after.key[:12]} serves on {host.name}: what it has received must not be lost",
            hint=undo,
        )
    return done
