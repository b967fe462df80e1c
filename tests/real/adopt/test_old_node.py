"""The agent on the old node of an adoption: services and addresses leave, and return by themselves if they must.

In network namespaces with real processes; tests/oldnode.py has the node.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from appliance.share import share
from appliance.shared.locks import hold_lock
from tests.oldnode import KEEPS, MACS, MOVES, PYTHON, SPARE, UNITS, Agent, OldNode, Space, old_node, wait_for
from tests.waiting import soon, wait_until

pytestmark = pytest.mark.real


@pytest.fixture
def node(tmp_path: Path) -> Iterator[OldNode]:
    with old_node(tmp_path) as made:
        yield made


def begin(node: OldNode) -> Agent:
    agent = node.start()
    agent.receive("ready")
    return agent


def stop(agent: Agent) -> None:
    agent.ask("note", "noted")
    agent.ask("prepare_stop", "prepared")
    agent.ask("stop_accounting", "stopped")
    agent.ask("stop", "final")


def release(agent: Agent) -> None:
    stop(agent)
    agent.ask("connections", "connections")
    agent.ask("release", "released")


def check_back(node: OldNode, before: object) -> None:
    """All is as it was, and nothing is left but the log."""
    assert node.network() == before
    assert node.runs() == list(UNITS)
    wait_until(lambda: not node.guard_runs(), "the guard has ended")
    assert sorted(path.suffix for path in Path(node.request["mark"]).parent.iterdir()) == [".lock", ".log"]
    assert node.old.run("find", "/etc/systemd/system", "!", "-type", "d") == ""


def test_it_leaves(node: OldNode, tmp_path: Path) -> None:
    """The copy of the state is complete, the addresses are the target's, the node keeps its own."""
    copy = tmp_path / "copy"
    agent = begin(node)
    agent.ask("note", "noted")
    whole = state_tree(node, "read")
    state_tree(copy, "write", whole)
    (node.state / "hash.1" / "script").unlink()
    (node.state / "hash.2").mkdir()
    (node.state / "hash.2" / "script").write_text("new")
    message, delta = agent.ask("round", "delta")
    assert message["files"] >= 4
    state_tree(copy, "change", delta)
    agent.ask("prepare_stop", "prepared")
    assert node.runs() == list(UNITS)
    agent.ask("stop_accounting", "stopped")
    assert node.runs() == [UNITS[1]]
    _, delta = agent.ask("stop", "final")
    assert node.runs() == []
    state_tree(copy, "change", delta)
    assert tree(copy) == tree(node.state) and (copy / "last").read_text() == (copy / "job_state").read_text()
    node.systemctl("start", *UNITS)
    assert node.runs() == [], "systemd does not start them either"

    agent.ask("connections", "connections")
    agent.ask("release", "released")
    node.serve()
    agent.ask("given", "given")
    agent.ask("finish", "finished")
    assert agent.end()["state"] == "gone"
    assert node.mark()["state"] == "given" and node.mark()["running"] == list(UNITS)
    found = node.network()
    assert {net: found["macs"][net] for net in MACS} == SPARE
    assert {net: found["addresses"][net] for net in MACS} == KEEPS
    assert any(line.startswith("default via 192.0.2.254 dev pub") for line in found["routes"])
    assert any(line.startswith("10.9.0.0/16 via 10.1.0.254 dev prov") for line in found["routes"])
    for address in ("10.1.0.1", "10.1.0.9", "192.0.2.2", "192.0.2.9"):
        assert node.reaches(address), address
    assert node.start().end()["status"] == 3, "not a second time"


def state_tree(place: OldNode | Path, command: str, data: bytes = b"") -> bytes:
    """Run the program that reads and writes the state."""
    folder = place.state if isinstance(place, OldNode) else place
    script = share("definitions", "scripts", "state-tree").read_text()
    argv = [sys.executable, "-I", "-c", script, command, f"/var/lib/slurm/state={folder}"]
    return subprocess.run(argv, input=data, stdout=subprocess.PIPE, check=True).stdout


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FULL = pytest.mark.full
RETURNS: dict[str, list[str]] = {"read": [], "stopping": ["killed"], "released": ["lost"]}
"""What each run of the tests has."""


@pytest.mark.parametrize(
    ("state", "end"),
    [
        pytest.param(state, end, marks=() if end in ends else FULL)
        for state, ends in RETURNS.items()
        for end in ("lost", "killed", "abort", "error")
    ],
)
def test_it_returns_by_itself(node: OldNode, state: str, end: str) -> None:
    before = node.network()
    agent = begin(node)
    if state == "stopping":
        stop(agent)
    if state == "released":
        release(agent)
        assert node.runs() == [] and not node.reaches("10.1.0.1")
    if end == "lost":
        agent.end()
    elif end == "killed":
        agent.kill()
        assert node.mark()["state"] == state
        found = node.call("adopt_resume")
        assert (found["found"], found["state"], found["trouble"]) == (state, "gone", "")
    elif end == "abort":
        agent.ask("abort", "back", why="a test", sure=state == "released")
    else:
        agent.send("an unknown message")
        assert "unknown message" in agent.end()["message"]
    check_back(node, before)
    assert node.reaches("10.1.0.1") and node.reaches("10.1.0.9") and node.reaches("192.0.2.1")
    begin(node).end()


@pytest.mark.parametrize("end", ["lost", pytest.param("killed", marks=FULL), pytest.param("abort", marks=FULL)])
def test_it_does_not_return_if_the_target_serves(node: OldNode, end: str) -> None:
    agent = begin(node)
    release(agent)
    node.serve()
    if end == "lost":
        agent.end()
    elif end == "killed":
        agent.kill()
        assert node.call("adopt_resume")["state"] == "given"
    else:
        agent.send("abort", why="a test")
        assert "may run on host-a" in agent.end()["message"]
    assert node.mark()["state"] == "given" and node.runs() == []
    assert node.network()["addresses"]["prov"] == KEEPS["prov"]


@pytest.mark.parametrize("serves", [True, pytest.param(False, marks=FULL)])
def test_it_waits_while_its_own_network_is_down(node: OldNode, serves: bool) -> None:
    before = node.network()
    agent = begin(node)
    release(agent)
    node.cut()
    agent.lose()
    if serves:
        node.serve()
    with pytest.raises(subprocess.TimeoutExpired):
        agent.process.wait(6)
    assert node.mark()["state"] == "released" and node.runs() == []
    assert "at work" in node.call("adopt_resume")["message"]
    node.cut(False)
    agent.end()
    if serves:
        assert node.mark()["state"] == "given" and node.runs() == []
    else:
        check_back(node, before)


def test_a_killed_one_waits_too(node: OldNode) -> None:
    before = node.network()
    agent = begin(node)
    release(agent)
    agent.kill()
    node.cut()
    found = node.call("adopt_resume")
    assert (found["found"], found["state"]) == ("released", "released") and node.runs() == []
    assert node.call("adopt_resume", sure=True)["state"] == "gone"
    node.cut(False)
    check_back(node, before)


def test_addresses_that_a_reboot_brought_back_are_removed_again(node: OldNode) -> None:
    agent = begin(node)
    release(agent)
    node.serve()
    agent.ask("given", "given")
    agent.kill()
    for net in MACS:
        node.old.ip(f"link set {net} address {MACS[net]}", *(f"address add {one} dev {net}" for one in MOVES[net]))
    found = node.call("adopt_resume")
    assert (found["found"], found["state"], found["trouble"]) == ("given", "given", "")
    network = node.network()
    assert {net: network["addresses"][net] for net in MACS} == KEEPS and network["macs"]["pub"] == SPARE["pub"]


def test_after_a_long_time_it_does_not_decide_alone(node: OldNode) -> None:
    """The target may have served, and what is here would be an older state."""
    before = node.network()
    agent = begin(node)
    release(agent)
    agent.kill()
    mark = node.mark()
    mark["times"]["released"] -= 700
    Path(node.request["mark"]).write_text(json.dumps(mark))
    assert node.call("adopt_resume")["state"] == "released"
    assert node.runs() == [] and not node.reaches("10.1.0.1")
    assert node.call("adopt_resume", sure=True)["state"] == "gone"
    check_back(node, before)


RECEIVER = """
import socket
server = socket.create_server(("0.0.0.0", 514))
print("listens", flush=True)
while True:
    one, _ = server.accept()
    with one, one.makefile() as stream:
        for line in stream:
            print(line.rstrip(), flush=True)
"""
SENDER = """
import socket, sys
with socket.create_connection(("10.1.0.1", 514), timeout=20) as one:
    one.sendall(sys.argv[1].encode() + b"\\n")
    print("sent", flush=True)
    print("closed" if one.recv(1) == b"" else "?", flush=True)
"""


def test_sessions_of_log_senders_end_before_the_switch(node: OldNode) -> None:
    """So that they notice; and they can connect again after a rollback."""

    def run(space: Space, *argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([*space.prefix, PYTHON, "-c", *argv], stdout=subprocess.PIPE, text=True)
        node.stack.callback(process.wait)
        node.stack.callback(process.kill)
        return process

    def line(process: subprocess.Popen[str]) -> str:
        assert process.stdout
        return process.stdout.readline().rstrip()

    receiver = run(node.old, RECEIVER)
    assert line(receiver) == "listens"
    sender = run(node.others, SENDER, "first")
    assert (line(sender), line(receiver)) == ("sent", "first")
    agent = node.start(stream_ports=[514])
    agent.receive("ready")
    stop(agent)
    agent.ask("connections", "connections")
    assert line(sender) == "closed"
    agent.ask("release", "released")
    agent.ask("abort", "back", why="a test", sure=True)
    sender = run(node.others, SENDER, "second")
    assert (line(sender), line(receiver)) == ("sent", "second")


# The guard


def has_left(node: OldNode) -> bool:
    network = node.network()
    return all(network["addresses"].get(net) == KEEPS[net] and network["macs"][net] == SPARE[net] for net in MACS)


def configure(node: OldNode) -> None:
    """What the node's network configuration does at a boot."""
    for net in MACS:
        lines = [f"address add {one} dev {net}" for one in (*MOVES[net], *KEEPS[net])]
        node.old.ip(f"address flush dev {net}", f"link set {net} address {MACS[net]}", *lines)


def test_addresses_that_return_are_removed(node: OldNode) -> None:
    """As by a lease of DHCP, or at the next boot, until the undo."""
    before = adopted(node)
    configure(node)
    wait_until(lambda: has_left(node), "the guard has removed them")
    node.stop_guard()
    configure(node)
    node.start_guard()
    wait_until(lambda: has_left(node), "the guard has removed them")
    agent = begin_return(node)
    agent.ask("up", "up")
    agent.ask("serve", "serves")
    wait_for(1)
    agent.ask("commit", "committed")
    agent.end()
    check_undone(node, before)
    wait_until(lambda: not node.guard_runs(), "the guard has ended")


HELD = {
    "a process that does not end": (1.0, "process "),
    "a file of another user": (900.0, "belongs to user 1000"),
    "a folder in which all users can write": (900.0, "every user can create files"),
}
"""A lock that shows no run: seconds until then in the guard's program, and what its log says."""


@pytest.mark.parametrize("how", HELD)
def test_addresses_that_return_are_removed_also_while_the_lock_is_held(node: OldNode, how: str) -> None:
    seconds, why = HELD[how]
    change_guard(node, {"HELD_S = 900.0": f"HELD_S = {seconds}", "LOOK_S = 10.0": "LOOK_S = 0.5"})
    adopted(node)
    lock = Path(node.request["lock"])
    with ExitStack() as stack:
        if how.startswith("a process"):
            stack.enter_context(hold_lock(str(lock)))
        elif how.startswith("a file"):
            os.chown(lock, 1000, 1000)
        else:
            lock.parent.chmod(0o777)
        configure(node)
        wait_until(lambda: has_left(node), "the guard has removed them")
        events = [json.loads(line) for line in lock.with_name("c.log").read_text().splitlines()]
        held = [one for one in events if one["event"] == "lock held"]
        assert len(held) == 1 and why in held[0]["why"], events
        configure(node)
        wait_until(lambda: has_left(node), "the guard has removed them again")
        if not how.startswith("a process"):
            found = node.call("adopt_resume")
            assert why in found["message"] and "ls -ld" in found["hint"]
    lock.parent.chmod(0o700)
    os.chown(lock, 0, 0)
    assert node.call("adopt_resume")["state"] == "given"


def test_a_run_that_is_at_work_is_left_alone(node: OldNode) -> None:
    """The guard does not touch addresses before the lock is held for longer than a run takes."""
    change_guard(node, {"LOOK_S = 10.0": "LOOK_S = 0.2"})
    adopted(node)
    with hold_lock(node.request["lock"]):
        configure(node)
        wait_for(2)
        assert not has_left(node)
    wait_until(lambda: has_left(node), "the guard has removed them")


def change_guard(node: OldNode, changes: dict[str, str]) -> None:
    """Change constants of the guard in the program of the agent."""
    path = node.folder / "agent.pyz"
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    name = "appliance/agent/adopt_hold.py"
    for old, new in changes.items():
        assert files[name].count(old.encode()) == 1, old
        files[name] = files[name].replace(old.encode(), new.encode())
    with zipfile.ZipFile(path, "w") as archive:
        for each, data in files.items():
            archive.writestr(each, data)


@pytest.mark.full  # the guard waits for half a minute
def test_addresses_that_stay_are_added_where_the_configuration_does_not_find_the_interface(node: OldNode) -> None:
    """Because it looks for the MAC address that has moved."""
    adopted(node)
    node.stop_guard()
    for net in MACS:
        node.old.ip(f"address flush dev {net}", f"link set {net} down address {MACS[net]}")
    node.start_guard()
    wait_until(lambda: node.network()["macs"]["prov"] == SPARE["prov"], "the guard")
    assert not node.reaches("10.1.0.9")
    wait_until(lambda: node.reaches("10.1.0.9") and node.reaches("192.0.2.9"), "the addresses that stay", every_s=2)
    assert has_left(node)
    assert any(line.startswith("default via 192.0.2.254 dev pub") for line in node.network()["routes"])


@pytest.mark.parametrize(
    "state", [pytest.param("stopping", marks=FULL), pytest.param("released", marks=FULL), "target serves"]
)
def test_a_reboot_amid_the_switch(node: OldNode, state: str) -> None:
    before = node.network()
    agent = begin(node)
    stop(agent)
    if state != "stopping":
        agent.ask("release", "released")
    if state == "target serves":
        node.serve()
    agent.kill()
    configure(node)
    node.start_guard()
    if state == "target serves":
        wait_until(lambda: node.mark()["state"] == "given", "it knows")
        assert has_left(node) and node.runs() == []
    else:
        wait_until(lambda: not node.mark(), "it has taken them back")
        network = node.network()
        assert [network[what] for what in ("macs", "addresses")] == [before[what] for what in ("macs", "addresses")]
        assert node.runs() == list(UNITS) and node.reaches("10.1.0.1")
        wait_until(lambda: not node.guard_runs(), "the guard has ended")


def test_a_reboot_amid_the_undo(node: OldNode) -> None:
    before = adopted(node)
    node.stop_guard()
    agent = begin_return(node)
    agent.ask("up", "up")
    agent.kill()
    for net in MACS:
        node.old.ip(f"address flush dev {net}")
    node.start_guard()
    wait_until(lambda: not node.mark(), "it has completed the undo")
    wait_until(lambda: not node.guard_runs(), "the guard has ended")
    check_undone(node, before)


def test_connections_of_moved_addresses_are_sent(node: OldNode) -> None:
    node.old.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
    node.old.run("nft", "add table ip nat; add chain ip nat post { type nat hook postrouting priority 100; }; "
                 "add rule ip nat post oifname pub ip saddr 10.1.0.7 snat to 192.0.2.1; "
                 "add rule ip nat post oifname pub ip saddr 10.1.0.8 snat to 192.0.2.9")  # fmt: skip
    for one in ("10.1.0.7", "10.1.0.8"):
        node.target.ip(f"address add {one}/16 dev prov", "link set prov up")
        node.target.run("ip", "route", "replace", "default", "via", "10.1.0.9")
        node.target.run("ping", "-n", "-c", "1", "-I", one, "192.0.2.254")
    agent = begin(node)
    stop(agent)
    message, body = agent.ask("connections", "connections")
    assert message["trouble"] == ""
    assert "-s 10.1.0.7" in body.decode() and "10.1.0.8" not in body.decode(), "an address that stays"
    message, more = agent.ask("release", "released")
    assert (more, message["connections"]) == (b"", 1)
    agent.end()


def test_without_conntrack_it_leaves_all_the_same(node: OldNode) -> None:
    (node.bin / "conntrack").write_text("#!/bin/sh\nexit 1\n")
    (node.bin / "conntrack").chmod(0o755)
    agent = begin(node)
    stop(agent)
    message, body = agent.ask("connections", "connections")
    assert body == b"" and "cannot be read" in message["trouble"]
    agent.ask("release", "released")
    agent.end()


# Undo


def adopted(node: OldNode) -> dict[str, object]:
    """Let the target serve; return the network of before."""
    before = node.network()
    agent = begin(node)
    release(agent)
    node.serve()
    agent.ask("given", "given")
    agent.ask("finish", "finished")
    agent.end()
    return before


def begin_return(node: OldNode) -> Agent:
    """The agent for the undo, armed, with a state of the container."""
    agent = node.start("adopt_return")
    message, _ = agent.receive("ready")
    new = Path(message["state_new"])
    shutil.copytree(node.state, new, dirs_exist_ok=True)
    (new / "accepted").write_text("a job that the container accepted")
    node.stop_serving()
    agent.ask("arm", "armed")
    return agent


def check_undone(node: OldNode, before: object) -> None:
    check_back(node, before)
    assert (node.state / "accepted").exists()
    kept = node.state.with_name("state.before-sms")
    assert kept.exists() and not (kept / "accepted").exists()
    assert node.reaches("10.1.0.1") and node.reaches("10.1.0.9") and node.reaches("192.0.2.1")


def test_it_returns(node: OldNode) -> None:
    before = adopted(node)
    agent = begin_return(node)
    message, _ = agent.ask("up", "up")
    assert message["trouble"] == "" and node.reaches("10.1.0.1")
    assert node.runs() == [] and node.mark()["state"] == "up"
    message, _ = agent.ask("serve", "serves")
    assert message["kept"] == f"{node.state}.before-sms"
    agent.ask("commit", "committed")
    assert agent.end()["state"] == "done"
    check_undone(node, before)
    begin(node).end()


@pytest.mark.parametrize(
    ("state", "end"),
    [
        pytest.param(state, end, marks=() if (state, end) == ("up", "killed") else FULL)
        for state in ("given", "up", "serves")
        for end in ("lost", "killed")
    ],
)
def test_an_interrupted_undo(node: OldNode, state: str, end: str) -> None:
    before = adopted(node)
    agent = begin_return(node)
    if state != "given":
        agent.ask("up", "up")
    if state == "serves":
        agent.ask("serve", "serves")
    if end == "lost":
        agent.end()
    else:
        agent.kill()
        found = node.call("adopt_resume")
        # The guard may have completed it before.
        assert found["found"] in (["given"] if state == "given" else ["up", ""]) and not found["trouble"]
    if state == "given":
        assert node.mark()["state"] == "given" and node.runs() == []
        assert node.network()["addresses"]["prov"] == KEEPS["prov"]
    else:
        check_undone(node, before)


@pytest.mark.parametrize(
    ("state", "serves"),
    [("serves", True), *(pytest.param(*one, marks=FULL) for one in (("up", False), ("up", True), ("serves", False)))],
)
def test_an_undo_waits_while_its_own_network_is_down(node: OldNode, state: str, serves: bool) -> None:
    """The container takes the addresses again when nobody answers for them: then both would serve."""
    before = adopted(node)
    agent = begin_return(node)
    agent.ask("up", "up")
    if state == "serves":
        agent.ask("serve", "serves")
    node.cut()
    agent.lose()
    wait_until(lambda: has_left(node) and node.runs() == [], "it is isolated")
    assert node.mark()["state"] == "up"
    assert "at work" in node.call("adopt_resume")["message"]
    if serves:
        node.serve()
    node.cut(False)
    agent.end()
    if not serves:
        check_undone(node, before)
        return
    assert node.mark()["state"] == "given" and node.runs() == [] and has_left(node)
    agent = begin_return(node)
    agent.ask("up", "up")
    agent.ask("serve", "serves")
    agent.ask("commit", "committed")
    agent.end()
    check_back(node, before)


def test_after_a_long_time_an_undo_does_not_decide_alone(node: OldNode) -> None:
    """The container may have served while the network of this node was down."""
    before = adopted(node)
    agent = begin_return(node)
    agent.ask("up", "up")
    node.stop_guard()
    agent.kill()
    mark = node.mark()
    mark["times"]["up"] -= 700
    Path(node.request["mark"]).write_text(json.dumps(mark))
    node.cut()
    assert node.call("adopt_resume")["state"] == "up"
    node.cut(False)
    assert node.call("adopt_resume")["state"] == "up"
    assert node.runs() == [] and has_left(node)
    assert node.call("adopt_resume", sure=True)["state"] == "gone"
    check_undone(node, before)


def test_an_undo_that_is_too_late_leaves_the_addresses(node: OldNode) -> None:
    adopted(node)
    agent = begin_return(node)
    wait_for(2.5)
    agent.send("up")
    assert "came too late" in agent.end()["message"]
    assert node.mark()["state"] == "given" and node.runs() == []
    found = node.network()
    assert found["addresses"]["pub"] == KEEPS["pub"] and found["macs"]["pub"] == SPARE["pub"]


def test_a_killed_undo_leaves_the_addresses_to_a_container_that_serves_again(node: OldNode) -> None:
    adopted(node)
    agent = begin_return(node)
    agent.ask("up", "up")
    agent.kill()
    node.cut()
    node.serve()
    node.cut(False)
    wait_until(lambda: node.others.run("ping", "-c1", "-W1", "10.1.0.9", ok=False).count(" 1 received"), "the network")
    assert node.call("adopt_resume")["state"] == "given"
    assert node.network()["addresses"]["prov"] == KEEPS["prov"] and node.runs() == []


def test_an_undo_needs_an_adoption_and_a_state(node: OldNode) -> None:
    assert node.start("adopt_return").end()["status"] == 3
    adopted(node)
    agent = node.start("adopt_return")
    agent.receive("ready")
    agent.send("arm")
    assert "is not in" in agent.end()["message"]
    assert node.mark()["state"] == "given"
    agent = node.start("adopt_return")
    agent.receive("ready")
    agent.ask("abort", "aborted", why="a test")
    assert node.mark()["state"] == "given"


def test_masqueraded_connections_are_there_again_after_a_rollback(node: OldNode) -> None:
    """The kernel forgets them together with their address."""
    node.old.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
    node.old.run("nft", "add table ip nat; add chain ip nat post { type nat hook postrouting priority 100; }; "
                 "add rule ip nat post oifname pub masquerade")  # fmt: skip
    node.target.ip("address add 10.1.0.7/16 dev prov", "link set prov up", "route add default via 10.1.0.9")
    node.target.run("ping", "-n", "-c", "1", "192.0.2.254")
    agent = begin(node)
    stop(agent)
    agent.ask("connections", "connections")
    agent.ask("release", "released")
    assert "src=10.1.0.7" not in node.old.run("conntrack", "-L")
    agent.ask("abort", "back", why="a test", sure=True)
    assert "dst=192.0.2.1 " in node.old.run("conntrack", "-L", "-s", "10.1.0.7")


# What is refused


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("address del 10.1.0.1/16 dev prov", "has not the address 10.1.0.1/16"),
        ("link set prov address 02:00:00:00:00:77", "has the MAC address 02:00:00:00:00:77"),
        ("link set prov name other", 'no interface prov|"prov" does not exist'),
    ],
)
def test_a_node_that_is_not_as_planned_is_refused(node: OldNode, change: str, why: str) -> None:
    node.old.ip("link set prov down", change)
    found = node.start().end()
    assert any(part in found["message"] for part in why.split("|")), found
    assert node.mark() == {} and node.runs() == list(UNITS)


def test_a_network_in_which_nobody_answers_is_refused(node: OldNode) -> None:
    node.cut()
    found = node.start().end()
    assert found["status"] == 3 and "no other machine answers ARP" in found["message"]


def test_what_cannot_be_restored_can_be_repeated(node: OldNode) -> None:
    before = node.network()
    agent = begin(node)
    stop(agent)
    (node.units / "fails-start").touch()
    message, _ = agent.ask("abort", "back", why="a test")
    assert "it fails" in message["trouble"] and node.mark()["state"] == "stopping"
    (node.units / "fails-start").unlink()
    assert node.call("adopt_resume")["state"] == "gone"
    check_back(node, before)


def test_units_that_did_not_run_are_not_started(node: OldNode) -> None:
    node.systemctl("stop", UNITS[0])
    agent = begin(node)
    stop(agent)
    agent.ask("abort", "back", why="a test")
    assert node.runs() == [UNITS[1]]


def test_deltas_are_those_of_state_tree(node: OldNode) -> None:
    agent = begin(node)
    agent.ask("note", "noted")
    _, body = agent.ask("round", "delta")
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        names = archive.getnames()
    assert names[0] == ".sms-removed" and "var/lib/slurm/state/job_state" in names
    agent.end()
    wait_until(lambda: node.mark() == {}, "it ends")
    assert soon(node.runs) == list(UNITS)
