"""A move of the state: which versions can read it, whose it is, whether a copy is complete, its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import Refused, SmsError
from appliance.operations.engines.move import refuse_left
from appliance.plan.migration.state import (
    COPYING,
    DONE,
    MovePlan,
    StateMove,
    Tree,
    Versions,
    check_identity,
    compare_trees,
    left_behind,
    moved_paths,
    read_state_move,
    read_tree,
    read_versions,
    refuse_newer,
    release_of,
    state_version,
)
from appliance.shared.records import to_json
from tests.unit.engines.cases import ONE, make_input

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
    """State in /etc and what may be lost is made again; what only the container runs stays."""
    given = make_input(tmp_path, "debian-12", ONE)
    assert moved_paths(given.services) == ("/var/lib/mysql", "/var/lib/mysql-dump", "/var/spool/slurmctld")
    assert list(left_behind(given.services, {"slurmctld", "munge", "slurmdbd", "mariadb"})) == ["nat"]


def test_services_that_would_stop() -> None:
    plan = MovePlan("container", "nomad", (), 0, 0, -1, "", "", {"nat": "it routes"}, 30.0)
    with pytest.raises(Refused, match="nat would stop"):
        refuse_left(plan, force=False)
    refuse_left(plan, force=True)


def test_the_record() -> None:
    record = StateMove("lab", COPYING, "container", "nomad", 5.0, 7)
    assert read_state_move(to_json(record), "lab") == record and not record.ended
    assert record.at(DONE, files=3).ended
    assert read_state_move(None, "lab") is None
    with pytest.raises(SmsError, match="is invalid"):
        read_state_move(b"{", "lab")
    with pytest.raises(SmsError, match="belongs to cluster lab"):
        read_state_move(to_json(record), "other")
