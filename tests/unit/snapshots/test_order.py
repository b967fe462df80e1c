"""The order of snapshots: by generation and sequence number, not by clocks, also after every lease was lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from appliance.agent.protocol import Busy, Problem
from appliance.agent.store import Store
from appliance.agent.take import assign_place, find_cluster
from appliance.config.model import Retention
from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.identity import ensure_identity
from appliance.operations.services.generation import SHORT_S, find_known
from appliance.operations.snapshots.list import find_snapshot, list_snapshots
from appliance.operations.snapshots.prune import prune
from appliance.operations.start_note import start_note_path
from appliance.plan.migration.failover import choose_snapshot, has_newer
from appliance.plan.snapshots import offsite
from appliance.progress import Silent
from appliance.shared.files import path_beside
from appliance.shared.lease import Lease, parse_lease
from appliance.shared.locks import hold_lock
from appliance.shared.order import last_place, order
from appliance.tools.agent import Agents, AgentTimeout
from tests import stores
from tests.pairs import STATE, AgentsInFolders, Pair
from tests.support.borg import Archives, HostWithBorg, borg_settings
from tests.support.env import FakeClock, FakeHosts, with_env
from tests.unit.snapshots.clusters import MANIFEST
from tests.unit.snapshots.conftest import START

DAY = 86400.0


def shown(generation: int, sequence: int, taken: float, **more: Any) -> dict[str, Any]:
    name = f"{generation:08d}-{sequence:04d}-4000-8000-{int(taken):012d}"
    facts = {"generation": generation, "sequence": sequence, "taken": taken, "uuid": name, "number": int(taken)}
    return {**facts, "host": "host-a", "health": {"ok": True}, "reason": "", **more}


IN_ORDER = [
    shown(1, 0, 300.0),  # of an earlier version, which recorded no sequence number: by its time, before those with one
    shown(1, 0, 400.0),
    shown(1, 5, 200.0),
    shown(1, 6, 100.0),
    shown(2, 1, 50.0),
    shown(2, 2, 50.0),
    shown(2, 10, 10.0),
]


def test_order() -> None:
    for some in permutations(IN_ORDER, 3):
        assert sorted(some, key=order) == [one for one in IN_ORDER if one in some]
    without = {name: value for name, value in IN_ORDER[0].items() if name != "sequence"}
    assert order(without) == order(IN_ORDER[0]), "as version 519381b wrote it"


def test_one_order_for_all() -> None:
    """The store, failover, pull and push: each chooses the same newest one, with clocks a day back or forward."""
    names = [shown(3, 1, START), shown(3, 2, START - DAY), shown(3, 3, START - 2 * DAY)]
    assert choose_snapshot(names) == names[-1]
    assert offsite.find("latest", names) == names[-1:]
    rule = Retention(last=1, hourly=0, daily=0, weekly=0, monthly=0)
    assert offsite.not_kept(names, rule, now=START) == names[:-1]
    assert offsite.missing(names, names[2:], rule, now=START) == []


def test_an_interrupted_failover_is_superseded_by_order() -> None:
    old, new = shown(3, 1, START), shown(3, 2, START - DAY, number=8)
    assert has_newer([old, new], old["number"]) and not has_newer([old, new], 8)
    assert has_newer([new], old["number"]), "it was pruned"
    assert not has_newer([], 8)


def test_last_place() -> None:
    known = [shown(4, 9, START), shown(40, 0, START), shown(50, 99, START, host="host-b")]
    assert last_place("host-a", 3, known) == (40, 9)
    assert last_place("host-a", 41, known) == (41, 9)
    assert last_place("host-c", 3, known) == (3, 0)
    received = shown(1 << 31, 1 << 39, START, came={"from": "host-b"})
    assert last_place("host-a", 3, [*known, received]) == (40, 9), "another host may have written anything into it"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def lease(tmp_path: Path) -> Path:
    path = tmp_path / "lab.lease"
    path.write_bytes(Lease("lab", 7, "host-a", START, "host-a").text())
    return path


def request(lease: Path | str, *, generation: int = 7, lock: str = "") -> dict[str, Any]:
    facts = {"host": "host-a", "generation": generation}
    return {"facts": facts, "lease": str(lease), "lock": lock}


def test_the_lease_has_the_sequence_number_before_the_snapshot_begins(store: Store, lease: Path) -> None:
    assert assign_place(store, request(lease)) == (7, 1)
    assert parse_lease(lease.read_bytes()) == Lease("lab", 7, "host-a", START, "host-a", sequence=1)
    assert assign_place(store, request(lease)) == (7, 2), "the first was killed: a gap, and no number twice"
    stores.add_snapshot(store, [b"x"], generation=7, sequence=9)
    assert assign_place(store, request(lease)) == (7, 10)
    assert parse_lease(lease.read_bytes()).sequence == 10


def test_a_lost_lease_is_not_created(store: Store, lease: Path) -> None:
    """Neither generation nor sequence number restart: both follow this host's own snapshots."""
    stores.add_snapshot(store, [b"x"], generation=7, sequence=9)
    lease.unlink()
    assert assign_place(store, request(lease, generation=0)) == (7, 10)
    assert not lease.exists()


def test_the_store_is_lost_and_the_lease_is_not(store: Store, lease: Path) -> None:
    lease.write_bytes(Lease("lab", 7, "host-a", START, "host-a", sequence=41).text())
    assert assign_place(store, request(lease)) == (7, 42)


def test_a_lease_that_cannot_be_written(store: Store, lease: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path(path_beside(str(lease))).mkdir()
    assert assign_place(store, request(lease)) == (7, 1)
    assert "does not have the snapshot's sequence number" in capfd.readouterr().out
    lease.write_bytes(b"{")
    with pytest.raises(Problem, match="cannot be read"):
        assign_place(store, request(lease))


def test_another_run_holds_the_lock_of_the_lease(
    store: Store, lease: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.agent.take.LOCK_WAIT_S", 0.0)
    with hold_lock(f"{lease}.lock"):
        assert assign_place(store, request(lease)) == (7, 1), "the caller holds both"
        with pytest.raises(Busy):
            assign_place(store, request(lease, lock=str(tmp_path / "host.lock")))


def store_of(pair: Pair, name: str) -> Store:
    return Store(str(pair.cluster.places.snapshots).replace(STATE, str(pair.hosts[name].folder)))


def lease_of(pair: Pair, name: str) -> Path:
    return Path(str(pair.cluster.places.lease).replace(STATE, str(pair.hosts[name].folder)))


def start(pair: Pair, name: str = "host-a", *, without_remote: bool = False) -> int:
    """Do what a start does with the lease; return its generation."""
    leases = pair.leases(name)
    leases.floor = find_known(pair.cluster, leases, without_remote=without_remote).generation
    ensure_identity(leases, Silent())
    generation = leases.take().generation
    host = pair.hosts[name]
    path = str(pair.cluster.places.history)
    event = {"verb": "start", "event": "started", "generation": generation}
    host.write(path, (host.read(path) or b"") + json.dumps(event).encode() + b"\n")
    return generation


def take(pair: Pair, name: str = "host-a") -> int:
    """Take and prune as a scheduled run does; return the number of the snapshot."""
    store, lease = store_of(pair, name), lease_of(pair, name)
    known = parse_lease(lease.read_bytes())
    about = request(lease, generation=known.generation)
    about["facts"] |= {"host": name, "cluster_uuid": known.cluster_uuid}
    generation, sequence = assign_place(store, about)
    facts: dict[str, Any] = {"taken": time.time(), "generation": generation, "sequence": sequence, "host": name}
    facts["cluster_uuid"] = find_cluster(store, about)
    taken = stores.add_snapshot(store, [b"x"], **facts).number
    prune(pair.cluster, pair.hosts[name], ())
    return taken


def run_schedule(pair: Pair, clock: FakeClock, hours: float) -> list[int]:
    """Run the schedule every 30 minutes: each new snapshot is the latest one afterwards. Return those that are left."""
    for _ in range(int(hours * 2)):
        clock.now += 1800
        taken = take(pair)
        listing = list_snapshots(pair.cluster, pair.hosts["host-a"])
        assert find_snapshot(listing, "latest")["number"] == taken == listing.snapshots[-1]["number"]
    return stores.numbers(store_of(pair, "host-a"))


def old_snapshots(pair: Pair, generation: int, *, days: int = 30) -> None:
    """Add daily snapshots, as version 519381b wrote them."""
    store = store_of(pair, "host-a")
    for day in range(days, 0, -1):
        stores.add_snapshot(store, [b"y"], taken=START - day * DAY, generation=generation)


def other_cluster(pair: Pair) -> int:
    """Add a snapshot of another cluster of this name, which uses the same folder; return its number."""
    facts = {"cluster_uuid": "5d6e71c0-0000-4000-8000-5d6e71c05d6e", "host": "host-x", "came": {"from": "host-x"}}
    return stores.add_snapshot(store_of(pair, "host-a"), [b"z"], taken=START, generation=90, **facts).number


def keep_lease(pair: Pair) -> None:
    """Nothing is lost."""


def lose_lease(pair: Pair) -> None:
    for name in pair.hosts:
        lease_of(pair, name).unlink()


def lose_lease_and_history(pair: Pair) -> None:
    lose_lease(pair)
    pair.hosts["host-a"].remove(str(pair.cluster.places.history))


@pytest.mark.parametrize("hours", [pytest.param(8, marks=pytest.mark.slow), pytest.param(48, marks=pytest.mark.full)])
def test_hours_of_schedule_after_losing_every_lease(
    make_pair: Callable[[], Pair], clock: FakeClock, hours: int
) -> None:
    """The latest is today's after each run, and prune removes exactly what it removes without the loss.

    Another cluster of this name has a snapshot of a higher generation in the same folder.
    """
    left = []
    for happens in (keep_lease, lose_lease, lose_lease_and_history):
        clock.now, pair = START, make_pair()
        lease_of(pair, "host-a").parent.mkdir(parents=True)
        lease_of(pair, "host-a").write_bytes(Lease(pair.cluster.site.cluster, 39, None, START, "host-a").text())
        old_snapshots(pair, 39)
        assert start(pair) == 40
        take(pair)
        uuid, foreign = parse_lease(lease_of(pair, "host-a").read_bytes()).cluster_uuid, other_cluster(pair)
        happens(pair)
        assert start(pair) == 91, "above everything that is known"
        assert parse_lease(lease_of(pair, "host-a").read_bytes()).cluster_uuid == uuid
        left.append(run_schedule(pair, clock, hours))
        assert foreign in left[-1], "of another cluster of this name, with the highest generation"
    assert left[0] == left[1] == left[2]
    new = [number for number in left[0] if number > 32]
    assert len(new) >= hours / 2 and new[-1] == 32 + hours * 2 and len(left[0]) > len(new) + 1


def test_a_cluster_that_restarted_at_generation_1_under_an_earlier_version(pair: Pair, clock: FakeClock) -> None:
    """Its own older snapshots of generation 40 do not push out what is taken now, even before the next start."""
    lease_of(pair, "host-a").parent.mkdir(parents=True)
    lease_of(pair, "host-a").write_bytes(Lease(pair.cluster.site.cluster, 1, "host-a", START, "host-a").text())
    old_snapshots(pair, 40)
    ensure_identity(pair.leases("host-a"), Silent())  # as a scheduled run does
    run_schedule(pair, clock, 6)
    assert start(pair) == 41


@pytest.mark.parametrize("jump", [-DAY, DAY])
def test_clock_jumps_of_a_day_change_nothing(pair: Pair, clock: FakeClock, jump: float) -> None:
    start(pair)
    run_schedule(pair, clock, 3)
    clock.now += jump
    run_schedule(pair, clock, 3)
    clock.now -= jump
    run_schedule(pair, clock, 3)
    newest = choose_snapshot(list_snapshots(pair.cluster, pair.hosts["host-a"]).snapshots)
    assert newest and newest["sequence"] == 18


def test_the_standby_has_the_only_copies(pair: Pair, clock: FakeClock) -> None:
    """The disks of the host that ran it died."""
    assert start(pair) == 1
    old_snapshots(pair, 40, days=3)
    lose_lease_and_history(pair)
    pair.hosts["host-b"].run("mkdir", "-p", str(pair.cluster.places.snapshots.parent))
    Path(store_of(pair, "host-a").root).rename(store_of(pair, "host-b").root)
    pair.hosts["host-b"].cut = True
    with pytest.raises(Refused, match=r"host-b \(it cannot be reached\)") as caught:
        start(pair)
    assert "--without-remote" in caught.value.hint
    assert not lease_of(pair, "host-a").exists()
    pair.hosts["host-b"].cut = False
    assert start(pair) == 41


def test_without_remote_copies(pair: Pair, clock: FakeClock) -> None:
    pair.hosts["host-b"].cut = True
    known = find_known(pair.cluster, pair.leases("host-a"), without_remote=True)
    assert (known.generation, known.lost, known.silent) == (0, True, ("host-b",))
    assert known.notes == ["note: host-b may know a higher generation, but did not answer"]
    assert start(pair, without_remote=True) == 1
    assert find_known(pair.cluster, pair.leases("host-a")).lost is False, "a lease is known: no copy has to answer"
    fenced = find_known(pair.cluster, pair.leases("host-a", without=("host-b",)), without=("host-b",))
    assert fenced.silent == ()


@pytest.mark.parametrize("records", [False, True])
def test_a_failed_disk_with_snapshots_does_not_keep_the_services_down(pair: Pair, *, records: bool) -> None:
    """The lease is known; after its loss the snapshots must be read."""

    class Failing(AgentsInFolders):
        def query(self, *_: Any, timeout: float) -> dict[str, Any]:
            limits.append(timeout)
            raise SmsError("host-a: input/output error")

    assert start(pair) == 1
    limits: list[float] = []
    pair.cluster = with_env(pair.cluster, agents=Failing())
    if records:
        pair.hosts["host-a"].unreadable = start_note_path(pair.cluster)
    known = find_known(pair.cluster, pair.leases("host-a"))
    assert (known.generation, known.lost, len(known.unread)) == (0 if records else 1, False, 1 + records)
    assert "could not be read: host-a: input/output error" in known.notes[0]
    assert limits == [SHORT_S]
    lose_lease(pair)
    with pytest.raises(SmsError, match="input/output error"):
        start(pair)


HANGS = """
import sys
import time
sys.path.insert(0, sys.argv.pop(1))
from appliance.agent import store
store.open_stored = lambda _: time.sleep(60)
from appliance.agent.main import main
raise SystemExit(main())
"""


class Hanging(Agents):
    """Agents that the first file which they open keeps waiting."""

    def install(self, host: Host, time_left: Callable[[], float] = lambda: 60.0) -> tuple[str, ...]:
        python, isolated, path = super().install(host, time_left)
        return (python, isolated, "-c", HANGS, path)


def test_a_disk_that_hangs(tmp_path: Path) -> None:
    """The agent itself has a time limit."""
    folder = tmp_path / "store" / "000001"
    folder.mkdir(parents=True)
    request = {"store": str(tmp_path / "store")}
    with pytest.raises(AgentTimeout):
        Hanging(str(tmp_path)).query(Local("here"), "brief", request, timeout=2)
    assert Agents(str(tmp_path)).query(Local("here"), "brief", request, timeout=60)["broken"] == [1]


@pytest.mark.parametrize("fails", [False, True])
def test_the_borg_repository_is_a_remote_copy(pair: Pair, *, fails: bool) -> None:
    archives = Archives()
    for number, generation in ((1, 44), (2, 1 << 31)):
        one = {**MANIFEST, "cluster": pair.cluster.site.cluster, "number": number, "generation": generation}
        archives.archives[offsite.archive_name(one)] = offsite.comment(one).format()
    pair.hosts |= {name: HostWithBorg(host, None if fails else archives) for name, host in pair.hosts.items()}
    site = pair.cluster.site
    settings = site.snapshots.model_copy(update={"borg": borg_settings("/backup/sms.borg")})
    pair.cluster = with_env(
        replace(pair.cluster, site=site.model_copy(update={"snapshots": settings})), hosts=FakeHosts(pair.hosts)
    )
    if fails:
        with pytest.raises(Refused, match=r"/backup/sms.borg \(borg is not installed on host-a\)"):
            start(pair)
        assert start(pair, without_remote=True) == 1
    else:
        assert start(pair) == 45
