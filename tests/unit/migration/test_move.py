"""A move planned, and what goes over the wire during one: messages, parcels of chunks, connections."""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.agent import line as line_module
from appliance.agent.changes import Changes
from appliance.agent.ends import NEIGHBOUR, lasting, translated
from appliance.agent.line import Gone, Line
from appliance.agent.parcels import HEAD, Packer, digest_or_zero, open_parcels
from appliance.agent.store import CHUNK, ZERO, digest_of
from appliance.agent.transfer import PACKED, PLAIN
from appliance.agent.words import Problem
from appliance.catalog import Service, read_catalog, select
from appliance.plan.migration.move import (
    DEFAULTS,
    PARTS,
    Away,
    missing_jobs,
    needs_outside,
    predict,
    predict_parts,
    stop_groups,
)
from appliance.plan.services.jobs import read_jobs
from appliance.share import share
from appliance.shared.wire import LONGEST

SHIPPED = read_catalog(share("definitions", "services"))
USUAL = ("slurmctld", "munge", "nat", "rsyslog", "chrony", "postfix", "cron", "filesync")


def services(*names: str) -> list[Service]:
    return list(select(SHIPPED, names or USUAL))


# The plan


@pytest.mark.parametrize(
    "names, ordered",
    [
        (USUAL, [("slurmctld", "munge"), ("slurmctld", "postfix")]),
        (("slurmctld", "slurmdbd", "mariadb", "munge"), [("slurmctld", "slurmdbd"), ("slurmdbd", "mariadb")]),
        (("slurmrestd", "slurmctld", "munge"), [("slurmrestd", "slurmctld"), ("slurmctld", "munge")]),
        (("munge",), []),
    ],
)
def test_who_needs_another_ends_before_it(names: tuple[str, ...], ordered: list[tuple[str, str]]) -> None:
    groups = stop_groups(services(*names))
    at = {name: number for number, group in enumerate(groups) for name in group}
    for first, later in ordered:
        assert at[first] < at[later], groups
    assert sorted(at) == sorted(service.name for service in services(*names) if not service.live)
    assert sum(len(group) for group in groups) == len(at), "each ends once"


def test_what_keeps_no_state_is_not_stopped() -> None:
    assert stop_groups(services("nat", "chrony", "rsyslog")) == []
    assert stop_groups([]) == []


@pytest.mark.parametrize(
    "measured, expected",
    [
        ([], DEFAULTS),
        ([dict.fromkeys(PARTS, 1.0)], dict.fromkeys(PARTS, 1.0)),
        ([{"stop": 9.0}, {"stop": 0.25}, {"stop": 0.75}], {**DEFAULTS, "stop": 0.75}),
        ([{"something else": 5.0}], DEFAULTS),
    ],
)
def test_a_prediction_goes_by_what_was_measured(measured: list[dict[str, float]], expected: dict[str, float]) -> None:
    assert predict_parts(measured) == expected


def test_who_keeps_no_state_is_away_for_the_switch_alone() -> None:
    parts = {"stop": 1.0, "last changes": 2.0, "start": 4.0, "switch": 0.5}
    away = {one.name: one.predicted_s for one in predict(services(), parts, shared=False)}
    assert away == {
        **dict.fromkeys(("slurmctld", "munge", "postfix", "cron", "filesync"), 7.5),
        **dict.fromkeys(("nat", "rsyslog", "chrony"), 0.5),
    }
    shared = {one.name: one.predicted_s for one in predict(services(), parts, shared=True)}
    assert set(shared.values()) == {7.5}, "the overlay cannot be in two places"


@pytest.mark.parametrize("predicted, over", [(0.0, False), (3.0, False), (3.001, True)])
def test_a_budget_holds_to_its_last_moment(predicted: float, over: bool) -> None:
    assert Away("x", predicted, 3.0).over is over


def test_whose_probe_leads_outside() -> None:
    assert needs_outside(services()) == {"nat", "filesync"}
    assert needs_outside([]) == set()


@pytest.mark.parametrize(
    "before, after, lost",
    [
        ({}, {}, []),
        ({"1": "RUNNING"}, {"1": "RUNNING"}, []),
        ({"1": "RUNNING"}, {"1": "COMPLETED"}, []),  # it ended meanwhile
        ({"1": "RUNNING"}, {"1": "COMPLETING"}, []),
        ({"1": "RUNNING"}, {"1": "PENDING"}, ["1"]),  # it would begin anew
        ({"1": "PENDING"}, {"1": "RUNNING"}, []),
        ({"1": "PENDING", "2": "RUNNING"}, {}, ["1", "2"]),
        ({"10": "PENDING", "9": "PENDING", "9_3": "PENDING"}, {}, ["9", "9_3", "10"]),
        ({}, {"1": "RUNNING"}, []),
        ({"1": "COMPLETED", "2": "CANCELLED", "3": "TIMEOUT"}, {}, []),  # forgotten, as the controller does
        ({"1": "COMPLETING", "2": "SUSPENDED"}, {}, ["1", "2"]),
        ({"5_1": "PENDING", "5_2": "PENDING"}, {"5_1": "RUNNING", "5_2": "PENDING"}, []),
    ],
)
def test_jobs_that_the_target_does_not_know(before: dict[str, str], after: dict[str, str], lost: list[str]) -> None:
    assert missing_jobs(before, after) == lost


@pytest.mark.parametrize(
    "text, jobs",
    [
        ("", {}),
        ("7 RUNNING\n8 PENDING\n", {"7": "RUNNING", "8": "PENDING"}),
        ("  7_1   PENDING  \n\nslurm_load_jobs\n", {"7_1": "PENDING"}),
    ],
)
def test_squeues_lines(text: str, jobs: dict[str, str]) -> None:
    assert read_jobs(text) == jobs


# Connections, as `conntrack -L -o save` of conntrack-tools 1.4.7 tells them

TCP = (
    "-A -t 299 -u SEEN_REPLY,ASSURED -s 10.77.0.101 -d 10.78.0.254 -r 10.78.0.254 -n 10.78.0.2 -p tcp --sport 40000 "
    "--dport 80 --reply-port-src 80 --reply-port-dst {port} --state ESTABLISHED"
)
ICMP = "-A -t 29 -u UNSET -s 10.77.0.101 -d 10.78.0.254 -r 10.78.0.254 -n 10.78.0.2 -p icmp --icmp-type 8 --icmp-id 77"
OWN = (
    "-A -t 299 -u UNSET -s 10.77.0.101 -d 10.77.0.1 -r 10.77.0.1 -q 10.77.0.101 -p tcp --sport 40000 --dport 6817 "
    "--reply-port-src 6817 --reply-port-dst 40000 --state ESTABLISHED"
)


@pytest.mark.parametrize(
    "saved, kept",
    [
        ("", []),
        (OWN, []),  # the container's own connections end with its daemons
        (TCP.format(port=40000), [TCP.format(port=40000)]),
        (TCP.format(port=50123), [TCP.format(port=50123).replace("-n 10.78.0.2", "-n 10.78.0.2:50123")]),
        (ICMP, [ICMP]),
        (f"{OWN}\n{ICMP}\n\n{OWN}\n", [ICMP]),
    ],
)
def test_translated_connections(saved: str, kept: list[str]) -> None:
    assert translated(saved) == kept


@pytest.mark.parametrize(
    "later, same",
    [
        (TCP.format(port=50123).replace("-t 299", "-t 298"), True),
        (TCP.format(port=50124), False),
        (TCP.format(port=50123).replace("ESTABLISHED", "CLOSE"), False),
    ],
)
def test_a_connection_that_has_been_told(later: str, same: bool) -> None:
    assert (lasting(later) == lasting(TCP.format(port=50123))) == same


@pytest.mark.parametrize(
    "line, good",
    [
        ("10.77.0.101 eth0 02:00:0a:4d:00:65", True),
        ("fe80::1 eth1 02:00:0a:4d:00:65", True),
        ("10.77.0.101 eth0 02:00:0a:4d:00:65 nud permanent", False),
        ("10.77.0.101\nlink del eth0 02:00:0a:4d:00:65", False),
        ("10.77.0.101 eth0 02:00:0a:4d:00:65\n", False),
        ("10.77.0.101 eth0 ", False),
    ],
)
def test_neighbours_are_written_into_commands(line: str, good: bool) -> None:
    assert bool(NEIGHBOUR.match(line)) == good


# What is written meanwhile


class Told:
    """A trace that has seen these chunks written between one look and the next."""

    def __init__(self, *looks: set[int]) -> None:
        self.looks = list(looks)

    def written(self) -> set[int]:
        return self.looks.pop(0)


def test_what_a_round_has_left_comes_with_the_first_of_the_next() -> None:
    changes = Changes.__new__(Changes)
    changes.source = type("Size", (), {"count": 100})()  # type: ignore[assignment]
    changes.last, changes.carried = 1 << 62, set()
    changes.trace = Told({1, 2, 3}, {4, 5}, {6, 7}, {8, 9, 10, 200}, {11})  # type: ignore[assignment]
    assert changes.so_far() == {1, 2, 3}
    assert changes.so_far() == {4, 5}
    assert changes.so_far() is None  # it gets no less: the freeze has it
    assert changes.so_far(anew=True) == {6, 7, 8, 9, 10}
    assert changes.so_far() == {11}
    assert changes.carried == set()


# Parcels

BLANK = bytes(CHUNK)


def parcel(number: int, data: bytes, *, kind: int = PLAIN, digest: bytes | None = None) -> bytes:
    return HEAD.pack(number, kind, len(data), digest_of(data) if digest is None else digest) + data


@pytest.mark.parametrize("compress", [False, True])
def test_what_is_packed_comes_out(compress: bool) -> None:
    chunks = [b"text again and again. " * 2900, os.urandom(CHUNK), BLANK, b"short"]
    packer = Packer(compress)
    sent = b"".join(packer.wrap(number, data, digest_or_zero(data)) for number, data in enumerate(chunks))
    came = list(open_parcels(sent))
    assert [number for number, _, _ in came] == [0, 1, 2, 3]
    assert [data or BLANK for _, data, _ in came] == chunks
    assert [digest for _, _, digest in came] == [digest_or_zero(data) for data in chunks]
    assert came[2][1:] == (b"", ZERO), "zeros have no bytes"
    assert list(open_parcels(b"")) == []


GOOD = parcel(3, b"a chunk")


@pytest.mark.parametrize(
    "data",
    [
        GOOD[:-1],
        GOOD[: HEAD.size - 1],
        GOOD + b"\0",
        parcel(3, b"a chunk", digest=digest_of(b"another")),
        parcel(3, b"a chunk", digest=ZERO),
        parcel(3, b"", digest=digest_of(b"a chunk")),
        parcel(3, b"a chunk", kind=2),
        parcel(3, b"no zlib", kind=PACKED),
        parcel(3, zlib.compress(b"a chunk")[:-2], kind=PACKED, digest=digest_of(b"a chunk")),
        parcel(3, zlib.compress(bytes(CHUNK + 1)), kind=PACKED, digest=ZERO),
        parcel(3, zlib.compress(b"x" * (1 << 24)), kind=PACKED, digest=digest_of(b"x" * (1 << 24))),
        HEAD.pack(3, PLAIN, 0xFFFFFFFF, ZERO) + b"much less",
    ],
    ids=[
        "cut in the chunk",
        "cut in the head",
        "more behind it",
        "wrong digest",
        "zeros that are none",
        "nothing for something",
        "unknown packing",
        "not packed",
        "packed and cut",
        "longer than a chunk",
        "a bomb",
        "a huge length",
    ],
)
def test_a_parcel_that_is_not_what_was_sent(data: bytes) -> None:
    with pytest.raises(Problem, match="not what was sent"):
        list(open_parcels(data))


@given(st.binary(max_size=400))
def test_no_bytes_are_taken_for_others(data: bytes) -> None:
    try:
        for _, plain, digest in open_parcels(data):
            assert digest_or_zero(plain or BLANK) == digest
    except Problem:
        pass


@given(st.integers(0, len(GOOD) * 8 - 1), st.integers(0, 3))
def test_a_bit_that_turns_is_seen(bit: int, more: int) -> None:
    damaged = bytearray(GOOD * (more + 1))
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        came = list(open_parcels(bytes(damaged)))
    except Problem:
        return
    # Only the number is not held by the digest; who stores it holds all digests against the source's in the end.
    assert [plain for _, plain, _ in came] == [b"a chunk"] * (more + 1)
    assert bit < 32


# The line


class Wire:
    """A line whose other side is the test."""

    def __init__(self) -> None:
        self.reader, self.far_writer = os.pipe()
        self.far_reader, self.writer = os.pipe()
        self.line = Line(self.reader, self.writer)

    def send(self, data: bytes) -> None:
        os.write(self.far_writer, data)

    def hang_up(self) -> None:
        for end in (self.far_writer, self.far_reader):
            if end >= 0:
                os.close(end)
        self.far_writer = self.far_reader = -1

    def close(self) -> None:
        self.hang_up()
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


def message(**facts: object) -> bytes:
    text = json.dumps(facts).encode()
    return struct.pack(">I", len(text)) + text


def test_messages_and_what_follows_them(wire: Wire) -> None:
    wire.send(message(do="ping") + message(do="send", bytes=5) + b"12345" + message(do="stop"))
    first = wire.line.hear()
    assert first["do"] == "send" and wire.line.body(first) == b"12345"
    second = wire.line.hear()
    assert second["do"] == "stop" and wire.line.body(second) == b""


def test_a_message_that_comes_byte_by_byte(wire: Wire) -> None:
    data = message(do="send", bytes=3) + b"abc"

    def drip() -> None:
        for byte in data:
            wire.send(bytes([byte]))

    dripping = threading.Thread(target=drip)
    dripping.start()
    assert wire.line.body(wire.line.hear()) == b"abc"
    dripping.join()


@pytest.mark.parametrize("sent", [b"", b"\0\0", message(do="send")[:-2], message(do="ping")])
def test_a_line_that_ends(wire: Wire, sent: bytes) -> None:
    wire.send(sent)
    wire.hang_up()
    with pytest.raises(Gone):
        wire.line.hear()


@pytest.mark.parametrize("sent", [b"", b"\0\0", message(do="send")[:-2], message(do="ping")])
def test_a_line_that_is_silent(wire: Wire, sent: bytes) -> None:
    """A network that is cut tells nobody its end; a ping is heard, and then no more."""
    wire.send(sent)
    with pytest.raises(Gone):
        wire.line.hear(0.05)


def test_what_follows_is_cut(wire: Wire) -> None:
    wire.send(message(do="send", bytes=10) + b"1234")
    wire.hang_up()
    heard = wire.line.hear()
    with pytest.raises(Gone):
        wire.line.body(heard)


@pytest.mark.parametrize("size", [-1, 1 << 40, "5", 1.5, None, []])
def test_bytes_that_cannot_be(wire: Wire, size: object) -> None:
    wire.send(message(do="send", bytes=size))
    with pytest.raises(Problem, match=r"a message came with"):
        wire.line.body(wire.line.hear())


def test_a_message_too_long_is_not_waited_for(wire: Wire) -> None:
    wire.send(struct.pack(">I", LONGEST + 1))
    with pytest.raises(Problem, match="a message of"):
        wire.line.hear(0.05)


@pytest.mark.parametrize("text", [b"no JSON", b"\xff\xfe", b"[1]", b'"ping"', b"7", b"null", b"{}", b'{"do": 5}'])
def test_a_message_that_is_none(wire: Wire, text: bytes) -> None:
    wire.send(struct.pack(">I", len(text)) + text)
    with pytest.raises(Problem, match="invalid message"):
        wire.line.hear(0.05)


def test_what_is_said(wire: Wire) -> None:
    wire.line.say("parcels", b"data", chunks=2)
    came = os.read(wire.far_reader, 1000)
    (length,) = struct.unpack(">I", came[:4])
    assert json.loads(came[4 : 4 + length]) == {"kind": "parcels", "bytes": 4, "chunks": 2}
    assert came[4 + length :] == b"data"


def test_nobody_takes_what_is_said(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "PATIENCE_S", 0.05)
    with pytest.raises(Gone):
        wire.line.say("parcels", bytes(1 << 22))


def test_nobody_is_there_to_take_it(wire: Wire) -> None:
    wire.hang_up()
    with pytest.raises(Gone):
        wire.line.say("parcels", b"data")
