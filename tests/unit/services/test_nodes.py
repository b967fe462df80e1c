"""Slurm's nodes, connections to them, and processes of the container, from the output of commands."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from ipaddress import IPv4Network

import pytest

from appliance.plan.services.inside import Inside, choose_silent, find_stopped, read_inside, view_nodes
from appliance.plan.services.nodes import (
    KNOWN_S,
    NODES,
    NetworkProbe,
    NodeState,
    add_probes,
    choose_targets,
    expect_nodes,
    judge_probes,
    read_probes,
)
from appliance.tools.scripts import python_argv
from tests.ownnet import own_network


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


@pytest.mark.parametrize(
    ("state", "user", "reason", "named"),
    [
        ("IDLE+DRAIN", "slurm", "Low RealMemory (reported:1 < 2)", True),
        ("IDLE+DRAIN+INVALID_REG", "slurm", "gres/gpu count reported lower than configured (0 < 4)", True),
        ("IDLE+DRAIN", "root", "Low RealMemory (reported:1 < 2)", True),  # after a restart of slurmctld
        ("IDLE+DRAIN", "slurm", "what a later version says", True),
        ("IDLE+DRAIN", "root", "the disk of n1", False),
        ("IDLE+DRAIN", "root", "NHC: check_fs_mount: /home", False),
        ("IDLE+DRAIN", "alice", "the disk of n1", False),
        ("IDLE", "Unknown", "none", False),
    ],
)
def test_nodes_that_a_daemon_took_out_are_named(state: str, user: str, reason: str, named: bool) -> None:
    """R12: only a person's own drain is acknowledged. One of many is a note."""
    lines = [line("n1", state, reason, user=user), line("n2", "idle")]
    problems, notes = view_nodes(read_inside("".join(lines), "slurm")).warnings("slurmctld")
    assert bool(problems) is named and not notes
    assert not named or ("n1" in problems[0] and reason in problems[0] and "State=RESUME" in problems[0])
    many = [*lines, *(line(f"m{number}", "idle") for number in range(40))]
    problems, notes = view_nodes(read_inside("".join(many), "slurm")).warnings("slurmctld")
    assert not problems and bool(notes) is named


def test_the_warning_names_nodes_and_the_reason() -> None:
    lines = [line(f"n{number}", "DOWN+NOT_RESPONDING", "Not responding", user="slurm") for number in (1, 2, 3)]
    inside = read_inside("".join([*lines, line("n4", "idle"), line("n5", "idle+drain+not_responding")]), "slurm")
    view = view_nodes(inside)
    assert view.count == 5 and [node.name for node in view.silent] == ["n1", "n2", "n3", "n5"]
    assert "3 of 5 nodes do not respond to slurmctld: n[1-3] (Not responding)" in view.warnings("slurmctld")[0][0]
    assert view_nodes(read_inside(line("n4", "idle"), "slurm")).warnings("slurmctld") == ([], [])


@pytest.mark.parametrize(
    ("nodes", "dead", "drained", "fault"),
    [
        (450, 1, 0, False),
        (450, 22, 0, False),
        (450, 23, 0, True),
        (40, 2, 1, True),
        (19, 1, 0, True),
        (900, 33, 0, True),
    ],
)
def test_a_few_broken_nodes_of_many_are_no_fault(nodes: int, dead: int, drained: int, fault: bool) -> None:
    """In a cluster of hundreds, one always is: an exit status of 4 would mean nothing."""
    lines = [line(f"n{number}", "DOWN+NOT_RESPONDING", "Not responding", user="slurm") for number in range(dead)]
    lines += [line(f"n{number}", "IDLE+DRAIN+NOT_RESPONDING") for number in range(dead, dead + drained)]
    lines += [line(f"n{number}", "IDLE") for number in range(dead + drained, nodes)]
    inside = read_inside("".join(lines), "slurm")
    view = view_nodes(inside)
    problems, notices = view.warnings("slurmctld")
    (text,) = problems if fault else notices
    assert f"{dead} of {nodes} nodes do not respond" in text and len(problems) + len(notices) == 1
    assert len(choose_silent(inside)) == (0 if fault else dead)


def test_a_node_that_accepts_connections_and_does_not_respond_is_a_fault() -> None:
    """Its key or clock is wrong, which a broken node does not show."""
    lines = [line(f"n{number}", "DOWN+NOT_RESPONDING", "Not responding", user="slurm") for number in (1, 2)]
    inside = read_inside("".join([*lines, *(line(f"n{number}", "IDLE") for number in range(3, 100))]), "slurm")
    probes = [NetworkProbe("n1", ("n1",), 6818, False, "x"), NetworkProbe("n2", ("n2",), 6818, True)]
    view = add_probes(view_nodes(inside), probes)
    (problem,), (notice,) = view.warnings("slurmctld")
    assert ": n2 (Not responding), but accept connections" in problem and ": n1 (Not responding); repair" in notice


def test_nodes_that_have_never_registered_are_no_fault() -> None:
    """They may not be installed yet."""
    lines = [line("n1", "UNKNOWN+NOT_RESPONDING"), line("n2", "UNKNOWN+NOT_RESPONDING"), line("n3", "IDLE")]
    nodes = expect_nodes(read(*lines), 61)
    view = view_nodes(Inside(nodes=nodes))
    assert view.warnings("slurmctld") == ([], [])
    assert view.missing("slurmctld") == "2 of 3 nodes have not registered with slurmctld: n[1-2]"
    assert view_nodes(Inside(nodes=nodes[2:])).missing("slurmctld") == ""
    probes = [NetworkProbe("10.2.0.0/16", ("n1", "n2"), 6818, False, "x")]
    assert judge_probes(probes, nodes, "slurmctld") == (set(), [])


@pytest.mark.parametrize("responding", [[], [line("n3", "DOWN+NOT_RESPONDING", user="root")]])
def test_all_nodes_may_have_registered_before_the_controllers_start(responding: list[str]) -> None:
    """It does not keep that of idle ones, and sets them DOWN later. The host may have the wrong VLAN."""
    nodes = read(line("n1", "UNKNOWN+NOT_RESPONDING"), line("n2", "UNKNOWN+NOT_RESPONDING"), *responding)
    early, late = expect_nodes(nodes, KNOWN_S - 1), expect_nodes(nodes, KNOWN_S)
    assert "2 of " in view_nodes(Inside(nodes=early)).warnings("slurmctld")[0][0]
    assert view_nodes(Inside(nodes=late)).warnings("slurmctld") == ([], [])
    probes = [NetworkProbe("10.0.0.0/16", ("n1", "n2"), 6818, False, "x")]
    unreachable, (problem,) = judge_probes(probes, early, "slurmctld")
    assert unreachable == {"10.0.0.0/16"} and "no node of 10.0.0.0/16 accepts connections" in problem


def test_nodes_that_answer_and_do_not_register_are_a_fault() -> None:
    nodes = (node("n1", registered=False), node("n2"))
    probes = [NetworkProbe("10.2.0.0/16", ("n1",), 6818, True), NetworkProbe("10.0.0.0/16", ("n2",), 6818, True)]
    unreachable, (problem,) = judge_probes(probes, nodes, "slurmctld")
    assert (
        not unreachable
        and "nodes of 10.2.0.0/16 accept connections, but have not registered with slurmctld: n1" in problem
    )


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
    warning = "".join(view_nodes(read_inside(output, "slurm")).warnings("slurmctld")[0])
    assert re.search(words, warning) and bool(warning) is bool(words)


def log(*lines: str) -> str:
    return "".join(f"log 2026-11-24T12:28:20.123Z slurmctld: {each}\n" for each in lines)


def test_nodes_that_refuse_the_controllers_user() -> None:
    """Only those that still have to end the job: that of n3 was ended since."""
    output = log(
        "sched: Allocate JobId=7 NodeList=n[1-2] #CPUs=2 Partition=normal",
        "sched: Allocate JobId=8_3(8) NodeList=n3 #CPUs=1 Partition=normal",
        "sched: Allocate JobId=9 NodeList=n4 #CPUs=1 Partition=normal",
        "sched: Allocate JobId=10 NodeList=n[5 #CPUs=1 Partition=normal",
        "sched: _slurm_rpc_allocate_resources JobId=12 NodeList=n6 usec=669",
        "sched: _slurm_rpc_allocate_resources JobId=13 NodeList=n7 usec=669",
        "_job_complete: JobId=12 WTERMSIG 36",
        "_job_complete: JobId=13 WTERMSIG 9",
        "Killing non-startable batch JobId=7: Invalid user id",
        "Killing non-startable batch JobId=8_3(8): Invalid user id",
        "Killing non-startable batch JobId=9: Requested node configuration is not available",
        "Killing non-startable batch JobId=10: Invalid user id",
        "Killing non-startable batch JobId=11: Invalid user id",
    )
    completing = dict.fromkeys(("n1", "n2", "n4", "n6", "n7"), "IDLE+COMPLETING")
    states = {**completing, "n3": "IDLE"}
    view = view_nodes(read_inside(output + "".join(line(*each) for each in states.items()), "slurm"))
    assert view.refusing == ("n1", "n6")
    (problem,) = view.warnings("slurmctld")[0]
    assert problem.startswith("2 of 6 nodes refuse slurmctld") and "n[1,6];" in problem and "slurm.user" in problem


def test_a_reason_cannot_hide_a_node_or_reach_the_terminal() -> None:
    """Its second line has the form of a line on another node."""
    forged = "x\n" + line("n2", "idle") + line("n2", "idle+drain")
    found = read(line("n2", "down+not_responding", user="slurm"), line("n1", "idle+drain", forged + "\x1b[2J"))
    assert {node.name: node.silent for node in found} == {"n1": False, "n2": True}
    found = read(line("n1", "idle+drain", "\x1b[2J\u202e"), line("n1", "idle+drain"))
    assert all(node.reason.isprintable() for node in found)


ROUTES = (IPv4Network("0.0.0.0/0"), IPv4Network("10.0.0.0/16"), IPv4Network("10.2.0.0/16"))


def node(
    name: str, address: str = "", *, silent: bool = False, acknowledged: bool = False, registered: bool = True
) -> NodeState:
    return NodeState(name, address or name, 6818, "idle", "", silent, acknowledged, registered)


def test_some_nodes_of_each_network_are_chosen() -> None:
    nodes = [node(f"a{number}", f"10.0.0.{number}", silent=number < 3) for number in range(1, 10)]
    nodes += [node("b1", "10.2.0.1"), node("c1"), node("d1", "192.0.2.9"), node("e1", "10.9.9.9", acknowledged=True)]
    chosen = choose_targets(nodes, ROUTES, {"c1": "10.0.0.77"})
    names = {network: [one.name for one in some] for network, some in chosen.items()}
    assert names == {"0.0.0.0/0": ["d1"], "10.0.0.0/16": ["a3", "a7", "c1"], "10.2.0.0/16": ["b1"]}
    assert choose_targets([node("a1", silent=True)], ROUTES, {}).keys() == {"other addresses"}
    nodes = [node("a1", "10.0.0.1", silent=True), node("a2", "10.0.0.2", silent=True, registered=False)]
    assert [one.name for one in choose_targets(nodes, ROUTES, {})["10.0.0.0/16"]] == ["a1"]
    assert [one.name for one in choose_targets(nodes[1:], ROUTES, {})["10.0.0.0/16"]] == ["a2"]
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


def test_a_probe_does_not_wake_the_server() -> None:
    """slurmd logs two errors for each connection that it accepts and that sends nothing."""
    with own_network(["10.0.0.9/32"]), socket.create_server(("10.0.0.9", 6818)) as server:
        argv = python_argv("connect-each", "10.0.0.9", "6818", "10.0.0.9", "6819", "10.0.0.9", "6818", "x.invalid", "1")
        began = time.monotonic()
        result = subprocess.run(argv, capture_output=True, text=True, check=True)
        assert result.stdout.splitlines()[:3] == ["1 0 ", "2 1 Connection refused", "3 0 "]
        assert result.stdout.splitlines()[3].startswith("4 ") and time.monotonic() - began < 10
        server.settimeout(1)
        with pytest.raises(TimeoutError):
            server.accept()
    targets = {"10.0.0.0/16": [node("a1")], "10.2.0.0/16": [node("b1")]}
    assert [probe.detail for probe in read_probes(targets, result.stdout)] == ["", "b1: Connection refused"]


def test_a_probe_gives_up_after_two_seconds() -> None:
    with own_network(["10.0.0.9/32"]), socket.create_server(("10.0.0.9", 6818), backlog=0):
        full = [socket.create_connection(("10.0.0.9", 6818), timeout=1)]
        result = subprocess.run(
            python_argv("connect-each", "10.0.0.9", "6818"), capture_output=True, text=True, check=True
        )
        full[0].close()
    assert result.stdout == "1 124 \n"


def stat(pid: int, parent: int, state: str, name: str, started: int = 1000) -> str:
    numbers = [0] * 48
    numbers[17] = started
    return f"process {pid} ({name}) {state} {parent} {' '.join(map(str, numbers))}\n"


def test_jobs_that_wait_for_an_administrator() -> None:
    """A node that refused a job, and users that a file of accounts has lost."""
    output = "held 1000 12 launch failed requeued held\nheld 1000 13_4 launch\nheld x; rm\nstranger 4242\nstranger -1\n"
    inside = read_inside(output, "slurm")
    assert (inside.held, inside.strangers) == (("12", "13_4"), (4242,))
    held, strangers = inside.job_problems()
    assert "scontrol release 12,13_4`" in held and "4242" in strangers
    many = read_inside("".join(f"held 1 {number} x\n" for number in range(1, 40)), "slurm")
    assert (
        many.job_problems()[0].endswith("scontrol release 1,2,3,4,5,6,7,8,9,10`")
        and "launch them: 39;" in many.job_problems()[0]
    )
    assert read_inside("", "slurm").job_problems() == []


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("unfit 1000 12 0 BadConstraints\nunfit 1000 13_[1-4%2] 0 BadConstraints\n", "scontrol release 12,13_[1-4%2]`"),
        ("unfit 1000 12;x 0 BadConstraints\n", ""),
        ("backlog 499\nrefused x\n", ""),
        ("backlog 500\n", "500 messages"),
        ("unaccounted 7\n", "discarded 7 records"),
        ("refused 3\n", "refused 3 mails"),
    ],
)
def test_what_waits_or_was_refused_is_said(output: str, text: str) -> None:
    assert [text in one for one in read_inside(output, "slurm").notices()] == ([True] if text else [])


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


@pytest.mark.parametrize("space", ["0 0", "0 5", "10 11", "9" * 30 + " 1"])
def test_a_size_that_no_overlay_has_is_none(space: str) -> None:
    """A `df` of the container's own may print it: verbs divide by it."""
    assert read_inside(f"space {space}\n", "").space == {}
