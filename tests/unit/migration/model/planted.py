"""Faults that are planted in the text of the product: the model must find each. As a program: explore one of them.

The process that explores a fault imports the product from a folder with the changed text (`tests/support/mutants.py`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tests.support.mutants import Edit
from tests.unit.migration.model import world as w
from tests.unit.migration.model.recovery import find_dead_ends
from tests.unit.migration.model.scenario import Scenario
from tests.unit.migration.model.scenarios import (
    BLIND,
    NEW,
    SNAPSHOT,
    UNUSED,
    released_last,
    returned,
    serving,
    superseded,
)

ALL = 250_000
DEEP = 600_000
"""For faults that only a long run shows."""

START, LEASE, GUARD = "operations/services/start.py", "operations/lease.py", "operations/services/guard.py"
SOURCE, TARGET = "agent/migration_source.py", "agent/migration_target.py"
FAILOVER = "plan/migration/failover.py"


@dataclass(frozen=True)
class Planted:
    """A fault in the real code, where the model shall find it, and what it shall report."""

    name: str
    edits: tuple[Edit, ...]
    scenario: Scenario
    report: str
    full: bool = False
    """It takes long to find."""


PLANTED = [
    Planted(
        "take without compare and swap",
        (
            Edit(LEASE, "digest(self._data.get(name))", '""'),
            Edit(LEASE, "digest(copy.text())", '""'),
            Edit(LEASE, "in self._query_hosts(names).items():", "in self._query_hosts([]).items():"),
            # Its file has two writers as well.
            Edit(
                START, "if one_cluster:\n                ensure_identity", "if False:\n                ensure_identity"
            ),
        ),
        Scenario("", **NEW, verbs={"start a": 1, "start b": 1}, faults={}),
        "two instances serve",
    ),
    Planted(
        "UUID of the cluster without one file that decides",
        (
            Edit(
                "operations/identity.py",
                "first = min(name for name, view in leases.views.items() if view.lease)",
                "first = leases.me",
            ),
        ),
        Scenario("", **NEW, verbs={"start a": 1, "start b": 1}, faults={}),
        "two UUIDs",
    ),
    Planted(
        "start without a last look at the lease",
        (Edit(START, "with hold_taken_lease(host, cluster, lease):", "with suppress():"),),
        Scenario("", **UNUSED, verbs={"start a": 2, "start b": 1}, faults={"kill": 1, "cut": 1}, excused=BLIND),
        "two instances serve",
        full=True,
    ),
    Planted(
        "target that takes over before the source has detached its ports",
        (
            Edit(
                "operations/migration/switch.py",
                '        source.send("release")\n',
                '        activate(migration)\n        source.send("release")\n',
            ),
            Edit(
                "operations/migration/switch.py", '["connections"]\n        activate(migration)\n', '["connections"]\n'
            ),
        ),
        Scenario("", **serving(), verbs={"move b": 1}, faults={}),
        "two instances serve",
    ),
    Planted(
        "agents that rely on a lease that was read before they had their locks",
        (
            Edit("agent/host_state.py", "if ours and generation <= self.request.generation and", "if True or"),
            Edit(TARGET, 'return newer and self.state in ("started", "up")', "return newer"),
        ),
        Scenario("", **serving(), verbs={"move b": 1}, faults={"moved": 1, "kill": 1}),
        "no way out",
    ),
    Planted(
        "source that does not wait for the target",
        (Edit(SOURCE, "RECLAIM_S = 3.0", "RECLAIM_S = -1.0"),),
        Scenario("", **serving(guard=False), verbs={"move b": 1}, faults={"kill": 1}),
        "two instances serve",
    ),
    Planted(
        "guard that ignores the generation",
        (
            Edit(
                GUARD,
                "return find_newer(self.host.name, views) if self.host.name in views else None",
                "held = [one.lease for name, one in sorted(views.items()) if one.lease and one.lease.holder == name]\n"
                "        return held[0] if held and held[0].holder != self.host.name else None",
            ),
        ),
        Scenario(
            "",
            **serving(store=(SNAPSHOT,)),
            verbs={"lie b": 1},
            faults={"cut": 1},
            links=("all",),
            excused=w.FALSE_FENCE,
        ),
        "guards leave none of two, not b",
    ),
    Planted(
        "start that looks neither again for an interrupted migration nor how old its overlay is",
        (
            Edit(START, "        refuse_interrupted(cluster, host)\n", ""),
            Edit(
                START,
                "known = 0 if rest else refuse_older(",
                "known = 0 if rest or check_overlay(leases.cluster, host) else refuse_older(",
            ),
        ),
        Scenario(
            "",
            **returned(),
            verbs={"move a": 1, "stop b": 1, "start a": 1},
            faults={"kill": 1, "write": 1},
        ),
        "a serves (1, 0), acknowledged was (1, 1)",
        full=True,
    ),
    Planted(
        "start that does not report what a failover lost that was killed",
        (
            Edit(
                "operations/services/unfinished.py",
                "return found if found and found.has_restored(overlay_inode(cluster, host)) else None",
                "return None",
            ),
        ),
        Scenario("", **released_last(), verbs={"by-snapshot b": 1, "start b": 1}, faults={"crash": 1, "kill": 1}),
        "b serves (1, 0), acknowledged was (0, 1)",
    ),
    Planted(
        "start that relies on the last line of a failover that was killed before it could write it",
        (
            Edit(
                FAILOVER,
                "and bool(overlay) and (self.restored or (self.snapshot is not None and replaced))",
                "and bool(overlay) and self.restored",
            ),
        ),
        Scenario("", **released_last(), verbs={"by-snapshot b": 1, "start b": 1}, faults={"crash": 1, "kill": 1}),
        "b serves (1, 0), acknowledged was (0, 1)",
    ),
    Planted(
        "lease of a host that was superseded, raised by the snapshot that it pulls",
        (
            Edit(
                LEASE,
                "raised = raise_floor(before, host.name, generation, cluster_uuid=cluster_uuid)",
                "raised = replace(before, generation=generation + 1, file=host.name)"
                " if before.holder in (None, host.name) and before.generation <= generation else None",
            ),
        ),
        Scenario("", **superseded(), verbs={"pull b": 1, "start b": 1}, faults={"crash": 1}, excused=BLIND),
        "b serves (0, 0), acknowledged was (0, 1)",
    ),
    Planted(
        "snapshots in the order of clocks",
        (
            Edit(
                FAILOVER,
                "from appliance.shared.order import order\n",
                'order = lambda one: (one["generation"], one["taken"])\n',
            ),
        ),
        Scenario(
            "",
            **serving(guard=False, store=(SNAPSHOT,)),
            verbs={"failover b": 1},
            faults={"push": 1, "jump": 1, "crash": 1},
        ),
        "an older snapshot was restored",
    ),
    Planted(
        "failover that restores the snapshot that was the newest one before it fenced the host",
        (
            Edit(
                "operations/migration/failover.py", "plan = _choose_again(cluster, host, plan, options)", "plan = plan"
            ),
        ),
        Scenario("", **serving(guard=False, store=(SNAPSHOT,)), verbs={"failover b": 1}, faults={"cut": 1, "push": 1}),
        "an older snapshot was restored",
    ),
    Planted(
        "guard that believes what a killed migration wrote",
        (Edit(GUARD, "if is_interrupted(self.cluster, self.host):", "if False:"),),
        Scenario("", **serving(), verbs={"move b": 1}, faults={"slow": 1, "kill": 1}),
        "no way out",
    ),
    Planted(
        "source that takes its own instance for the target",
        (Edit(SOURCE, "if any(self.system.is_attached(", "if False and any(self.system.is_attached("),),
        Scenario("", **serving(guard=False), verbs={"move b": 1}, faults={"kill": 1}),
        "no way out",
    ),
    Planted(
        "target that rolls back although it has served",
        (Edit(TARGET, 'if self.state == "up" and not self.request.shared and not', "if False and not"),),
        Scenario("", **serving(guard=False), verbs={"move b": 1}, faults={"slow": 1, "write": 1}),
        "a serves (0, 1), acknowledged was (0, 2)",
    ),
]


def explore(planted: Planted) -> str:
    """Return what the model reports of a scenario, in this process."""
    found = planted.scenario.explore(DEEP if planted.full else ALL)
    wrong = [str(found)] if found.violation else find_dead_ends(planted.scenario, found.quiet)
    return "\n".join([f"{planted.name}: after {found.states} states", *wrong])


if __name__ == "__main__":
    print(explore(PLANTED[int(sys.argv[1])]))
