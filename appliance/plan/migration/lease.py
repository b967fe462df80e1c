"""The lease: which host may write the overlay and use the addresses. Pure decisions over small files.

Every admin host has a file beside its overlay; hosts that share the overlay's folder share the file. The generation
never decreases: a host that returns and finds a generation higher than its own has been superseded. A host that takes
or releases the lease writes a copy into the other hosts' files, so that a holder is known even when it is unreachable.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from appliance.errors import Refused
from appliance.shared.lease import LAST_RAISING, Lease, parse_lease

GENERATION_BUMP = 1000
"""Added to the generation when an unreachable holder is superseded: it may have raised its own a few times."""


@dataclass(frozen=True)
class View:
    """What a query of one admin host found: its lease, None when it is unreachable, and whether an instance runs there.

    ``stuck``: the host is alive, but does not answer in time.
    """

    lease: Lease | None
    runs: bool = False
    stuck: bool = False


Views = Mapping[str, View]
"""By name of the admin host."""


class DamagedLease(Refused):
    """A lease file that is not a lease."""


def read_lease(data: bytes | None, cluster: str) -> Lease:
    """Return the lease of a file's bytes; a free lease without a file.

    Raises:
        DamagedLease: it is not a lease.
        Refused: it is one of another cluster.
    """
    if data is None:
        return Lease(cluster)
    try:
        lease = parse_lease(data)
    except (ValueError, TypeError) as error:
        raise DamagedLease(
            f"the lease file cannot be read: {error}", hint="see what is in it before you remove it"
        ) from error
    if lease.cluster != cluster:
        raise Refused(
            f"the lease file is of cluster {lease.cluster}", hint="check whether two clusters share one overlay folder"
        )
    return lease


def find_last(views: Views) -> str:
    """Return the host that released the lease last, and has the newest overlay; empty if it is not known, or none."""
    files = [view.lease for view in views.values() if view.lease]
    last = max(files, key=lambda lease: lease.generation).last if files else ""
    return last if last in views else ""


def find_holder(views: Views, *, without: Collection[str] = ()) -> Lease | None:
    """Return the lease of the current holder; None when the lease is free.

    A reachable host is authoritative about itself. An unreachable host counts as the holder when the copies of the
    others name it and none has a later generation.

    Args:
        without: hosts that are known to be off; leases that they hold are ignored.
    """
    files = {name: view.lease for name, view in views.items() if view.lease and name not in without}
    top = max((lease.generation for lease in files.values()), default=0)
    released = any(lease.generation == top and lease.holder is None for lease in files.values())
    claims: list[tuple[int, str, Lease]] = []
    for lease in files.values():
        if lease.holder is None or lease.holder in without:
            continue
        if lease.holder in files:
            valid = files[lease.holder].holder == lease.holder
        else:
            valid = lease.generation == top and not released
        if valid:
            claims.append((-lease.generation, lease.holder, lease))
    # Two hosts may have taken the same generation while they were partitioned: everybody must choose the same one.
    return min(claims, key=lambda claim: claim[:2])[2] if claims else None


def may_take(
    me: str, views: Views, cluster: str, *, now: float, generation_bump: int = 1, without: Collection[str] = ()
) -> Lease:
    """Return the lease that ``me`` may take.

    Args:
        generation_bump: added to the highest known generation.
        without: hosts that are known to be off; leases that they hold are ignored.

    Raises:
        Refused: another host holds it, or runs an instance.
    """
    for name, view in views.items():
        if view.runs and name != me and name not in without:
            raise Refused(f"the services container runs on {name}", hint=handover_hint(name, me))
    holder = find_holder(views, without=without)
    if holder and holder.holder != me:
        raise _held_error(me, holder, reachable=_is_reachable(views, holder.holder))
    for name, view in views.items():
        if view.stuck and name != me and name not in without:
            raise Refused(
                f"{name} is alive and does not answer in time: it may hold the lease",
                hint=f"check that host, then run this again; if it has failed, `sms failover {me}` fences it",
            )
    top = max((max(view.lease.generation, view.lease.floor) for view in views.values() if view.lease), default=0)
    mine = views[me].lease
    lease = Lease(cluster, top + generation_bump, me, now, me, sequence=mine.sequence if mine else 0)
    named = find_identity(views)
    return lease.with_identity_of(named) if named else lease


def find_identity(views: Views) -> Lease | None:
    """Return the lease that has the cluster's UUID: of those that have one, that of the highest generation."""
    named = [view.lease for view in views.values() if view.lease and view.lease.cluster_uuid]
    return max(named, key=lambda lease: (lease.generation, lease.cluster_uuid), default=None)


def refuse_other_cluster(views: Views) -> None:
    """Raise Refused if lease files have different UUIDs: the hosts are not all of one cluster."""
    uuids = {name: view.lease.cluster_uuid for name, view in views.items() if view.lease and view.lease.cluster_uuid}
    if len(set(uuids.values())) > 1:
        each = ", ".join(f"{uuid} on {name}" for name, uuid in sorted(uuids.items()))
        raise Refused(
            f"the admin hosts have leases of different clusters of this name: {each}",
            hint="if two clusters share an admin host, give one of them another name or `state` folder; if it is one "
            "cluster, `sms overlay identity UUID` makes it one again",
        )


def find_foreign(me: str, views: Views) -> dict[str, Lease]:
    """Return the leases of hosts that have another UUID than that of ``me``; none if that has no UUID."""
    mine = views[me].lease
    return {name: view.lease for name, view in views.items() if view.lease and _is_foreign(view.lease, mine)}


def raise_floor(mine: Lease, me: str, generation: int, *, cluster_uuid: str = "") -> Lease | None:
    """Return the lease file of ``me`` after it got a snapshot of ``generation``: later snapshots sort after that one.

    The generation itself stays: to other hosts a higher one would mean that ``me`` has taken the lease since, also from
    one that serves. None where nothing changes: it is above already, or another host holds the lease: its generation is
    that host's. A lease that was never taken stays one: the next start still has to query all that may know a higher
    generation.

    Args:
        cluster_uuid: of the snapshot. A cluster that was never started, or whose leases were all lost, continues the
            one that it restores.

    Raises:
        Refused: the generation is implausible, because another host wrote it; or ``me`` holds the lease, and another
            host has taken a later generation.
    """
    check_plausible(generation, mine)
    if mine.holder == me and mine.generation < generation:
        raise Refused(
            f"the snapshot is of generation {generation}, and {me} holds the lease in generation {mine.generation}: "
            "another host has taken over since, or every lease was lost",
            hint=f"`sms status` shows who serves; if it is {me}: `sms stop --host {me}`, then run this again",
        )
    lease = mine
    if not mine.since and not mine.cluster_uuid and cluster_uuid:
        lease = replace(mine, cluster_uuid=cluster_uuid, adopted=generation, file=mine.file or me)
    if mine.holder is None and max(mine.generation, mine.floor) < generation:
        lease = replace(lease, floor=generation, file=mine.file or me)
    return None if lease == mine else lease


def refuse_unknown_taker(views: Views, *, without: Collection[str] = ()) -> None:
    """Refuse a start where a snapshot is newer than every lease that answers: a silent host may serve since.

    Args:
        without: hosts that are known to be off.

    Raises:
        Refused: naming the silent hosts.
    """
    leases = [view.lease for view in views.values() if view.lease]
    floor, top = (max((getattr(one, name) for one in leases), default=0) for name in ("floor", "generation"))
    silent = sorted(name for name, view in views.items() if view.lease is None and name not in without)
    if silent and floor > top:
        raise Refused(
            f"a snapshot of generation {floor} was pulled or restored, and no host that answers has taken that one: "
            f"{', '.join(silent)} may have, and run the services container",
            hint="if that host has failed, `sms failover` fences it; `--without-remote` starts without it",
        )


def check_plausible(generation: int, mine: Lease) -> None:
    """Raise Refused unless snapshots that are newer than one of this generation are possible.

    Args:
        mine: the lease of this host: what is not newer than that is plausible.
    """
    if not 0 <= generation <= max(LAST_RAISING, mine.generation):
        raise Refused(
            f"the snapshot is of generation {str(generation)[:20]}, which is not plausible",
            hint="choose another one: `sms overlay list`, `sms overlay pull --list`",
        )


def was_taken(views: Views) -> bool:
    """Whether any reachable host knows a lease; if not, the cluster is new, or every copy of the lease was lost."""
    return any(view.lease.since > 0 for view in views.values() if view.lease)


def _is_reachable(views: Views, name: str | None) -> bool:
    return any(view.lease for host, view in views.items() if host == name)


def handover_hint(holder: str, me: str) -> str:
    """Return the hint for who wants to start on ``me`` what runs on ``holder``."""
    return f"stop it there first: sms stop --host {holder}; or migrate it while it runs: sms migrate {me}"


def engine_error(lease: Lease) -> Refused:
    """Return the refusal of what an admin host may not do while an engine has the services."""
    return Refused(
        f"{lease.engine} has the services and their state (generation {lease.generation})",
        hint="`sms deploy` applies the site file, also to what stays in the services container; `sms deploy status` "
        "shows them; `sms migrate --to container` moves them back to an admin host",
    )


def find_newest(views: Views) -> str:
    """Return the host with the newest overlay by the leases that answer, or the engine with the newest state.

    Empty where that is not known.
    """
    leases = [view.lease for view in views.values() if view.lease]
    top = max(leases, key=lambda one: (one.generation, bool(one.taker)), default=None)
    return top.taker if top else ""


def _held_error(me: str, lease: Lease, *, reachable: bool) -> Refused:
    if lease.engine:
        return engine_error(lease)
    message = f"{lease.holder} holds the lease (generation {lease.generation})"
    if reachable:
        return Refused(message, hint=handover_hint(str(lease.holder), me))
    return Refused(
        f"{message} and cannot be reached: the services container may run there",
        hint=f"if it has failed, `sms failover {me}` fences it and takes over",
    )


def find_newer(me: str, views: Views) -> Lease | None:
    """Return the lease of the host that superseded ``me``; None when ``me`` was not superseded.

    A host that shares its folder with another cluster of this name may have the lease of that one: if it names a host
    which is not of this cluster, it supersedes nobody here.
    """
    mine = views[me].lease

    def counts(lease: Lease | None) -> bool:
        return not _is_foreign(lease, mine) or (lease is not None and lease.holder in views)

    holder = find_holder({name: view for name, view in views.items() if counts(view.lease)})
    if not holder or holder.holder == me or (mine and holder.generation < mine.generation):
        return None
    return holder


def find_released(me: str, views: Views) -> Lease | None:
    """Return the lease that another host has taken since ``me`` did, and has released; None when there is none.

    One that ``me`` has released itself, or that nobody has taken, counts where the file of ``me`` names an engine: that
    gave it back. Only for a host that runs nothing: a start that is under way elsewhere writes such a lease before it
    holds it.
    """
    mine = views[me].lease
    leases = [view.lease for view in views.values() if view.lease and not _is_foreign(view.lease, mine)]
    top = max(leases, key=lambda lease: (lease.generation, bool(lease.holder)), default=None)
    if not top or not mine or top.holder or top.generation <= mine.generation:
        return None
    return top if mine.engine or top.last not in ("", me) else None


def _is_foreign(lease: Lease | None, mine: Lease | None) -> bool:
    uuids = {one.cluster_uuid for one in (lease, mine) if one and one.cluster_uuid}
    return len(uuids) > 1


def merge_update(current: Lease, update: Lease, *, sender: str) -> Lease | None:
    """Return what a host's lease file becomes after an update by another host; None when it stays unchanged.

    Args:
        current: the contents of the file.
        sender: the host that sends the update; it may release a lease that it held itself.
    """
    if _is_foreign(current, update):
        return None
    released = update.generation == current.generation and current.holder == sender and update.holder is None
    if update.generation > current.generation or released:
        return update.written_over(current)
    named = current.written_over(update)
    return named if named != current and update.generation == current.generation else None


def has_own_overlay(mine: Lease, me: str) -> bool | None:
    """Whether the overlay beside this file is a different one from the holder's; None when that is not known.

    Args:
        mine: the lease file in the folder of ``me``.
    """
    if not mine.file or mine.holder in (None, me):
        return None
    return mine.file == me


def take(lease: Lease, holder: str, *, now: float) -> Lease:
    """Return the lease taken by ``holder``, who may hold it already; decides by a single file.

    Raises:
        Refused: another host holds it.
    """
    if lease.holder not in (None, holder):
        raise _held_error(holder, lease, reachable=True)
    return replace(lease, generation=lease.generation + 1, holder=holder, since=now)


def release(lease: Lease, holder: str, *, now: float) -> Lease:
    """Return the lease released if ``holder`` holds it, else unchanged."""
    return replace(lease, holder=None, since=now, last=holder) if lease.holder == holder else lease
