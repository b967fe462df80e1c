"""Which host has the newest overlay: every start compares the marks of all hosts and their leases."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import Refused, SmsError
from appliance.operations import lease as lease_file
from appliance.operations.overlay import create, generation
from appliance.operations.overlay.generation import (
    find_lost,
    mark_overlay,
    query_overlay,
    refuse_older,
    refuse_second,
    retire_overlay,
    set_aside_older,
)
from appliance.operations.services import start
from appliance.operations.start_note import start_note_path
from appliance.plan.migration.lease import View
from appliance.plan.overlay.generation import Newer, OverlayState, find_newer_overlay, read_mark, refusal
from appliance.progress import Silent
from appliance.shared.lease import Lease
from appliance.shared.overlay import mark_path
from appliance.tools.apptainer import Instance
from tests.pairs import STATE, HostInFolder, Pair
from tests.support.env import FakeHosts, Reports, with_env
from tests.unit.migration.test_lease_files import make_guard

NONE = OverlayState(False)
HAD = OverlayState(False, 5, had=True)
OFF = None


def at(generation: int) -> OverlayState:
    return OverlayState(True, generation, had=bool(generation))


def lease(generation: int, *, holder: str | None = None, last: str = "", file: str = "a") -> Lease:
    return Lease("lab", generation, holder, 1.0, file, last)


A, B = "a", "b"
CASES: list[tuple[str, OverlayState, OverlayState | None, Lease, Lease | None, Newer | None]] = [
    ("nothing has ever run", NONE, NONE, lease(0, file=""), lease(0, file=""), None),
    ("nothing has ever run, and the other is off", NONE, OFF, lease(0, file=""), OFF, None),
    ("its own, released", at(5), NONE, lease(5, last=A), lease(5, last=A), None),
    ("its own, the other is off", at(5), OFF, lease(5, last=A), OFF, None),
    ("stopped there, never here", NONE, at(5), lease(5, last=B), lease(5, last=B), Newer(B, 5)),
    ("used there by an older version", NONE, at(0), lease(5), lease(5), Newer(B, 0)),
    ("a stale one, and the guard has written the lease", at(1), at(1002), lease(1002, holder=B), OFF, Newer(B, 1002)),
    (
        "a stale one, the lease here is as stale",
        at(1),
        at(1002),
        lease(1, holder=A),
        lease(1002, last=B),
        Newer(B, 1002),
    ),
    ("a stale one, the newer host is off", at(1), OFF, lease(1002, last=B), OFF, Newer(B, 1002, reachable=False)),
    ("a stale one, the newer is lost", at(1), HAD, lease(1002, last=B), lease(1002, last=B), Newer(B, 1002, lost=True)),
    ("killed between lease and mark", at(5), NONE, lease(6, holder=A), lease(6, holder=A), None),
    ("its start failed before the mark", at(5), at(5), lease(6, last=A), lease(6, last=A), None),
    ("the other's start failed before the mark", at(5), at(5), lease(6, last=B), lease(6, last=B), Newer(B, 6)),
    ("restored here, by somebody's decision", at(5), at(5), lease(5, last=B), lease(5, last=B), None),
    ("shared", at(5), at(5), lease(6, holder=B, file=B), lease(6, holder=B, file=B), None),
    ("deleted here", HAD, NONE, lease(5, last=A), lease(5, last=A), Newer(A, 5, lost=True)),
    ("deleted there", NONE, HAD, lease(5, last=B), lease(5, last=B), Newer(B, 5, lost=True)),
    ("none was made by a start that failed", NONE, NONE, lease(1, last=A), lease(1, last=A), None),
    ("none was made by the other's start", NONE, NONE, lease(1, last=B), lease(1, last=B), None),
    ("of a host that was removed", at(1), NONE, lease(5, last="c"), lease(5, last="c"), Newer("c", 5, lost=True)),
    ("the same, without one here", NONE, NONE, lease(5, last="c"), lease(5, last="c"), Newer("c", 5, lost=True)),
    ("released by an older version, after a failed start", at(5), at(3), lease(6), lease(6), None),
    ("the same, and the other is off", at(5), OFF, lease(6), OFF, Newer("", 6, reachable=False)),
    ("all leases are lost", at(7), at(5), lease(0, file=""), lease(0, file=""), None),
    ("all leases are lost, and that of b is newer", at(5), at(7), lease(0, file=""), lease(0, file=""), Newer(B, 7)),
]


@pytest.mark.parametrize(("mine", "theirs", "own", "other", "found"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_find_newer_overlay(
    mine: OverlayState, theirs: OverlayState | None, own: Lease, other: Lease | None, found: Newer | None
) -> None:
    assert find_newer_overlay(A, {A: mine, B: theirs}, {A: own, B: other}) == found


@pytest.mark.parametrize(
    ("newer", "words", "hint"),
    [
        (Newer(B, 7), r"a has no overlay: the newest one is on b \(generation 7\)", "sms start --host b"),
        (Newer(B, 7, reachable=False), "is on b .*cannot be reached", "sms failover a"),
        (Newer("", 7, reachable=False), "is on another host", "sms failover a"),
        (Newer(B, 7, lost=True), "that of b, is gone", "sms overlay restore latest --host a"),
    ],
)
def test_refusals_name_the_newest(newer: Newer, words: str, hint: str) -> None:
    error = refusal("a", newer, exists=False)
    assert hint in error.hint and error.status == 3
    with pytest.raises(Refused, match=words):
        raise error


@pytest.mark.parametrize("data", [b"", b"{", b'{"cluster": "other", "generation": 1}', b'{"cluster": "lab"}'])
def test_an_unreadable_mark_is_an_error(data: bytes) -> None:
    with pytest.raises(SmsError):
        read_mark(data, "lab")


@pytest.fixture
def apart(tmp_path: Path) -> Pair:
    return Pair(tmp_path, shared=False)


def overlay(pair: Pair, name: str) -> Path:
    path = pair.hosts[name].folder / "overlays" / pair.cluster.places.overlay.name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def use(pair: Pair, name: str, *, mark: bool = True) -> None:
    """Start there and stop again, as far as overlay, mark and lease."""
    taken = pair.take(name)
    overlay(pair, name).write_bytes(b"x")
    if mark:
        mark_overlay(pair.cluster, pair.hosts[name], taken)
    pair.release(name)


def check(pair: Pair, name: str, **options: Any) -> int:
    return refuse_older(pair.cluster, pair.hosts[name], pair.leases(name), **options)


def test_a_host_without_an_overlay_is_refused_while_another_has_one(apart: Pair) -> None:
    use(apart, "host-b")
    with pytest.raises(Refused, match="host-a has no overlay: the newest one is on host-b") as caught:
        check(apart, "host-a")
    assert "sms start --host host-b" in caught.value.hint
    with pytest.raises(Refused, match="the newest one is on host-b"):
        refuse_second_of(apart, "host-a")
    assert check(apart, "host-b") == 1


def refuse_second_of(pair: Pair, name: str) -> int:
    return refuse_second(pair.cluster, pair.hosts[name])


def test_the_first_overlay_of_a_site_is_created(apart: Pair) -> None:
    assert check(apart, "host-a") == 0 and refuse_second_of(apart, "host-a") == 0


def test_an_overlay_that_is_gone_is_not_replaced_in_silence(apart: Pair) -> None:
    use(apart, "host-a")
    overlay(apart, "host-a").unlink()
    with pytest.raises(Refused, match="that of host-a, is gone") as caught:
        check(apart, "host-a")
    assert "sms overlay create --host host-a" in caught.value.hint
    assert refuse_second_of(apart, "host-a") == 1


def test_create_leads_on_where_the_newest_is_gone_and_an_older_one_has_no_mark(
    apart: Pair,
) -> None:
    """A first start on host-b was killed before it marked its new overlay, then one on host-a before it had one."""
    use(apart, "host-b", mark=False)
    apart.take("host-a")
    apart.release("host-a")
    with pytest.raises(Refused, match="out of date, and the newest one, that of host-a, is gone") as caught:
        check(apart, "host-b")
    assert "sms overlay create --host host-b" in caught.value.hint
    assert find_lost(apart.cluster, apart.hosts["host-b"])
    kept = create._set_aside(apart.cluster, apart.hosts["host-b"])
    assert kept.endswith(".past-2") and not overlay(apart, "host-b").exists()
    generation.mark_overlay(apart.cluster, apart.hosts["host-b"], refuse_second(apart.cluster, apart.hosts["host-b"]))
    overlay(apart, "host-b").write_bytes(b"new")
    assert check(apart, "host-b") == 2
    assert find_lost(apart.cluster, apart.hosts["host-b"]) is None


def test_a_stale_overlay_is_set_aside_whoever_wrote_the_lease(apart: Pair) -> None:
    """A failover to host-b while host-a was off: the guard there then writes the lease of host-a."""
    old = apart.leases("host-b")
    apart.take("host-a")
    overlay(apart, "host-a").write_bytes(b"stale")
    mark_overlay(apart.cluster, apart.hosts["host-a"], 1)
    apart.hosts["host-a"].cut = True
    newer = apart.leases("host-b", without=("host-a",)).take(generation_bump=1000)
    overlay(apart, "host-b").write_bytes(b"new")
    mark_overlay(apart.cluster, apart.hosts["host-b"], newer.generation)
    apart.hosts["host-a"].cut = False
    old.query()
    old.publish(newer)
    assert apart.files()["host-a"] == ("host-b", 1001, "host-a")
    host = apart.hosts["host-a"]
    assert not start._is_still_held(apart.cluster, host)
    assert not overlay(apart, "host-a").exists()
    assert overlay(apart, "host-a").with_name(f"{overlay(apart, 'host-a').name}.past-1001").read_bytes() == b"stale"
    apart.release("host-b")
    with pytest.raises(Refused, match="host-a has no overlay: the newest one is on host-b"):
        check(apart, "host-a")


@pytest.mark.parametrize("set_aside", [True, False])
def test_a_start_sets_it_aside_and_a_dry_run_does_not(apart: Pair, set_aside: bool) -> None:
    use(apart, "host-a")
    use(apart, "host-b")
    with pytest.raises(Refused, match="the overlay of host-a is out of date") as caught:
        check(apart, "host-a", set_aside=set_aside)
    assert overlay(apart, "host-a").exists() is not set_aside
    assert ("renamed to" in caught.value.message) is set_aside


def test_the_guard_sets_it_aside_as_well(apart: Pair) -> None:
    use(apart, "host-a")
    newer = apart.leases("host-b").take()
    lines: list[str] = []
    guard = make_guard(apart, "host-a", lines)
    guard.read_own = lambda: guard.query("host-a")  # type: ignore[method-assign]
    for name in ("host-a", "host-b"):
        guard.query(name)
    found = guard.newer()
    assert found and (found.holder, found.generation) == ("host-b", newer.generation)
    assert guard.check() is None
    assert not overlay(apart, "host-a").exists() and "was renamed to" in lines[-1]


def test_a_shared_overlay_is_never_set_aside(tmp_path: Path) -> None:
    pair = Pair(tmp_path, shared=True)
    use(pair, "host-a")
    pair.take("host-b")
    assert set_aside_older(pair.cluster, pair.hosts["host-a"]) == "" and overlay(pair, "host-a").exists()
    pair.release("host-b")
    assert check(pair, "host-a") == 1


def note_start(pair: Pair, name: str, generation: int) -> None:
    facts = {"image": "/i", "key": "k", "sha256": "5" * 64, "signer": "us", "host": name, "started": 1.0}
    text = json.dumps({**facts, "generation": generation}, indent=1)
    pair.hosts[name].write(start_note_path(pair.cluster), text.encode())


def test_state_of_the_version_before_marks(apart: Pair) -> None:
    """519381b wrote no mark: the start note has the generation."""
    for name, started in (("host-a", 1), ("host-b", 1002)):
        overlay(apart, name).write_bytes(b"x")
        note_start(apart, name, started)
        held = {"cluster": "sample", "generation": 1002, "holder": None, "since": 1.0, "file": name}
        apart.hosts[name].write(str(apart.cluster.places.lease), json.dumps(held).encode())
    assert query_overlay(apart.cluster, apart.hosts["host-a"]) == OverlayState(True, 1)
    with pytest.raises(Refused, match=r"the newest one is on host-b \(generation 1002\)"):
        check(apart, "host-a")
    assert check(apart, "host-b") == 1002


def test_an_unreadable_mark_stops_a_start(apart: Pair) -> None:
    use(apart, "host-a")
    Path(mark_path(str(overlay(apart, "host-a")))).write_bytes(b"")
    with pytest.raises(SmsError, match=r"host-a: .*\.generation: it cannot be read"):
        check(apart, "host-a")
    with pytest.raises(SmsError, match=r"host-a: .*\.generation: it cannot be read"):
        check(apart, "host-b")  # which has no overlay: the other may be the only one


@pytest.mark.parametrize("kind", ["mark", "lease", "lease of another cluster"])
def test_an_invalid_file_of_another_host_does_not_stop_the_holder(apart: Pair, kind: str) -> None:
    use(apart, "host-b")
    use(apart, "host-a")
    apart.take("host-a")
    path = mark_path(str(overlay(apart, "host-b"))) if kind == "mark" else lease_path(apart, "host-b")
    Path(path).write_bytes(Lease("other", 7).text() if "another" in kind else b"")
    host, reports = apart.hosts["host-a"], Reports()
    assert start._is_still_held(apart.cluster.showing(reports), host)
    leases = lease_file.Leases(host, apart.cluster, tolerant=True)
    leases.query()
    with ExitStack() as undo:
        assert start._take_lease(host, leases, reports, undo, start.StartOptions()).generation == 4
        undo.pop_all()
    unread = [line for line in reports.lines if "UUID" not in line]
    assert len(unread) == 1 and unread[0].startswith("note: host-b counts as unreachable: host-b: ")
    if kind != "mark":
        assert Path(path).read_bytes() in (b"", Lease("other", 7).text()), "it is not replaced"


def test_a_newer_overlay_is_seen_although_the_lease_beside_it_is_damaged(apart: Pair) -> None:
    """Host-b has taken over and was stopped; host-a's own file still names it as the holder."""
    use(apart, "host-a")
    before = Path(lease_path(apart, "host-a")).read_bytes()
    apart.release("host-a")
    use(apart, "host-b")
    Path(lease_path(apart, "host-a")).write_bytes(before)
    Path(lease_path(apart, "host-b")).write_bytes(b"{")
    leases = apart.leases("host-a", query=False)
    leases.tolerant = True
    leases.query()
    with ExitStack() as undo, pytest.raises(Refused, match="host-b"):
        start._take_lease(apart.hosts["host-a"], leases, Silent(), undo, start.StartOptions(boot=True))
    undo.pop_all()


def test_a_host_that_boots_after_the_one_that_took_over_was_stopped_gives_way(apart: Pair) -> None:
    """Its own lease file still names it as the holder, which would refuse the start of the newest overlay."""
    overlay(apart, "host-a").write_bytes(b"old")
    mark_overlay(apart.cluster, apart.hosts["host-a"], apart.take("host-a"))
    before = Path(lease_path(apart, "host-a")).read_bytes()
    apart.release("host-a")
    use(apart, "host-b")
    Path(lease_path(apart, "host-a")).write_bytes(before)
    with pytest.raises(Refused, match="host-a holds the lease"):
        apart.leases("host-b").check()
    reports = Reports()
    assert start._is_still_held(apart.cluster.showing(reports), apart.hosts["host-a"]) is False
    assert "host-b had taken over (generation 2) and was stopped" in reports.lines[0]
    assert not overlay(apart, "host-a").exists()
    assert apart.leases("host-b").check().generation == 3


def test_an_instance_runs_on_a_host_whose_lease_is_damaged(apart: Pair) -> None:
    use(apart, "host-a")
    Path(lease_path(apart, "host-b")).write_bytes(b"{")
    leases = apart.leases("host-a", query=False)
    leases.tolerant = True
    assert leases.query()["host-b"] == View(None)
    apart.hosts["host-b"].instances.append(Instance("sms-sample", 7, "/i.sif"))
    assert leases.query()["host-b"] == View(None, runs=True)
    with pytest.raises(Refused, match="the services container runs on host-b"):
        leases.check()


def lease_path(pair: Pair, name: str) -> str:
    return str(pair.cluster.places.lease).replace(STATE, str(pair.hosts[name].folder))


class OwnNotes(HostInFolder):
    """A host that shares its state folder, but not the start notes."""

    def path(self, word: str) -> str:
        return super().path(word.replace("/sample.json", f"/sample.{self.name}.json"))


def test_a_shared_overlay_of_the_version_before_marks_is_not_renamed(tmp_path: Path) -> None:
    """519381b: host-a ran it at generation 9; a start on host-b failed and was rolled back, and left its name."""
    pair = Pair(tmp_path, shared=True)
    overlay(pair, "host-a").write_bytes(b"the only one")
    held = {"cluster": "sample", "generation": 10, "holder": None, "since": 1.0, "file": "host-b"}
    Path(lease_path(pair, "host-b")).write_text(json.dumps(held))
    pair.hosts = {name: OwnNotes(name, host.folder) for name, host in pair.hosts.items()}
    pair.cluster = with_env(pair.cluster, hosts=FakeHosts(pair.hosts))
    for name, started in (("host-a", 9), ("host-b", 7)):
        note_start(pair, name, started)
    with pytest.raises(Refused, match="host-b is out of date: the newest one is on host-a") as caught:
        check(pair, "host-b")
    assert "sms start --host host-a" in caught.value.hint
    assert check(pair, "host-a") == 9
    assert overlay(pair, "host-a").read_bytes() == b"the only one"


def test_earlier_ones_that_were_set_aside_are_kept(apart: Pair) -> None:
    names = []
    for text in (b"1", b"2"):
        overlay(apart, "host-a").write_bytes(text)
        names.append(retire_overlay(apart.cluster, apart.hosts["host-a"], 7))
    assert [name.rpartition("/")[2] for name in names] == ["sample.img.past-7", "sample.img.past-7.2"]
    assert sorted(path.read_bytes() for path in overlay(apart, "host-a").parent.glob("*.past-*")) == [b"1", b"2"]


def test_the_lease_is_taken_above_every_mark(apart: Pair) -> None:
    """All lease files are lost."""
    overlay(apart, "host-a").write_bytes(b"x")
    mark_overlay(apart.cluster, apart.hosts["host-a"], 41)
    with ExitStack() as undo:
        taken = start._take_lease(apart.hosts["host-a"], apart.leases("host-a"), Silent(), undo, start.StartOptions())
        undo.pop_all()
    assert taken.generation == 42
