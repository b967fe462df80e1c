"""Decoders of single packets, and the outage budgets that follow from them."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis import reading
from analysis.context import EXPECTED
from analysis.observed import Row, Sample
from analysis.protocols import SAMPLED
from analysis.protocols import dhcp as protocols_dhcp
from analysis.protocols.dhcp import ACK, INFORM, OFFER, REQUEST, is_renewal, read_dhcp, terms
from analysis.protocols.ntp import read_ntp
from analysis.protocols.slurm import read_slurm
from analysis.signatures import TCP, UDP
from analysis.unseen import needed_capture_s
from tests.unit.classify_cases import GROUP, NODE, OUTSIDE, SIGNATURES, SMS, boot, make_row, run, service


def dhcp(kind: int, *, server: str = "10.1.0.1", own: str = "0.0.0.0", relay: str = "0.0.0.0", **times: int) -> bytes:
    """A message of DHCP as RFC 2131 and RFC 2132 lay it out; times: lease, renew, rebind."""
    numbers = {"lease": 51, "renew": 58, "rebind": 59}
    options = bytes([53, 1, kind, 54, 4, *map(int, server.split("."))])
    options += b"".join(bytes([numbers[name], 4]) + struct.pack("!I", value) for name, value in times.items()) + b"\xff"
    head = struct.pack("!BBBBIHH", 2 if kind in (OFFER, ACK) else 1, 1, 6, 0, 1, 0, 0)
    addresses = bytes(map(int, own.split("."))) + bytes(8) + bytes(map(int, relay.split(".")))
    return head + addresses + bytes.fromhex("525400010000") + bytes(10 + 192) + b"\x63\x82\x53\x63" + options


def ntp(poll: int, mode: int = 3) -> bytes:
    return bytes([4 << 3 | mode, 2, poll, 0xE9]) + bytes(44)


def slurm(kind: int, version: int = 0x2600) -> bytes:
    """A message's beginning as pack_header of each release writes it."""
    middle = struct.pack("!H", kind) if version >= 0x2600 else struct.pack("!HH", 0, kind)
    return struct.pack("!IHH", 200, version, 0) + middle + struct.pack("!IHH", 8, 0, 0)


def samples(port: int, *payloads: bytes, protocol: int = UDP) -> list[Sample]:
    return [Sample(protocol, port, True, 0, 1, 0, payload) for payload in payloads]


def test_dhcp() -> None:
    found = read_dhcp(dhcp(ACK, lease=21600, renew=10800, rebind=18900))
    assert found
    assert (found.kind, found.server) == (ACK, "10.1.0.1")
    assert (found.lease_s, found.renew_s) == (21600, 10800)


def test_dhcp_times_that_follow_from_the_lease() -> None:
    """RFC 2131, section 4.4.5: a half."""
    found = read_dhcp(dhcp(ACK, lease=800))
    assert found and found.renew_s == 400
    forever = read_dhcp(dhcp(ACK, lease=0xFFFFFFFF))
    assert forever and forever.lease_s == math.inf


@pytest.mark.parametrize("length", [22, 54, 86, 300])
def test_dhcp_renewal(length: int) -> None:
    """Also of messages that are cut before their type, at 64, 96 or 128 bytes of the frame."""
    renewal = dhcp(REQUEST, own="10.1.1.1")
    assert is_renewal(renewal[:length])
    assert not is_renewal(dhcp(REQUEST)[:length])
    assert not is_renewal(dhcp(ACK, own="10.1.1.1")[:length])
    assert is_renewal(dhcp(INFORM, own="10.1.1.1")[:length]) == (length < 243), "only the type tells them apart"
    assert not is_renewal(dhcp(REQUEST, own="10.1.1.1", relay="10.2.0.1")[:300])
    relayed = bytearray(renewal)
    relayed[3] = 1
    assert not is_renewal(bytes(relayed[:length])), "a relay has counted a hop"
    assert not is_renewal(renewal[:15])


@pytest.mark.parametrize(("poll", "seconds"), [(4, 16.0), (6, 64.0), (10, 1024.0)])
def test_ntp(poll: int, seconds: float) -> None:
    found = read_ntp(ntp(poll))
    assert found and (found.mode, found.poll_s) == (3, seconds)


@pytest.mark.parametrize("payload", [ntp(0), ntp(255), ntp(6, mode=6), ntp(6)[:40], b""])
def test_not_ntp(payload: bytes) -> None:
    assert read_ntp(payload) is None


@pytest.mark.parametrize(
    ("version", "release"),
    [
        (0x1D00, "15.08"),
        (0x2500, "21.08"),
        (0x2600, "22.05"),
        (0x2900, "24.05"),
        (0x2E00, "26.11"),
        (0x2F00, "protocol 47"),
    ],
)
def test_slurm(version: int, release: str) -> None:
    found = read_slurm(slurm(1008, version))
    assert found and (found.release, found.name) == (release, "REQUEST_PING")


@pytest.mark.parametrize(
    "payload", [b"", slurm(1008)[:15], slurm(1008, 0x2601), slurm(1008, 0x0100), slurm(0), b"GET / HTTP/1.1\r\n"]
)
def test_not_slurm(payload: bytes) -> None:
    assert read_slurm(payload) is None


@given(st.binary(max_size=1100), st.integers(0, 300))
def test_no_packet_breaks_them(noise: bytes, cut: int) -> None:
    whole = dhcp(ACK, lease=600)
    for payload in (noise, whole[:cut], whole[:240] + noise, whole[:cut] + noise, ntp(6)[:cut] + noise):
        for read in (read_dhcp, read_ntp, read_slurm):
            read(payload)
    run(
        [],
        samples=[*samples(67, noise, whole[:240] + noise), *samples(123, noise), *samples(6817, noise, protocol=TCP)],
    )


OPTION = st.one_of(
    st.tuples(st.sampled_from([51, 53, 54, 58]), st.binary(min_size=4, max_size=4)),
    st.tuples(st.just(53), st.binary(min_size=1, max_size=1)),
    st.tuples(st.integers(1, 254), st.binary(max_size=12)),
)


@given(st.lists(OPTION, max_size=8), st.booleans(), st.integers(236, 400))
def test_dhcp_is_read_as_scapy_reads_it(options: list[tuple[int, bytes]], known: bool, cut: int) -> None:
    """Of numbers that scapy only names, it returns the bytes; a number with a type of its own may stop it."""
    given_options = [one for one in options if one[0] in (51, 53, 54, 58) or one[0] > 223]
    message = dhcp(REQUEST, own="10.1.1.1" if known else "0.0.0.0")
    packed = b"".join(bytes([number, len(value)]) + value for number, value in given_options)
    payload = (message[:240] + packed + b"\xff" + bytes(8))[:cut]
    assert read_dhcp(payload) == protocols_dhcp._read_by_scapy(payload)


def test_odd_dhcp_is_left_to_scapy() -> None:
    whole = dhcp(ACK, lease=600)
    twice = whole[:-1] + bytes([51, 4, 0, 0, 2, 0, 255])
    found = read_dhcp(twice)
    assert found and found.lease_s == 512
    odd = read_dhcp(whole[:-1] + bytes([58, 8, 0, 0, 0, 9, 0, 0, 0, 5, 255]))
    assert odd and odd.renew_s == 9


def test_usual_packets_are_read_without_scapy() -> None:
    """Importing it takes as long as all other work on a small capture."""
    script = (
        "import sys; from analysis.protocols.dhcp import read_dhcp; from analysis.protocols.ntp import read_ntp;"
        f"assert read_dhcp({dhcp(ACK, lease=600)!r}) and read_ntp({ntp(6)!r});"
        "print(any(name.startswith('scapy') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# Budgets.

BOOT = make_row(NODE, GROUP, UDP, 67, opened=2, contacts_boot=2, client_hosts=1, client_indexes=(11,))
RENEWED = make_row(NODE, SMS, UDP, 67, opened=8, contacts_steady=8)
LEASE = dhcp(ACK, lease=21600, renew=10800)
SHORT = dhcp(ACK, lease=600)
WEEK = dhcp(ACK, lease=604800)

BUDGETS: dict[str, tuple[list[Row], list[Sample], str, float, str]] = {
    "the catalogue's": ([make_row(NODE, SMS, TCP, 25, opened=9)], [], "postfix", 432000, ""),
    "leases that are renewed": (
        [BOOT, RENEWED],
        samples(67, LEASE),
        "provisioning",
        10800,
        "a lease lasts 6 h and is renewed after 3 h",
    ),
    "the shortest lease counts": ([BOOT, RENEWED], samples(67, LEASE, SHORT), "provisioning", 300, "lasts 10 min"),
    "an answer on the client's port": ([BOOT, RENEWED], samples(68, LEASE), "provisioning", 10800, "6 h"),
    "a renewal in a packet": (
        [BOOT],
        samples(67, LEASE, dhcp(REQUEST, own="10.1.1.1")),
        "provisioning",
        10800,
        "keeps its address",
    ),
    "leases, too short to see renewals": ([BOOT], samples(67, LEASE), "provisioning", 10800, "too short to decide"),
    "leases that nobody renews": ([BOOT], samples(67, SHORT), "provisioning", 2592000, "no running node did so"),
    "offers and answers in turn": (
        [BOOT, RENEWED],
        samples(67, *[dhcp(OFFER, lease=21600), LEASE] * 60),
        "provisioning",
        10800,
        "a lease lasts 6 h",
    ),
    "an offer, where the answer is missing": (
        [BOOT],
        samples(67, dhcp(OFFER, lease=21600)),
        "provisioning",
        10800,
        "6 h",
    ),
    "a relay's first requests are not renewals": (
        [BOOT, RENEWED],
        samples(67, SHORT, *[dhcp(REQUEST, relay="10.2.0.1")] * 8),
        "provisioning",
        2592000,
        "no running node did so",
    ),
    "a renewal behind a relay": (
        [BOOT, RENEWED],
        samples(67, LEASE, dhcp(REQUEST, relay="10.2.0.1"), dhcp(REQUEST, own="10.2.1.1")),
        "provisioning",
        10800,
        "keeps its address",
    ),
    "an inform is not a renewal": (
        [BOOT, RENEWED],
        samples(67, SHORT, dhcp(INFORM, own="10.1.1.1")),
        "provisioning",
        2592000,
        "no running node did so",
    ),
    "leases for ever": ([BOOT, RENEWED], samples(67, dhcp(ACK, lease=0xFFFFFFFF)), "provisioning", 2592000, "boot"),
    "the clock, by the packets": (
        [make_row(NODE, SMS, UDP, 123, opened=9)],
        samples(123, ntp(6), ntp(10), ntp(4, mode=4)),
        "chrony",
        512,
        "nodes poll every 64 s to 1024 s",
    ),
    "the clock without packets": ([make_row(NODE, SMS, UDP, 123, opened=9)], [], "chrony", 1024, "poll"),
    "SlurmdTimeout by the pings": (
        [make_row(SMS, NODE, TCP, 6818, opened=320, every=40)],
        samples(6818, slurm(1008), protocol=TCP),
        "slurmctld",
        120,
        "a third of SlurmdTimeout, which is 120 s",
    ),
    "no pings": (
        [make_row(SMS, NODE, TCP, 6818, opened=320, every=40)],
        samples(6818, slurm(6001), protocol=TCP),
        "slurmctld",
        300,
        "SlurmdTimeout",
    ),
    "syslog over UDP": ([make_row(NODE, SMS, UDP, 514, opened=9)], [], "rsyslog", 0, "lost immediately"),
    "syslog over TCP": ([make_row(NODE, SMS, TCP, 514, opened=9)], [], "rsyslog", 924, "all senders use TCP"),
    "syslog over both": (
        [make_row(NODE, SMS, TCP, 514, opened=9), make_row(NODE, SMS, UDP, 514, opened=9)],
        [],
        "rsyslog",
        0,
        "lost immediately",
    ),
    "unknown over UDP": (
        [make_row(NODE, SMS, UDP, 4000, opened=80, every=400)],
        [],
        "udp/4000",
        50,
        "one of 8 nodes uses it every 50 s",
    ),
    "unknown over TCP": ([make_row(NODE, SMS, TCP, 4000, opened=80, every=400)], [], "tcp/4000", 177, "for 127 s"),
    "unknown and open": (
        [make_row(NODE, SMS, TCP, 4000, opened=1, midstream=8, contacts_steady=90)],
        [],
        "tcp/4000",
        924,
        "stay open",
    ),
    "unknown and opened by the management node": (
        [make_row(SMS, NODE, TCP, 4000, opened=80)],
        [],
        "tcp/4000",
        86400,
        "nodes do not use it",
    ),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_budgets(case: str) -> None:
    rows, kept, name, seconds, expected = BUDGETS[case]
    found = service(run(rows, samples=kept, boots=[boot()]), name)
    assert found.budget_s == pytest.approx(seconds)
    assert expected in found.budget_why, found.budget_why


@pytest.mark.parametrize(
    ("rows", "lease", "verdict"),
    [
        ([BOOT, RENEWED], SHORT, "time-critical"),
        ([BOOT, RENEWED], dhcp(ACK, lease=7200), "time-critical"),
        ([BOOT, RENEWED], LEASE, "time-critical"),
        ([BOOT, RENEWED], WEEK, "deferrable"),
        ([BOOT], SHORT, "deferrable"),
    ],
)
def test_leases_of_hours_that_are_renewed_make_dhcp_time_critical(rows: list[Row], lease: bytes, verdict: str) -> None:
    found = run([*rows, make_row(NODE, SMS, TCP, 6817, opened=9)], samples=samples(67, lease), boots=[boot()])
    dhcpd = service(found, "provisioning")
    assert dhcpd.verdict == verdict
    renewed = RENEWED in rows
    assert ("running nodes renew leases" in dhcpd.reasons[0]) == renewed
    assert dhcpd.confidence > 0.5 or verdict == "deferrable", "packets prove it: it needs no long capture"
    assert any("tolerated outage of provisioning (DHCP)" in one for one in found.capture.remarks) == renewed


def test_slurm_messages_are_described() -> None:
    kept = samples(6817, slurm(6012), slurm(6012), slurm(1002), protocol=TCP)
    found = service(run([make_row(NODE, SMS, TCP, 6817, opened=9)], samples=kept), "slurmctld")
    expected = "messages of Slurm 22.05; of 3 decoded: MESSAGE_EPILOG_COMPLETE 2, MESSAGE_NODE_REGISTRATION_STATUS 1"
    assert found.reasons[-1] == expected


def test_of_many_samples_only_some_are_decoded() -> None:
    """2,000 answers of a boot storm must not take a second, and the shortest lease must be found."""
    kept = samples(67, *[LEASE] * 1000, SHORT, *[LEASE] * 1000)
    began = time.monotonic()
    assert service(run([BOOT, RENEWED], samples=kept), "provisioning").budget_s == 300
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("length", [0, 12, 40, 86, 236, 239, 240, 241, 243, 248])
def test_terms_of_messages_that_are_cut(length: int) -> None:
    whole = dhcp(ACK, lease=21600, renew=10800)
    assert terms(whole) == (ACK, (21600).to_bytes(4), (10800).to_bytes(4))
    assert terms(whole[:length]) == (ACK if length >= 243 else 0, b"", b"")
    assert terms(whole[:240] + bytes(9) + whole[240:]) == terms(whole), "padding"


CUT = LEASE[:86]
ASKED, RENEWING = dhcp(REQUEST)[:86], dhcp(REQUEST, own="10.1.1.1")[:86]


@pytest.mark.parametrize(
    ("rows", "asked", "seconds", "expected"),
    [
        # 8 nodes, one of which boots: 7 hours and 58 minutes of running nodes, 8 renewals.
        ([BOOT, RENEWED], [RENEWING] * 8, (7 * 3600 + 3470) / 8, "running nodes renew every 59.7 min"),
        # Of more packets than are sampled, only counts show this.
        ([BOOT, RENEWED], [ASKED] * 2048, (7 * 3600 + 3470) / 8, "running nodes renew every 59.7 min"),
        ([BOOT, RENEWED], [ASKED], 3600, "did not renew for 1 h"),
        ([BOOT], [ASKED], 3600, "did not renew for 1 h"),
    ],
)
def test_leases_that_cut_packets_hide(rows: list[Row], asked: list[bytes], seconds: float, expected: str) -> None:
    """The budget is what was seen, not the catalogue's month."""
    found = run(rows, samples=samples(67, CUT, *asked), boots=[boot()], cut=900, cut_at=128)
    dhcpd = service(found, "provisioning")
    assert dhcpd.budget_s == pytest.approx(seconds) and dhcpd.budget_from == "observed"
    assert "packets are cut at 128 bytes" in dhcpd.budget_why
    assert expected in dhcpd.budget_why
    assert (found.capture.cut_packets, found.capture.cut_at) == (900, 128)


def test_leases_that_truncated_packets_hide_for_longer_than_the_catalogue_has() -> None:
    found = run([BOOT], samples=samples(67, CUT, ASKED), duration_s=40 * 86400, cut=900, cut_at=128)
    dhcpd = service(found, "provisioning")
    assert (dhcpd.budget_s, dhcpd.budget_from) == (2592000, "catalogue")
    assert "packets are cut at 128 bytes" in dhcpd.budget_why


@pytest.mark.parametrize(
    ("row", "name", "seconds"),
    [
        (make_row(NODE, SMS, UDP, 123, opened=80, every=64), "chrony", 512),
        (make_row(SMS, NODE, TCP, 6818, opened=320, every=40), "slurmctld", 120),
    ],
)
def test_budgets_of_cut_packets_use_their_times(row: Row, name: str, seconds: float) -> None:
    """If that is less than the catalogue says."""
    found = service(run([row], cut=400, cut_at=64), name)
    assert found.budget_s == pytest.approx(seconds, rel=0.03) and found.budget_from == "observed"


@pytest.mark.parametrize(
    ("rows", "kept", "name", "source"),
    [
        ([make_row(NODE, SMS, TCP, 25, opened=9)], [], "postfix", "catalogue"),
        ([make_row(NODE, SMS, UDP, 514, opened=9)], [], "rsyslog", "protocol"),
        ([make_row(NODE, SMS, UDP, 123, opened=9)], samples(123, ntp(6)), "chrony", "observed"),
        ([make_row(NODE, SMS, UDP, 123, opened=9)], [], "chrony", "catalogue"),
        ([BOOT, RENEWED], samples(67, LEASE), "provisioning", "observed"),
        ([make_row(NODE, SMS, UDP, 4000, opened=80, every=400)], [], "udp/4000", "observed"),
    ],
)
def test_sources_of_budgets(rows: list[Row], kept: list[Sample], name: str, source: str) -> None:
    assert service(run(rows, samples=kept, boots=[boot()]), name).budget_from == source


def test_the_core_keeps_what_is_read_here() -> None:
    """DHCP's answers come from the server's port; a storm of boots must not hide Slurm or the clock."""
    assert {(protocol, port) for protocol, port, _ in SAMPLED} == {(UDP, 67), (UDP, 123), (TCP, 6817), (TCP, 6818)}
    assert reading.SAMPLED is SAMPLED  # type: ignore[attr-defined]


# What was not seen.


def test_rule_of_three() -> None:
    assert pytest.approx(2.9957, abs=1e-4) == EXPECTED
    assert needed_capture_s(300, 1) == pytest.approx(898.7, abs=0.1)
    assert needed_capture_s(300, 450) == pytest.approx(1.997, abs=0.001)
    assert needed_capture_s(300, 0) == needed_capture_s(300, 1)


def test_unseen() -> None:
    logs = make_row(NODE, SMS, UDP, 514, opened=8, contacts_steady=640)
    files, names = make_row(NODE, SMS, TCP, 2049, opened=9), make_row(NODE, SMS, UDP, 53, opened=9)
    found = run([make_row(NODE, SMS, TCP, 25, opened=9), logs, files, names])
    by_name = {one.name: one for one in found.unseen}
    seen = {"munge", "nfs", "postfix", "rsyslog"}
    assert set(by_name) == {one.name for one in SIGNATURES} - seen, "munge has no traffic of its own"
    assert by_name["slurmctld"].needed_capture_s == pytest.approx(112.3, abs=0.1)
    assert "nodes hardly use it" in by_name["slurmctld"].why
    assert "too short to decide" in by_name["provisioning"].why
    assert [one.needed_capture_s for one in found.unseen] == sorted(one.needed_capture_s for one in found.unseen)


def test_unseen_without_an_interval() -> None:
    """A day, if the catalogue does not say."""
    (found,) = run([], signatures=[replace(SIGNATURES[0], every_s=0.0)]).unseen
    assert found.needed_capture_s == pytest.approx(needed_capture_s(86400, 8))


OUTSIDE_INDEX = 9
"""Index of an outside address among the hosts of eight nodes."""


def test_nat_tolerates_no_outage_whatever_is_routed() -> None:
    """Nodes poll a public time server, log to the site, and renew leases of a server elsewhere."""
    polls = [Sample(UDP, 123, True, 0, 1, OUTSIDE_INDEX, ntp(6))] * 4
    ports = ((UDP, 123), (UDP, 514), (UDP, 67), (TCP, 6817))
    rows = [make_row(NODE, OUTSIDE, protocol, port, opened=90, every=64) for protocol, port in ports]
    for some in ([rows[0]], rows):
        found = service(run(some, samples=polls), "nat")
        assert (found.budget_s, found.budget_from, found.verdict) == (0, "catalogue", "time-critical")


def test_chrony_is_not_what_its_own_servers_are() -> None:
    """The management node polls a public server every 64 s, nodes the management node every 1,024 s."""
    row = make_row(NODE, SMS, UDP, 123, opened=40, every=1024)
    upstream = [Sample(UDP, 123, True, 0, 0, OUTSIDE_INDEX, ntp(6))] * 4
    routed = [Sample(UDP, 123, True, 0, 1, OUTSIDE_INDEX, ntp(6))] * 4
    found = service(run([row], samples=[*upstream, *routed, *samples(123, ntp(10))]), "chrony")
    assert (found.budget_s, found.budget_from) == (8 * 1024, "observed")
    assert service(run([row], samples=upstream), "chrony").budget_from == "catalogue"
