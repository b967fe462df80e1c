"""The UUID of a cluster: created once, and what has another one is never touched."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from appliance.agent.manifest import check_manifest
from appliance.agent.protocol import Problem
from appliance.agent.store import Store
from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations import identity as creation
from appliance.operations.history import read_history
from appliance.operations.identity import ensure_identity
from appliance.operations.lease import Leases, raise_lease
from appliance.operations.migration.failover import FailoverOptions, _choose_origin, _learn_identity
from appliance.operations.services import start
from appliance.operations.snapshots import scheduled
from appliance.operations.snapshots.list import find_snapshot, list_snapshots
from appliance.operations.snapshots.prune import prune
from appliance.operations.upgrade.rehearse import _name_copy
from appliance.plan.migration.lease import View, find_newer
from appliance.plan.snapshots import offsite
from appliance.plan.snapshots.runs import Found, judge
from appliance.progress import Silent
from appliance.shared.identity import Identity, assume, identify
from appliance.shared.lease import BUSY, Lease, SwapLease, parse_lease
from appliance.shared.requests import Request
from tests import stores
from tests.pairs import AgentsInFolders, Pair
from tests.support.env import FakeClock, with_env
from tests.unit.snapshots.clusters import (
    MANIFEST,
    SNAPSHOT,
    U1,
    U2,
    U3,
    Reported,
    add,
    lease_path,
    name,
    other_cluster,
    start_on,
    store_of,
    uuid_in,
)
from tests.unit.snapshots.conftest import START


def test_two_clusters_of_one_name_on_one_folder_of_snapshots(make_pair: Callable[[], Pair], clock: FakeClock) -> None:
    """Each keeps what its own retention keeps, whatever the generation of the other one."""
    one, other = make_pair(), make_pair()
    Path(store_of(one).root).mkdir(parents=True)
    Path(store_of(other).root).parent.mkdir(parents=True)
    Path(store_of(other).root).symlink_to(store_of(one).root)
    start_on(one)
    for _ in range(9):
        start_on(other)
        other.release("host-a")
    mine, theirs = [], []
    for _ in range(30):
        clock.now += 60
        mine += add(one)
        theirs += add(other)
        prune(one.cluster, one.hosts["host-a"], ())
    kept = stores.numbers(store_of(one))
    assert set(theirs) <= set(kept), "snapshots of the other cluster were removed"
    listing = list_snapshots(one.cluster, one.hosts["host-a"])
    assert find_snapshot(listing, "latest")["number"] == mine[-1], "the other cluster has the higher generation"
    assert len([number for number in mine if number in kept]) < len(mine)


def test_created_once_and_copied_to_every_host(pair: Pair) -> None:
    reported = Reported()
    assert start_on(pair, progress=reported) == 1
    known = uuid_in(lease_path(pair))
    assert known and known == uuid_in(lease_path(pair, "host-b"))
    assert reported.notes == [f"note: this cluster has the UUID {known} from now on"]
    pair.release("host-a")
    reported.notes.clear()
    assert start_on(pair, "host-b", reported) == 2
    assert uuid_in(lease_path(pair)) == uuid_in(lease_path(pair, "host-b")) == known
    assert reported.notes == []


def test_state_without_a_uuid_is_adopted_once(pair: Pair) -> None:
    """What version 519381b took counts as its own; what appears later without a UUID does not."""
    name(pair, "", generation=40)
    old = add(pair, 3, generation=40)
    received = add(pair, 1, on="host-b", generation=44, host="host-a", came={"from": "host-a"})
    reported = Reported()
    start_on(pair, progress=reported)
    known = uuid_in(lease_path(pair))
    text = "its snapshots up to generation 44, which have none, count as its own"
    assert reported.notes == [f"note: this cluster has the UUID {known} from now on; {text}"]
    add(pair, 1, generation=45, cluster_uuid=None)
    here, there = (list_snapshots(pair.cluster, host) for host in pair.hosts.values())
    assert [one["number"] for one in here.snapshots] == old and len(here.foreign) == 1
    assert [one["number"] for one in there.snapshots] == received
    reported.notes.clear()
    start_on(pair, progress=reported)
    assert reported.notes == [] and parse_lease(lease_path(pair).read_bytes()).adopted == 44


def busy(host: Host, request: Request) -> str | None:
    """Reply that another run has the lease file of every host."""
    return BUSY if isinstance(request, SwapLease) else None


def test_a_running_cluster_of_an_earlier_version_gets_one_by_a_scheduled_run(pair: Pair, clock: FakeClock) -> None:
    """Which prints nothing: the record of the run and the history have it."""
    name(pair, "", generation=40, holder="host-a")
    work = scheduled.RunState(clock)
    scheduled.name_cluster(pair.cluster, pair.hosts["host-a"], work)
    known = uuid_in(lease_path(pair))
    assert known == uuid_in(lease_path(pair, "host-b")) != "" and known in work.notes[0]
    lease = parse_lease(lease_path(pair).read_bytes())
    assert (lease.holder, lease.generation, lease.adopted) == ("host-a", 40, 40)
    (event,) = read_history(pair.cluster, pair.hosts["host-a"])
    assert (event["verb"], event["uuid"], event["adopted"]) == ("identity", known, 40)


def test_a_scheduled_run_leaves_the_lease_of_another_cluster_alone(pair: Pair, clock: FakeClock) -> None:
    """It goes on, as its own lease shows that it is the holder, and `sms status` warns."""
    name(pair, U1, on=("host-a",), holder="host-a")
    name(pair, U2, on=("host-b",), generation=9)
    before = [lease_path(pair, host).read_bytes() for host in pair.hosts]
    work = scheduled.RunState(clock)
    work.attempt("UUID of the cluster", lambda: scheduled.name_cluster(pair.cluster, pair.hosts["host-a"], work))
    run = work.run(START)
    assert run.ok and run.error == ""
    assert before == [lease_path(pair, host).read_bytes() for host in pair.hosts]
    found = judge(Found(START, START, run, 15, 35, START))
    assert found.healthy and f"the lease of host-b is of another cluster of this name, {U2}" in found.warnings[0]


def test_a_host_that_did_not_get_the_uuid(pair: Pair, clock: FakeClock) -> None:
    """The failed write is a note, no failover there takes one without a UUID, and the next run retries."""
    name(pair, "", generation=40, holder="host-a")
    usual, first, host = pair.cluster, scheduled.RunState(clock), pair.hosts["host-b"]

    def fail(host: Host, request: Request) -> None:
        if host.name == "host-b" and isinstance(request, SwapLease):
            raise SmsError("the disk is full")

    pair.cluster = with_env(usual, agents=AgentsInFolders(instead=fail))
    scheduled.name_cluster(pair.cluster, pair.hosts["host-a"], first)
    known = uuid_in(lease_path(pair))
    assert known and not uuid_in(lease_path(pair, "host-b"))
    assert any("lease of host-b" in text and "the disk is full" in text for text in first.notes)
    pair.cluster = with_env(usual, agents=AgentsInFolders(instead=busy))
    ensure_identity(pair.leases("host-a"), reported := Reported())
    assert any("lease of host-b" in text and "another run" in text for text in reported.notes)
    pair.cluster = usual
    came: dict[str, Any] = {"host": "host-a", "came": {"from": "host-a"}, "generation": 40}
    add(pair, on="host-b", **came)
    (newest,) = add(pair, on="host-b", cluster_uuid=known, **came)
    listing = list_snapshots(pair.cluster, host)
    with pytest.raises(Refused, match=f"not of this cluster, but of cluster {known}"):
        find_snapshot(listing, "latest")
    own, options = parse_lease(lease_path(pair, "host-b").read_bytes()), FailoverOptions(snapshot="latest")
    with pytest.raises(Refused, match=f"not of this cluster, but of cluster {known}"):
        _choose_origin(pair.cluster, host, options, own, None)
    learned = replace(own, cluster_uuid=known, adopted=40)
    chosen = _choose_origin(pair.cluster, host, options, learned, None)[1]
    assert chosen and chosen["number"] == newest, "a third host that answers knows the UUID"
    before = lease_path(pair, "host-b").read_bytes()
    _learn_identity(pair.cluster, host)
    assert parse_lease(lease_path(pair, "host-b").read_bytes()) == learned
    lease_path(pair, "host-b").write_bytes(before)
    again = scheduled.RunState(clock)
    scheduled.name_cluster(pair.cluster, pair.hosts["host-a"], again)
    assert uuid_in(lease_path(pair, "host-b")) == known and again.notes == ()


def test_the_copy_of_a_rehearsal_reports_no_uuid(pair: Pair) -> None:
    """It has that of its snapshot."""
    places = pair.cluster.places
    path = lease_path(pair)
    path.parent.mkdir(parents=True)
    mine = replace(pair.cluster, site=pair.cluster.site.model_copy(update={"state": pair.hosts["host-a"].folder}))
    assert mine.places.lease == PurePosixPath(path) != places.lease
    for facts, known in (({"cluster_uuid": U1}, U1), ({}, "")):
        _name_copy(mine, {**MANIFEST, **facts})
        reported = Reported()
        ensure_identity(pair.leases("host-a"), reported)
        assert reported.notes == [] and (uuid_in(path) == known or (not known and uuid_in(path)))
        lease_path(pair, "host-b").unlink()
        path.unlink()


def test_not_created_while_a_host_is_silent(pair: Pair) -> None:
    """It may know the UUID."""
    reported = Reported()
    pair.hosts["host-b"].cut = True
    start_on(pair, progress=reported)
    assert uuid_in(lease_path(pair)) == "" and len(reported.notes) == 1 and "host-b" in reported.notes[0]
    taken = add(pair, 2)
    pair.hosts["host-b"].cut = False
    ensure_identity(pair.leases("host-a"), reported)
    assert uuid_in(lease_path(pair)) == uuid_in(lease_path(pair, "host-b")) != ""
    listing = list_snapshots(pair.cluster, pair.hosts["host-a"])
    assert [one["number"] for one in listing.snapshots] == taken, "taken before it had a UUID"


@pytest.mark.parametrize("failed", ["host-a", "host-b"])
def test_a_disk_with_snapshots_that_fails_does_not_keep_the_services_down(pair: Pair, failed: str) -> None:
    reported, limits = Reported(), list[float]()

    class Slow(AgentsInFolders):
        def query(self, host: Host, command: str, request: dict[str, Any], *, timeout: float) -> dict[str, Any]:
            limits.append(timeout)
            if host.name == failed:
                raise SmsError("it did not end in time")
            return super().query(host, command, request, timeout=timeout)

    pair.cluster = with_env(pair.cluster, agents=Slow())
    start_on(pair, progress=reported)
    assert uuid_in(lease_path(pair)) == "" and failed in reported.notes[0]
    assert limits == [creation.STORE_S] * 2


def test_at_boot_the_holder_starts_beside_a_lease_of_another_cluster(pair: Pair) -> None:
    """Unless that has a higher generation, or an administrator is there to look."""
    for mine, theirs, boot, starts in ((3, 2, True, True), (3, 2, False, False), (3, 3, True, False)):
        name(pair, U1, on=("host-a",), holder="host-a", generation=mine)
        name(pair, U2, on=("host-b",), generation=theirs, file="host-b")
        leases, reported = pair.leases("host-a"), Reported()
        if not starts:
            with pytest.raises(Refused, match="different clusters"):
                start._is_one_cluster(leases, reported, boot=boot)
            continue
        assert not start._is_one_cluster(leases, reported, boot=boot)
        assert U2 in reported.notes[0]


def test_two_first_starts_at_the_same_time_create_one_uuid(make_pair: Callable[[], Pair]) -> None:
    """The second run is interleaved before every effect of the first one."""
    at = 0
    while True:
        pair, effects = make_pair(), 0
        second = pair.leases("host-b")

        def interleaved(_: Host, request: Request, second: Leases = second, at: int = at) -> None:
            nonlocal effects
            if isinstance(request, SwapLease):
                effects += 1
                if effects == at + 1:
                    ensure_identity(second, Silent())

        usual = pair.cluster
        pair.cluster = with_env(usual, agents=AgentsInFolders(instead=interleaved))
        ensure_identity(pair.leases("host-a"), Silent())
        pair.cluster = usual
        ensure_identity(pair.leases("host-a"), Silent())
        uuids = {uuid_in(lease_path(pair, host)) for host in pair.hosts}
        assert len(uuids) == 1 and "" not in uuids, f"before effect {at}"
        if effects <= at:
            break
        at += 1
    assert at >= 2


def test_found_again_after_every_lease_was_lost(pair: Pair) -> None:
    start_on(pair)
    known = uuid_in(lease_path(pair))
    taken = add(pair, 2)
    stores.add_snapshot(store_of(pair), [b"y"], cluster_uuid=U1, came={"from": "host-a"}, generation=90)
    for host in pair.hosts:
        lease_path(pair, host).unlink()
    listing = list_snapshots(pair.cluster, pair.hosts["host-a"])
    assert [one["number"] for one in listing.snapshots] == taken, "already before the next start"
    reported = Reported()
    start_on(pair, progress=reported)
    assert reported.notes == [f"note: no lease has the UUID of this cluster; by the snapshots of host-a it is {known}"]
    assert uuid_in(lease_path(pair, "host-b")) == known


def test_a_running_cluster_that_lost_its_lease_goes_on_with_its_uuid(tmp_path: Path) -> None:
    from appliance.agent.take import find_cluster

    store = Store(str(tmp_path / "store"))
    request = {"facts": {"host": "host-a", "cluster_uuid": ""}}
    assert find_cluster(store, request) is None
    stores.add_snapshot(store, [b"x"], cluster_uuid=U1)
    stores.add_snapshot(store, [b"x"], cluster_uuid=U2, came={"from": "host-c"})
    assert find_cluster(store, request) == U1
    assert find_cluster(store, {"facts": {"host": "host-a", "cluster_uuid": U3}}) == U3


def test_hosts_that_know_different_uuids(pair: Pair) -> None:
    """Two clusters share an admin host: nothing is started, and neither lease changes."""
    name(pair, U1, on=("host-a",))
    name(pair, U2, on=("host-b",), generation=9)
    before = [lease_path(pair, host).read_bytes() for host in pair.hosts]
    with pytest.raises(Refused, match=f"{U1} on host-a, {U2} on host-b"):
        start_on(pair)
    assert before == [lease_path(pair, host).read_bytes() for host in pair.hosts]
    mine = replace(parse_lease(before[0]), holder="host-a", generation=12)
    assert pair.leases("host-a").publish(mine) == [], "nor by a guard"


def test_a_lease_of_another_cluster_supersedes_nobody(pair: Pair) -> None:
    """Its holder is not a host of this one; a guard would stop production."""
    mine = View(Lease("c", 3, "host-a", START, "host-a", cluster_uuid=U1))
    other = Lease("c", 40, "host-x", START, "host-b", cluster_uuid=U2)
    assert find_newer("host-a", {"host-a": mine, "host-b": View(other)}) is None
    for newer in (replace(other, cluster_uuid=U1), replace(other, cluster_uuid=""), replace(other, holder="host-b")):
        assert find_newer("host-a", {"host-a": mine, "host-b": View(newer)}) == newer


def test_stores_that_know_different_uuids(pair: Pair) -> None:
    add(pair, cluster_uuid=U1)
    add(pair, on="host-b", cluster_uuid=U2)
    with pytest.raises(Refused, match=f"{U1} on host-a, {U2} on host-b") as caught:
        start_on(pair)
    assert "sms overlay identity" in caught.value.hint


def test_no_verb_touches_what_is_foreign(pair: Pair) -> None:
    start_on(pair)
    mine, foreign = add(pair)[0], other_cluster(pair)
    host, reported = pair.hosts["host-a"], Reported()
    with pytest.raises(Refused, match=f"snapshot {foreign} on host-a is not of this cluster, but of cluster {U2}"):
        find_snapshot(list_snapshots(pair.cluster, host), str(foreign))
    with pytest.raises(Refused, match=U2):
        prune(pair.cluster.showing(reported), host, [foreign])
    assert prune(pair.cluster.showing(reported), host, (), dry_run=True).snapshots[-1]["number"] == mine
    assert reported.notes == [f"note: host-a has 1 snapshot of cluster {U2} (taken on host-x): not touched"]
    own = Lease(pair.cluster.site.cluster, 1, "host-a", START, "host-b", cluster_uuid=uuid_in(lease_path(pair)))
    options = FailoverOptions(snapshot="latest")
    _, chosen = _choose_origin(pair.cluster, host, options, own, None)
    assert chosen and chosen["number"] == mine


def test_a_new_host_restores_what_it_has_received(pair: Pair) -> None:
    """It has no lease: the only UUID is assumed, of several the user chooses one. No assumption is enough to prune."""
    first = other_cluster(pair)
    host = pair.hosts["host-a"]
    listing = list_snapshots(pair.cluster, host)
    assert find_snapshot(listing, "latest")["number"] == first and listing.identity.assumed
    with pytest.raises(Refused, match=U2):
        prune(pair.cluster, host, [first])
    other_cluster(pair, cluster_uuid=None, generation=1)
    assert find_snapshot(list_snapshots(pair.cluster, host), "latest")["number"] == first
    other_cluster(pair, cluster_uuid=U3)
    with pytest.raises(Refused, match="not of this cluster"):
        find_snapshot(list_snapshots(pair.cluster, host), "latest")
    own = Lease(pair.cluster.site.cluster)
    with pytest.raises(Refused, match="not of this cluster"):
        _choose_origin(pair.cluster, host, FailoverOptions(snapshot="latest"), own, None)


def test_a_restore_continues_the_cluster_of_the_snapshot_where_there_was_none(pair: Pair) -> None:
    lease_path(pair).parent.mkdir(parents=True)
    note = raise_lease(pair.hosts["host-a"], pair.cluster, 40, cluster_uuid=U1)
    assert U1 in note and "sms overlay identity new" in note
    assert uuid_in(lease_path(pair)) == U1
    assert start_on(pair) == 41 and uuid_in(lease_path(pair, "host-b")) == U1
    assert raise_lease(pair.hosts["host-a"], pair.cluster, 41, cluster_uuid=U2) == ""
    assert uuid_in(lease_path(pair)) == U1


@pytest.mark.parametrize(
    ("identity", "facts", "own"),
    [
        (Identity(), {}, True),
        (Identity(), {"cluster_uuid": U1}, False),
        (Identity(U1), {"cluster_uuid": U1}, True),
        (Identity(U1), {"cluster_uuid": U2}, False),
        (Identity(U1), {}, False),
        (Identity(U1, 5), {}, True),
        (Identity(U1, 4), {}, False),
        (Identity(U1, 5, ("host-a",)), {}, True),
        (Identity(U1, 5, ("host-b",)), {}, False),
    ],
)
def test_owns(identity: Identity, facts: dict[str, Any], *, own: bool) -> None:
    assert identity.owns({"generation": 5, "host": "host-a", **facts}) is own


def one(uuid: str, *, host: str = "host-a", came: bool = False, generation: int = 5) -> dict[str, Any]:
    return {"cluster_uuid": uuid, "host": host, "generation": generation, **({"came": {"from": "x"}} if came else {})}


NEW = Identity(new=True)


@pytest.mark.parametrize(
    ("recorded", "there", "found"),
    [
        (Identity(U1, 3), [one(U2)], Identity(U1, 3)),
        (Identity(), [one(U2, came=True)], Identity()),
        (Identity(), [one(U2), one(U1, generation=7)], Identity(U1, 7)),
        (NEW, [one(U1, generation=4), one(U1), one(U2, came=True)], replace(NEW, uuid=U1, adopted=4)),
        (NEW, [one("", came=True), one(U2, came=True)], replace(NEW, uuid=U2, adopted=5, assumed=True)),
        (NEW, [one(U1, came=True), one(U2, came=True)], NEW),
        (NEW, [], NEW),
    ],
)
def test_identify(recorded: Identity, there: list[dict[str, Any]], found: Identity) -> None:
    assert identify(recorded, "host-a", there) == found
    assert assume(found, there) == found


def test_received_manifests() -> None:
    assert check_manifest({**MANIFEST, "cluster_uuid": U1}).cluster_uuid == U1
    assert check_manifest(MANIFEST).cluster_uuid is None
    for bad in ("", "x", 7, None, U1.upper().replace("1", "A"), U1 + "\n"):
        with pytest.raises(Problem, match="invalid cluster_uuid"):
            check_manifest({**MANIFEST, "cluster_uuid": bad})


def test_archive_names() -> None:
    manifest = {"cluster": "lab", "number": 42, "uuid": SNAPSHOT}
    old, new = offsite.archive_name(manifest), offsite.archive_name({**manifest, "cluster_uuid": U1})
    assert (old, new) == (f"sms-lab-000042-{SNAPSHOT}", f"sms-lab-000042-{SNAPSHOT}-{U1}")
    assert offsite.is_archive(old, "lab") and offsite.is_archive(new, "lab")
    for other in (f"sms-lab-2-000042-{SNAPSHOT}", f"{new}.checkpoint", f"{old}.checkpoint", "sms-lab-x"):
        assert not offsite.is_archive(other, "lab")
    assert not fnmatch.fnmatchcase(new, offsite.archive_glob("lab")), "version 519381b leaves it alone"
    assert fnmatch.fnmatchcase(f"{new}.checkpoint.1", f"{offsite.archive_glob('lab', U1)}.checkpoint*")
    assert not fnmatch.fnmatchcase(f"{new}.checkpoint", f"{offsite.archive_glob('lab', U2)}.checkpoint*")


def test_a_uuid_that_cannot_be_written_is_no_error(pair: Pair) -> None:
    usual = pair.cluster
    pair.cluster = with_env(usual, agents=AgentsInFolders(instead=busy))
    ensure_identity(pair.leases("host-a"), Silent())
    assert not lease_path(pair).exists()

    def fail(host: Host, request: Request) -> None:
        if isinstance(request, SwapLease):
            raise SmsError("the disk is full")

    pair.cluster = with_env(usual, agents=AgentsInFolders(instead=fail))
    ensure_identity(pair.leases("host-a"), Silent())
    assert pair.cluster.env.new_uuid() != pair.cluster.env.new_uuid()
