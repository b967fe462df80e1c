"""The lease: which host may take it, and that its generation never decreases."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import Refused
from appliance.plan.migration.lease import (
    GENERATION_BUMP,
    DamagedLease,
    View,
    Views,
    find_holder,
    find_last,
    find_newer,
    find_released,
    has_own_overlay,
    may_take,
    merge_update,
    raise_floor,
    read_lease,
    refuse_unknown_taker,
    release,
    take,
    was_taken,
)
from appliance.shared.lease import LAST_GENERATION, LAST_RAISING, Lease, digest

FREE = Lease("lab")
HELD = Lease("lab", 3, "host-a", 100.0)


def test_take() -> None:
    assert take(FREE, "host-a", now=5.0) == Lease("lab", 1, "host-a", 5.0)
    assert take(HELD, "host-a", now=200.0) == Lease("lab", 4, "host-a", 200.0), "again by its holder"
    with pytest.raises(Refused, match=r"host-a holds the lease \(generation 3\)") as caught:
        take(HELD, "host-b", now=200.0)
    assert "--host host-a" in caught.value.hint


def test_release() -> None:
    assert release(HELD, "host-a", now=200.0) == Lease("lab", 3, None, 200.0, last="host-a"), "the generation stays"
    assert release(HELD, "host-b", now=200.0) == HELD, "only the holder releases it"
    assert release(FREE, "host-a", now=200.0) == FREE


@given(st.lists(st.tuples(st.sampled_from(["take", "release"]), st.sampled_from(["host-a", "host-b"]))))
def test_generation_never_decreases(moves: list[tuple[str, str]]) -> None:
    lease = FREE
    for number, (move, host) in enumerate(moves):
        before = lease
        try:
            lease = (take if move == "take" else release)(lease, host, now=float(number))
        except Refused:
            assert before.holder not in (None, host)
        assert lease.generation - before.generation == (1 if lease.holder == host and move == "take" else 0)


def test_lease_round_trip() -> None:
    for lease in (FREE, HELD, Lease("lab", 3, "host-a", 100.0, "host-b")):
        assert read_lease(lease.text(), "lab") == lease
    assert read_lease(None, "lab") == FREE


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"[]", "cannot be read"),
        (b"null", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"generation": 1}', "cannot be read"),
        (b'{"cluster": "lab", "generation": "x"}', "cannot be read"),
        (b'{"cluster": "lab", "generation": "3"}', "cannot be read"),
        (b'{"cluster": "lab", "generation": true}', "cannot be read"),
        (b'{"cluster": "lab", "generation": -1}', "cannot be read"),
        (b'{"cluster": "lab", "generation": 1e3}', "cannot be read"),
        (b'{"cluster": "lab", "generation": 100000000000000000000}', "cannot be read"),
        (b'{"cluster": "lab", "holder": 7}', "cannot be read"),
        (b'{"cluster": "lab", "holder": "host\\u001b[2J"}', "cannot be read"),
        (b'{"cluster": "lab", "since": "now"}', "cannot be read"),
        (b'{"cluster": "lab", "file": null}', "cannot be read"),
        (b'{"cluster": "other"}', "is of cluster other"),
    ],
)
def test_invalid_lease_files(data: bytes, words: str) -> None:
    """It never counts as a free lease: a host may hold it."""
    with pytest.raises(Refused, match=words) as caught:
        read_lease(data, "lab")
    assert caught.value.status == 3
    assert isinstance(caught.value, DamagedLease) == (words == "cannot be read")


def test_what_a_newer_version_added_is_ignored() -> None:
    assert read_lease(b'{"cluster": "lab", "generation": 3, "more": [1]}', "lab") == Lease("lab", 3)


def test_digests_differ() -> None:
    assert digest(None) == "none"
    assert len({digest(None), digest(b""), digest(HELD.text()), digest(FREE.text())}) == 4


def make_views(**files: str) -> Views:
    """Build views from short codes: ``a="a3"`` means that host-a's file names host-a as holder of generation 3.

    ``-`` the lease is free, ``?`` the host is unreachable, ``~`` it is alive but stuck, ``!`` as suffix:
    the services container runs there.
    """
    views = {}
    for name, code in files.items():
        runs, code = code.endswith("!"), code.rstrip("!")
        holder = None if code[0] == "-" else f"host-{code[0]}"
        lease = None if code in "?~" else Lease("lab", int(code[1:]), holder, 1.0, f"host-{name}")
        views[f"host-{name}"] = View(lease, runs, stuck=code == "~")
    return views


# The files, and the holder according to them.
HOLDERS: list[tuple[Views, str | None]] = [
    (make_views(a="-0", b="-0"), None),
    (make_views(a="a3", b="-0"), "a3"),
    (make_views(a="a3", b="a3"), "a3"),
    # A reachable host is authoritative about itself; copies on others do not count.
    (make_views(a="-3", b="a3"), None),
    (make_views(a="-0", b="a3"), None),
    (make_views(a="a4", b="a3"), "a4"),
    (make_views(a="a3", b="a4"), "a4"),
    # An unreachable host: the latest copy counts.
    (make_views(a="?", b="a3"), "a3"),
    (make_views(a="?", b="-3"), None),
    (make_views(a="?", b="a3", c="-4"), None),
    (make_views(a="?", b="a3", c="-3"), None),
    (make_views(a="?", b="a3", c="-2"), "a3"),
    (make_views(a="?", b="a3", c="b4"), None),
    (make_views(a="?", b="-0", c="a3"), "a3"),
    (make_views(a="?", b="b4", c="a3"), "b4"),
    (make_views(a="?", b="?"), None),
    # A host that was removed from the site is unreachable, too.
    (make_views(a="x3", b="-0"), "x3"),
    # Another host took over from one that has returned.
    (make_views(a="a3", b="b1003"), "b1003"),
    (make_views(a="b1003", b="b1003"), "b1003"),
    (make_views(a="a3", b="b4", c="a3"), "b4"),
    # A migration hands over with N + 1; a source that takes back writes N + 2.
    (make_views(a="b4", b="b4"), "b4"),
    (make_views(a="a5", b="b4"), "a5"),
    # The source has written its file, the target has not yet: the lease counts as free.
    (make_views(a="b4", b="a3"), None),
    # Both took it while partitioned: everybody chooses the same one.
    (make_views(a="a4", b="b4"), "a4"),
    # A run that lost a race left a higher generation without a holder.
    (make_views(a="-5", b="b4"), "b4"),
]


@pytest.mark.parametrize(("views", "holder"), HOLDERS)
def test_find_holder(views: Views, holder: str | None) -> None:
    found = find_holder(views)
    assert (found and f"{str(found.holder)[-1]}{found.generation}") == holder


@pytest.mark.parametrize(
    ("a", "b", "last"),
    [
        (replace(FREE, generation=3, last="a"), replace(FREE, generation=2, last="b"), "a"),
        (replace(FREE, generation=3, last="a"), replace(FREE, generation=4, last="engine:nomad"), ""),
        (replace(FREE, generation=3, last="a"), None, "a"),
        (FREE, FREE, ""),
        (None, None, ""),
    ],
)
def test_who_stopped_last(a: Lease | None, b: Lease | None, last: str) -> None:
    assert find_last({"a": View(a), "b": View(b)}) == last


# The files; the generation that host-b may take, or fragments of the refusal and its hint.
TAKING: list[tuple[Views, int | tuple[str, str]]] = [
    (make_views(a="-0", b="-0"), 1),
    (make_views(a="-3", b="-2"), 4),
    (make_views(a="-3", b="a3"), 4),
    (make_views(a="-7", b="b3"), 8),
    (make_views(a="b3", b="b3"), 4),
    (make_views(a="?", b="-3"), 4),
    (make_views(a="?", b="b3"), 4),
    (make_views(a="?", b="-0"), 1),
    (make_views(a="a3", b="b1003"), 1004),
    (make_views(a="a3", b="a3"), ("host-a holds the lease (generation 3)", "sms stop --host host-a")),
    (make_views(a="a3", b="-0"), ("host-a holds the lease", "sms migrate host-b")),
    (make_views(a="?", b="a3"), ("cannot be reached", "sms failover host-b")),
    (make_views(a="?", b="-0", c="a3"), ("cannot be reached", "sms failover host-b")),
    (make_views(a="~", b="-0"), ("alive and does not answer", "sms failover host-b")),
    (make_views(a="~", b="b3"), ("alive and does not answer", "sms failover host-b")),
    (make_views(a="-0!", b="-0"), ("the services container runs on host-a", "sms stop --host host-a")),
    (make_views(a="a3!", b="b1003"), ("the services container runs on host-a", "sms stop --host host-a")),
    # The host's own instance is checked elsewhere.
    (make_views(a="-3", b="b3!"), 4),
]


@pytest.mark.parametrize(("views", "outcome"), TAKING)
def test_may_take(views: Views, outcome: int | tuple[str, str]) -> None:
    if isinstance(outcome, int):
        assert may_take("host-b", views, "lab", now=9.0) == Lease("lab", outcome, "host-b", 9.0, "host-b")
        return
    with pytest.raises(Refused) as caught:
        may_take("host-b", views, "lab", now=9.0)
    assert outcome[0] in caught.value.message and outcome[1] in caught.value.hint


def test_leases_of_fenced_hosts_are_ignored() -> None:
    views = make_views(b="a3", c="a3")
    assert find_holder(views, without={"host-a"}) is None
    lease = may_take("host-b", views, "lab", now=9.0, generation_bump=GENERATION_BUMP, without={"host-a"})
    assert (lease.generation, lease.holder) == (1003, "host-b")
    with pytest.raises(Refused, match="host-c holds"):
        may_take("host-b", make_views(b="a3", c="c2"), "lab", now=9.0, without={"host-a"})


def test_the_sequence_number_is_that_of_the_own_file() -> None:
    mine, theirs = Lease("lab", 3, None, 1.0, "host-b", sequence=12), Lease("lab", 3, None, 1.0, "host-a", sequence=99)
    lease = may_take("host-b", {"host-a": View(theirs), "host-b": View(mine)}, "lab", now=9.0)
    assert lease == Lease("lab", 4, "host-b", 9.0, "host-b", sequence=12)
    assert release(lease, "host-b", now=10.0).sequence == 12


# A lease file of host-a, the generation of a snapshot, and the floor that the file has then; None: unchanged.
FLOORS: list[tuple[Lease, int, int | None]] = [
    (FREE, 5, 5),
    (HELD, 2, None),
    (HELD, 3, None),
    (Lease("lab", 3, None, 100.0), 9, 9),
    (Lease("lab", 3, None, 100.0), 3, None),
    (Lease("lab", 3, None, 100.0, floor=12), 9, None),
    (Lease("lab", 3, "host-b", 100.0, "host-a"), 9, None),  # the generation of another holder
]


@pytest.mark.parametrize(("mine", "generation", "floor"), FLOORS)
def test_raise_floor(mine: Lease, generation: int, floor: int | None) -> None:
    """The generation stays: another host that serves would take a higher one for a host that took over."""
    found = raise_floor(mine, "host-a", generation)
    assert (found and found.floor) == floor
    same = (mine.generation, mine.holder, mine.since, "host-a")
    assert found is None or (found.generation, found.holder, found.since, found.file) == same


def test_a_holder_that_finds_a_later_generation_was_superseded() -> None:
    with pytest.raises(Refused):
        raise_floor(HELD, "host-a", 9)


@pytest.mark.parametrize("generation", [-1, LAST_RAISING + 1, 1 << 80])
def test_never_raised_above_an_implausible_generation(generation: int) -> None:
    """What this host takes afterwards could not be sent to any other one."""
    with pytest.raises(Refused, match="not plausible"):
        raise_floor(FREE, "host-a", generation)
    raised = raise_floor(FREE, "host-a", LAST_RAISING)
    assert raised and raised.floor < LAST_GENERATION


def test_what_is_not_newer_than_the_own_lease_is_plausible() -> None:
    """Whatever has raised it so far: own snapshots can always be restored."""
    lease = Lease("lab", LAST_RAISING + 5, None, 1.0, "host-a")
    assert raise_floor(lease, "host-a", LAST_RAISING + 5) is None
    with pytest.raises(Refused, match="not plausible"):
        raise_floor(lease, "host-a", LAST_RAISING + 6)


def test_the_lease_is_taken_above_the_floor_of_any_host_that_answers() -> None:
    views = {"host-a": View(Lease("lab", 3, None, 1.0, "host-a")), "host-b": View(Lease("lab", 3, floor=9))}
    assert may_take("host-a", views, "lab", now=9.0).generation == 10
    assert may_take("host-a", views, "lab", now=9.0, generation_bump=GENERATION_BUMP).generation == 9 + GENERATION_BUMP


@pytest.mark.parametrize(
    ("floor", "answers", "without", "refused"),
    [
        (9, False, (), True),
        (9, True, (), False),
        (9, False, ("host-b",), False),  # it is known to be off
        (3, False, (), False),
    ],
)
def test_a_snapshot_that_is_newer_than_all_leases_may_be_of_a_silent_host(
    floor: int, *, answers: bool, without: tuple[str, ...], refused: bool
) -> None:
    views = {"host-a": View(Lease("lab", 3, floor=floor)), "host-b": View(Lease("lab", 3) if answers else None)}
    with pytest.raises(Refused) if refused else nullcontext():
        refuse_unknown_taker(views, without=without)


def test_an_update_lowers_no_floor() -> None:
    current, update = Lease("lab", 3, floor=9), Lease("lab", 4, "host-b", 1.0)
    assert merge_update(current, update, sender="host-b") == replace(update, floor=9)


def test_was_taken() -> None:
    raised = raise_floor(FREE, "host-a", 9)
    assert not was_taken({"host-a": View(raised), "host-b": View(FREE), "host-c": View(None)})
    assert was_taken({"host-a": View(FREE), "host-b": View(Lease("lab", 1, None, 5.0))})


# The files, and the host that supersedes host-a.
NEWER: list[tuple[Views, str | None]] = [
    (make_views(a="a3", b="-0"), None),
    (make_views(a="a3", b="?"), None),
    (make_views(a="a3", b="a3"), None),
    (make_views(a="a3", b="a9"), None),
    (make_views(a="a3", b="b1003"), "host-b"),
    (make_views(a="a3", b="?", c="b1003"), "host-b"),
    (make_views(a="b1003", b="?"), "host-b"),
    (make_views(a="b4", b="b4"), "host-b"),
    (make_views(a="a5", b="b4"), None),
    (make_views(a="a4", b="b4"), None),
    (make_views(a="-9", b="b4"), None),
    (make_views(a="a3", b="-4"), None),
]


@pytest.mark.parametrize(("views", "holder"), NEWER)
def test_find_newer(views: Views, holder: str | None) -> None:
    newer = find_newer("host-a", views)
    assert (newer and newer.holder) == holder


RELEASED: list[tuple[str, dict[str, Lease | None], str]] = [
    ("it has taken over since", {"host-b": Lease("lab", 1003, None, last="host-b")}, "host-b"),
    ("a third host knows it", {"host-b": None, "host-c": Lease("lab", 1003, None, last="host-b")}, "host-b"),
    ("it is held again", {"host-b": Lease("lab", 1004, "host-b"), "host-c": Lease("lab", 3, None, last="host-b")}, ""),
    ("the holder is newest", {"host-b": Lease("lab", 9, "host-b"), "host-c": Lease("lab", 9, None, last="host-c")}, ""),
    ("it was released before", {"host-b": Lease("lab", 3, None, last="host-b")}, ""),
    ("this host released it", {"host-b": Lease("lab", 9, None, last="host-a")}, ""),
    ("an older version released it", {"host-b": Lease("lab", 9)}, ""),
    ("another cluster's", {"host-b": Lease("lab", 9, None, last="host-b", cluster_uuid="b" * 36)}, ""),
    ("it cannot be reached", {"host-b": None}, ""),
]


@pytest.mark.parametrize(("leases", "taker"), [row[1:] for row in RELEASED], ids=[row[0] for row in RELEASED])
def test_find_released(leases: dict[str, Lease | None], taker: str) -> None:
    mine = Lease("lab", 3, "host-a", cluster_uuid="a" * 36)
    found = find_released("host-a", {"host-a": View(mine), **{name: View(lease) for name, lease in leases.items()}})
    assert (found.last if found else "") == taker


@pytest.mark.parametrize("last", ["", "host-a", "host-b"])
def test_what_an_engine_gave_back_is_released(last: str) -> None:
    """The file of a host that was off names the engine still, also where that host had the newest overlay."""
    views = {"host-a": View(Lease("lab", 3, "engine:nomad")), "host-b": View(Lease("lab", 4, None, last=last))}
    assert find_released("host-a", views) == views["host-b"].lease
    assert find_released("host-a", {**views, "host-a": View(Lease("lab", 4, "engine:nomad"))}) is None


def test_exactly_one_of_two_with_the_same_generation_steps_down() -> None:
    views = make_views(a="a4", b="b4")
    assert [bool(find_newer(me, views)) for me in views] == [False, True]


FILE = st.one_of(
    st.just("?"), st.tuples(st.sampled_from("-abc"), st.integers(0, 4)).map(lambda pair: f"{pair[0]}{pair[1]}")
)


@given(FILE, FILE, FILE)
def test_same_files_never_allow_two_holders(a: str, b: str, c: str) -> None:
    """No other host may take a held lease, and only the holder supersedes others."""
    views = make_views(a=a, b=b, c=c)
    holder = find_holder(views)
    for me, view in views.items():
        if not view.lease:
            continue
        try:
            lease = may_take(me, views, "lab", now=9.0)
        except Refused:
            assert holder and holder.holder != me
        else:
            assert holder is None or holder.holder == me
            assert all(lease.generation > other.lease.generation for other in views.values() if other.lease)
        newer = find_newer(me, views)
        assert newer is None or (newer == holder and newer.holder != me)


UPDATES: list[tuple[str, str, bool]] = [
    ("-0", "a1", True),
    ("a1", "a1", False),
    ("a1", "-1", True),  # host-a releases it
    ("b1", "-1", False),
    ("-1", "a1", False),
    ("a5", "a4", False),
    ("b5", "a4", False),
    ("b3", "a4", True),
]


@pytest.mark.parametrize(("current", "update", "changes"), UPDATES)
def test_merge_update(current: str, update: str, changes: bool) -> None:
    """The update is sent by host-a."""
    before, after = (make_views(b=code)["host-b"].lease for code in (current, update))
    assert before and after
    assert merge_update(before, after, sender="host-a") == (after if changes else None)


def test_has_own_overlay() -> None:
    copy, original = Lease("lab", 3, "host-a", 1.0, "host-b"), Lease("lab", 3, "host-a", 1.0, "host-a")
    assert has_own_overlay(copy, "host-b") is True
    assert has_own_overlay(original, "host-b") is False, "host-a wrote it into a shared folder"
    assert has_own_overlay(HELD, "host-b") is None, "not known"
    assert has_own_overlay(original, "host-a") is None and has_own_overlay(FREE, "host-b") is None


U1, U2 = (f"{digit * 8}-0000-4000-8000-{digit * 12}" for digit in "12")


@pytest.mark.parametrize(
    ("current", "update", "uuid"),
    [
        ((3, ""), (3, U1), U1),  # the file was written while the cluster had none
        ((2, ""), (3, U1), U1),
        ((4, ""), (3, U1), ""),  # a newer one
        ((2, U1), (3, ""), U1),  # written by the agents of a migration, or an earlier version
        ((2, U1), (3, U2), U1),  # of another cluster
    ],
)
def test_an_update_never_removes_the_uuid(current: tuple[int, str], update: tuple[int, str], uuid: str) -> None:
    before, after = (Lease("lab", number, "host-a", cluster_uuid=found) for number, found in (current, update))
    assert (merge_update(before, after, sender="host-a") or before).cluster_uuid == uuid


def test_a_lease_that_is_taken_has_the_uuid_that_any_host_knows() -> None:
    known = Lease("lab", 3, None, 1.0, "host-b", cluster_uuid=U1, adopted=2)
    views = {"host-a": View(Lease("lab", 4, None, 1.0, "host-a")), "host-b": View(known), "host-c": View(None)}
    taken = may_take("host-a", views, "lab", now=5.0)
    assert (taken.generation, taken.cluster_uuid, taken.adopted) == (5, U1, 2)
