"""The scenarios that are explored.

Hosts are not symmetric, as their names decide ties and the order of writes; scenarios therefore begin on either host.
"""

from __future__ import annotations

from typing import Any

from appliance.shared.lease import Lease
from tests.unit.migration.model import world as w
from tests.unit.migration.model.hosts import CLUSTER
from tests.unit.migration.model.scenario import Scenario

WRITTEN = (0, 1)
"""Contents of the overlay at the beginning: one write was acknowledged."""
BLIND = w.BLIND_A | w.BLIND_B
SNAPSHOT = (1, 5, 1, 11.0, "a", WRITTEN)
"""A snapshot of host a: number, generation, sequence number, time, host that took it, contents."""
OLDER = (1, 5, 1, 11.0, "b", (0, 0))
"""A snapshot of host b, from before that write."""
MOVED = (("moved", (0, 0), 9),)
"""What a migration leaves on its source."""


def lease(holder: str | None, file: str, generation: int = 5, *, last: str = "") -> bytes:
    """Return a lease file."""
    return Lease(CLUSTER, generation, holder, 1e9, file, last).text()


def mark(generation: int) -> tuple[str, Any, int]:
    """Return a generation mark."""
    return "generation", (generation,), 0


def serving(*, shared: bool = False, guard: bool = True, **more: Any) -> dict[str, Any]:
    """Return both hosts while a serves; ``more``: fields of host b."""
    own, copied = lease("a", "a"), lease("a", "b")
    known = (own, w.MISSING if shared else copied, False) if guard else None
    host_a = {"lease": own, "files": (mark(5), ("img", WRITTEN, 1)), "instance": (1, True, True, 0), "guard": known}
    return {"host_a": host_a, "host_b": {**({} if shared else {"lease": copied}), **more}}


def stopped(**more: Any) -> dict[str, Any]:
    """Return both hosts after a stop on a; ``more``: fields of host b."""
    host_a = {"lease": lease(None, "a", last="a"), "files": (mark(5), ("img", WRITTEN, 1))}
    return {"host_a": host_a, "host_b": {"lease": lease(None, "b", last="a"), **more}}


def released_last() -> dict[str, Any]:
    """Return both hosts after a stop on b, which has a snapshot that is older than its overlay."""
    own = {"lease": lease(None, "b", last="b"), "files": (mark(5), ("img", WRITTEN, 1)), "store": (OLDER,)}
    return {"host_a": {"lease": lease(None, "a", last="b")}, "host_b": own}


def superseded() -> dict[str, Any]:
    """Return both hosts after a failover to a, when b is on again: by its own file it served last."""
    own = lease("a", "a", 1005)
    host_a = {"lease": own, "files": (mark(1005), ("img", WRITTEN, 1)), "instance": (1, True, True, 0)}
    host_b = {"lease": lease(None, "b", last="b"), "files": (mark(5), ("img", (0, 0), 2)), "store": (OLDER,)}
    return {"host_a": {**host_a, "guard": (own, w.MISSING, False)}, "host_b": host_b}


def returned() -> dict[str, Any]:
    """Return both hosts after a failover to b, when a has been switched on again."""
    host_a = {"lease": lease("b", "a", 1005), "files": (("past-1005", WRITTEN, 1),)}
    own = {"lease": lease("b", "b", 1005), "files": (mark(1005), ("img", (1, 0), 20)), "instance": (20, True, True, 0)}
    return {"host_a": host_a, "host_b": own}


NEW: dict[str, Any] = {"host_a": {}, "host_b": {}}
NAMED = "aaaaaaaa-0000-4000-8000-aaaaaaaaaaaa"
UNUSED: dict[str, Any] = {
    f"host_{name}": {"lease": Lease(CLUSTER, 5, None, 1e9, name, "a", cluster_uuid=NAMED).text()} for name in "ab"
}
"""The lease was released by a before there was an overlay; the cluster has its UUID, which shortens each start."""
STARTS = {"start a": 2, "start b": 2}
MOVE_LINKS = ("ca", "cb", "ssh")

SCENARIOS = [
    Scenario("starts, killed", **NEW, verbs=STARTS, faults={"kill": 2, "write": 1}),
    Scenario(
        "starts, crash and cut",
        **NEW,
        verbs=STARTS,
        faults={"crash": 1, "cut": 1, "unanswered": 1, "write": 1},
        excused=BLIND,
    ),
    Scenario("starts, shared", **NEW, shared=True, verbs=STARTS, faults={"kill": 1, "crash": 1, "cut": 1, "write": 1}),
    Scenario("stop", **serving(files=MOVED), verbs={"stop a": 1, **STARTS}, faults={"kill": 1, "crash": 1, "cut": 1}),
    Scenario(
        "stop, shared",
        **serving(shared=True),
        shared=True,
        verbs={"stop a": 1, "start b": 1, "stop b": 1, "start a": 1},
        faults={"kill": 1, "crash": 1, "cut": 1, "jump": 1},
    ),
    Scenario(
        "failover",
        **serving(store=(SNAPSHOT,)),
        verbs={"failover b": 2, "start a": 1},
        faults={"cut": 1, "kill": 1, "crash": 1, "write": 1},
        links=("all", "ab"),
        excused=BLIND,
    ),
    Scenario(
        "failover by hand",
        **serving(guard=False, store=(SNAPSHOT,)),
        verbs={"by-hand b": 2, "start a": 1, "start b": 1},
        faults={"crash": 2, "kill": 1, "write": 1},
        excused=BLIND,
    ),
    Scenario(
        "failover of a free lease",
        **stopped(store=(SNAPSHOT,)),
        verbs={"failover b": 2, "start a": 1},
        faults={"cut": 1, "kill": 1, "write": 1},
        excused=BLIND,
    ),
    Scenario(
        "start after a failover of a free lease, killed",
        **stopped(store=(SNAPSHOT,)),
        verbs={"failover b": 1, "start b": 1},
        faults={"crash": 1, "kill": 1},
    ),
    Scenario(
        "start after a failover that was killed, on the host that released the lease last",
        **released_last(),
        verbs={"by-snapshot b": 2, "start b": 2},
        faults={"crash": 2, "kill": 1, "write": 1, "fail": 1},
    ),
    Scenario(
        "snapshots and clocks",
        **serving(guard=False, store=(SNAPSHOT,)),
        verbs={"failover b": 1},
        faults={"push": 2, "jump": 1, "write": 2, "crash": 1},
    ),
    Scenario(
        "failover, shared",
        **serving(shared=True),
        shared=True,
        verbs={"failover b": 2, "start a": 1},
        faults={"cut": 1, "kill": 1, "crash": 1, "write": 1},
        links=("all", "ab"),
    ),
    Scenario(
        "restore by hand",
        **stopped(store=(SNAPSHOT,)),
        verbs={"restore b": 1, "start b": 1, "start a": 1},
        faults={"kill": 1, "cut": 1, "write": 1},
        excused=BLIND,
    ),
    Scenario(
        "a host that was superseded gets the newest snapshot",
        **superseded(),
        verbs={"pull b": 1, "restore b": 1, "start b": 1, "start a": 1, "stop a": 1},
        faults={"crash": 1, "cut": 1, "kill": 1},
        excused=BLIND,
    ),
    Scenario("move", **serving(), verbs={"move b": 1}, faults={"kill": 1, "crash": 1, "cut": 1}, links=MOVE_LINKS),
    Scenario(
        "move, slow", **serving(), verbs={"move b": 2}, faults={"slow": 1, "tick": 1, "fail": 1, "kill": 1, "write": 1}
    ),
    Scenario(
        "move and verbs",
        **serving(guard=False, files=MOVED),
        verbs={"move b": 1, "start a": 1, "start b": 1, "stop a": 1},
        faults={"kill": 1, "fail": 1},
    ),
    Scenario(
        "move, another run is faster", **serving(), verbs={"move b": 1}, faults={"moved": 1, "kill": 1, "write": 1}
    ),
    Scenario(
        "move back",
        **returned(),
        verbs={"move a": 1, "stop b": 1, "start a": 1},
        faults={"kill": 1, "fail": 1, "write": 1},
    ),
    Scenario(
        "move, shared",
        **serving(shared=True),
        shared=True,
        verbs={"move b": 1},
        faults={"kill": 1, "crash": 1, "cut": 1},
        links=MOVE_LINKS,
    ),
    Scenario(
        "move, shared, and verbs",
        **serving(shared=True, guard=False),
        shared=True,
        verbs={"move b": 1, "start a": 1, "start b": 1, "stop a": 1},
        faults={"kill": 1, "slow": 1, "fail": 1},
    ),
    Scenario(
        "lost lease file",
        **serving(guard=False, files=MOVED),
        verbs=STARTS,
        faults={"lose": 1, "crash": 1, "kill": 1},
        excused=BLIND,
    ),
    Scenario(
        "failover by hand of a host that is not off",
        **serving(store=(SNAPSHOT,)),
        verbs={"lie b": 1, "stop b": 1},
        faults={"cut": 1, "kill": 1, "write": 1},
        links=("all",),
        excused=w.FALSE_FENCE,
    ),
    *(
        Scenario(
            f"move, source partitioned, {'' if fenced else 'not '}fenced",
            **serving(),
            fenced=fenced,
            verbs={"move b": 1},
            faults={"cut": 1, "write": 1},
            links=("source",),
            excused=w.PARTED | w.TAKEN_OVER,
        )
        for fenced in (True, False)
    ),
]
