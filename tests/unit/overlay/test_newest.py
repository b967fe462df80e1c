"""A snapshot that was restored while nobody holds the lease is the newest overlay, on whatever host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.env import Locks
from appliance.operations.lease import query_lease, raise_lease, release_lease
from appliance.operations.overlay import newest
from appliance.operations.overlay.generation import mark_overlay, query_overlay, refuse_older
from appliance.operations.services.unfinished import image_of_unfinished, write_phase
from appliance.operations.snapshots.restore import restore, restore_own
from appliance.plan.migration.lease import find_newer, find_released, refuse_unknown_taker
from appliance.plan.upgrade.upgrade import RETURNING, Side, Upgrade
from tests.pairs import HostInFolder, Pair
from tests.support.env import Answer, FakeAgents, Reports, with_env
from tests.unit.overlay.admin_host import NONE, echo, manifest


@pytest.fixture
def agent() -> dict[str, Answer]:
    """What the agents answer, by command; snapshots are made and restored here."""

    def put(host: Host, request: dict[str, Any]) -> dict[str, Any]:
        assert isinstance(host, HostInFolder)
        Path(host.path(request["target"])).write_bytes(b"restored")
        return {"bytes": 8, "seconds": 0.0}

    return {"list": lambda host, request: listed(1), "take": lambda host, request: echo(request), "restore": put}


def listed(generation: int) -> dict[str, Any]:
    chosen = manifest(1, generation=generation, used_bytes=8, image={})
    return {**NONE, "snapshots": [chosen]}


@pytest.fixture
def pair(tmp_path: Path, agent: dict[str, Answer]) -> Pair:
    """Two hosts; host-a served last. The snapshot is older than its overlay, and host-b has none."""
    made = Pair(tmp_path, shared=False, agents=FakeAgents(answers=agent))
    for _ in range(2):
        use(made, "host-a")
    return made


def overlay(pair: Pair, name: str) -> Path:
    path = pair.hosts[name].folder / "overlays" / pair.cluster.places.overlay.name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def use(pair: Pair, name: str) -> None:
    """Start there and stop again, as far as overlay, mark and lease."""
    taken = pair.take(name)
    overlay(pair, name).write_bytes(b"used")
    mark_overlay(pair.cluster, pair.hosts[name], taken)
    release_lease(pair.hosts[name], pair.cluster, leases=pair.leases(name))


def may_start(pair: Pair, name: str) -> bool:
    try:
        refuse_older(pair.cluster, pair.hosts[name], pair.leases(name), set_aside=False)
    except Refused:
        return False
    return True


@pytest.mark.parametrize(("restored_on", "other"), [("host-a", "host-b"), ("host-b", "host-a")])
def test_the_restored_one_is_started_and_no_other(pair: Pair, restored_on: str, other: str) -> None:
    restore(pair.cluster, pair.hosts[restored_on], "1")
    assert (may_start(pair, restored_on), may_start(pair, other)) == (True, False)
    pair.hosts[restored_on].cut = True
    assert not may_start(pair, other), "also if the other host cannot be reached"
    pair.hosts[restored_on].cut = False
    use(pair, restored_on)
    assert (may_start(pair, restored_on), may_start(pair, other)) == (True, False)


def test_it_says_whose_overlay_is_outdated_then(pair: Pair) -> None:
    notes = Reports()
    restore(pair.cluster.showing(notes), pair.hosts["host-b"], "1")
    assert [line for line in notes.lines if "overlay of host-a counts as older" in line]
    notes = Reports()
    pair.hosts["host-a"].cut = True
    restore(pair.cluster.showing(notes), pair.hosts["host-b"], "1")
    assert [line for line in notes.lines if "host-a does not answer" in line]


@pytest.mark.parametrize("by", ["host-a", "host-b"])
def test_a_shared_overlay_makes_no_other_one_older(tmp_path: Path, by: str) -> None:
    pair = Pair(tmp_path / "one", shared=True)
    use(pair, by)
    pair.hosts["host-b"].folder.mkdir(exist_ok=True)
    assert newest.outdated_by_restore(pair.cluster, pair.leases("host-b")) == []
    apart = Pair(tmp_path / "two", shared=False)
    use(apart, "host-a")
    assert len(newest.outdated_by_restore(apart.cluster, apart.leases("host-b"))) == 1


def test_while_another_host_serves_it_is_older_than_that_one(pair: Pair) -> None:
    """Also where the own lease file does not show that."""
    pair.hosts["host-b"].cut = True
    serving = pair.take("host-a")
    mark_overlay(pair.cluster, pair.hosts["host-a"], serving)
    pair.hosts["host-b"].cut = False
    assert query_lease(pair.hosts["host-b"], pair.cluster).holder is None
    restore(pair.cluster, pair.hosts["host-b"], "1")
    assert query_overlay(pair.cluster, pair.hosts["host-b"]).generation < serving
    pair.release("host-a")
    assert (may_start(pair, "host-a"), may_start(pair, "host-b")) == (True, False)


class NoLocks(Locks):
    """Locks that hold nobody back."""

    @contextmanager
    def hold(self, host: Host, path: str, what: str) -> Iterator[None]:
        yield


def test_a_start_elsewhere_during_the_restore_goes_on(pair: Pair, agent: dict[str, Answer]) -> None:
    """It writes the lease file of the host of the restore, too."""
    pair.cluster = with_env(pair.cluster, locks=NoLocks())

    def put(*_: Any) -> dict[str, Any]:
        overlay(pair, "host-b").write_bytes(b"restored")
        mark_overlay(pair.cluster, pair.hosts["host-a"], pair.take("host-a"))
        return {"bytes": 8, "seconds": 0.0}

    agent["restore"] = put
    with pytest.raises(Refused):
        restore(pair.cluster, pair.hosts["host-b"], "1")
    assert pair.files()["host-a"][0] == "host-a"
    pair.release("host-a")
    assert (may_start(pair, "host-a"), may_start(pair, "host-b")) == (True, False)


def test_killed_before_the_end_the_overlay_that_was_used_last_is_started(pair: Pair, agent: dict[str, Answer]) -> None:
    def put(*_: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    agent["restore"] = put
    with pytest.raises(KeyboardInterrupt):
        restore(pair.cluster, pair.hosts["host-b"], "1")
    assert (may_start(pair, "host-a"), may_start(pair, "host-b")) == (True, False)


@pytest.mark.parametrize("how", ["pull", "restore", "restore, not reachable"])
def test_a_snapshot_of_the_host_that_took_over_makes_nothing_newer_than_what_that_one_serves(
    pair: Pair, agent: dict[str, Answer], how: str
) -> None:
    """The own file of host-a does not show yet that host-b took over: it was off then."""
    a, b = pair.hosts["host-a"], pair.hosts["host-b"]
    a.cut = True
    serving = pair.leases("host-b", without=("host-a",)).take(generation_bump=1000).generation
    overlay(pair, "host-b").write_bytes(b"served by b")
    mark_overlay(pair.cluster, b, serving)
    a.cut = False
    if how == "pull":
        raise_lease(a, pair.cluster, serving)
    else:
        b.cut = how != "restore"
        agent["list"] = lambda host, request: listed(serving)
        restore(pair.cluster, a, "1")
        if b.cut:
            views = pair.leases("host-a").views
            with pytest.raises(Refused):
                refuse_unknown_taker(views)
        b.cut = False
    for name in pair.hosts:
        pair.leases("host-b").publish(query_lease(b, pair.cluster), names=[name])
    views = pair.leases("host-b").views
    assert (find_newer("host-b", views), find_released("host-b", views)) == (None, None)
    assert find_newer("host-a", pair.leases("host-a").views)
    pair.release("host-b")
    assert (may_start(pair, "host-a"), may_start(pair, "host-b")) == (False, True)


def test_a_holder_that_was_superseded_pulls_no_snapshot_of_the_host_that_took_over(pair: Pair) -> None:
    a = pair.hosts["host-a"]
    pair.take("host-a")
    a.cut = True
    serving = pair.leases("host-b", without=("host-a",)).take(generation_bump=1000).generation
    a.cut = False
    with pytest.raises(Refused):
        raise_lease(a, pair.cluster, serving)
    assert find_newer("host-b", pair.leases("host-b").views) is None
    assert find_newer("host-a", pair.leases("host-a").views)


@pytest.mark.parametrize("known", [False, True])
def test_the_rollback_of_an_upgrade_makes_no_overlay_newer_than_one_that_was_used_since(
    pair: Pair, *, known: bool
) -> None:
    """It was interrupted on host-a; host-b took over, served and was stopped. ``known``: host-a has its lease."""
    a, b = pair.hosts["host-a"], pair.hosts["host-b"]
    pair.take("host-a")
    a.cut = True
    serving = pair.leases("host-b", without=("host-a",)).take(generation_bump=1000).generation
    overlay(pair, "host-b").write_bytes(b"served by b")
    mark_overlay(pair.cluster, b, serving)
    a.cut = not known
    pair.release("host-b")
    a.cut = False
    before, after = Side("/i/old.sif", "old", "aa"), Side("/i/new.sif", "new", "bb")
    write_phase(pair.cluster, a, Upgrade(pair.cluster.site.cluster, RETURNING, before, after, 100.0, kept=1))
    data = overlay(pair, "host-a").read_bytes()
    with pytest.raises(Refused):
        image_of_unfinished(pair.cluster, a)
    assert overlay(pair, "host-a").read_bytes() == data
    assert (may_start(pair, "host-a"), may_start(pair, "host-b")) == (False, True)


def test_a_snapshot_of_its_own_past_is_as_old_as_what_it_replaces(pair: Pair) -> None:
    use(pair, "host-b")
    before = query_overlay(pair.cluster, pair.hosts["host-a"]).generation
    files = pair.files()
    restore_own(pair.cluster, pair.hosts["host-a"], "1")
    assert overlay(pair, "host-a").read_bytes() == b"restored"
    assert query_overlay(pair.cluster, pair.hosts["host-a"]).generation == before
    assert pair.files() == files and not may_start(pair, "host-a")
