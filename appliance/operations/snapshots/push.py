"""``sms overlay push``: copy verified snapshots to an off-host Borg repository and to standby hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from appliance.errors import Busy, ConfigError, Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.snapshots.list import Listing, Snapshot, find_snapshot, foreign_note, list_snapshots
from appliance.operations.snapshots.prune import by_rule, prune
from appliance.operations.snapshots.transfer import Offsite, Sent, estimate, send
from appliance.plan.snapshots.offsite import BORG, LATEST, archive_name, missing
from appliance.shared.order import order

PUSHED, PRESENT, WOULD_PUSH, FAILED = "pushed", "present", "would push", "failed"
REMOVED, WOULD_REMOVE = "removed", "would remove"


@dataclass(frozen=True)
class Pushed:
    """The result for one snapshot at one target; ``name`` is its number or archive there.

    ``snapshot`` is 0 where the target itself failed; for one that was removed there, it is its number there.
    ``status`` is the exit status of the failure, else 0; ``busy``: another run was in the way, a later one may succeed.
    """

    target: str
    snapshot: int
    state: str
    name: str = ""
    bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    hint: str = ""
    status: int = 0
    busy: bool = False


def failure(target: str, snapshot: int, error: SmsError) -> Pushed:
    """Return the result for a snapshot that could not be pushed."""
    busy = isinstance(error, Busy)
    return Pushed(target, snapshot, FAILED, error=error.message, hint=error.hint, status=error.status, busy=busy)


@dataclass(frozen=True)
class PushOptions:
    """What to push: a number, ``latest``, or all that are missing at the target.

    ``prune``: afterwards remove there what the site's retention does not keep.
    """

    snapshot: str = LATEST
    all_missing: bool = False
    prune: bool = False
    dry_run: bool = False


def push(cluster: Cluster, source: Host, options: PushOptions, targets: Sequence[str]) -> list[Pushed]:
    """Push snapshots of ``source``; a failure at one target does not stop the others.

    Args:
        targets: ``borg`` or names of admin hosts; empty: all targets of the site file.

    Raises:
        ConfigError: a target is neither.
        Refused: there is no such snapshot, it is damaged, or no target is configured.
    """
    names = choose_targets(cluster, source.name, targets)
    listing = list_snapshots(cluster, source)
    chosen = None if options.all_missing and listing.snapshots else find_snapshot(listing, options.snapshot)
    if chosen and not chosen["health"].get("ok"):
        damage = (chosen["health"].get("damage") or ["it was never verified"])[0]
        raise Refused(
            f"snapshot {chosen['number']} of {source.name} is damaged: {damage}; it is not pushed",
            hint="`sms overlay list` shows others",
        )
    done: list[Pushed] = []
    for name in names:
        work = _to_borg if name == BORG else _to_host
        try:
            work(
                Push(
                    cluster,
                    source,
                    listing,
                    chosen,
                    options.prune,
                    options.dry_run,
                    name,
                    done.append,
                )
            )
        except SmsError as error:
            done.append(failure(name, 0, error))
    return done


def exit_status(done: Sequence[Pushed]) -> int:
    """Return the failures' common status when nothing was changed, 1 for other failures, 0 without any."""
    failed = {one.status for one in done if one.state == FAILED}
    if len(failed) == 1 and not any(one.state in (PUSHED, REMOVED) for one in done):
        return failed.pop()
    return 1 if failed else 0


def choose_targets(cluster: Cluster, source: str, targets: Sequence[str], *, option: str = "--to") -> list[str]:
    """Return the targets of a push: ``targets``, else those of the site file.

    Args:
        option: the command-line option that names a target, for hints.

    Raises:
        ConfigError: a target is neither borg nor an admin host.
        Refused: there is none, or a target is the source.
    """
    known = [host.name for host in cluster.site.admin_hosts]
    for name in targets:
        if name != BORG and name not in known:
            raise ConfigError(
                f"no admin host named {name}", hint=f"the site has: {', '.join(known)}; or {option} {BORG}"
            )
        if name == source:
            raise Refused(f"the snapshots are on {name} already", hint=f"name another one with {option}")
    chosen = list(dict.fromkeys(targets)) or site_targets(cluster, source)
    if not chosen:
        raise Refused(
            "no push target configured", hint=f"set snapshots.borg or snapshots.standby, or name one: {option} HOST"
        )
    return chosen


def site_targets(cluster: Cluster, source: str) -> list[str]:
    """Return the push targets of the site file, without the host ``source`` itself."""
    settings = cluster.site.snapshots
    return [*([BORG] if settings.borg else []), *(name for name in settings.standby if name != source)]


@dataclass(frozen=True)
class Push:
    """The push to one target; ``chosen`` is None for all missing snapshots."""

    cluster: Cluster
    source: Host
    listing: Listing
    chosen: Snapshot | None
    prune: bool
    dry_run: bool
    target: str
    report: Callable[[Pushed], None]

    def select(self, there: Sequence[Snapshot]) -> list[Snapshot]:
        """Return the snapshots to send, oldest first; those that are there already are left out."""
        if self.chosen is None:
            retention = self.cluster.site.retention
            return missing(self.listing.snapshots, there, retention, now=self.cluster.env.clock.time())
        for one in there:
            if one["uuid"] == self.chosen["uuid"]:
                return []
        return [self.chosen]

    def push_one(self, snapshot: Snapshot, work: Callable[[], Sent]) -> bool:
        """Push one snapshot and report the result; return whether to continue with the next."""
        began = self.cluster.env.clock.monotonic()
        number = snapshot["number"]
        try:
            sent = work()
        except SmsError as error:
            self.report(failure(self.target, number, error))
            return False
        state = PRESENT if sent.present else WOULD_PUSH if self.dry_run else PUSHED
        seconds = round(self.cluster.env.clock.monotonic() - began, 3)
        self.report(Pushed(self.target, number, state, sent.name, sent.bytes, seconds))
        return True

    def refuse_other_cluster(self, listing: Listing) -> None:
        """Raise Refused if the lease of the target has the UUID of another cluster."""
        here, there = self.listing.identity, listing.identity
        if here.uuid and there.uuid and there.uuid != here.uuid and not (here.assumed or there.assumed):
            raise Refused(
                f"{listing.host} is a host of another cluster of this name, {there.uuid}; this one is {here.uuid}",
                hint="give one of them another name or `state` folder; `sms overlay identity` shows more",
            )

    def report_foreign(self, found: Sequence[Snapshot], where: str) -> None:
        """Report snapshots of other clusters of this name at the target."""
        if note := foreign_note(found, where):
            self.cluster.env.progress.report(note)

    def report_removed(self, number: int, name: str) -> None:
        """Report a snapshot that was, or would be, removed at the target."""
        self.report(Pushed(self.target, number, WOULD_REMOVE if self.dry_run else REMOVED, name))


def _to_host(push: Push) -> None:
    target = push.cluster.host(push.target)
    listing = list_snapshots(push.cluster, target, identity=push.listing.identity)
    push.refuse_other_cluster(listing)
    push.report_foreign(listing.foreign, target.name)
    there = [one for one in listing.snapshots if one["health"].get("ok")]
    selected = push.select(there)
    if push.chosen and not selected:
        same = next(one for one in there if one["uuid"] == push.chosen["uuid"])
        push.report(Pushed(push.target, push.chosen["number"], PRESENT, str(same["number"])))

    def work(number: int) -> Sent:
        if push.dry_run:
            return estimate(push.cluster, push.source, number, target)
        return send(push.cluster, push.source, number, target)

    for one in selected:
        if not push.push_one(one, lambda one=one: work(one["number"])):  # type: ignore[misc]
            return
    if push.prune and push.dry_run:
        for number in plan_removals(push.cluster, listing, selected):
            push.report_removed(number, str(number))
    elif push.prune:
        for number in prune(push.cluster, target, (), identity=push.listing.identity).removed:
            push.report_removed(number, str(number))


def plan_removals(cluster: Cluster, listing: Listing, incoming: Sequence[Snapshot]) -> list[int]:
    """Return the numbers that a prune would remove from a host after ``incoming`` were added."""
    taken = {one["number"] for one in listing.snapshots} | set(listing.broken)
    both, used = list(listing.snapshots), taken | {one["number"] for one in listing.foreign}
    for one in incoming:
        # As the import does: the same number where it is free, else the next one.
        number = one["number"] if one["number"] not in used else max(used) + 1
        used.add(number)
        both.append({**one, "number": number})
    decisions = by_rule(cluster, replace(listing, snapshots=tuple(sorted(both, key=order))))
    return [one.number for one in decisions if not one.keep and one.number in taken]


def _to_borg(push: Push) -> None:
    offsite = Offsite(push.cluster, push.source, push.listing.identity)
    if push.prune and offsite.append_only:
        raise Refused(
            f"{push.source.name} may only append to {offsite.repository.url}: snapshots.borg.append_only is set",
            hint="without --prune; `sms overlay prune --at borg` on the machine that prunes it",
        )
    with ExitStack() as stack:
        if not push.dry_run:
            offsite.lock_repository(stack)
        known = offsite.open()
        push.report_foreign(offsite.foreign, offsite.repository.url)
        there = [manifest for manifest, _ in known]
        selected = push.select(there)
        if push.chosen and not selected:
            same = next(one for one, _ in known if one["uuid"] == push.chosen["uuid"])
            push.report(Pushed(push.target, push.chosen["number"], PRESENT, archive_name(same)))
        for one in selected:
            if push.dry_run:
                push.report(Pushed(push.target, one["number"], WOULD_PUSH, bytes=one["used_bytes"]))
            elif not push.push_one(one, lambda one=one: offsite.push(one, known, push.cluster.env.progress)):  # type: ignore[misc]
                return
        if push.prune:
            for one in offsite.prune([*there, *selected], push.cluster.env.progress, dry_run=push.dry_run):
                push.report_removed(one["number"], archive_name(one))
