"""A move of the state: which versions can read it, whose it is, whether a copy is complete, its record."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from appliance.cli.services.status import Shown
from appliance.errors import Refused, SmsError
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.engines.container_owner import ContainerOwner
from appliance.operations.engines.kubernetes_owner import KubernetesOwner
from appliance.operations.engines.move import refuse_left
from appliance.operations.engines.owners import LEASE
from appliance.operations.image.deliver import Image
from appliance.plan.migration.state import (
    COPYING,
    DONE,
    STARTING,
    STOPPING,
    MovePlan,
    StateMove,
    Tree,
    Versions,
    check_identity,
    compare_trees,
    describe_interrupted,
    moved_paths,
    read_state_move,
    read_tree,
    read_versions,
    refuse_newer,
    release_of,
    state_version,
)
from appliance.shared.lease import ENGINE, Lease
from appliance.shared.records import to_json
from appliance.shared.state_lease import StateLease
from appliance.tools import ext3
from tests.support.fake import Fake
from tests.support.instances import LIST, lists
from tests.support.kubernetes import WithKubectl, on_kubernetes
from tests.unit.engines.cases import ONE, make_input

STATE = "/var/spool/slurmctld"
DEBIAN = "slurm-wlm 22.05.8\nmariadbd  Ver 10.11.4-MariaDB-1~deb12u1 for debian-linux-gnu on x86_64 (Debian 12)\n"


@pytest.mark.parametrize(
    ("output", "slurm", "mariadb"),
    [
        (DEBIAN, "22.05", "10.11"),
        ("slurm 23.11.10\nsh: mariadbd: not found\n", "23.11", ""),
        ("mysqld  Ver 10.5.22-MariaDB for Linux on x86_64 (MariaDB Server)\n", "", "10.5"),
        ("", "", ""),
    ],
)
def test_versions_of_programs(output: str, slurm: str, mariadb: str) -> None:
    assert read_versions(output) == Versions(slurm, mariadb)


@pytest.mark.parametrize(
    ("release", "high"),
    [("20.11", 36), ("22.05", 38), ("23.11", 40), ("24.05", 41), ("24.11", 42), ("25.05", 43), ("25.11", 44)],
)
def test_versions_of_state(release: str, high: int) -> None:
    """As in src/common/slurm_protocol_common.h of each release."""
    assert state_version(release) == high << 8 and release_of(high << 8) == release


@pytest.mark.parametrize("release", ["", "22.06", "19.05", "24.08", "x"])
def test_versions_that_are_not_known(release: str) -> None:
    assert state_version(release) == 0


@pytest.mark.parametrize(
    ("tree", "image"),
    [
        (Tree(), Versions()),
        (Tree(slurm=0x2600), Versions("22.05")),
        (Tree(slurm=0x2600, mariadb="10.5"), Versions("23.11", "10.11")),
    ],
)
def test_state_that_can_be_read(tree: Tree, image: Versions) -> None:
    refuse_newer(tree, image, "Nomad")


@pytest.mark.parametrize(
    ("tree", "image", "message"),
    [
        (Tree(slurm=0x2700), Versions("22.05"), "Slurm 23.02 wrote the state, and the image of Nomad has 22.05"),
        (Tree(slurm=0x2600), Versions(), "the version of Slurm in the image of Nomad is not known"),
        (Tree(mariadb="10.11"), Versions("22.05", "10.5"), "MariaDB 10.11 wrote the database, .* has 10.5"),
        (Tree(mariadb="10.11"), Versions("22.05"), "has none"),
    ],
)
def test_state_that_is_newer(tree: Tree, image: Versions, message: str) -> None:
    with pytest.raises(Refused, match=message) as caught:
        refuse_newer(tree, image, "Nomad")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("clustername", "databases"),
    [("lab", None), ("", None), ("lab", ["lab|"]), ("lab|7", ["lab|7", "other|8"]), ("lab|7", ["lab"])],
)
def test_state_and_database_of_one_cluster(clustername: str, databases: list[str] | None) -> None:
    check_identity(Tree(clustername=clustername), "lab", databases)


@pytest.mark.parametrize(
    ("clustername", "databases", "message"),
    [
        ("other", None, "the state is of cluster other"),
        ("lab", ["other|"], "the database does not have cluster lab"),
        ("lab|7", ["lab|8"], "the state has ClusterID 7 and the database 8"),
    ],
)
def test_state_and_database_of_two(clustername: str, databases: list[str] | None, message: str) -> None:
    with pytest.raises(Refused, match=message):
        check_identity(Tree(clustername=clustername), "lab", databases)


def test_a_copy_that_differs() -> None:
    one = ["file", 0o600, 1, 1, 3, "a"]
    tree = Tree(entries={"/a": one, "/b": one}, digest="x")
    compare_trees(tree, Tree(entries={"/a": one, "/b": one}, digest="x"))
    with pytest.raises(SmsError, match="differs from the original in 2 files: /b, /c"):
        compare_trees(tree, Tree(entries={"/a": one, "/b": [*one[:5], "z"], "/c": one}, digest="y"))


def test_an_output_that_is_not_one() -> None:
    with pytest.raises(SmsError, match="files is not a int"):
        read_tree({"files": "many"})


def test_what_moves(tmp_path: Path) -> None:
    """State in /etc and what may be lost is made again."""
    given = make_input(tmp_path, "debian-12", ONE)
    assert moved_paths(given.services) == ("/var/lib/mysql", "/var/lib/mysql-dump", "/var/spool/slurmctld")


def test_services_that_would_stop() -> None:
    plan = MovePlan("container", "nomad", (), 0, 0, -1, "", "", {"slurmrestd": "no key"}, 30.0, stays=("nat",))
    with pytest.raises(Refused, match="slurmrestd would stop"):
        refuse_left(plan, force=False)
    refuse_left(plan, force=True)


@pytest.mark.parametrize(
    ("there", "inside", "replaced", "free"),
    [(900, 100, 50, 150), (40, 100, 50, 70), (10, 100, 0, 0), (900, 0, 0, 0)],
)
def test_space_for_a_copy_in_the_overlay(cluster: Cluster, there: int, inside: int, replaced: int, free: int) -> None:
    """The copy is inside the image; beside it is room for another one, which has 20 bytes."""
    figures = {"Free blocks": inside, "Reserved block count": 0, "Block count": 200, "Block size": 1}
    host = Fake(
        {
            LIST: lists([]),
            ("readlink",): (0, "/mirror/lab.img"),
            ("test", "-L"): (1, ""),
            ("test",): (0, ""),
            ("df",): lambda argv, _: (0, f"1B-blocks Avail\n900 {there}") if argv[-1] == "/mirror" else (1, ""),
            ("losetup",): (0, ""),
            ("dumpe2fs",): (0, "".join(f"{name}: {number}\n" for name, number in figures.items())),
            ("stat",): (0, "200 20 1"),
            ("find",): (0, ""),
            ("mkdir",): (0, ""),
            ("unshare",): (0, json.dumps({"bytes": replaced})),
        }
    )
    owner = ContainerOwner(cluster, host, ("/a",))
    owner._image = Image("/i.sif", "key", "0" * 64, "")
    assert owner.free_bytes() == free


def test_free_bytes_of_an_image(tmp_path: Path) -> None:
    path = tmp_path / "x.img"
    with path.open("wb") as stream:
        stream.truncate(16 << 20)
    with pytest.raises(SmsError, match="is not an ext3 file system"):
        ext3.free_bytes(Local("here"), str(path))
    subprocess.run(["mke2fs", "-q", "-t", "ext3", "-m", "0", path], check=True)
    empty = ext3.free_bytes(Local("here"), str(path))
    subprocess.run(["mke2fs", "-q", "-t", "ext3", "-m", "10", path], check=True)
    assert 8 << 20 < ext3.free_bytes(Local("here"), str(path)) < empty < 16 << 20


def move_on(cluster: Cluster, host: WithKubectl) -> KubernetesOwner:
    """Return Kubernetes for one run of a move."""
    return KubernetesOwner(cluster, host, (STATE,))


@pytest.fixture
def host(cluster: Cluster) -> WithKubectl:
    """A host whose `kubectl` has a cluster with the namespace; no task has the state."""
    found = WithKubectl(cluster.site.admin_hosts[0].name)
    found.objects["namespace", "lab"] = {}
    found.prints[LEASE] = StateLease(1).text().decode()
    return found


def test_each_move_has_a_pod_of_its_own(cluster: Cluster, host: WithKubectl, tmp_path: Path) -> None:
    """The checks delete none of another run; a run that goes on deletes those that are left."""
    cluster = on_kubernetes(cluster, tmp_path)
    one, other = move_on(cluster, host), move_on(cluster, host)
    assert one.pod != other.pod
    for each in (one, other):
        each.inside(("true",), state=False)
    assert host.objects.keys() >= {("pod", one.pod), ("pod", other.pod)}
    assert host.deleted == [one.pod, other.pod]
    one.stop()
    assert host.deleted[2:] == [other.pod]


@pytest.mark.parametrize("namespace", [True, False])
def test_checks_create_only_a_pod(cluster: Cluster, host: WithKubectl, tmp_path: Path, *, namespace: bool) -> None:
    """Neither namespace nor volumes nor secrets; where there is no namespace, not even that."""
    if not namespace:
        del host.objects["namespace", "lab"]
    one = move_on(on_kubernetes(cluster, tmp_path), host)
    one.check()
    assert bool(one.lacks()) != namespace
    assert host.applied == ["Pod"] * namespace
    one.open()
    assert sorted(host.applied) == ["Namespace", "Pod"]
    host.applied.clear()
    one.prepare()
    assert host.applied == ["Namespace", "Secret", "PersistentVolumeClaim", "Pod"]


def test_a_source_without_its_volumes_is_refused(cluster: Cluster, host: WithKubectl, tmp_path: Path) -> None:
    """And none is created in their place, in which there is no state."""
    cluster = on_kubernetes(cluster, tmp_path)
    with pytest.raises(Refused, match="the claim state-slurmctld-0 is missing"):
        move_on(cluster, host).survey()
    move_on(cluster, host).discard()
    assert host.applied == []
    host.objects["persistentvolumeclaim", "state-slurmctld-0"] = {"metadata": {"name": "state-slurmctld-0"}}
    move_on(cluster, host).discard()
    assert host.applied == ["Pod"]


@pytest.mark.parametrize(
    ("runs", "services", "healthy"), [(False, (), True), (True, ("nat",), True), (True, ("nat", "slurmctld"), False)]
)
def test_services_that_run_twice_are_not_healthy(*, runs: bool, services: tuple[str, ...], healthy: bool) -> None:
    engine = MagicMock(healthy=True, record=MagicMock(services=("slurmctld", "munge")))
    answers = [SimpleNamespace(name=name, ok=True) for name in services]
    assert Shown(MagicMock(healthy=True, running=runs, services=answers), engine).healthy == healthy


def test_the_record() -> None:
    record = StateMove("lab", COPYING, "container", "nomad", 5.0, 7)
    assert read_state_move(to_json(record), "lab") == record and not record.ended
    assert record.at(DONE, files=3).ended
    assert read_state_move(None, "lab") is None
    with pytest.raises(SmsError, match="is invalid"):
        read_state_move(b"{", "lab")
    with pytest.raises(SmsError, match="belongs to cluster lab"):
        read_state_move(to_json(record), "other")


BACK = StateMove("lab", STARTING, "nomad", "container", 5.0, 8)
THERE = StateMove("lab", STOPPING, "container", "nomad", 5.0)


@pytest.mark.parametrize(
    ("last", "generation", "holder", "text"),
    [
        (None, 8, None, ""),
        (BACK, 8, None, r"from nomad was interrupted after its copy; `sms migrate --to container` goes on$"),
        (BACK.at(DONE), 8, None, ""),
        (BACK, 9, None, ""),
        (BACK.at(COPYING, generation=0), 7, f"{ENGINE}nomad", r"\(copying\); .*--to nomad` starts them there$"),
        (BACK.at(COPYING, generation=0), 7, "host-b", ""),
        (THERE, 7, "host-a", r"\(stopping\); `sms migrate --to nomad` goes on, `sms start` starts them here$"),
        (THERE.at(STARTING, generation=8), 8, f"{ENGINE}nomad", ""),
        (THERE, 9, "host-b", ""),
    ],
)
def test_what_an_interrupted_move_left(last: StateMove | None, generation: int, holder: str | None, text: str) -> None:
    found = describe_interrupted(last, Lease("lab", generation, holder), "host-a")
    assert re.search(text, found) if text else not found
