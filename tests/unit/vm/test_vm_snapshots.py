"""Snapshots of the VM: their order, which one is the latest, and which a prune removes; clocks decide nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from appliance.catalog import read_bases
from appliance.errors import Refused
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.operations.vm.snapshots import (
    NOTE,
    VmSnapshot,
    assign_place,
    choose_removed,
    cluster_uuid,
    find_snapshot,
    list_snapshots,
    prune_snapshots,
)
from appliance.operations.vm.start import StartOptions, _choose_holder
from appliance.plan.vm.holder import Holder, HostView, follow_known, newest_holder, read_holder, stale_generation
from appliance.plan.vm.vm import VmPlaces
from appliance.share import share
from appliance.shared.lease import Lease
from appliance.shared.records import to_json
from tests.sites import make_site
from tests.support.env import Reports, Unlocked, fake_env

DAY = 86400.0
HOST = Local("a")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    base = read_bases(share("definitions", "bases"))["debian-12"]
    site = make_site(tmp_path, directory=str(tmp_path / "vm"))
    env = fake_env({"a": HOST}, locks=Unlocked())  # locks of a VM are below /run
    return Cluster(site.model_copy(update={"state": PurePosixPath(tmp_path / "state")}), (), base, env=env)


def add(cluster: Cluster, name: str, taken: float, *, holder: Holder | None, verified: bool = True) -> VmSnapshot:
    """Write the record of a snapshot, as a run at this time does."""
    where = VmPlaces(cluster.site)
    generation, sequence = assign_place(HOST, where, holder and (read_holder(HOST.read(str(where.holder))) or holder))
    made = VmSnapshot(name, taken, verified=verified, generation=generation, sequence=sequence)
    HOST.write(f"{where.snapshots}/{name}/{NOTE}", made.note())
    return made


def add_old(cluster: Cluster, name: str, taken: float) -> None:
    """Write a record as version 519381b did."""
    record = {"taken": taken, "frozen_ms": 0, "running": False, "reason": "", "key": "", "verified": True}
    HOST.write(f"{VmPlaces(cluster.site).snapshots}/{name}/{NOTE}", json.dumps(record).encode() + b"\n")


def names(cluster: Cluster) -> list[str]:
    return [one.name for one in list_snapshots(cluster, HOST)]


@pytest.mark.parametrize("jump", [-DAY, DAY])
def test_clock_jumps_of_a_day_change_nothing(cluster: Cluster, jump: float) -> None:
    add_old(cluster, "old", 500 * DAY)
    for number, at in enumerate((400 * DAY, 400 * DAY + jump, 400 * DAY + 60)):
        add(cluster, f"s{number}", at, holder=Holder("a", 1))
    assert names(cluster) == ["old", "s0", "s1", "s2"]
    assert find_snapshot(cluster, HOST, "latest").name == "s2"
    removed = prune_snapshots(cluster, HOST, keep=1)
    assert [one.name for one in removed] == ["old", "s0", "s1"] and names(cluster) == ["s2"]


def test_the_newest_verified_one_is_never_removed(cluster: Cluster) -> None:
    add(cluster, "good", 1.0, holder=Holder("a", 1))
    for number in range(3):
        add(cluster, f"before-restore-{number}", 2.0, holder=Holder("a", 1), verified=False)
    assert find_snapshot(cluster, HOST, "latest").name == "good"
    assert [one.name for one in prune_snapshots(cluster, HOST, keep=1)] == [
        "before-restore-0",
        "before-restore-1",
    ]
    assert names(cluster) == ["good", "before-restore-2"]
    assert prune_snapshots(cluster, HOST, keep=1) == []


def test_one_whose_record_cannot_be_read_stays(cluster: Cluster) -> None:
    HOST.write(f"{VmPlaces(cluster.site).snapshots}/torn/{NOTE}", b'{"taken": 5')
    for number in range(2):
        add(cluster, f"s{number}", 1.0, holder=Holder("a", 1))
    assert [one.name for one in prune_snapshots(cluster, HOST, keep=1)] == ["s0"]
    assert names(cluster) == ["torn", "s1"]


def test_without_a_verified_one_the_newest_is_the_latest(cluster: Cluster) -> None:
    with pytest.raises(Refused):
        find_snapshot(cluster, HOST, "latest")
    for number in range(2):
        add(cluster, f"s{number}", 1.0, holder=Holder("a", 1), verified=False)
    assert find_snapshot(cluster, HOST, "latest").name == "s1"


def test_the_record_of_the_holder_has_the_sequence_number(cluster: Cluster) -> None:
    where = VmPlaces(cluster.site)
    assert assign_place(HOST, where, Holder("a", 3, 41)) == (3, 42)
    assert read_holder(HOST.read(str(where.holder))) == Holder("a", 3, 42), "also if the snapshot then fails"
    add(cluster, "one", 1.0, holder=Holder("a", 3))
    HOST.remove(str(where.holder))
    assert assign_place(HOST, where, None) == (3, 44), "the record was lost: both follow the snapshots"
    assert HOST.read(str(where.holder)) is None
    add(cluster, "two", 1.0, holder=Holder("a", 4))
    assert [(one.generation, one.sequence) for one in list_snapshots(cluster, HOST)] == [(3, 43), (4, 44)]


def test_choose_removed() -> None:
    made = [VmSnapshot(str(number), 0, verified=number < 2, sequence=number) for number in range(5)]
    assert [one.name for one in choose_removed(made, 2)] == ["0", "2"]
    assert choose_removed(made[:1], 1) == choose_removed([], 1) == []
    assert choose_removed([replace(made[0], readable=False), made[1]], 1) == []


def test_records() -> None:
    views = [HostView("a", holder=Holder("a", 4, 7)), HostView("b", holder=Holder("a", 4, 2)), HostView("c")]
    assert newest_holder(views) == Holder("a", 4, 7)
    assert read_holder(to_json(Holder("a", 4, 7))) == Holder("a", 4, 7)
    assert read_holder(b'{"holder": "a", "generation": 4}') == Holder("a", 4), "as version 519381b wrote it"


@pytest.mark.parametrize(
    ("chosen", "newest", "known", "generation"),
    [
        (Holder("a", 1), None, 0, 1),  # a new cluster
        (Holder("a", 1), None, 1, 2),  # every record was lost
        (Holder("a", 1), None, 7, 8),
        (Holder("a", 4), Holder("a", 4), 4, 4),
        (Holder("a", 4), Holder("a", 4), 7, 8),  # an old copy of the record
        (Holder("a", 5), Holder("b", 4), 4, 5),
    ],
)
def test_generation_after_the_record_was_lost(
    chosen: Holder, newest: Holder | None, known: int, generation: int
) -> None:
    assert follow_known(chosen, newest, known) == replace(chosen, generation=generation)


def test_a_start_exceeds_snapshots_and_history(cluster: Cluster) -> None:
    """Where every record of who has the disks was lost, and where an old one was put back."""
    views = [HostView("a")]
    assert _choose_holder(cluster, HOST, views, StartOptions()) == Holder("a", 1)
    add(cluster, "one", 1.0, holder=Holder("a", 3))
    assert _choose_holder(cluster, HOST, views, StartOptions()) == Holder("a", 4)
    note(cluster, HOST, "start", "started", generation=99)  # of the services container
    note(cluster, HOST, "vm start", "started", generation=7)
    assert _choose_holder(cluster, HOST, views, StartOptions()) == Holder("a", 8)
    assert _choose_holder(cluster, HOST, [HostView("a", holder=Holder("a", 7, 5))], StartOptions()) == Holder("a", 7, 5)
    assert _choose_holder(cluster, HOST, [HostView("a", holder=Holder("a", 2))], StartOptions()) == Holder("a", 8)


def test_generation_of_stale_disks() -> None:
    assert stale_generation("a", None) == stale_generation("a", Holder("b", 0)) == 0
    assert stale_generation("a", Holder("a", 3)) == 3
    assert stale_generation("a", Holder("b", 4)) == 3


U1, U2 = (f"{digit * 8}-0000-4000-8000-{digit * 12}" for digit in "12")


def test_snapshots_of_another_cluster_of_this_name(cluster: Cluster) -> None:
    """They are neither restored nor removed; those of earlier versions have no UUID and count as the own ones."""
    lease = Path(str(cluster.places.lease))
    lease.parent.mkdir(parents=True)
    lease.write_bytes(Lease(cluster.site.cluster, 1, "a", 1.0, "a", cluster_uuid=U1).text())
    add_old(cluster, "old", 1.0)
    for number, uuid in enumerate((U1, U2, U1, U2)):
        made = add(cluster, f"s{number}", 1.0, holder=Holder("a", 1))
        made = replace(made, cluster_uuid=uuid)
        HOST.write(f"{VmPlaces(cluster.site).snapshots}/{made.name}/{NOTE}", made.note())
    assert find_snapshot(cluster, HOST, "latest").name == "s2"
    with pytest.raises(Refused, match=f"snapshot s3 of the VM is not of this cluster, but of cluster {U2}"):
        find_snapshot(cluster, HOST, "s3")
    progress = Reports()
    assert [one.name for one in prune_snapshots(cluster.showing(progress), HOST, keep=1)] == ["old", "s0"]
    assert names(cluster) == ["s1", "s2", "s3"]
    assert progress.lines == [f"note: 2 snapshots of the VM on a are of cluster {U2}: not touched"]


def test_the_record_of_the_disks_has_the_uuid_of_the_lease(cluster: Cluster) -> None:
    lease = Path(str(cluster.places.lease))
    lease.parent.mkdir(parents=True)
    assert cluster_uuid(cluster, HOST) == ""
    where = VmPlaces(cluster.site)
    HOST.write(str(where.holder), to_json(Holder("a", 1, cluster_uuid=U2)))
    assert cluster_uuid(cluster, HOST) == U2, "the lease was lost"
    lease.write_bytes(Lease(cluster.site.cluster, 1, "a", 1.0, "a", cluster_uuid=U1).text())
    assert cluster_uuid(cluster, HOST) == U1
    assert _choose_holder(cluster, HOST, [HostView("a", holder=Holder("a", 1))], StartOptions()) == Holder(
        "a", 1, cluster_uuid=U1
    )
    with pytest.raises(Refused, match=f"disks are of another cluster of this name, {U2}"):
        _choose_holder(cluster, HOST, [HostView("a", holder=Holder("a", 1, cluster_uuid=U2))], StartOptions())
