"""The UUID of a cluster: created once, and what has another one is never touched."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from appliance.agent.manifest import check_manifest
from appliance.agent.protocol import Problem
from appliance.agent.store import Store
from appliance.cli.snapshots.identity import lines
from appliance.config.model import BorgRepository
from appliance.errors import Refused, SmsError
from appliance.operations import identity as creation
from appliance.operations.context import Cluster
from appliance.operations.history import read_history
from appliance.operations.identity import ensure_identity
from appliance.operations.lease import Leases, raise_lease
from appliance.operations.migration.failover import FailoverOptions, _choose_origin, _learn_identity
from appliance.operations.services import start
from appliance.operations.services.start import StartOptions
from appliance.operations.snapshots import identity as verb
from appliance.operations.snapshots import pull as pulls
from appliance.operations.snapshots import push as pushes
from appliance.operations.snapshots import scheduled
from appliance.operations.snapshots.list import find_snapshot, list_snapshots
from appliance.operations.snapshots.prune import prune
from appliance.operations.snapshots.pull import list_remote, pull
from appliance.operations.snapshots.push import PushOptions, push
from appliance.operations.snapshots.repository import prune_repository
from appliance.operations.snapshots.transfer import Sent
from appliance.operations.upgrade.rehearse import _name_copy
from appliance.plan.migration.lease import View, find_newer
from appliance.plan.snapshots import offsite
from appliance.progress import Silent
from appliance.shared.identity import Identity, assume, identify
from appliance.shared.lease import Lease, parse_lease
from appliance.tools import borg
from tests import stores
from tests.pairs import STATE, Pair
from tests.unit.snapshots.conftest import START, Clock

SEQUENCE = count(1)
SNAPSHOT = "01234567-89ab-4cde-8f01-23456789abcd"
FACTS = {
    "uuid": SNAPSHOT,
    "generation": 1,
    "taken": START,
    "size": 9,
    "used_bytes": 9,
    "new_bytes": 9,
    "digests": "0" * 64,
}
MANIFEST = stores.make_manifest(1, FACTS).to_dict()
U1, U2, U3 = (f"{digit * 8}-0000-4000-8000-{digit * 12}" for digit in "123")


class Reported(Silent):
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def report(self, text: str) -> None:
        self.notes.append(text)


def lease_path(pair: Pair, name: str = "host-a") -> Path:
    return Path(str(pair.cluster.places.lease).replace(STATE, str(pair.hosts[name].folder)))


def store_of(pair: Pair, name: str = "host-a") -> Store:
    return Store(str(pair.cluster.places.snapshots).replace(STATE, str(pair.hosts[name].folder)))


def uuid_in(path: Path) -> str:
    found: str = json.loads(path.read_bytes()).get("cluster_uuid", "") if path.exists() else ""
    return found


def start_on(pair: Pair, name: str = "host-a", progress: Silent | None = None) -> int:
    """Do what a start does with the lease; return its generation."""
    with ExitStack() as undo:
        leases = pair.leases(name)
        found = start._take_lease(pair.hosts[name], leases, progress or Silent(), undo, StartOptions()).generation
        undo.pop_all()
    return found


def add(pair: Pair, many: int = 1, *, on: str = "host-a", **facts: Any) -> list[int]:
    """Add snapshots as ``on`` takes them; return their numbers."""
    path, store = lease_path(pair, on), store_of(pair, on)
    lease = parse_lease(path.read_bytes()) if path.exists() else Lease("")
    named = {"generation": lease.generation, "host": on, "cluster": pair.cluster.site.cluster}
    named |= {"cluster_uuid": uuid_in(path) or None, **facts}
    places = ({"sequence": next(SEQUENCE), "uuid": str(uuid4())} for _ in range(many))
    return [stores.add_snapshot(store, [b"x"], **{**named, **place}).number for place in places]


def name(pair: Pair, uuid: str, *, on: tuple[str, ...] = ("host-a", "host-b"), **facts: Any) -> None:
    """Write the leases of a stopped cluster."""
    for host in on:
        path = lease_path(pair, host)
        path.parent.mkdir(parents=True, exist_ok=True)
        usual = Lease(pair.cluster.site.cluster, 3, None, START, host, "host-a", cluster_uuid=uuid)
        path.write_bytes(replace(usual, **facts).text())


def test_two_clusters_of_one_name_on_one_folder_of_snapshots(make_pair: Callable[[], Pair], clock: Clock) -> None:
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
        clock.at += 60
        mine += add(one)
        theirs += add(other)
        prune(one.cluster, one.hosts["host-a"], (), Silent())
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


def test_a_running_cluster_of_an_earlier_version_gets_one_by_a_scheduled_run(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which prints nothing: the record of the run and the history have it."""
    name(pair, "", generation=40, holder="host-a")
    monkeypatch.setattr(Cluster, "host", lambda _, name: pair.hosts[name])
    work = scheduled.RunState()
    scheduled.name_cluster(pair.cluster, pair.hosts["host-a"], work)
    known = uuid_in(lease_path(pair))
    assert known == uuid_in(lease_path(pair, "host-b")) != "" and known in work.notes[0]
    lease = parse_lease(lease_path(pair).read_bytes())
    assert (lease.holder, lease.generation, lease.adopted) == ("host-a", 40, 40)
    (event,) = read_history(pair.cluster, pair.hosts["host-a"])
    assert (event["verb"], event["uuid"], event["adopted"]) == ("identity", known, 40)


def test_a_host_that_did_not_get_the_uuid(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed write is a note, no failover there takes one without a UUID, and the next run retries."""
    name(pair, "", generation=40, holder="host-a")
    monkeypatch.setattr(Cluster, "host", lambda _, name: pair.hosts[name])
    swap, first, host = Leases._swap, scheduled.RunState(), pair.hosts["host-b"]

    def fail(leases: Leases, name: str, *args: Any) -> str:
        if name == "host-b":
            raise SmsError("the disk is full")
        return swap(leases, name, *args)

    monkeypatch.setattr(Leases, "_swap", fail)
    scheduled.name_cluster(pair.cluster, pair.hosts["host-a"], first)
    known = uuid_in(lease_path(pair))
    assert known and not uuid_in(lease_path(pair, "host-b"))
    assert any("lease of host-b" in text and "the disk is full" in text for text in first.notes)
    monkeypatch.setattr(Leases, "_swap", lambda *_: "busy")
    ensure_identity(pair.leases("host-a"), reported := Reported())
    assert any("lease of host-b" in text and "another run" in text for text in reported.notes)
    monkeypatch.setattr(Leases, "_swap", swap)
    came = {"host": "host-a", "came": {"from": "host-a"}, "generation": 40}
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
    again = scheduled.RunState()
    scheduled.name_cluster(pair.cluster, pair.hosts["host-a"], again)
    assert uuid_in(lease_path(pair, "host-b")) == known and again.notes == ()


def test_the_copy_of_a_rehearsal_reports_no_uuid(pair: Pair) -> None:
    """It has that of its snapshot."""
    places = pair.cluster.places
    path = lease_path(pair)
    path.parent.mkdir(parents=True)
    mine = replace(pair.cluster, site=pair.cluster.site.model_copy(update={"state": pair.hosts["host-a"].folder}))
    assert mine.places.lease == path != places.lease
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
def test_a_disk_with_snapshots_that_fails_does_not_keep_the_services_down(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, failed: str
) -> None:
    reported, limits, real = Reported(), list[float](), creation.agent.query

    def query(host: Any, command: str, request: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        limits.append(timeout)
        if host.name == failed:
            raise SmsError("it did not end in time")
        return real(host, command, request, timeout=timeout)

    monkeypatch.setattr(creation.agent, "query", query)
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


def test_two_first_starts_at_the_same_time_create_one_uuid(
    make_pair: Callable[[], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run is interleaved before every effect of the first one."""
    swap, at = Leases._swap, 0
    while True:
        pair, effects = make_pair(), 0
        second = pair.leases("host-b")

        def interleaved(leases: Leases, *args: Any, second: Leases = second, at: int = at) -> str:
            nonlocal effects
            if leases is not second:
                effects += 1
                if effects == at + 1:
                    ensure_identity(second, Silent())
            return swap(leases, *args)

        monkeypatch.setattr(Leases, "_swap", interleaved)
        ensure_identity(pair.leases("host-a"), Silent())
        monkeypatch.setattr(Leases, "_swap", swap)
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


def test_only_received_snapshots_know_a_uuid(verbs: Pair) -> None:
    """The cluster after the loss of its disks, or a new one that uses the folder of another: the user decides."""
    other_cluster(verbs)
    with pytest.raises(Refused, match=f"received snapshots of a cluster {U2} on host-a") as caught:
        start_on(verbs)
    assert "sms overlay identity" in caught.value.hint and not lease_path(verbs).exists()
    verbs.hosts["host-b"].cut = True
    leases = verbs.leases("host-a")
    ensure_identity(leases, Silent())  # of a failover: it must not wait for a decision
    assert uuid_in(lease_path(verbs)) == U2
    verbs.hosts["host-b"].cut = False
    lease_path(verbs).unlink()
    shown = verb.set_identity(verbs.cluster, verbs.hosts["host-a"], U2, Silent())
    assert shown.uuid == U2 and start_on(verbs) == 92


def other_cluster(pair: Pair, **facts: Any) -> int:
    """Add a snapshot of another cluster; return its number."""
    about = {"generation": 90, "host": "host-x", "came": {"from": "host-x"}, "cluster_uuid": U2, **facts}
    return stores.add_snapshot(store_of(pair), [b"y"], **about).number


def test_no_verb_touches_what_is_foreign(pair: Pair) -> None:
    start_on(pair)
    mine, foreign = add(pair)[0], other_cluster(pair)
    host, reported = pair.hosts["host-a"], Reported()
    with pytest.raises(Refused, match=f"snapshot {foreign} on host-a is not of this cluster, but of cluster {U2}"):
        find_snapshot(list_snapshots(pair.cluster, host), str(foreign))
    with pytest.raises(Refused, match=U2):
        prune(pair.cluster, host, [foreign], reported)
    assert prune(pair.cluster, host, (), reported, dry_run=True).snapshots[-1]["number"] == mine
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
        prune(pair.cluster, host, [first], Silent())
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
    assert start_on(pair) == 42 and uuid_in(lease_path(pair, "host-b")) == U1
    assert raise_lease(pair.hosts["host-a"], pair.cluster, 50, cluster_uuid=U2) == ""
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


class Repository:
    """A Borg repository: archives, each with its comment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.archives: dict[str, str] = {}
        self.globs: list[str] = []
        monkeypatch.setattr(borg, "check_ready", lambda *_: None)
        monkeypatch.setattr(borg, "list_archives", self.list)
        monkeypatch.setattr(borg, "remove", self.remove)
        monkeypatch.setattr(pushes.Offsite, "lock_repository", lambda *_: None)
        monkeypatch.setattr(pushes.Offsite, "push", self.push)
        monkeypatch.setattr(pulls.Offsite, "pull", lambda _, one, __: Sent(str(one["number"]), False, 0))
        monkeypatch.setattr(pulls, "lock_host", lambda *_: nullcontext())

    def list(self, _: object, __: object, glob: str) -> list[borg.Archive]:
        there = self.archives.items()
        return [borg.Archive(name, 0.0, comment) for name, comment in there if fnmatch.fnmatchcase(name, glob)]

    def remove(self, _: object, __: object, glob: str, names: list[str]) -> None:
        self.globs.append(glob)
        for name in names:
            del self.archives[name]

    def push(self, one: dict[str, Any], *_: object) -> Sent:
        self.archives[offsite.archive_name(one)] = offsite.comment(one).format()
        return Sent(offsite.archive_name(one), False, 0)


def cluster_in(archive: str) -> str:
    """Return the UUID of the cluster in an archive's name."""
    return archive[-36:] if archive.count("-") > 10 else ""


def with_borg(pair: Pair) -> Pair:
    site = pair.cluster.site
    settings = BorgRepository.model_construct(repository="/r", passphrase="/p", ssh_key=None, known_hosts=None)
    snapshots = site.snapshots.model_copy(update={"borg": settings, "standby": ()})
    update = {
        "snapshots": snapshots,
        "retention": site.retention.model_copy(update={"last": 1, "hourly": 0, "daily": 0}),
    }
    pair.cluster = Cluster(site.model_copy(update=update), pair.cluster.services, pair.cluster.base)
    return pair


def test_two_clusters_of_one_name_in_one_repository(
    make_pair: Callable[[], Pair], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Pushes and prunes of both, in turn; one has adopted archives of an earlier version, and the higher generation."""
    one, other, repository = with_borg(make_pair()), with_borg(make_pair()), Repository(monkeypatch)
    name(one, "", generation=40)
    add(one, 2, generation=40, taken=START - 86400)
    work = PushOptions(all_missing=True, prune=True)
    push(one.cluster, one.hosts["host-a"], work, ["borg"], Silent())
    assert start_on(one) == 41 and start_on(other) == 1
    uuids = [uuid_in(lease_path(pair)) for pair in (one, other)]
    reported = Reported()
    for turn in range(4):
        for pair, own in zip((one, other), (("", uuids[0]), (uuids[1],)), strict=True):
            add(pair, 2, taken=START + turn * 60)
            foreign = {found for found in repository.archives if cluster_in(found) not in own}
            done = push(pair.cluster, pair.hosts["host-a"], work, ["borg"], reported)
            assert not [found for found in done if found.error]
            assert foreign <= set(repository.archives), "one cluster has removed the archives of the other"
    assert any(uuids[1] in text for text in reported.notes) and any(uuids[0] in text for text in reported.notes)
    assert all(glob.endswith(tuple(uuids)) for glob in repository.globs[1:]), "checkpoints of the own cluster only"
    for pair, own in zip((one, other), uuids, strict=True):
        identity = list_snapshots(pair.cluster, pair.hosts["host-a"]).identity
        remote = list_remote(pair.cluster, pair.hosts["host-a"], "borg", identity)
        assert {found.get("cluster_uuid") or "" for found in remote.snapshots} <= {own, ""}
        newest = pull(pair.cluster, pair.hosts["host-a"], "borg", "latest", Silent(), dry_run=True).snapshot
        assert newest == stores.numbers(store_of(pair))[-1]
        foreign = offsite.archive_name(remote.foreign[-1])
        with pytest.raises(Refused, match=remote.foreign[-1].get("cluster_uuid") or "without a UUID"):
            pull(pair.cluster, pair.hosts["host-a"], "borg", foreign, Silent())


def test_a_cluster_without_a_uuid_removes_only_archives_of_its_hosts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was upgraded while one admin host is off; another cluster of its name has not been upgraded."""
    repository = Repository(monkeypatch)
    with_borg(pair)
    name(pair, "", generation=3)
    for number in range(1, 7):
        host = "host-a" if number % 2 else "host-x"
        found = {**MANIFEST, "cluster": pair.cluster.site.cluster, "number": number, "host": host, "uuid": str(uuid4())}
        found |= {"taken": START - 86400 * 900 + number, "sequence": number}
        repository.archives[offsite.archive_name(found)] = offsite.comment(found).format()
    foreign = {text for text in repository.archives if int(text.split("-")[-6]) % 2 == 0}
    monkeypatch.setattr(borg, "compact", lambda *_: True)
    reported = Reported()
    done = prune_repository(pair.cluster, pair.hosts["host-a"], reported)
    assert done.removed and foreign <= set(repository.archives) and not foreign & {*done.kept, *done.removed}
    assert any("3 snapshots of a cluster without a UUID (taken on host-x)" in text for text in reported.notes)
    add(pair, 2, generation=3, taken=START)
    push(pair.cluster, pair.hosts["host-a"], PushOptions(all_missing=True, prune=True), ["borg"], Silent())
    assert foreign <= set(repository.archives)


def test_a_new_host_pulls_the_only_cluster_of_a_repository(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Repository(monkeypatch)
    with_borg(pair)
    lease_path(pair).parent.mkdir(parents=True)
    for number, uuid in ((1, ""), (2, U1)):
        found = {**MANIFEST, "cluster": pair.cluster.site.cluster, "number": number, "generation": number}
        found |= {"cluster_uuid": uuid} if uuid else {}
        repository.archives[offsite.archive_name(found)] = offsite.comment(found).format()
    assert pull(pair.cluster, pair.hosts["host-a"], "borg", "latest", Silent()).number == 2
    assert uuid_in(lease_path(pair)) == U1
    lease_path(pair).unlink()
    found |= {"cluster_uuid": U2, "number": 3}
    repository.archives[offsite.archive_name(found)] = offsite.comment(found).format()
    with pytest.raises(Refused, match="not of this cluster"):
        pull(pair.cluster, pair.hosts["host-a"], "borg", "latest", Silent())


def test_a_standby_host_of_another_cluster_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    name(pair, U1, on=("host-a",))
    name(pair, U2, on=("host-b",))
    add(pair)
    monkeypatch.setattr(Cluster, "host", lambda _, name: pair.hosts[name])
    (done,) = push(pair.cluster, pair.hosts["host-a"], PushOptions(), ["host-b"], Silent())
    assert U2 in done.error and done.status == 3 and stores.numbers(store_of(pair, "host-b")) == []


@pytest.fixture
def verbs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Two hosts for the verb, without locks."""
    monkeypatch.setattr(verb, "query_all_leases", lambda host, cluster: pair.leases(host.name))
    monkeypatch.setattr(verb, "lock_host", lambda *_: nullcontext())
    monkeypatch.setattr(verb, "only_one", lambda *_: nullcontext())
    return pair


def test_a_copy_gets_a_uuid_of_its_own(verbs: Pair) -> None:
    name(verbs, U1)
    taken = add(verbs, 2)
    shown = verb.set_identity(verbs.cluster, verbs.hosts["host-a"], "new", Silent())
    assert shown.uuid not in ("", U1) and set(shown.leases.values()) == {shown.uuid}
    assert [found["number"] for found in list_snapshots(verbs.cluster, verbs.hosts["host-a"]).foreign] == taken
    text = "\n".join(lines(shown))
    assert f"cluster {shown.cluster}: {shown.uuid}" in text and f"{U1}: 2 snapshots of host-a" in text


def test_a_cluster_continues_another_one(verbs: Pair) -> None:
    """Its lease rises above the snapshots that are its own now."""
    start_on(verbs)
    verbs.release("host-a")
    number = other_cluster(verbs)
    with pytest.raises(Refused, match="no lease and no snapshot"):
        verb.set_identity(verbs.cluster, verbs.hosts["host-a"], "33333333", Silent())
    shown = verb.set_identity(verbs.cluster, verbs.hosts["host-a"], U2[:6], Silent())
    assert shown.uuid == U2 and list(shown.found) == [U2]
    assert find_snapshot(list_snapshots(verbs.cluster, verbs.hosts["host-a"]), "latest")["number"] == number
    assert start_on(verbs) == 92


def test_the_verb_refuses(verbs: Pair) -> None:
    name(verbs, U1)
    verbs.hosts["host-b"].cut = True
    with pytest.raises(Refused, match="host-b cannot be reached"):
        verb.set_identity(verbs.cluster, verbs.hosts["host-a"], "new", Silent())
    verbs.hosts["host-b"].cut = False
    verbs.take("host-a")
    with pytest.raises(Refused, match="runs on host-a"):
        verb.set_identity(verbs.cluster, verbs.hosts["host-a"], "new", Silent())
    assert uuid_in(lease_path(verbs)) == uuid_in(lease_path(verbs, "host-b")) == U1
    assert [verb.is_valid(text) for text in ("new", U1, U1[:4], U1[:10], "111", "zzzz", U1 + "1", "")] == [
        *[True] * 4,
        *[False] * 4,
    ]


def test_a_holder_that_was_removed_from_the_site(verbs: Pair) -> None:
    """Its host is dead; the copies of the others name it still."""
    name(verbs, U1, holder="host-x", on=("host-a",))
    name(verbs, "", holder="host-x", on=("host-b",))
    shown = verb.set_identity(verbs.cluster, verbs.hosts["host-b"], U1, Silent())
    assert shown.leases == {"host-a": U1, "host-b": U1}


def test_two_hosts_that_disagree_become_one_cluster(verbs: Pair) -> None:
    name(verbs, U1, on=("host-a",))
    name(verbs, U2, on=("host-b",), generation=9)
    verb.set_identity(verbs.cluster, verbs.hosts["host-a"], U1, Silent())
    assert start_on(verbs) == 10 and uuid_in(lease_path(verbs, "host-b")) == U1


def test_a_uuid_that_cannot_be_written_is_no_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "_swap", lambda *_: "busy")
    ensure_identity(pair.leases("host-a"), Silent())
    assert not lease_path(pair).exists()

    def fail(*_: object) -> str:
        raise SmsError("the disk is full")

    monkeypatch.setattr(Leases, "_swap", fail)
    ensure_identity(pair.leases("host-a"), Silent())
    assert creation.new_uuid() != creation.new_uuid()
