"""Which host has the newest overlay, and whether that of a host may be started. Pure decisions.

A host takes the lease only with an overlay that is the newest one known. So an overlay is older than another one if the
other one's generation mark is higher, or if another host has taken a higher generation of the lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from appliance.errors import Refused, SmsError
from appliance.shared.lease import Lease
from appliance.shared.overlay import OverlayMark
from appliance.shared.records import RecordError, from_json


@dataclass(frozen=True)
class OverlayState:
    """What was found beside the path of the overlay on one host.

    ``generation``: of the lease under which it was last used there; 0: not known. ``had``: a sign of an earlier one is
    left: its mark, or a copy that was set aside. ``marked``: it has a mark.
    """

    exists: bool
    generation: int = 0
    had: bool = False
    marked: bool = False


@dataclass(frozen=True)
class Newer:
    """Why the overlay of a host is not the newest one.

    ``host`` has a newer one, or is not known (empty). ``reachable``: it answers. ``lost``: it has none any more.
    """

    host: str
    generation: int
    reachable: bool = True
    lost: bool = False


def read_mark(data: bytes, cluster: str) -> int:
    """Return the generation in the bytes of a mark.

    Raises:
        SmsError: they are not a mark of this cluster.
    """
    try:
        mark = from_json(OverlayMark, data)
    except RecordError as error:
        raise SmsError(f"it cannot be read: {error}", hint="see what is in it before you remove it") from error
    if mark.cluster != cluster or mark.generation < 0:
        raise SmsError(f"it is of cluster {mark.cluster}, generation {mark.generation}", hint="whose overlay is this?")
    return mark.generation


def is_shared(mine: Lease, me: str) -> bool:
    """Return whether the folder of ``me`` may be shared with other hosts, by the lease file in it."""
    return mine.file != me


def find_newer_overlay(
    me: str, overlays: Mapping[str, OverlayState | None], leases: Mapping[str, Lease | None]
) -> Newer | None:
    """Return why the overlay of ``me`` must not be started, or no new one created; None when it may.

    Args:
        overlays: of all hosts; None for one that cannot be reached.
        leases: the files of all hosts; None for one that cannot be reached.
    """
    mine, own = overlays[me], leases[me]
    assert mine and own
    if mine.exists and own.file and is_shared(own, me):
        return None  # it is the overlay of all hosts
    # The holder's overlay is as new as its lease: it may have been killed before it could mark it.
    known = max(mine.generation, own.generation if own.taker == me else 0) if mine.exists else -1
    there = {name: one.generation for name, one in overlays.items() if one and one.exists and name != me}
    best = max(there, key=lambda name: there[name], default="")
    if best and there[best] > known:
        return Newer(best, there[best])
    silent = [name for name, one in overlays.items() if one is None]
    top = max((one for one in leases.values() if one), key=lambda one: (one.generation, bool(one.taker)))
    if top.generation > known and top.taker not in ("", me):
        known_host = top.taker in overlays  # else it was removed from the site file
        if known_host and overlays[top.taker] is None:
            return Newer(top.taker, top.generation, reachable=False)
        if mine.exists or _had(overlays) or not known_host:
            return Newer(top.taker, top.generation, lost=top.taker not in there)
    if top.generation > max(known, 0) and not top.taker and silent:
        return Newer("", top.generation, reachable=False)  # an older version has released it
    if not mine.exists and _had(overlays):
        return Newer(me if mine.had else "", top.generation, lost=True)
    return None


def _had(overlays: Mapping[str, OverlayState | None]) -> bool:
    return any(one and one.had for one in overlays.values())


def find_older_by_file(me: str, mine: OverlayState, own: Lease) -> Newer | None:
    """Return why the overlay of ``me`` is stale, by its own lease file alone; None when that does not show it.

    While an engine has the state, the overlay stays where it is: the services return to it.
    """
    if not mine.exists or is_shared(own, me) or own.taker in ("", me) or own.engine:
        return None
    if own.generation <= mine.generation:
        return None
    return Newer(own.taker, own.generation)


def refusal(me: str, newer: Newer, *, exists: bool, kept: str = "") -> Refused:
    """Return the refusal to start on ``me``.

    Args:
        exists: whether ``me`` has an overlay, which is older.
        kept: where it was set aside.
    """
    what = f"the overlay of {me} is out of date" if exists else f"{me} has no overlay"
    if kept:
        what += f", and was renamed to {kept}"
    if newer.lost:
        return Refused(
            f"{what}, and the newest one{f', that of {newer.host},' if newer.host else ''} is gone",
            hint=f"`sms overlay restore latest --host {me}` restores a snapshot; `sms overlay create --host {me}` "
            "begins with an empty one, without jobs and accounting",
        )
    where = f"{newer.host or 'another host'} (generation {newer.generation})"
    if newer.reachable:
        return Refused(
            f"{what}: the newest one is on {where}",
            hint=f"start it there: sms start --host {newer.host}; then `sms migrate {me}` moves it here",
        )
    return Refused(
        f"{what}: the newest one is on {where}, which cannot be reached",
        hint=f"make it reachable; or if it has failed, `sms failover {me}` starts from the newest snapshot",
    )
