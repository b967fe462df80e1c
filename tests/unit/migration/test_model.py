"""Model check of the lease and of migrations: real code, every interleaving of its effects and of faults.

What is promised, and checked in each state:

- Never two instances that serve (whose ports are on the bridges), and never two that have a shared overlay open.
- An instance that serves has every acknowledged write in its overlay, except what a failover has reported as lost.
- Never two UUIDs of the cluster.
- When both hosts are on, reach each other and nothing runs: guards leave one of two instances that serve, and users
  find a way (`recovery.VERBS`) to one host that serves the newest state.

The documents promise less in these cases, which `Scenario.excused` names; guards then still end one of two instances:

- A host takes a free lease, or at boot its own, without reaching the other one, which has taken it or does so.
- The user claims that a host is off (`--i-have-fenced`), and it is not.
- A migration goes on without its source, which does not answer; no fencing is configured, and it is only partitioned.
- The network of the nodes is cut between source and target of a migration during the switch.
- The lease file that decides about the UUID is lost while two starts create it: hosts may then have different ones,
  every start refuses, and `sms overlay identity` decides.

A host that was fenced stays off until the failover has ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from appliance.agent import endpoint, migration_source
from appliance.agent.endpoint import HostState
from appliance.agent.migration_source import MigrationSource
from appliance.agent.migration_target import MigrationTarget
from appliance.operations import identity, lease
from appliance.operations.migration import failover as migration_failover
from appliance.operations.migration import steps, switch
from appliance.operations.overlay import generation
from appliance.operations.services import guard, start, unfinished
from appliance.plan.migration import failover
from tests.unit.migration.model import world as w
from tests.unit.migration.model.recovery import find_dead_ends
from tests.unit.migration.model.scenario import Scenario
from tests.unit.migration.model.scenarios import (
    BLIND,
    NEW,
    SCENARIOS,
    SNAPSHOT,
    UNUSED,
    released_last,
    returned,
    serving,
    superseded,
)

SAMPLE = 4000
"""States of each scenario in every run."""
ALL = 250_000
DEEP = 600_000
"""For planted faults that only a long run shows."""
ENOUGH = 1_000_000
visited: dict[str, int] = {}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
def test_sample(scenario: Scenario) -> None:
    found = scenario.explore(SAMPLE)
    assert not found.violation, str(found)
    assert found.complete or found.states >= SAMPLE


@pytest.mark.full
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
def test_all(scenario: Scenario) -> None:
    found = scenario.explore(ALL)
    assert not found.violation, str(found)
    assert find_dead_ends(scenario, found.quiet) == []
    visited[scenario.name] = found.states
    print(f"{scenario.name}: {found.states} states, {found.transitions} transitions, {len(found.quiet)} quiet")


@pytest.mark.full
def test_enough_states() -> None:
    assert len(visited) == len(SCENARIOS), "run all of this file"
    assert sum(visited.values()) >= ENOUGH


@pytest.mark.parametrize("verb", ["by-hand b", "lie b"])
def test_two_serve_only_after_a_false_claim_that_a_host_is_off(verb: str) -> None:
    scenario = Scenario(
        "",
        **serving(store=(SNAPSHOT,)),
        verbs={verb: 1},
        faults={"cut": 1, "crash": 1},
        links=("all",),
        excused=BLIND,
    )
    assert bool(scenario.explore(ALL).violation) == (verb == "lie b")


# Planted faults: the model must find each


@contextmanager
def replaced(place: Any, **values: Any) -> Iterator[None]:
    """Replace parts of the real code for a while."""
    with mock.patch.multiple(place, **values):
        yield


@contextmanager
def without_compare_and_swap() -> Iterator[None]:
    """The lease is written whatever the files are by now, and not queried again."""
    with (
        replaced(lease, digest=lambda data: ""),
        replaced(lease.Leases, _refuse_if_taken=lambda *_: None),
        replaced(start, ensure_identity=lambda *_: None),  # its file has two writers as well
    ):
        yield


def switch_too_early(migration: Any) -> None:
    """The target attaches its ports before the source has detached its own."""
    switch.arm(migration)
    switch.activate(migration)
    migration.source.send("release")
    migration.source.receive("released")


def ignore_generations(me: str, views: Any) -> Any:
    """Any host that claims the lease has superseded this one."""
    claims = [view.lease for name, view in sorted(views.items()) if view.lease and view.lease.holder == name]
    return claims[0] if claims and claims[0].holder != me else None


def ask_with_ports_attached(source: MigrationSource, *, alone: bool) -> bool:
    """Ask who answers for the addresses, even if it is this host."""
    request = source.request
    return any(endpoint.find_mac(request.bridges[name], request.addresses[name]) for name in request.bridges)


def roll_back_always(target: MigrationTarget, message: Any) -> None:
    """Roll back from any state."""
    target.roll_back("")
    target.channel.send("aborted")  # type: ignore[union-attr]


def trust_any_overlay(cluster: Any, host: Any, leases: Any, **_: Any) -> int:
    """An overlay that exists counts as the newest."""
    return 0 if generation.query_overlay(cluster, host).exists else generation.refuse_older(cluster, host, leases)


def create_alone(leases: Any, cluster_uuid: str, adopted: int, *_: Any) -> Any:
    """Each run decides by the file of its own host."""
    leases.name_cluster(leases.me, cluster_uuid, adopted)
    return leases.views[leases.me].lease


def raise_generation(mine: Any, me: str, generation: int, **_: Any) -> Any:
    """A snapshot raises the lease itself, as if this host had taken it."""
    raises = mine.holder in (None, me) and mine.generation <= generation
    return dataclasses.replace(mine, generation=generation + 1, file=me) if raises else None


@contextmanager
def agents_that_do_not_look_again() -> Iterator[None]:
    """They rely on the lease that the coordinator has read before they had their locks."""

    def is_newer(target: MigrationTarget) -> bool:
        state = target.host_state
        return state.generation() > target.generation and state.holder() == target.request.host

    with replaced(HostState, check_plan=lambda *_, **__: None), replaced(MigrationTarget, _wrote_lease=is_newer):
        yield


@dataclass(frozen=True)
class Planted:
    """A fault in the real code, where the model shall find it, and what it shall report."""

    name: str
    plant: Callable[[], AbstractContextManager[None]]
    scenario: Scenario
    report: str
    full: bool = False
    """It takes long to find."""


PLANTED = [
    Planted(
        "take without compare and swap",
        without_compare_and_swap,
        Scenario("", **NEW, verbs={"start a": 1, "start b": 1}, faults={}),
        "two instances serve",
    ),
    Planted(
        "UUID of the cluster without one file that decides",
        lambda: replaced(identity, _decide=create_alone),
        Scenario("", **NEW, verbs={"start a": 1, "start b": 1}, faults={}),
        "two UUIDs",
    ),
    Planted(
        "start without a last look at the lease",
        lambda: replaced(start, hold_taken_lease=lambda *_: nullcontext()),
        Scenario("", **UNUSED, verbs={"start a": 2, "start b": 1}, faults={"kill": 1, "cut": 1}, excused=BLIND),
        "two instances serve",
        full=True,
    ),
    Planted(
        "target that takes over before the source has detached its ports",
        lambda: replaced(steps, switch_addresses=switch_too_early),
        Scenario("", **serving(), verbs={"move b": 1}, faults={}),
        "two instances serve",
    ),
    Planted(
        "agents that rely on a lease that was read before they had their locks",
        agents_that_do_not_look_again,
        Scenario("", **serving(), verbs={"move b": 1}, faults={"moved": 1, "kill": 1}),
        "no way out",
    ),
    Planted(
        "source that does not wait for the target",
        lambda: replaced(migration_source, RECLAIM_S=-1.0),
        Scenario("", **serving(guard=False), verbs={"move b": 1}, faults={"kill": 1}),
        "two instances serve",
    ),
    Planted(
        "guard that ignores the generation",
        lambda: replaced(guard, find_newer=ignore_generations),
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
        lambda: replaced(start, refuse_interrupted=lambda *_: None, refuse_older=trust_any_overlay),
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
        lambda: replaced(unfinished, find_restored=lambda *_, **__: None),
        Scenario("", **released_last(), verbs={"by-snapshot b": 1, "start b": 1}, faults={"crash": 1, "kill": 1}),
        "b serves (1, 0), acknowledged was (0, 1)",
    ),
    Planted(
        "start that relies on the last line of a failover that was killed before it could write it",
        lambda: replaced(failover.OpenFailover, has_restored=lambda found, overlay: found.restored and bool(overlay)),
        Scenario("", **released_last(), verbs={"by-snapshot b": 1, "start b": 1}, faults={"crash": 1, "kill": 1}),
        "b serves (1, 0), acknowledged was (0, 1)",
    ),
    Planted(
        "lease of a host that was superseded, raised by the snapshot that it pulls",
        lambda: replaced(lease, raise_floor=raise_generation),
        Scenario("", **superseded(), verbs={"pull b": 1, "start b": 1}, faults={"crash": 1}, excused=BLIND),
        "b serves (0, 0), acknowledged was (0, 1)",
    ),
    Planted(
        "snapshots in the order of clocks",
        lambda: replaced(failover, order=lambda one: (one["generation"], one["taken"])),
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
        lambda: replaced(migration_failover, _choose_again=lambda cluster, host, plan, options: plan),
        Scenario("", **serving(guard=False, store=(SNAPSHOT,)), verbs={"failover b": 1}, faults={"cut": 1, "push": 1}),
        "an older snapshot was restored",
    ),
    Planted(
        "guard that believes what a killed migration wrote",
        lambda: replaced(guard, is_interrupted=lambda *_: False),
        Scenario("", **serving(), verbs={"move b": 1}, faults={"slow": 1, "kill": 1}),
        "no way out",
    ),
    Planted(
        "source that takes its own instance for the target",
        lambda: replaced(MigrationSource, target_answers=ask_with_ports_attached),
        Scenario("", **serving(guard=False), verbs={"move b": 1}, faults={"kill": 1}),
        "no way out",
    ),
    Planted(
        "target that rolls back although it has served",
        lambda: replaced(MigrationTarget, abort=roll_back_always),
        Scenario("", **serving(guard=False), verbs={"move b": 1}, faults={"slow": 1, "write": 1}),
        "a serves (0, 1), acknowledged was (0, 2)",
    ),
]


@pytest.mark.parametrize(
    "planted",
    [pytest.param(one, id=one.name, marks=[pytest.mark.full] if one.full else []) for one in PLANTED],
)
def test_planted_fault_is_found(planted: Planted) -> None:
    with planted.plant():
        found = planted.scenario.explore(DEEP if planted.full else ALL)
        wrong = [str(found)] if found.violation else find_dead_ends(planted.scenario, found.quiet)
    print(f"{planted.name}: after {found.states} states\n" + "\n".join(wrong[:1]))
    assert any(planted.report in one for one in wrong)
    assert not planted.scenario.explore(1000).violation, "without it"
