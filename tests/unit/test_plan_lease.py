"""The lease: who may take it, and that its generation only grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import Refused, SmsError
from appliance.plan.lease import Lease, digest, read_lease, release, take

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
    for lease in (FREE, HELD):
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
