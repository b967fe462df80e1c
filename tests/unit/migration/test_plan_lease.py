"""The lease: who may take it, and that its generation only grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import Refused, SmsError
from appliance.plan.migration.lease import (
    LEAP,
    Lease,
    View,
    Views,
    digest,
    find_holder,
    find_newer,
    is_apart,
    may_take,
    read_lease,
    release,
    take,
    told,
)

FREE = Lease("lab")
HELD = Lease("lab", 3, "host-a", 100.0)


def test_taking() -> None:
    assert take(FREE, "host-a", now=5.0) == Lease("lab", 1, "host-a", 5.0)
    assert take(HELD, "host-a", now=200.0) == Lease("lab", 4, "host-a", 200.0), "again, by who has it"
    with pytest.raises(Refused, match=r"host-a holds the lease \(generation 3\)") as caught:
        take(HELD, "host-b", now=200.0)
    assert "--host host-a" in caught.value.hint


def test_releasing() -> None:
    assert release(HELD, "host-a", now=200.0) == Lease("lab", 3, None, 200.0), "the generation stays"
    assert release(HELD, "host-b", now=200.0) == HELD, "nobody lets go what another holds"
    assert release(FREE, "host-a", now=200.0) == FREE


@given(st.lists(st.tuples(st.sampled_from(["take", "release"]), st.sampled_from(["host-a", "host-b"]))))
def test_generation_only_grows(moves: list[tuple[str, str]]) -> None:
    lease = FREE
    for number, (move, host) in enumerate(moves):
        before = lease
        try:
            lease = (take if move == "take" else release)(lease, host, now=float(number))
        except Refused:
            assert before.holder not in (None, host)
        assert lease.generation - before.generation == (1 if lease.holder == host and move == "take" else 0)


def test_a_lease_survives_its_file() -> None:
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
        (b'{"cluster": "lab", "more": 1}', "cannot be read"),
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
def test_a_file_that_is_no_lease(data: bytes, words: str) -> None:
    """It is never taken for a free one: somebody may hold it."""
    with pytest.raises(SmsError, match=words):
        read_lease(data, "lab")


def test_digest_tells_what_was_read() -> None:
    assert digest(None) == "none"
    assert len({digest(None), digest(b""), digest(HELD.text()), digest(FREE.text())}) == 4


def seen(**files: str) -> Views:
    """Views by short words: ``a="a3"`` means that host-a's file says that host-a holds generation 3.

    ``-`` nobody holds, ``?`` the host cannot be asked, ``~`` it is alive and does not answer in time, ``!`` behind it:
    the appliance runs there.
    """
    views = {}
    for name, word in files.items():
        runs, word = word.endswith("!"), word.rstrip("!")
        holder = None if word[0] == "-" else f"host-{word[0]}"
        lease = None if word in "?~" else Lease("lab", int(word[1:]), holder, 1.0, f"host-{name}")
        views[f"host-{name}"] = View(lease, runs, stuck=word == "~")
    return views


# What the files say, and who holds by that.
HOLDERS: list[tuple[Views, str | None]] = [
    (seen(a="-0", b="-0"), None),
    (seen(a="a3", b="-0"), "a3"),
    (seen(a="a3", b="a3"), "a3"),
    # Told by others: the host itself is believed where it answers.
    (seen(a="-3", b="a3"), None),
    (seen(a="-0", b="a3"), None),
    (seen(a="a4", b="a3"), "a4"),
    (seen(a="a3", b="a4"), "a4"),
    # The host does not answer: what others know counts, the latest of it.
    (seen(a="?", b="a3"), "a3"),
    (seen(a="?", b="-3"), None),
    (seen(a="?", b="a3", c="-4"), None),
    (seen(a="?", b="a3", c="-3"), None),
    (seen(a="?", b="a3", c="-2"), "a3"),
    (seen(a="?", b="a3", c="b4"), None),
    (seen(a="?", b="-0", c="a3"), "a3"),
    (seen(a="?", b="b4", c="a3"), "b4"),
    (seen(a="?", b="?"), None),
    # A host that is no admin host any more cannot be asked either.
    (seen(a="x3", b="-0"), "x3"),
    # Somebody took over from a host that has come back.
    (seen(a="a3", b="b1003"), "b1003"),
    (seen(a="b1003", b="b1003"), "b1003"),
    (seen(a="a3", b="b4", c="a3"), "b4"),
    # A migration hands over with N + 1; a source that takes back writes N + 2.
    (seen(a="b4", b="b4"), "b4"),
    (seen(a="a5", b="b4"), "a5"),
    # Begun, and the target is not told yet: nobody holds.
    (seen(a="b4", b="a3"), None),
    # Both took it while they could not see each other: everybody chooses the same one.
    (seen(a="a4", b="b4"), "a4"),
    # A run that lost a race left a higher generation that nobody holds.
    (seen(a="-5", b="b4"), "b4"),
]


@pytest.mark.parametrize(("views", "holder"), HOLDERS)
def test_who_holds(views: Views, holder: str | None) -> None:
    found = find_holder(views)
    assert (found and f"{str(found.holder)[-1]}{found.generation}") == holder


# What the files say; what host-b may take (its generation), or words of why not, and of the hint.
TAKING: list[tuple[Views, int | tuple[str, str]]] = [
    (seen(a="-0", b="-0"), 1),
    (seen(a="-3", b="-2"), 4),
    (seen(a="-3", b="a3"), 4),
    (seen(a="-7", b="b3"), 8),
    (seen(a="b3", b="b3"), 4),
    (seen(a="?", b="-3"), 4),
    (seen(a="?", b="b3"), 4),
    (seen(a="?", b="-0"), 1),
    (seen(a="a3", b="b1003"), 1004),
    (seen(a="a3", b="a3"), ("host-a holds the lease (generation 3)", "sms stop --host host-a")),
    (seen(a="a3", b="-0"), ("host-a holds the lease", "sms migrate host-b")),
    (seen(a="?", b="a3"), ("cannot be reached", "sms failover host-b")),
    (seen(a="?", b="-0", c="a3"), ("cannot be reached", "sms failover host-b")),
    (seen(a="~", b="-0"), ("alive and does not answer", "sms failover host-b")),
    (seen(a="~", b="b3"), ("alive and does not answer", "sms failover host-b")),
    (seen(a="-0!", b="-0"), ("the appliance runs on host-a", "sms stop --host host-a")),
    (seen(a="a3!", b="b1003"), ("the appliance runs on host-a", "sms stop --host host-a")),
    # Its own instance is somebody else's business.
    (seen(a="-3", b="b3!"), 4),
]


@pytest.mark.parametrize(("views", "outcome"), TAKING)
def test_who_may_take(views: Views, outcome: int | tuple[str, str]) -> None:
    if isinstance(outcome, int):
        assert may_take("host-b", views, "lab", now=9.0) == Lease("lab", outcome, "host-b", 9.0, "host-b")
        return
    with pytest.raises(Refused) as caught:
        may_take("host-b", views, "lab", now=9.0)
    assert outcome[0] in caught.value.message and outcome[1] in caught.value.hint


def test_a_fenced_host_holds_nothing() -> None:
    views = seen(b="a3", c="a3")
    assert find_holder(views, without={"host-a"}) is None
    lease = may_take("host-b", views, "lab", now=9.0, leap=LEAP, without={"host-a"})
    assert (lease.generation, lease.holder) == (1003, "host-b")
    with pytest.raises(Refused, match="host-c holds"):
        may_take("host-b", seen(b="a3", c="c2"), "lab", now=9.0, without={"host-a"})


# What the files say, and to whom host-a gives way.
NEWER: list[tuple[Views, str | None]] = [
    (seen(a="a3", b="-0"), None),
    (seen(a="a3", b="?"), None),
    (seen(a="a3", b="a3"), None),
    (seen(a="a3", b="a9"), None),
    (seen(a="a3", b="b1003"), "host-b"),
    (seen(a="a3", b="?", c="b1003"), "host-b"),
    (seen(a="b1003", b="?"), "host-b"),
    (seen(a="b4", b="b4"), "host-b"),
    (seen(a="a5", b="b4"), None),
    (seen(a="a4", b="b4"), None),
    (seen(a="-9", b="b4"), None),
    (seen(a="a3", b="-4"), None),
]


@pytest.mark.parametrize(("views", "holder"), NEWER)
def test_who_gives_way(views: Views, holder: str | None) -> None:
    newer = find_newer("host-a", views)
    assert (newer and newer.holder) == holder


def test_of_two_that_took_the_same_generation_exactly_one_gives_way() -> None:
    views = seen(a="a4", b="b4")
    assert [bool(find_newer(me, views)) for me in views] == [False, True]


FILE = st.one_of(
    st.just("?"), st.tuples(st.sampled_from("-abc"), st.integers(0, 4)).map(lambda pair: f"{pair[0]}{pair[1]}")
)


@given(FILE, FILE, FILE)
def test_never_two_may_take_by_the_same_files(a: str, b: str, c: str) -> None:
    """Whoever holds by the files, no other host is let in, and nobody gives way to two."""
    views = seen(a=a, b=b, c=c)
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


TOLD: list[tuple[str, str, bool]] = [
    ("-0", "a1", True),
    ("a1", "a1", False),
    ("a1", "-1", True),  # host-a lets go
    ("b1", "-1", False),
    ("-1", "a1", False),
    ("a5", "a4", False),
    ("b5", "a4", False),
    ("b3", "a4", True),
]


@pytest.mark.parametrize(("mine", "news", "changes"), TOLD)
def test_what_a_file_becomes_that_is_told(mine: str, news: str, changes: bool) -> None:
    """Told by host-a."""
    before, after = (seen(b=word)["host-b"].lease for word in (mine, news))
    assert before and after
    assert told(before, after, by="host-a") == (after if changes else None)


def test_whether_the_holders_overlay_is_the_one_beside_the_file() -> None:
    copy, original = Lease("lab", 3, "host-a", 1.0, "host-b"), Lease("lab", 3, "host-a", 1.0, "host-a")
    assert is_apart(copy, "host-b") is True
    assert is_apart(original, "host-b") is False, "host-a wrote it itself, into a folder that both have"
    assert is_apart(HELD, "host-b") is None, "nobody knows"
    assert is_apart(original, "host-a") is None and is_apart(FREE, "host-b") is None
