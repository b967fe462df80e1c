"""The lease in real files, where an engine has the services."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.deployed import Deployed, record_path
from appliance.operations.engines.writer import release_from_engine, take_for_engine
from appliance.operations.lease import hand_over, query_lease, release_lease
from appliance.operations.migration import failover
from appliance.operations.services import start
from appliance.progress import Silent
from appliance.shared.lease import BUSY, ENGINE
from appliance.shared.records import to_json
from appliance.shared.requests import Request
from tests.pairs import AgentsInFolders, HostInFolder, Pair
from tests.support.env import FakeHosts, with_env
from tests.support.nomad import WithNomad, on_nomad

GOES_ON = "host-a cannot run the services container: bridge"
"""The host to start on is checked, which has no bridges."""


class Admin(WithNomad, HostInFolder):
    """An admin host that reaches Nomad."""


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
    assert release_from_engine(pair.cluster, a, "nomad")
    assert {holder for holder, _, _ in pair.files().values()} == {None}
    assert query_lease(pair.hosts["host-b"], pair.cluster).last == before
    assert pair.take("host-b") == (4 if before else 3)


def test_a_stop_does_not_release_a_lease_that_a_move_gave(apart: Pair) -> None:
    """A start would use the overlay of before the move."""
    a = apart.hosts["host-a"]
    apart.take("host-a")
    hand_over(a, apart.cluster, apart.leases("host-a"), holder=f"{ENGINE}nomad", generation=2)
    before = apart.files()
    assert not release_from_engine(apart.cluster, a, "nomad")
    assert apart.files() == before
    assert release_from_engine(apart.cluster, a, "kubernetes") and apart.files() == before


@pytest.mark.parametrize("busy", [1, 9])
def test_a_host_that_does_not_know_who_has_the_services_is_named(apart: Pair, busy: int) -> None:
    left = [busy]

    def locked(host: Host, _: Request) -> str | None:
        if host.name == "host-b" and left[0]:
            left[0] -= 1
            return BUSY
        return None

    apart.cluster = with_env(apart.cluster, agents=AgentsInFolders(instead=locked))
    apart.take("host-a")
    left[0] = busy
    leases = apart.leases("host-a")
    hand_over(apart.hosts["host-a"], apart.cluster, leases, holder=f"{ENGINE}nomad", generation=2)
    knows = query_lease(apart.hosts["host-b"], apart.cluster).engine == "nomad"
    assert knows == (busy == 1) and list(leases.unwritten) == ([] if knows else ["host-b"])
    assert len(leases.notes) == len(leases.unwritten) and all("host-b does not know" in one for one in leases.notes)


@pytest.mark.parametrize("known", ["by the lease", "by the deployment"])
@pytest.mark.parametrize("answers", [True, False])
def test_a_failover_from_a_lost_engine(apart: Pair, tmp_path: Path, *, known: str, answers: bool) -> None:
    """With --i-have-fenced only: one that answers and runs the services has not failed."""
    a = Admin("host-a", apart.hosts["host-a"].folder)
    apart.hosts["host-a"] = a
    apart.cluster = with_env(on_nomad(apart.cluster, tmp_path), hosts=FakeHosts(apart.hosts))
    if known == "by the lease":
        take_for_engine(apart.leases("host-a"), "nomad", Silent())
    else:
        apart.take("host-b")
        apart.hosts["host-b"].cut = True
        deployed = Deployed("nomad", "deployed", 1, "", "", 1.0, "host-a")
        a.write(record_path(apart.cluster), to_json(deployed))
    if answers:
        a.has_job("slurm-ctl", allocation="1")
    else:
        a.error = "dial tcp 10.0.0.1:4646: connect: connection refused"

    def plan(*, fenced: bool) -> None:
        failover.plan_failover(apart.cluster, a, failover.FailoverOptions(fenced=fenced))

    if known == "by the lease":
        with pytest.raises(Refused, match="nomad has the services and their state"):
            plan(fenced=False)
    with pytest.raises(Refused, match="nomad answers and runs 1" if answers else GOES_ON):
        plan(fenced=True)


def test_a_start_of_a_failover_takes_the_lease_of_a_lost_engine(apart: Pair) -> None:
    a, nomad = apart.hosts["host-a"], f"{ENGINE}nomad"
    apart.take("host-a")
    hand_over(a, apart.cluster, apart.leases("host-a"), holder=nomad, generation=2)
    with pytest.raises(Refused, match="nomad has the services"):
        start.start(apart.cluster, a, start.StartOptions())
    with pytest.raises(Refused, match=GOES_ON):
        start.start(apart.cluster, a, start.StartOptions(fenced=(nomad,)))
    leases = apart.leases("host-a", without=(nomad,))
    assert leases.check().holder == "host-a"


def test_a_failover_does_not_take_an_engine_for_a_host(apart: Pair) -> None:
    with pytest.raises(Refused, match="nomad has the services") as caught:
        failover.find_admin(apart.cluster, f"{ENGINE}nomad")
    assert "--i-have-fenced" in caught.value.hint
