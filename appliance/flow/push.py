"""``sms overlay push``: verified snapshots go to an off-host Borg repository and to standby hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from appliance.errors import ConfigError, Refused, SmsError
from appliance.flow.context import Cluster, find_host
from appliance.flow.snapshots import LATEST, Listing, Snapshot, find_snapshot, list_snapshots
from appliance.flow.transfer import BORG, Offsite, Sent, estimate, send
from appliance.host.base import Host
from appliance.plan.offsite import archive_name, missing
from appliance.progress import Progress

PUSHED, PRESENT, WOULD, FAILED = "pushed", "present", "would push", "failed"


@dataclass(frozen=True)
class Pushed:
    """What became of one snapshot at one target; ``name`` is its number or archive there.

    ``snapshot`` is 0 where the target itself is the trouble.
    """

    target: str
    snapshot: int
    state: str
    name: str = ""
    bytes: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    error: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Wanted:
    """What to push: a number, ``latest``, or every one that is missing there."""

    snapshot: str = LATEST
    all_missing: bool = False
    dry_run: bool = False


def push(cluster: Cluster, source: Host, wanted: Wanted, targets: Sequence[str], progress: Progress) -> list[Pushed]:
    """Push snapshots of ``source``; a target that fails does not hinder the others.

    Args:
        targets: ``borg`` or names of admin hosts; none: all that the site names.

    Raises:
        ConfigError: a target is neither.
        Refused: there is no such snapshot, it is damaged, or there is nowhere to push to.
    """
    names = choose_targets(cluster, source.name, targets)
    listing = list_snapshots(cluster, source)
    chosen = None if wanted.all_missing and listing.snapshots else find_snapshot(listing, wanted.snapshot)
    if chosen and not chosen["health"].get("ok"):
        damage = (chosen["health"].get("damage") or ["it was never checked"])[0]
        raise Refused(
            f"snapshot {chosen['number']} of {source.name} is damaged: {damage}; it is not pushed",
            hint="`sms overlay list` shows others",
        )
    done: list[Pushed] = []
    for name in names:
        work = _to_borg if name == BORG else _to_host
        try:
            work(Push(cluster, source, listing, chosen, wanted.dry_run, name, progress, done.append))
        except SmsError as error:
            done.append(Pushed(name, 0, FAILED, error=error.message, hint=error.hint))
    return done


def choose_targets(cluster: Cluster, source: str, targets: Sequence[str]) -> list[str]:
    """Where to push to.

    Raises:
        ConfigError: a target is neither borg nor an admin host.
        Refused: there is none.
    """
    known = [host.name for host in cluster.site.admin_hosts]
    for name in targets:
        if name != BORG and name not in known:
            raise ConfigError(f"no admin host named {name}", hint=f"the site has: {', '.join(known)}; or --to {BORG}")
        if name == source:
            raise Refused(f"the snapshots are on {name} already", hint="name another one with --to")
    settings = cluster.site.snapshots
    site = [*([BORG] if settings.borg else []), *(name for name in settings.standby if name != source)]
    chosen = list(dict.fromkeys(targets)) or site
    if not chosen:
        raise Refused(
            "the site says nowhere to push to", hint="set snapshots.borg or snapshots.standby, or name one: --to HOST"
        )
    return chosen


@dataclass(frozen=True)
class Push:
    """One target's part of a push; ``chosen`` is None when all that is missing is wanted."""

    cluster: Cluster
    source: Host
    listing: Listing
    chosen: Snapshot | None
    dry_run: bool
    target: str
    progress: Progress
    tell: Callable[[Pushed], None]

    def wanted(self, there: Sequence[Snapshot]) -> list[Snapshot]:
        """What is to go, the oldest first; what is there already is told."""
        if self.chosen is None:
            retention = self.cluster.site.retention
            return missing(self.listing.snapshots, there, retention, now=time.time())
        for one in there:
            if one["uuid"] == self.chosen["uuid"]:
                return []
        return [self.chosen]

    def one(self, snapshot: Snapshot, work: Callable[[], Sent]) -> bool:
        """Push one and tell what became of it; say whether to go on with the next."""
        began = time.monotonic()
        number = snapshot["number"]
        try:
            sent = work()
        except SmsError as error:
            self.tell(Pushed(self.target, number, FAILED, error=error.message, hint=error.hint))
            return False
        state = PRESENT if sent.present else WOULD if self.dry_run else PUSHED
        seconds = round(time.monotonic() - began, 3)
        self.tell(Pushed(self.target, number, state, sent.name, sent.bytes, seconds, sent.notes))
        return True


def _to_host(push: Push) -> None:
    target = find_host(push.cluster.site, push.target)
    there = [one for one in list_snapshots(push.cluster, target).snapshots if one["health"].get("ok")]
    wanted = push.wanted(there)
    if push.chosen and not wanted:
        same = next(one for one in there if one["uuid"] == push.chosen["uuid"])
        push.tell(Pushed(push.target, push.chosen["number"], PRESENT, str(same["number"])))

    def work(number: int) -> Sent:
        if push.dry_run:
            return estimate(push.cluster, push.source, number, target)
        return send(push.cluster, push.source, number, target, push.progress)

    for one in wanted:
        if not push.one(one, lambda one=one: work(one["number"])):  # type: ignore[misc]
            return


def _to_borg(push: Push) -> None:
    offsite = Offsite(push.cluster, push.source)
    with ExitStack() as stack:
        if not push.dry_run:
            offsite.one_at_a_time(stack)
        known = offsite.open()
        wanted = push.wanted([manifest for manifest, _ in known])
        if push.chosen and not wanted:
            same = next(one for one, _ in known if one["uuid"] == push.chosen["uuid"])
            push.tell(Pushed(push.target, push.chosen["number"], PRESENT, archive_name(same)))
        pushed = 0
        for one in wanted:
            if push.dry_run:
                push.tell(Pushed(push.target, one["number"], WOULD, bytes=one["used_bytes"]))
            elif not push.one(one, lambda one=one: offsite.push(one, known, push.progress)):  # type: ignore[misc]
                return
            else:
                pushed += 1
        if pushed:
            offsite.prune(push.progress)
