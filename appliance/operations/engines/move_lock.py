"""The lock under which services are moved, deployed on an engine, stopped and drained there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from appliance.errors import Refused
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster


@contextmanager
def lock_moves(cluster: Cluster, host: Host, *, tolerant: bool = False) -> Iterator[None]:
    """Hold the lock of moves on every admin host: another run would undo what this one does.

    Args:
        tolerant: leave out other hosts that cannot be reached. A move never does: it has the lock of ``host``, too,
            and so keeps out those that do.

    Raises:
        Busy: another run moves, deploys, stops or drains.
        Refused: a host cannot be reached.
    """
    path = f"{cluster.places.lock}.move"
    with ExitStack() as stack:
        for name in sorted({one.name for one in cluster.site.admin_hosts} | {host.name}):  # in the same order always
            what = f"another `sms migrate --to` or `sms deploy` is at work; {name} has its lock"
            try:
                one = host if name == host.name else cluster.host(name)
                stack.enter_context(cluster.env.locks.hold(one, path, what))
            except Unreachable as error:
                if not tolerant or name == host.name:
                    raise unreachable([name]) from error
        yield


def unreachable(names: Sequence[str]) -> Refused:
    """Return the refusal of a move while admin hosts cannot be reached."""
    return Refused(
        f"{', '.join(names)} cannot be reached, and would not know who has the services",
        hint="make every admin host reachable, or remove it from `admin_hosts`",
    )
