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

import pytest

from tests.support.mutants import run_mutant
from tests.unit.migration.model import planted as planted_faults
from tests.unit.migration.model.planted import ALL, PLANTED
from tests.unit.migration.model.recovery import find_dead_ends
from tests.unit.migration.model.scenario import Scenario
from tests.unit.migration.model.scenarios import BLIND, SCENARIOS, SNAPSHOT, serving

SAMPLE = 4000
"""States of each scenario in every run."""
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


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=one.name, marks=[pytest.mark.full] if one.full else [])
        for number, one in enumerate(PLANTED)
    ],
)
def test_planted_fault_is_found(number: int) -> None:
    planted = PLANTED[number]
    report = run_mutant(planted.edits, planted_faults.__name__, str(number))
    print(report)
    assert planted.report in report
    assert not planted.scenario.explore(1000).violation, "without it"
