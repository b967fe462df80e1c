"""The lease: who may write the overlay and hold the addresses. Pure decisions over small files.

Every admin host has a file beside its overlay; hosts that share the overlay's folder share the file. The generation
only ever grows: a host that comes back and finds a higher one than its own knows that somebody else has taken over
meanwhile. Who takes or lets go tells the other hosts' files, so that they know of a holder that cannot be reached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace

from appliance.errors import Refused, SmsError

MOST = 1 << 40
"""Of a generation: a million failovers a day for three years."""
LONGEST = 255
"""Characters of a name."""
LEAP = 1000
"""How far a failover leaps: the dead host may have started again, unseen, a few times."""


@dataclass(frozen=True)
class Lease:
    """What a lease file says.

    ``holder`` is the admin host's name, None when it is free; ``since`` is Unix time, in seconds; ``file`` is the host
    whose own file this is. What the holder wrote into another host's folder has that host's name: it is a copy, and
    the holder's overlay is not there. Empty: nobody knows.
    """

    cluster: str
    generation: int = 0
    holder: str | None = None
    since: float = 0.0
    file: str = ""

    def text(self) -> bytes:
        """As it lies in its file."""
        facts = asdict(self)
        if not self.file:
            del facts["file"]
        return (json.dumps(facts, indent=1) + "\n").encode()


@dataclass(frozen=True)
class View:
    """What is seen of one admin host: its lease, None where it cannot be asked, and whether it runs the appliance.

    ``stuck``: it is alive, and does not answer in time.
    """

    lease: Lease | None
    runs: bool = False
    stuck: bool = False


Views = Mapping[str, View]
"""By the admin host's name."""


def read_lease(data: bytes | None, cluster: str) -> Lease:
    """The lease of a file's bytes; a free one where there is no file.

    Raises:
        SmsError: the file is not a lease of this cluster.
    """
    if data is None:
        return Lease(cluster)
    try:
        lease = Lease(**json.loads(data))
        _check_kinds(lease)
    except (ValueError, TypeError) as error:
        raise SmsError(
            f"the lease file cannot be read: {error}", hint="see what is in it before you remove it"
        ) from error
    if lease.cluster != cluster:
        raise SmsError(
            f"the lease file is of cluster {lease.cluster}", hint="do two clusters share one overlay folder?"
        )
    return lease


def _check_kinds(lease: Lease) -> None:
    """It may come from another host: what is compared must be a number, what is shown must be a name."""
    if type(lease.generation) is not int or not 0 <= lease.generation <= MOST:
        raise ValueError(f"generation {str(lease.generation)[:20]!r}")
    if not isinstance(lease.since, int | float):
        raise TypeError("since is no time")
    for name in (lease.cluster, lease.file, lease.holder or "-"):
        if not isinstance(name, str) or len(name) > LONGEST or not name.isprintable():
            raise ValueError(f"{str(name)[:20]!r} is no name")


def find_holder(views: Views, *, without: Collection[str] = ()) -> Lease | None:
    """The lease of the host that holds; None when nobody does.

    A host that answers is believed about itself. Of one that does not answer, the others' word counts as long as
    nobody knows of a later generation.

    Args:
        without: hosts that are known to be off; what they hold does not count.
    """
    files = {name: view.lease for name, view in views.items() if view.lease and name not in without}
    top = max((lease.generation for lease in files.values()), default=0)
    let_go = any(lease.generation == top and lease.holder is None for lease in files.values())
    claims: list[tuple[int, str, Lease]] = []
    for lease in files.values():
        if lease.holder is None or lease.holder in without:
            continue
        if lease.holder in files:
            good = files[lease.holder].holder == lease.holder
        else:
            good = lease.generation == top and not let_go
        if good:
            claims.append((-lease.generation, lease.holder, lease))
    # Two that took the same generation while they could not see each other: all who look choose the same one.
    return min(claims, key=lambda claim: claim[:2])[2] if claims else None


def may_take(me: str, views: Views, cluster: str, *, now: float, leap: int = 1, without: Collection[str] = ()) -> Lease:
    """The lease that ``me`` may take.

    Args:
        leap: how much higher than all that are known its generation is.
        without: hosts that are known to be off; what they hold does not count.

    Raises:
        Refused: another host holds it, or runs the appliance.
    """
    for name, view in views.items():
        if view.runs and name != me and name not in without:
            raise Refused(f"the appliance runs on {name}", hint=_ways(name, me))
    holder = find_holder(views, without=without)
    if holder and holder.holder != me:
        raise _held(me, holder, reachable=_answers(views, holder.holder))
    for name, view in views.items():
        if view.stuck and name != me and name not in without:
            raise Refused(
                f"{name} is alive and does not answer in time: it may hold the lease",
                hint=f"look at it, then run this again; if it is broken, `sms failover {me}` makes sure that it is off",
            )
    top = max((view.lease.generation for view in views.values() if view.lease), default=0)
    return Lease(cluster, top + leap, me, now, me)


def _answers(views: Views, name: str | None) -> bool:
    return any(view.lease for who, view in views.items() if who == name)


def _ways(holder: str, me: str) -> str:
    return f"stop the appliance there first: sms stop --host {holder}; or move it, as it runs: sms migrate {me}"


def _held(me: str, lease: Lease, *, reachable: bool) -> Refused:
    words = f"{lease.holder} holds the lease (generation {lease.generation})"
    if reachable:
        return Refused(words, hint=_ways(str(lease.holder), me))
    return Refused(
        f"{words} and cannot be reached: it may run the appliance",
        hint=f"if it is dead, `sms failover {me}` makes sure of that and takes over",
    )


def find_newer(me: str, views: Views) -> Lease | None:
    """The lease of another host that took over from ``me``; None when ``me`` need not give way."""
    mine = views[me].lease
    holder = find_holder(views)
    if not holder or holder.holder == me or (mine and holder.generation < mine.generation):
        return None
    return holder


def told(mine: Lease, news: Lease, *, by: str) -> Lease | None:
    """What a host's file becomes that is told of a lease; None when it stays as it is.

    Args:
        mine: what the file says now.
        by: who tells; of what it held itself it may say that it has let go.
    """
    let_go = news.generation == mine.generation and mine.holder == by and news.holder is None
    return news if news.generation > mine.generation or let_go else None


def is_apart(mine: Lease, me: str) -> bool | None:
    """Whether the overlay beside this file is another one than the holder's; None when nobody knows.

    Args:
        mine: what lies in the folder of ``me``.
    """
    if not mine.file or mine.holder in (None, me):
        return None
    return mine.file == me


def take(lease: Lease, holder: str, *, now: float) -> Lease:
    """The lease, taken by ``holder``, who may have it already; for who looks at one file alone.

    Raises:
        Refused: another host holds it.
    """
    if lease.holder not in (None, holder):
        raise _held(holder, lease, reachable=True)
    return replace(lease, generation=lease.generation + 1, holder=holder, since=now)


def release(lease: Lease, holder: str, *, now: float) -> Lease:
    """The lease, free, if ``holder`` has it; else as it is."""
    return replace(lease, holder=None, since=now) if lease.holder == holder else lease


def digest(data: bytes | None) -> str:
    """What the lease file must still hold when it is replaced."""
    return "none" if data is None else hashlib.sha256(data).hexdigest()
