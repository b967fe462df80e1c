"""Connections whose first bytes were not captured, and paths anywhere in a request."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.observed import EMPTY, UNREAD, Role
from analysis.services import iana_name
from analysis.signatures import ANYWHERE, TCP, FirstBytes, Signature
from bench.calibration import Stated, signatures, state
from tests.captures import files
from tests.captures import packets as p
from tests.captures.clusters.families import draw
from tests.captures.clusters.stage import START_S, box
from tests.captures.clusters.tape import Stream, Tape
from tests.captures.native import run_core
from tests.unit.classify_cases import KINDS, NODE, OUTSIDE, SMS, boot, make_row, run, service

NODES, SERVER = [box(number, f"10.1.1.{1 + number}") for number in range(3)], box(1, "10.1.0.1", vendor=0)
REQUEST = b"GET /a/long/path/to/repodata/repomd.xml HTTP/1.1\r\nHost: sms\r\n\r\n"
FIRST = [(TCP, 80, 0, b"GET /WW/file", b"GET /WW/file"), (TCP, 80, ANYWHERE, b"/repodata/", b"/repodata/")]


def kinds(tape: Tape, *, keep: slice = slice(None), snap: int = 262144) -> list[int]:
    """Return the kinds of the rows of port 80."""
    packets = sorted(tape.frames)[keep]
    counter = run_core(files.pcap(packets, snap=snap), first=FIRST)
    return [row[2] for row in counter.rows(bytes(len(counter.hosts()))) if row[1] == 80]


def one(request: bytes) -> Tape:
    """An opening (3 packets), a request, its answer, the end (3)."""
    tape = Tape()
    stream = Stream(tape, NODES[0], SERVER, 80)
    stream.open(START_S)
    stream.send(START_S + 1, request)
    stream.send(START_S + 2, b"HTTP/1.1 200 OK\r\n\r\n", back=True)
    stream.close(START_S + 3)
    return tape


LINES = {
    "anywhere": (REQUEST, 2),
    "at the end of what is gathered": (b"GET /".ljust(117, b"x") + b"/repodata/", 2),
    "another service's beginning precedes": (b"GET /WW/file/repodata/ HTTP/1.1\r\n\r\n", 1),
    "after the first line": (b"GET / HTTP/1.1\r\nReferer: /repodata/\r\n\r\n", 0),
    "too late": (b"GET /".ljust(125, b"x") + b"/repodata/ HTTP/1.1\r\n\r\n", 0),
    "a line without an end": (b"GET /index", 0),
    "no path": (b"\r\n", 0),
}


@pytest.mark.parametrize("case", LINES)
def test_a_path_is_found_in_the_first_line(case: str) -> None:
    request, kind = LINES[case]
    assert kinds(one(request)) == [kind]


PARTS = {
    "all": (slice(None), 1),
    "without the request": (slice(4, None), UNREAD),
    "only the answer": (slice(4, 5), UNREAD),
    "only the end": (slice(5, None), UNREAD),
    "only the opening": (slice(0, 3), EMPTY),
    "from the request on": (slice(3, None), 1),
}


@pytest.mark.parametrize("case", PARTS)
def test_what_was_not_captured_was_not_read(case: str) -> None:
    keep, kind = PARTS[case]
    assert kinds(one(b"GET /WW/file?hwaddr=1 HTTP/1.1\r\n\r\n"), keep=keep) == [kind]


@pytest.mark.parametrize(("snap", "kind"), [(66, UNREAD), (74, UNREAD), (78, 1), (96, 1)])
def test_cut_packets_may_not_show_it(snap: int, kind: int) -> None:
    assert kinds(one(b"GET /WW/file?hwaddr=1 HTTP/1.1\r\n\r\n"), snap=snap) == [kind]


def test_a_port_without_first_bytes_has_nothing_to_read() -> None:
    tape = Tape()
    stream = Stream(tape, NODES[0], SERVER, 22)
    stream.send(START_S, b"SSH-2.0-x\r\n", back=True)
    counter = run_core(files.pcap(tape.frames), first=FIRST)
    assert [row[2] for row in counter.rows(bytes(len(counter.hosts())))] == [0]


# What they are.


def read_as(*rows: tuple[int, int], client: Role = NODE) -> set[str]:
    """Return the services of rows of port 80, by kind and connections."""
    made = [make_row(client, SMS, TCP, 80, kind=kind, opened=opened) for kind, opened in rows]
    return {one.name for one in run([*made, make_row(NODE, SMS, TCP, 6817, opened=9)]).services} - {"slurmctld"}


def test_what_was_not_read_is_what_was_read() -> None:
    assert read_as((KINDS["warewulf"], 5), (UNREAD, 40), (EMPTY, 3)) == {"warewulf"}
    assert read_as((KINDS["warewulf"], 2), (KINDS["provisioning"], 5), (UNREAD, 40)) == {"warewulf", "provisioning"}


def test_what_was_read_differs() -> None:
    """A request of something else: what was not read may be either."""
    assert read_as((KINDS["warewulf"], 5), (0, 1), (UNREAD, 40)) == {"warewulf", "http"}
    assert read_as((UNREAD, 40)) == {"http"}


def test_a_complete_capture_has_nothing_to_guess() -> None:
    """A connection that was open before may be anything, such as a long download; a lost packet changes nothing."""
    read, before = (
        make_row(NODE, SMS, TCP, 80, kind=KINDS["warewulf"], opened=90),
        make_row(NODE, SMS, TCP, 80, kind=UNREAD, midstream=3),
    )
    for lost, names in ((0, {"warewulf", "http"}), (9, {"warewulf", "http"}), (30, {"warewulf"})):
        rows = [read, before, make_row(NODE, SMS, TCP, 80, kind=UNREAD, opened=lost, midstream=1)]
        assert {one.name for one in run(rows).services} == names


def test_first_bytes_without_an_opening_show_that_packets_are_missing() -> None:
    read = make_row(NODE, SMS, TCP, 80, kind=KINDS["warewulf"], opened=0, midstream=3)
    before = make_row(NODE, SMS, TCP, 80, kind=UNREAD, opened=0, midstream=9)
    assert {one.name for one in run([read, before]).services} == {"warewulf"}


def test_what_was_read_of_others_says_nothing() -> None:
    outside = make_row(NODE, OUTSIDE, TCP, 80, kind=KINDS["warewulf"], opened=5)
    found = run([outside, make_row(NODE, SMS, TCP, 80, kind=UNREAD, opened=40)])
    assert service(found, "http").connections.node == 40


def test_a_port_beside_first_bytes(tmp_path: Path) -> None:
    """xcatd's is xCAT's where paths of xCAT were seen at the management node."""
    first = FirstBytes(TCP, 80, 0, b"GET /install/", b"GET /install/", (TCP, 3001))
    xcat = Signature("provisioning", boot=True, first=(first,), every_s=2592000, budget_s=2592000)
    daemon = make_row(NODE, SMS, TCP, 3001, opened=4, contacts_boot=4)
    image = make_row(NODE, SMS, TCP, 80, kind=1, opened=4, contacts_boot=4)
    of_another = make_row(NODE, OUTSIDE, TCP, 80, kind=1, opened=4, contacts_boot=4)
    for rows, ports in (([daemon, image], ("tcp/80", "tcp/3001")), ([daemon, of_another], None), ([daemon], None)):
        found = {one.name: one for one in run(rows, signatures=[xcat], boots=[boot()]).services}
        assert (found["provisioning"].ports if ports else None) == ports
        assert (iana_name((TCP, 3001)) in found) == (not ports)


def stated(folder: Path, family: str, seed: int) -> dict[str, Stated]:
    return {each.name: each for each in state(draw(family, seed), folder).stated}


def test_a_sampled_capture_of_warewulf_has_no_other_http(tmp_path: Path) -> None:
    drawn = draw("sampled", 9)
    assert not {"portal", "repository"} & {*drawn.activities}
    found = stated(tmp_path, "sampled", 9)
    assert "http" not in found
    assert found["warewulf"].right


def test_the_catalogue_knows_repositories() -> None:
    found = {one.low for each in signatures() if each.name == "repository" for one in each.first}
    assert found == {b"/repodata/", b".rpm HTTP/", b"/dists/", b".deb HTTP/"}


@pytest.mark.parametrize("path", ["/rocky/9/BaseOS/os/repodata/repomd.xml", "/debian/dists/bookworm/InRelease"])
def test_updates_of_packages_can_wait(tmp_path: Path, path: str) -> None:
    tape = Tape()
    for number, node in enumerate(NODES):
        stream = Stream(tape, node, SERVER, 80)
        stream.open(START_S + number)
        stream.send(START_S + number + 0.1, f"GET {path} HTTP/1.1\r\n\r\n".encode())
        stream.send(START_S + number + 0.2, bytes(5000), back=True)
        stream.close(START_S + number + 0.3)
        Stream(tape, node, SERVER, 6817).open(START_S + number)
    drawn = draw("slurm", 1)
    made = type(drawn)("updates", 0, 3, 3.0, {"repository": 9}, sorted(tape.frames))
    (found,) = (each for each in state(made, tmp_path).stated if each.name == "repository")
    assert found.verdict == "deferrable"


def test_a_message_to_srun_is_slurms(tmp_path: Path) -> None:
    """On 32803, where lockd of old systems listened: the system gives it to srun as any other."""
    tape = Tape()
    for number, node in enumerate(NODES):
        for port in (6817, 32803):
            stream = Stream(tape, node, SERVER, port)
            stream.open(START_S + number)
            stream.send(START_S + number + 0.1, p.slurm(5017, bytes(60)))
            stream.send(START_S + number + 0.2, p.slurm(8001, bytes(8)), back=True)
            stream.close(START_S + number + 0.3)
    drawn = draw("slurm", 1)
    made = type(drawn)("srun", 0, 3, 3.0, {"slurm": 9}, sorted(tape.frames))
    assert [each.name for each in state(made, tmp_path).stated] == ["slurmctld"]
