"""A move planned, and what goes over the wire during one: messages, chunk frames, connections."""

from __future__ import annotations

import json
import os
import select as kernel
import struct
import threading
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.agent.changes import Changes
from appliance.agent.channel import PATIENCE_S, Channel, Disconnected
from appliance.agent.chunk_frames import HEAD, FrameEncoder, chunk_digest, decode_frames
from appliance.agent.connections import CONNECTION, NEIGHBOUR, parse_translated, without_timeout
from appliance.agent.protocol import Problem
from appliance.agent.store import CHUNK, ZERO, digest_of
from appliance.agent.transfer import COMPRESSED, PLAIN
from appliance.catalog import Service, read_catalog, select
from appliance.plan.migration.move import (
    DEFAULTS,
    PARTS,
    ServiceOutage,
    missing_jobs,
    needs_outside,
    predict_outages,
    predict_parts,
    reset_ports,
    stop_groups,
    stream_ports,
)
from appliance.plan.services.jobs import read_jobs
from appliance.share import share
from appliance.shared.wire import MAX_MESSAGE_BYTES
from appliance.tools.move import Lost, receive_after

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
def test_dependents_stop_first(names: tuple[str, ...], ordered: list[tuple[str, str]]) -> None:
    groups = stop_groups(services(*names))
    at = {name: number for number, group in enumerate(groups) for name in group}
    for first, later in ordered:
        assert at[first] < at[later], groups
    assert sorted(at) == sorted(service.name for service in services(*names) if not service.live)
    assert sum(len(group) for group in groups) == len(at), "each stops once"


def test_stateless_services_are_not_stopped() -> None:
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
def test_prediction_uses_measurements(measured: list[dict[str, float]], expected: dict[str, float]) -> None:
    assert predict_parts(measured) == expected


def test_outage_of_live_services_is_the_switch() -> None:
    parts = {"stop": 1.0, "last changes": 2.0, "start": 4.0, "switch": 0.5}
    outages = {one.name: one.predicted_s for one in predict_outages(services(), parts, shared=False)}
    assert outages == {
        **dict.fromkeys(("slurmctld", "munge", "postfix", "cron", "filesync"), 7.5),
        **dict.fromkeys(("nat", "rsyslog", "chrony"), 0.5),
    }
    shared = {one.name: one.predicted_s for one in predict_outages(services(), parts, shared=True)}
    assert set(shared.values()) == {7.5}, "only one host can use a shared overlay"


@pytest.mark.parametrize("predicted, over", [(0.0, False), (3.0, False), (3.001, True)])
def test_outage_equal_to_its_budget_is_not_over(predicted: float, over: bool) -> None:
    assert ServiceOutage("x", predicted, 3.0).over is over


def test_ports_on_which_log_sessions_are_closed() -> None:
    assert stream_ports(services("rsyslog")) == (514, 2514), "TCP, RELP"
    assert reset_ports(services("rsyslog")) == (2514,)


def test_services_with_external_probes() -> None:
    assert needs_outside(services()) == {"nat", "filesync"}
    assert needs_outside([]) == set()


@pytest.mark.parametrize(
    "before, after, lost",
    [
        ({}, {}, []),
        ({"1": "RUNNING"}, {"1": "RUNNING"}, []),
        ({"1": "RUNNING"}, {"1": "COMPLETED"}, []),  # it completed meanwhile
        ({"1": "RUNNING"}, {"1": "COMPLETING"}, []),
        ({"1": "RUNNING"}, {"1": "PENDING"}, ["1"]),  # it would run again
        ({"1": "PENDING"}, {"1": "RUNNING"}, []),
        ({"1": "PENDING", "2": "RUNNING"}, {}, ["1", "2"]),
        ({"10": "PENDING", "9": "PENDING", "9_3": "PENDING"}, {}, ["9", "9_3", "10"]),
        ({}, {"1": "RUNNING"}, []),
        ({"1": "COMPLETED", "2": "CANCELLED", "3": "TIMEOUT"}, {}, []),  # purged by the controller
        ({"1": "COMPLETING", "2": "SUSPENDED"}, {}, ["1", "2"]),
        ({"5_1": "PENDING", "5_2": "PENDING"}, {"5_1": "RUNNING", "5_2": "PENDING"}, []),
    ],
)
def test_missing_jobs(before: dict[str, str], after: dict[str, str], lost: list[str]) -> None:
    assert missing_jobs(before, after) == lost


@pytest.mark.parametrize(
    "text, jobs",
    [
        ("", {}),
        ("7 RUNNING\n8 PENDING\n", {"7": "RUNNING", "8": "PENDING"}),
        ("  7_1   PENDING  \n\nslurm_load_jobs\n", {"7_1": "PENDING"}),
    ],
)
def test_read_jobs(text: str, jobs: dict[str, str]) -> None:
    assert read_jobs(text) == jobs


# Connections, as `conntrack -L -o save` of conntrack-tools 1.4.7 prints them

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
    assert parse_translated(saved) == kept


@pytest.mark.parametrize(
    "later, same",
    [
        (TCP.format(port=50123).replace("-t 299", "-t 298"), True),
        (TCP.format(port=50124), False),
        (TCP.format(port=50123).replace("ESTABLISHED", "CLOSE"), False),
    ],
)
def test_a_connection_that_was_sent_before(later: str, same: bool) -> None:
    assert (without_timeout(later) == without_timeout(TCP.format(port=50123))) == same


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
def test_neighbours_are_safe_in_commands(line: str, good: bool) -> None:
    assert bool(NEIGHBOUR.match(line)) == good


# Changes


class FakeTrace:
    """A trace that reports these chunks, one set per call."""

    def __init__(self, *written: set[int]) -> None:
        self.sets = list(written)

    def written(self) -> set[int]:
        return self.sets.pop(0)


def test_unread_changes_of_a_round_come_with_the_next_first_one() -> None:
    changes = Changes.__new__(Changes)
    changes.source = type("Size", (), {"count": 100})()
    changes.last, changes.pending = 1 << 62, set()
    changes.trace = FakeTrace({1, 2, 3}, {4, 5}, {6, 7}, {8, 9, 10, 200}, {11})  # type: ignore[assignment]
    assert changes.collect() == {1, 2, 3}
    assert changes.collect() == {4, 5}
    assert changes.collect() is None  # no fewer than before: left to the freeze
    assert changes.collect(restart=True) == {6, 7, 8, 9, 10}
    assert changes.collect() == {11}
    assert changes.pending == set()


# Chunk frames

BLANK = bytes(CHUNK)


def frame(number: int, data: bytes, *, kind: int = PLAIN, digest: bytes | None = None) -> bytes:
    return HEAD.pack(number, kind, len(data), digest_of(data) if digest is None else digest) + data


@pytest.mark.parametrize("compress", [False, True])
def test_frames_decode_to_what_was_encoded(compress: bool) -> None:
    chunks = [b"text again and again. " * 2900, os.urandom(CHUNK), BLANK, b"short"]
    encoder = FrameEncoder(compress)
    sent = b"".join(encoder.encode(number, data, chunk_digest(data)) for number, data in enumerate(chunks))
    received = list(decode_frames(sent))
    assert [number for number, _, _ in received] == [0, 1, 2, 3]
    assert [data or BLANK for _, data, _ in received] == chunks
    assert [digest for _, _, digest in received] == [chunk_digest(data) for data in chunks]
    assert received[2][1:] == (b"", ZERO), "zeros have no bytes"
    assert list(decode_frames(b"")) == []


GOOD = frame(3, b"a chunk")


@pytest.mark.parametrize(
    "data",
    [
        GOOD[:-1],
        GOOD[: HEAD.size - 1],
        GOOD + b"\0",
        frame(3, b"a chunk", digest=digest_of(b"another")),
        frame(3, b"a chunk", digest=ZERO),
        frame(3, b"", digest=digest_of(b"a chunk")),
        frame(3, b"a chunk", kind=2),
        frame(3, b"no zlib", kind=COMPRESSED),
        frame(3, zlib.compress(b"a chunk")[:-2], kind=COMPRESSED, digest=digest_of(b"a chunk")),
        frame(3, zlib.compress(bytes(CHUNK + 1)), kind=COMPRESSED, digest=ZERO),
        frame(3, zlib.compress(b"x" * (1 << 24)), kind=COMPRESSED, digest=digest_of(b"x" * (1 << 24))),
        HEAD.pack(3, PLAIN, 0xFFFFFFFF, ZERO) + b"much less",
    ],
    ids=[
        "truncated chunk",
        "truncated header",
        "trailing bytes",
        "wrong digest",
        "data with the digest of zeros",
        "no data with a digest",
        "unknown encoding",
        "not compressed",
        "truncated compressed data",
        "longer than a chunk",
        "zip bomb",
        "huge length",
    ],
)
def test_damaged_frames_are_refused(data: bytes) -> None:
    with pytest.raises(Problem, match="not what was sent"):
        list(decode_frames(data))


@given(st.binary(max_size=400))
def test_random_bytes_are_never_accepted_with_a_wrong_digest(data: bytes) -> None:
    try:
        for _, plain, digest in decode_frames(data):
            assert chunk_digest(plain or BLANK) == digest
    except Problem:
        pass


@given(st.integers(0, len(GOOD) * 8 - 1), st.integers(0, 3))
def test_a_flipped_bit_is_detected(bit: int, more: int) -> None:
    damaged = bytearray(GOOD * (more + 1))
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        received = list(decode_frames(bytes(damaged)))
    except Problem:
        return
    # Only the number is not covered by the digest; the target compares all digests with the source's at the end.
    assert [plain for _, plain, _ in received] == [b"a chunk"] * (more + 1)
    assert bit < 32


# The channel


class Wire:
    """A channel whose other side is the test."""

    def __init__(self) -> None:
        self.reader, self.far_writer = os.pipe()
        self.far_reader, self.writer = os.pipe()
        self.channel = Channel(self.reader, self.writer)

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


def test_messages_and_their_bodies(wire: Wire) -> None:
    wire.send(message(do="ping") + message(do="send", bytes=5) + b"12345" + message(do="stop"))
    first = wire.channel.receive()
    assert first["do"] == "send" and wire.channel.read_body(first) == b"12345"
    second = wire.channel.receive()
    assert second["do"] == "stop" and wire.channel.read_body(second) == b""


def test_a_message_in_single_bytes(wire: Wire) -> None:
    data = message(do="send", bytes=3) + b"abc"

    def drip() -> None:
        for byte in data:
            wire.send(bytes([byte]))

    dripping = threading.Thread(target=drip)
    dripping.start()
    assert wire.channel.read_body(wire.channel.receive()) == b"abc"
    dripping.join()


@pytest.mark.parametrize("sent", [b"", b"\0\0", message(do="send")[:-2], message(do="ping")])
def test_a_closed_channel(wire: Wire, sent: bytes) -> None:
    wire.send(sent)
    wire.hang_up()
    with pytest.raises(Disconnected):
        wire.channel.receive()


@pytest.mark.parametrize("sent", [b"", b"\0\0", message(do="send")[:-2], message(do="ping")])
def test_a_silent_channel(wire: Wire, sent: bytes) -> None:
    """A broken network does not close the connection; a ping is received, then nothing."""
    wire.send(sent)
    with pytest.raises(Disconnected):
        wire.channel.receive(0.05)


def test_a_truncated_body(wire: Wire) -> None:
    wire.send(message(do="send", bytes=10) + b"1234")
    wire.hang_up()
    received = wire.channel.receive()
    with pytest.raises(Disconnected):
        wire.channel.read_body(received)


@pytest.mark.parametrize("size", [-1, 1 << 40, "5", 1.5, None, []])
def test_invalid_body_sizes(wire: Wire, size: object) -> None:
    wire.send(message(do="send", bytes=size))
    with pytest.raises(Problem, match=r"received a message with"):
        wire.channel.read_body(wire.channel.receive())


def test_a_too_long_message_is_refused_at_once(wire: Wire) -> None:
    wire.send(struct.pack(">I", MAX_MESSAGE_BYTES + 1))
    with pytest.raises(Problem, match="a message of"):
        wire.channel.receive(0.05)


@pytest.mark.parametrize("text", [b"no JSON", b"\xff\xfe", b"[1]", b'"ping"', b"7", b"null", b"{}", b'{"do": 5}'])
def test_invalid_messages(wire: Wire, text: bytes) -> None:
    wire.send(struct.pack(">I", len(text)) + text)
    with pytest.raises(Problem, match="invalid message"):
        wire.channel.receive(0.05)


def test_a_sent_message(wire: Wire) -> None:
    wire.channel.send("parcels", b"data", chunks=2)
    received = os.read(wire.far_reader, 1000)
    (length,) = struct.unpack(">I", received[:4])
    assert json.loads(received[4 : 4 + length]) == {"kind": "parcels", "bytes": 4, "chunks": 2}
    assert received[4 + length :] == b"data"


def test_a_receiver_that_does_not_read(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, patience = kernel.select, list[float]()

    def select_soon(reads: list[int], writes: list[int], other: list[int], seconds: float) -> object:
        patience.append(seconds)
        return ready(reads, writes, other, 0.05)

    monkeypatch.setattr(kernel, "select", select_soon)
    with pytest.raises(Disconnected):
        wire.channel.send("parcels", bytes(1 << 22))
    assert set(patience) == {PATIENCE_S}


def test_a_receiver_that_is_gone(wire: Wire) -> None:
    wire.hang_up()
    with pytest.raises(Disconnected):
        wire.channel.send("parcels", b"data")


ENDS = "-s 10.1.0.2 -d 10.9.0.1 -r 10.9.0.1 -n 10.9.0.7:4001"


@pytest.mark.parametrize(
    ("line", "known"),
    [
        (f"-A -t 299 -u SEEN_REPLY,ASSURED {ENDS} -p tcp --sport 1 --dport 80 --reply-port-dst 1 --state CLOSE ", True),
        (f"-A -t 29 -u UNSET -w 3 {ENDS} -p udp --sport 4 --dport 53 --reply-port-src 53 --reply-port-dst 4", True),
        (f"-A -t 29 {ENDS} -p icmp --icmp-type 8 --icmp-code 0 --icmp-id 7", True),
        (f"-A -t 29 {ENDS} -p gre --srckey 1 --dstkey 2 --reply-key-src 2 --reply-key-dst 1", True),
        (f"-A -t 29 {ENDS} -p sctp --sport 1 --dport 2 --state ESTABLISHED --orig-vtag 1 --reply-vtag 2", True),
        ("-F", False),
        ("-D", False),
        (f"-D {ENDS}", False),
        (f"-A {ENDS} -F", False),
        (f"-A {ENDS} --load-file /etc/shadow", False),
        (f"-A {ENDS} -o /etc/shadow", False),
        ("", False),
    ],
)
def test_only_connections_of_another_host_are_added(line: str, known: bool) -> None:
    """`conntrack -R` runs any command that is in its input, such as to forget all connections."""
    assert bool(CONNECTION.fullmatch(line)) == known


class Talker:
    """An agent whose replies to earlier requests go on."""

    name = "host-b"

    def __init__(self, *kinds: str) -> None:
        self.kinds = iter(kinds)

    def receive(self, *kinds: str, patience_s: float) -> tuple[dict[str, str], bytes]:
        return {"kind": next(self.kinds, "ready")}, b""


def test_earlier_replies_are_not_awaited_for_ever() -> None:
    """A hostile agent could keep `sms adopt --undo` waiting in its rollback."""
    assert receive_after(Talker("ready", "aborted"), "aborted", "ready")["kind"] == "aborted"  # type: ignore[arg-type]
    with pytest.raises(Lost):
        receive_after(Talker(), "aborted", "ready", patience_s=0.1)  # type: ignore[arg-type]
