"""A snapshot that was restored while nobody holds the lease is the newest overlay, on whatever host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.errors import Refused
from appliance.operations.lease import check_lease, query_lease, raise_lease, release_lease
from appliance.operations.overlay import generation, newest
from appliance.operations.overlay.generation import mark_overlay, query_overlay, refuse_older
from appliance.operations.services import unfinished
from appliance.operations.snapshots import restore as restoring
from appliance.operations.snapshots.restore import restore, restore_own
from appliance.plan.migration.lease import find_newer, find_released, refuse_unknown_taker
from appliance.plan.upgrade.upgrade import RETURNING
from appliance.progress import Silent
from tests.pairs import Pair


class Notes(Silent):
    """Collects the lines that stay."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def report(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Two hosts; host-a served last. The snapshot is older than its overlay, and host-b has none."""
    made = Pair(tmp_path, shared=False)
    for _ in range(2):
        use(made, "host-a")

    @contextmanager
    def keep_stopped(cluster: Any, host: Any, **_: Any) -> Iterator[Any]:
        yield check_lease(host, cluster)

    def put(cluster: Any, host: Any, *_: Any) -> tuple[int, float]:
        overlay(made, host.name).write_bytes(b"restored")
        return 8, 0.0

    chosen = {"number": 1, "generation": 1, "used_bytes": 8, "uuid": "", "image": {}}
    monkeypatch.setattr(generation, "SETTLE_S", 0)
    monkeypatch.setattr(newest, "Leases", lambda host, cluster, tolerant: made.leases(host.name, query=False))
    monkeypatch.setattr(restoring, "keep_stopped", keep_stopped)
    monkeypatch.setattr(restoring, "_request_restore", put)
    monkeypatch.setattr(restoring, "_keep_overlay", lambda *_: None)
    monkeypatch.setattr(restoring, "check_programs", lambda host: None)
    monkeypatch.setattr(restoring, "list_snapshots", lambda cluster, host: SimpleNamespace())
    monkeypatch.setattr(restoring, "find_snapshot", lambda found, selector: chosen)
    monkeypatch.setattr(restoring, "other_image", lambda *_: False)
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
    restore(pair.cluster, pair.hosts[restored_on], "1", Silent())
    assert (may_start(pair, restored_on), may_start(pair, other)) == (True, False)
    pair.hosts[restored_on].cut = True
    assert not may_start(pair, other), "also if the other host cannot be reached"
    pair.hosts[restored_on].cut = False
    use(pair, restored_on)
    assert (may_start(pair, restored_on), may_start(pair, other)) == (True, False)


def test_it_says_whose_overlay_is_outdated_then(pair: Pair) -> None:
    notes = Notes()
    restore(pair.cluster, pair.hosts["host-b"], "1", notes)
    assert [line for line in notes.lines if "overlay of host-a counts as older" in line]
    notes = Notes()
    pair.hosts["host-a"].cut = True
    restore(pair.cluster, pair.hosts["host-b"], "1", notes)
    assert [line for line in notes.lines if "host-a does not answer" in line]


@pytest.mark.parametrize("by", ["host-a", "host-b"])
def test_a_shared_overlay_makes_no_other_one_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
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
    restore(pair.cluster, pair.hosts["host-b"], "1", Silent())
    assert query_overlay(pair.cluster, pair.hosts["host-b"]).generation < serving
    pair.release("host-a")
    assert (may_start(pair, "host-a"), may_start(pair, "host-b")) == (True, False)


def test_a_start_elsewhere_during_the_restore_goes_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(*_: Any) -> tuple[int, float]:
        overlay(pair, "host-b").write_bytes(b"restored")
        mark_overlay(pair.cluster, pair.hosts["host-a"], pair.take("host-a"))
        return 8, 0.0

    monkeypatch.setattr(restoring, "_request_restore", put)
    with pytest.raises(Refused):
        restore(pair.cluster, pair.hosts["host-b"], "1", Silent())
    assert pair.files()["host-a"][0] == "host-a"
    pair.release("host-a")
    assert (may_start(pair, "host-a"), may_start(pair, "host-b")) == (True, False)


def test_killed_before_the_end_the_overlay_that_was_used_last_is_started(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(*_: Any) -> tuple[int, float]:
        raise KeyboardInterrupt

    monkeypatch.setattr(restoring, "_request_restore", put)
    with pytest.raises(KeyboardInterrupt):
        restore(pair.cluster, pair.hosts["host-b"], "1", Silent())
    assert (may_start(pair, "host-a"), may_start(pair, "host-b")) == (True, False)


@pytest.mark.parametrize("how", ["pull", "restore", "restore, not reachable"])
def test_a_snapshot_of_the_host_that_took_over_makes_nothing_newer_than_what_that_one_serves(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, how: str
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
        chosen = {"number": 1, "generation": serving, "used_bytes": 8, "uuid": "", "image": {}}
        monkeypatch.setattr(restoring, "find_snapshot", lambda found, selector: chosen)
        restore(pair.cluster, a, "1", Silent())
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
    pair: Pair, monkeypatch: pytest.MonkeyPatch, *, known: bool
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
    upgrade: Any = SimpleNamespace(
        kept=1, phase=RETURNING, ended=False, at=lambda phase: upgrade, before=SimpleNamespace(), after=None
    )
    monkeypatch.setattr(unfinished, "Leases", lambda host, cluster, tolerant: pair.leases(host.name, query=False))
    monkeypatch.setattr(unfinished, "read_last_upgrade", lambda cluster, host: upgrade)
    monkeypatch.setattr(unfinished, "find_instance", lambda cluster, host: None)
    before = overlay(pair, "host-a").read_bytes()
    with pytest.raises(Refused):
        unfinished.image_of_unfinished(pair.cluster, a, Silent())
    assert overlay(pair, "host-a").read_bytes() == before
    assert (may_start(pair, "host-a"), may_start(pair, "host-b")) == (False, True)


def test_a_snapshot_of_its_own_past_is_as_old_as_what_it_replaces(pair: Pair) -> None:
    use(pair, "host-b")
    before = query_overlay(pair.cluster, pair.hosts["host-a"]).generation
    files = pair.files()
    restore_own(pair.cluster, pair.hosts["host-a"], "1", Silent())
    assert overlay(pair, "host-a").read_bytes() == b"restored"
    assert query_overlay(pair.cluster, pair.hosts["host-a"]).generation == before
    assert pair.files() == files and not may_start(pair, "host-a")
