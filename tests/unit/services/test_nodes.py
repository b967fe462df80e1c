"""Slurm's nodes, connections to them, and processes of the container, from the output of commands."""

from __future__ import annotations

import re
from ipaddress import IPv4Network

import pytest

from appliance.plan.services.nodes import (
    NODES,
    NodeState,
    choose_targets,
    find_stopped,
    read_inside,
    read_probes,
    view_nodes,
)


def line(name: str, state: str, reason: str = "none", *, address: str = "", user: str = "Unknown") -> str:
    """A line of sinfo."""
    return f"node {name:<65}{address or name:<254}{'6818':<8}{state:<200}{user:<33}{reason}\n"


def read(*lines: str) -> tuple[NodeState, ...]:
    return read_inside("".join(lines), "slurm").nodes


def test_the_columns_are_those_of_the_command() -> None:
    assert NODES[-1] == "--Format=NodeList:65,NodeAddr:254,Port:8,StateComplete:200,User:33,Reason:200"
    assert read(line("n1", "IDLE", address="10.0.0.1")) == (
        NodeState("n1", "10.0.0.1", 6818, "idle", "", False, False),
    )


@pytest.mark.parametrize(
    ("state", "user", "silent", "acknowledged"),
    [
        ("IDLE", "Unknown", False, False),
        ("IDLE+NOT_RESPONDING", "Unknown", True, False),
        ("ALLOCATED+NOT_RESPONDING", "Unknown", True, False),
        ("UNKNOWN+NOT_RESPONDING", "Unknown", True, False),
        ("DOWN+NOT_RESPONDING", "slurm", True, False),
        ("DOWN+NOT_RESPONDING", "root", True, True),
        ("DOWN+DRAIN+NOT_RESPONDING", "root", True, True),
        ("IDLE+DRAIN+NOT_RESPONDING", "root", True, True),
        ("IDLE+CLOUD+POWERED_DOWN", "Unknown", False, True),
        ("DOWN+REBOOT_ISSUED+NOT_RESPONDING", "slurm", True, True),
    ],
)
def test_who_has_to_respond(state: str, user: str, silent: bool, acknowledged: bool) -> None:
    (found,) = read(line("n1", state, user=user))
    assert (found.silent, found.acknowledged) == (silent, acknowledged)


def test_the_warning_names_nodes_and_the_reason() -> None:
    lines = [line(f"n{number}", "DOWN+NOT_RESPONDING", "Not responding", user="slurm") for number in (1, 2, 3)]
    inside = read_inside("".join([*lines, line("n4", "idle"), line("n5", "idle+drain+not_responding")]), "slurm")
    view = view_nodes(inside)
    assert view.count == 5 and [node.name for node in view.silent] == ["n1", "n2", "n3", "n5"]
    assert "3 of 5 nodes do not respond to slurmctld: n[1-3] (Not responding)" in view.warning("slurmctld")
    assert view_nodes(read_inside(line("n4", "idle"), "slurm")).warning("slurmctld") == ""


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("error sinfo: Unable to contact slurm controller\nerror it ended with status 1\n", "contact.*; it ended with"),
        ("error it ended with status 124\n", "status 124"),
        ("node something else\n", "unknown form"),
        (line("n1; rm", "idle"), "unknown form"),
        (line("-n1", "idle"), "unknown form"),
        (line("n1", "idle", address="$(id)"), "unknown form"),
        ("", ""),  # it has no nodes
        ("error a warning\n" + line("n1", "idle"), ""),
    ],
)
def test_a_view_that_is_not_known(output: str, words: str) -> None:
    warning = view_nodes(read_inside(output, "slurm")).warning("slurmctld")
    assert re.search(words, warning) and bool(warning) is bool(words)


def test_a_reason_cannot_hide_a_node_or_reach_the_terminal() -> None:
    """Its second line has the form of a line on another node."""
    forged = "x\n" + line("n2", "idle") + line("n2", "idle+drain")
    found = read(line("n2", "down+not_responding", user="slurm"), line("n1", "idle+drain", forged + "\x1b[2J"))
    assert {node.name: node.silent for node in found} == {"n1": False, "n2": True}
    found = read(line("n1", "idle+drain", "\x1b[2J\u202e"), line("n1", "idle+drain"))
    assert all(node.reason.isprintable() for node in found)


ROUTES = (IPv4Network("0.0.0.0/0"), IPv4Network("10.0.0.0/16"), IPv4Network("10.2.0.0/16"))


def node(name: str, address: str = "", *, silent: bool = False, acknowledged: bool = False) -> NodeState:
    return NodeState(name, address or name, 6818, "idle", "", silent, acknowledged)


def test_some_nodes_of_each_network_are_chosen() -> None:
    nodes = [node(f"a{number}", f"10.0.0.{number}", silent=number < 3) for number in range(1, 10)]
    nodes += [node("b1", "10.2.0.1"), node("c1"), node("d1", "192.0.2.9"), node("e1", "10.9.9.9", acknowledged=True)]
    chosen = choose_targets(nodes, ROUTES, {"c1": "10.0.0.77"})
    names = {network: [one.name for one in some] for network, some in chosen.items()}
    assert names == {"0.0.0.0/0": ["d1"], "10.0.0.0/16": ["a3", "a7", "c1"], "10.2.0.0/16": ["b1"]}
    assert choose_targets([node("a1", silent=True)], ROUTES, {}).keys() == {"other addresses"}
    assert choose_targets([], ROUTES, {}) == {}


def test_one_accepted_connection_is_enough() -> None:
    targets = {"10.0.0.0/16": [node("a1"), node("a2")], "10.2.0.0/16": [node("b1"), node("b2")]}
    refused = "bash: connect: Connection refused\x1b"
    output = f"2 0 \n1 1 {refused}\n3 124 \nnonsense\n4 1 x: No route to host\n"
    one, two = read_probes(targets, output)
    assert one.ok and one.detail == ""
    assert not two.ok and two.detail == "b1: no answer within 2 s; b2: No route to host"
    lost = read_probes(targets, "")
    assert [probe.ok for probe in lost] == [False, False] and "no result" in lost[0].detail


def stat(pid: int, parent: int, state: str, name: str, started: int = 1000) -> str:
    numbers = [0] * 48
    numbers[17] = started
    return f"process {pid} ({name}) {state} {parent} {' '.join(map(str, numbers))}\n"


def test_stopped_processes_of_services() -> None:
    output = "space  1000 400\nuptime 110.00 200.00\n"
    output += stat(1, 0, "S", "appinit") + stat(20, 1, "S", "supervisord") + stat(30, 20, "T", "a) S 1 (b", 5000)
    output += stat(31, 30, "T", "x\nprocess y") + stat(90, 0, "S", "bash") + stat(91, 90, "T", "vim")
    inside = read_inside(output, "")
    assert inside.space == {"size": 1000, "used": 400} and inside.uptime_s() == 100
    assert inside.age_s("a) S 1 (b") == 60 and inside.age_s("other") == 0
    found = find_stopped(inside.processes)
    assert [(process.pid, process.name) for process in found] == [(30, "a) S 1 (b"), (31, "x y")]
    assert read_inside("space x\nuptime y\nprocess z\n", "").space == {}
