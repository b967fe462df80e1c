"""The lease in real files, where an engine has the services."""

from __future__ import annotations

from typing import Any

import pytest
from pytest import MonkeyPatch

from appliance.errors import Refused
from appliance.host.base import Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.deployed import Deployed
from appliance.operations.engines import abandon
from appliance.operations.engines import engine as engines
from appliance.operations.engines.writer import release_from_engine, take_for_engine
from appliance.operations.lease import (
    Leases,
    hand_over,
    query_lease,
    release_lease,
)
from appliance.operations.migration import failover
from appliance.operations.services import start
from appliance.progress import Silent
from appliance.shared.lease import BUSY, ENGINE, SwapLease
from appliance.tools import agent
from tests.pairs import Pair

GOES_ON = "the host to start on is checked"


@pytest.mark.parametrize("kind", ["apart", "together"])
def test_an_engine_has_the_services(kind: str, request: pytest.FixtureRequest) -> None:
    """No host can take the lease, and none takes the engine for a host that has failed."""
    pair: Pair = request.getfixturevalue(kind)
    a, b, nomad = pair.hosts["host-a"], pair.hosts["host-b"], f"{ENGINE}nomad"
    pair.take("host-a")
    leases = pair.leases("host-a")
    given = hand_over(a, pair.cluster, leases, holder=nomad, generation=leases.top + 1)
    assert (given.engine, given.generation) == ("nomad", 2)
    assert {holder for holder, _, _ in pair.files().values()} == {nomad}
    for name in pair.hosts:
        with pytest.raises(Refused, match="nomad has the services") as caught:
            pair.take(name)
        assert "sms migrate --to container" in caught.value.hint
    with pytest.raises(Refused, match="the lease has changed meanwhile"):
        hand_over(a, pair.cluster, leases, holder=nomad, generation=9)
    leases = pair.leases("host-a")
    hand_over(a, pair.cluster, leases, holder=None, generation=leases.top + 1)
    assert query_lease(b, pair.cluster).generation == 3 and query_lease(b, pair.cluster).taker == "host-a"
    assert pair.take("host-a") == 4


@pytest.mark.parametrize("kind", ["apart", "together"])
@pytest.mark.parametrize("before", ["", "host-b"])
def test_a_deployment_takes_the_lease_and_a_stop_releases_it(
    kind: str, before: str, request: pytest.FixtureRequest
) -> None:
    """Who has the newest overlay is known afterwards as it was before."""
    pair: Pair = request.getfixturevalue(kind)
    a, nomad = pair.hosts["host-a"], f"{ENGINE}nomad"
    if before:
        pair.take(before)
        release_lease(pair.hosts[before], pair.cluster, leases=pair.leases(before))
    take_for_engine(pair.leases("host-a"), "nomad", Silent())
    assert {holder for holder, _, _ in pair.files().values()} == {nomad}
    taken = pair.files()
    take_for_engine(pair.leases("host-a"), "nomad", Silent())
    assert pair.files() == taken
    for name in pair.hosts:
        with pytest.raises(Refused, match="nomad has the services"):
            pair.take(name)
    with MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "host", lambda _, name: pair.hosts[name])
        assert release_from_engine(pair.cluster, a, "nomad", Silent())
    assert {holder for holder, _, _ in pair.files().values()} == {None}
    assert query_lease(pair.hosts["host-b"], pair.cluster).last == before
    assert pair.take("host-b") == (4 if before else 3)


def test_a_stop_does_not_release_a_lease_that_a_move_gave(apart: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start would use the overlay of before the move."""
    monkeypatch.setattr(Cluster, "host", lambda _, name: apart.hosts[name])
    a = apart.hosts["host-a"]
    apart.take("host-a")
    hand_over(a, apart.cluster, apart.leases("host-a"), holder=f"{ENGINE}nomad", generation=2)
    before = apart.files()
    assert not release_from_engine(apart.cluster, a, "nomad", Silent())
    assert apart.files() == before
    assert release_from_engine(apart.cluster, a, "kubernetes", Silent()) and apart.files() == before


@pytest.mark.parametrize("busy", [1, 9])
def test_a_host_that_does_not_know_who_has_the_services_is_named(
    apart: Pair, monkeypatch: pytest.MonkeyPatch, busy: int
) -> None:
    perform, left = agent.perform, [busy]

    def locked(host: Host, request: SwapLease, **options: Any) -> str:
        if host.name == "host-b" and left[0]:
            left[0] -= 1
            return BUSY
        return str(perform(host, request, **options))

    monkeypatch.setattr(agent, "perform", locked)
    apart.take("host-a")
    left[0] = busy
    leases = apart.leases("host-a")
    hand_over(apart.hosts["host-a"], apart.cluster, leases, holder=f"{ENGINE}nomad", generation=2)
    knows = query_lease(apart.hosts["host-b"], apart.cluster).engine == "nomad"
    assert knows == (busy == 1) and list(leases.unwritten) == ([] if knows else ["host-b"])
    assert len(leases.notes) == len(leases.unwritten) and all("host-b does not know" in one for one in leases.notes)


@pytest.mark.parametrize("known", ["by the lease", "by the deployment"])
@pytest.mark.parametrize("answers", [True, False])
def test_a_failover_from_a_lost_engine(
    apart: Pair, monkeypatch: pytest.MonkeyPatch, *, known: str, answers: bool
) -> None:
    """With --i-have-fenced only: one that answers and runs the services has not failed."""
    monkeypatch.setattr(Cluster, "host", lambda _, name: apart.hosts[name])
    for check in ("check_programs", "find_known"):
        monkeypatch.setattr(failover, check, lambda *_, **__: None)
    monkeypatch.setattr(abandon, "render_bundle", lambda *_: None)
    monkeypatch.setattr(failover, "check_networks", lambda *_: pytest.fail(GOES_ON))
    a = apart.hosts["host-a"]
    if known == "by the lease":
        take_for_engine(apart.leases("host-a"), "nomad", Silent())
    else:
        apart.take("host-b")
        apart.hosts["host-b"].cut = True
        monkeypatch.setattr(apart.hosts["host-b"], "accepts_connections", lambda: False)
        deployed = Deployed("nomad", "deployed", 1, "", "", 1.0, "host-a")
        monkeypatch.setattr(failover, "read_deployed", lambda *_: deployed)

    class Engine:
        def states(self, _: object) -> list[engines.WorkloadState]:
            if not answers:
                raise Unreachable("no answer")
            allocation = engines.Instance("1", "c1", True, True, ())
            return [engines.WorkloadState("slurm-ctl", "service", True, 1, (allocation,))]

    monkeypatch.setattr(abandon, "find_engine", lambda *_: Engine())

    def plan(*, fenced: bool) -> None:
        failover.plan_failover(apart.cluster, a, failover.FailoverOptions(fenced=fenced), Silent())

    if known == "by the lease":
        with pytest.raises(Refused, match="nomad has the services and their state"):
            plan(fenced=False)
    if answers:
        with pytest.raises(Refused, match="nomad answers and runs 1"):
            plan(fenced=True)
    else:
        with pytest.raises(pytest.fail.Exception, match=GOES_ON):
            plan(fenced=True)


def test_a_start_of_a_failover_takes_the_lease_of_a_lost_engine(apart: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    a, nomad = apart.hosts["host-a"], f"{ENGINE}nomad"
    apart.take("host-a")
    hand_over(a, apart.cluster, apart.leases("host-a"), holder=nomad, generation=2)
    for name in ("check_programs", "recover_migration"):
        monkeypatch.setattr(start, name, lambda *_: None)
    monkeypatch.setattr(start, "image_of_unfinished", lambda *_: pytest.fail(GOES_ON))
    with pytest.raises(Refused, match="nomad has the services"):
        start.start(apart.cluster, a, Silent(), start.StartOptions())
    with pytest.raises(pytest.fail.Exception, match=GOES_ON):
        start.start(apart.cluster, a, Silent(), start.StartOptions(fenced=(nomad,)))
    leases = Leases(a, apart.cluster, without=(nomad,))
    leases.hosts = dict(apart.hosts)
    leases.query()
    assert leases.check().holder == "host-a"


def test_a_failover_does_not_take_an_engine_for_a_host(apart: Pair) -> None:
    with pytest.raises(Refused, match="nomad has the services") as caught:
        failover.find_admin(apart.cluster, f"{ENGINE}nomad")
    assert "--i-have-fenced" in caught.value.hint
