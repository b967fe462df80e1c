"""`sms overlay identity`: the UUID of a cluster, set by hand."""

from __future__ import annotations

import pytest

from appliance.cli.snapshots.identity import lines
from appliance.errors import Refused
from appliance.operations.identity import ensure_identity
from appliance.operations.snapshots import identity as verb
from appliance.operations.snapshots.list import find_snapshot, list_snapshots
from appliance.progress import Silent
from tests.pairs import Pair
from tests.unit.snapshots.clusters import U1, U2, Reported, add, lease_path, name, other_cluster, start_on, uuid_in


def test_only_received_snapshots_know_a_uuid(pair: Pair) -> None:
    """The cluster after the loss of its disks, or a new one that uses the folder of another: the user decides."""
    other_cluster(pair)
    with pytest.raises(Refused, match=f"received snapshots of a cluster {U2} on host-a") as caught:
        start_on(pair)
    assert "sms overlay identity" in caught.value.hint and not lease_path(pair).exists()
    pair.hosts["host-b"].cut = True
    leases = pair.leases("host-a")
    ensure_identity(leases, Silent())  # of a failover: it must not wait for a decision
    assert uuid_in(lease_path(pair)) == U2
    pair.hosts["host-b"].cut = False
    lease_path(pair).unlink()
    shown = verb.set_identity(pair.cluster, pair.hosts["host-a"], U2)
    assert shown.uuid == U2 and start_on(pair) == 92


def test_a_copy_gets_a_uuid_of_its_own(pair: Pair) -> None:
    name(pair, U1)
    taken = add(pair, 2)
    shown = verb.set_identity(pair.cluster, pair.hosts["host-a"], "new")
    assert shown.uuid not in ("", U1) and set(shown.leases.values()) == {shown.uuid}
    assert [found["number"] for found in list_snapshots(pair.cluster, pair.hosts["host-a"]).foreign] == taken
    text = "\n".join(lines(shown))
    assert f"cluster {shown.cluster}: {shown.uuid}" in text and f"{U1}: 2 snapshots of host-a" in text


def test_a_cluster_continues_another_one(pair: Pair) -> None:
    """Its lease rises above the snapshots that are its own now."""
    start_on(pair)
    pair.release("host-a")
    number = other_cluster(pair)
    with pytest.raises(Refused, match="no lease and no snapshot"):
        verb.set_identity(pair.cluster, pair.hosts["host-a"], "33333333")
    shown = verb.set_identity(pair.cluster, pair.hosts["host-a"], U2[:6])
    assert shown.uuid == U2 and list(shown.found) == [U2]
    assert find_snapshot(list_snapshots(pair.cluster, pair.hosts["host-a"]), "latest")["number"] == number
    assert start_on(pair) == 92


def test_the_verb_refuses(pair: Pair) -> None:
    name(pair, U1)
    pair.hosts["host-b"].cut = True
    with pytest.raises(Refused, match="host-b cannot be reached"):
        verb.set_identity(pair.cluster, pair.hosts["host-a"], "new")
    pair.hosts["host-b"].cut = False
    pair.take("host-a")
    with pytest.raises(Refused, match="runs on host-a"):
        verb.set_identity(pair.cluster, pair.hosts["host-a"], "new")
    assert uuid_in(lease_path(pair)) == uuid_in(lease_path(pair, "host-b")) == U1
    assert [verb.is_valid(text) for text in ("new", U1, U1[:4], U1[:10], "111", "zzzz", U1 + "1", "")] == [
        *[True] * 4,
        *[False] * 4,
    ]


def test_a_host_that_is_dead_is_named_and_left_out_on_demand(pair: Pair) -> None:
    name(pair, U1)
    dead, reported = pair.hosts["host-b"], Reported()
    dead.cut = True
    with pytest.raises(Refused, match="host-b cannot be reached") as caught:
        verb.set_identity(pair.cluster.showing(reported), pair.hosts["host-a"], "new")
    assert "--without-remote" in caught.value.hint
    shown = verb.set_identity(pair.cluster.showing(reported), pair.hosts["host-a"], "new", without_remote=True)
    assert uuid_in(lease_path(pair)) == shown.uuid != U1 == uuid_in(lease_path(pair, "host-b"))
    (note,) = reported.notes
    assert note == f"note: host-b keeps its UUID: run `sms overlay identity {shown.uuid}` again once it answers"
    dead.cut = False
    with pytest.raises(Refused, match=f"{U1} on host-b"):
        start_on(pair)
    verb.set_identity(pair.cluster.showing(reported), pair.hosts["host-a"], shown.uuid)
    assert start_on(pair) and uuid_in(lease_path(pair, "host-b")) == shown.uuid


def test_a_dead_host_that_may_run_it_is_never_left_out(pair: Pair) -> None:
    name(pair, U1, holder="host-b")
    pair.hosts["host-b"].cut = True
    with pytest.raises(Refused, match="host-b does not answer, and the services container may run there"):
        verb.set_identity(pair.cluster, pair.hosts["host-a"], "new", without_remote=True)
    name(pair, U1)
    pair.hosts["host-b"].cut, pair.hosts["host-b"].stuck = False, True
    with pytest.raises(Refused, match="host-b does not answer, and the services container may run there"):
        verb.set_identity(pair.cluster, pair.hosts["host-a"], "new", without_remote=True)
    assert uuid_in(lease_path(pair)) == U1


def test_a_holder_that_was_removed_from_the_site(pair: Pair) -> None:
    """Its host is dead; the copies of the others name it still."""
    name(pair, U1, holder="host-x", on=("host-a",))
    name(pair, "", holder="host-x", on=("host-b",))
    shown = verb.set_identity(pair.cluster, pair.hosts["host-b"], U1)
    assert shown.leases == {"host-a": U1, "host-b": U1}


def test_two_hosts_that_disagree_become_one_cluster(pair: Pair) -> None:
    name(pair, U1, on=("host-a",))
    name(pair, U2, on=("host-b",), generation=9)
    verb.set_identity(pair.cluster, pair.hosts["host-a"], U1)
    assert start_on(pair) == 10 and uuid_in(lease_path(pair, "host-b")) == U1
