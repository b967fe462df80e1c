"""Who opens connections to whom: the matrix of a classification, and its drawing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis import matrix
from analysis.classify import classify
from analysis.model import Matrix, Party, Talk
from analysis.reading import read_captures
from analysis.report import grid
from analysis.report.html import render_html
from analysis.roles import find_roles
from tests.captures import files
from tests.captures.cluster import Plan, simulate
from tests.unit import classification_example as example
from tests.unit.classify_cases import SIGNATURES

WITHOUT = ("arp", "lldp")
"""Traffic without addresses that talk."""


def make(folder: Path, plan: Plan) -> tuple[Matrix, int, int]:
    """Return the matrix of a simulated capture, and packets and bytes of all links."""
    (folder / "made.pcap").write_bytes(files.pcap(simulate(plan).packets()))
    reading = read_captures([str(folder / "made.pcap")], signatures=SIGNATURES)
    hosts, links = reading.hosts(), reading.links()
    roles = find_roles(hosts, links, reading.samples)
    found = classify(reading.observe(roles.by_index, hosts, links), roles, SIGNATURES)
    return found.matrix, sum(link.packets for link in links), sum(link.bytes for link in links)


def test_every_node_has_a_row_and_nothing_is_lost(tmp_path: Path) -> None:
    found, packets, octets = make(tmp_path, Plan(nodes=8, duration_s=600, seed=3))
    assert found.parties[:2] == (Party("the management node", "sms"), Party("10.1.1.1", "node"))
    assert [one.name for one in found.parties if one.role == "node"][:8] == [f"10.1.1.{n}" for n in range(1, 9)]
    assert {one.role for one in found.parties[9:]} == {"node", "outside", "group"}
    assert sum(one.packets for one in found.talks) == packets
    assert sum(one.bytes for one in found.talks) == octets
    assert {(1, 0), (8, 0), (0, 1)} <= {(one.client, one.server) for one in found.talks}


@pytest.mark.parametrize(("nodes", "rows", "first"), [(50, 50, "10.1.1.1"), (51, 26, "10.1.1.1 to 10.1.1.2")])
def test_more_than_fifty_nodes_share_rows(nodes: int, rows: int, first: str, tmp_path: Path) -> None:
    plan = Plan(nodes=nodes, duration_s=120, boots=0, services=("ntp", "ganglia"))
    found, packets, _ = make(tmp_path, plan)
    blocks = [one for one in found.parties if one.role == "node"]
    assert (len(blocks), blocks[0].name) == (rows, first)
    assert sum(one.machines for one in blocks) == nodes
    assert len(blocks) <= matrix.MAX_NODES
    assert sum(one.packets for one in found.talks) == packets


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("10.1.1.1", "10.1.1.1"),
        ("10.1.1.1 to 10.1.1.9", "10.1.1.1 to .9"),
        ("10.1.1.250 to 10.1.2.3", "10.1.1.250 to 10.1.2.3"),
        ("fd00:1::a to fd00:1::f", "fd00:1::a to :f"),
        ("52:54:00:00:00:01", "52:54:00:00:00:01"),
        ("<b>to\x1b", "<b>to\\x1b"),
        ("x" * 99, "x" * 25 + "…"),
    ],
)
def test_labels(name: str, label: str) -> None:
    assert grid.shorten(Party(name, "node")) == label


def test_shades_are_logarithmic() -> None:
    parties = tuple(Party(str(n), "node") for n in range(6))
    talks = tuple(Talk(0, n, 1, 10**n) for n in range(6))
    drawn = grid.draw(replace(example.paper(), matrix=Matrix(parties, talks)))
    assert drawn
    assert [cell.level for cell in drawn.cells] == [1, 2, 3, 4, 5, 5]
    assert drawn.cells[5].title == "0 → 5: 100 kB"
    assert grid.draw(example.empty()) is None
    alone = grid.draw(replace(example.paper(), matrix=Matrix(parties, (Talk(0, 1, 0, 0),))))
    assert alone
    assert [cell.level for cell in alone.cells] == [5]


def test_pairs_that_cannot_be_are_left_out() -> None:
    wrong = Matrix((Party("a", "sms"),), (Talk(0, 7, 1, 1), Talk(-1, 0, 1, 1)))
    text = render_html(replace(example.paper(), matrix=wrong))
    assert "Machine by machine" not in text
    mixed = replace(wrong, talks=(*wrong.talks, Talk(0, 0, 1, 1)))
    assert render_html(replace(example.paper(), matrix=mixed)).count('class="shade-') == 1


def everyone(rows: int) -> Matrix:
    """The largest matrix: every party talks to every other, with the longest names."""
    name = "2001:db8:ffff:ffff:ffff:ffff:ffff:{0:x} to 2001:db8:ffff:ffff:ffff:ffff:fffe:{0:x}"
    parties = tuple(Party(name.format(0xFF00 + n), "node", 40) for n in range(rows))
    return Matrix(parties, tuple(Talk(a, b, 10**9, 10**15 + a) for a in range(rows) for b in range(rows)))


def test_the_page_of_a_large_cluster_stays_small() -> None:
    """2,000 nodes, every row with every other, 60 services: under a megabyte. More services: at most three."""
    for services, most in ((60, 1_000_000), (5_000, 3_000_000)):
        found = example.many(services)
        nodes = replace(found.nodes, count=2_000, addresses=tuple(f"10.1.{n // 250}.{n % 250}" for n in range(1_000)))
        text = render_html(replace(found, nodes=nodes, matrix=everyone(56)))
        assert text.count('class="shade-') == 56 * 56
        assert len(text.encode()) < most
