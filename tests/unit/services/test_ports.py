"""Ports of an instance: veth pairs on bridges, and macvlan interfaces, in network namespaces of this machine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.host.local import Local
from appliance.shared.migration import MacvlanRequest
from appliance.shared.ports import (
    change_commands,
    is_macvlan_attached,
    match_ports,
    port_address,
    replace_commands,
    split_macvlan,
)
from appliance.tools import carrier, ports
from tests.ownnet import own_network
from tests.waiting import wait_until

ADDRESS, PEER, MAC = "10.99.0.5", "10.99.0.2", "02:00:0a:63:00:05"
Commands = list[tuple[tuple[str, ...], str]]


def link(index: int, name: str, kind: str = "", peer: int = 0, mode: str = "bridge") -> dict[str, Any]:
    found: dict[str, Any] = {"ifindex": index, "ifname": name, "flags": ["UP"], "qdisc": "noqueue"}
    data = {"info_data": {"mode": mode}} if kind == "macvlan" else {}
    return {**found, "linkinfo": {"info_kind": kind, **data}, **({"link_index": peer} if peer else {})}


@pytest.mark.parametrize(
    ("inside", "outside", "found"),
    [
        ([link(2, "eth0", "veth", 9)], [link(9, "veth9", "veth", 2)], {"eth0": "veth9"}),
        ([link(2, "eth0", "veth", 9)], [link(9, "veth9", "veth", 3)], {}),
        ([link(2, "eth0", "macvlan", 9)], [link(9, "ens1")], {"eth0": "eth0@7"}),
        ([link(2, "eth0", "macvlan", 8)], [link(9, "ens1")], {}),
        ([link(1, "lo")], [link(1, "lo")], {}),
    ],
)
def test_ports_of_an_instance(inside: list[Any], outside: list[Any], found: dict[str, str]) -> None:
    assert match_ports([link(1, "lo"), *inside], [link(1, "lo"), *outside], 7) == found


@pytest.mark.parametrize(
    ("change", "attached"),
    [
        ({}, True),
        ({"qdisc": "blackhole"}, False),
        ({"flags": []}, False),
        ({"link_index": 8}, False),
        ({"linkinfo": {"info_kind": "macvlan", "info_data": {"mode": "source"}}}, False),
        ({"linkinfo": {}}, False),
    ],
)
def test_a_macvlan_interface_that_sends_and_receives(change: dict[str, Any], attached: bool) -> None:
    assert is_macvlan_attached({**link(2, "eth0", "macvlan", 9), **change}, 9) is attached


def test_both_kinds_change_with_one_command_each() -> None:
    enter = ("nsenter", "--net=/proc/7/ns/net")
    batch = ("-force", "-batch", "-")
    assert change_commands({"veth1": "br0", "eth0@7": "ens1", "eth1@7": "ens2"}) == [
        (("ip", *batch), f"link set dev veth1 address {port_address('veth1')} master br0 up\n"),
        ((*enter, "tc", *batch), "qdisc replace dev eth0 root noqueue\nqdisc replace dev eth1 root noqueue\n"),
        (
            (*enter, "ip", *batch),
            "link set dev eth0 up type macvlan mode bridge\nlink set dev eth1 up type macvlan mode bridge\n",
        ),
    ]
    assert change_commands({"eth0@7": None, "veth1": None}, down=True) == [
        (("ip", *batch), "link set dev veth1 nomaster down\n"),
        ((*enter, "tc", *batch), "qdisc replace dev eth0 root blackhole\n"),
        ((*enter, "ip", *batch), "link set dev eth0 down type macvlan mode source\n"),
    ]
    assert change_commands({}) == []


def test_names() -> None:
    assert split_macvlan("eth0@7") == ("eth0", "7") and split_macvlan("veth0") is None


class Wire:
    """A network card ens1 of this network, a neighbour at its other end, and an instance with an interface eth0."""

    def __init__(self, neighbour: int, instance: int) -> None:
        self.neighbour, self.instance = neighbour, instance

    def inside(self, *argv: str) -> str:
        """Run a program in the instance's network."""
        return run("nsenter", f"--net=/proc/{self.instance}/ns/net", *argv)

    def reached(self) -> bool:
        """Whether the neighbour gets an answer from the instance."""
        enter = ("nsenter", f"--net=/proc/{self.neighbour}/ns/net")
        argv = (*enter, "arping", "-q", "-c", "1", "-w", "1", "-I", "far", ADDRESS)
        return subprocess.run(argv, check=False, capture_output=True).returncode == 0

    def heard(self, name: str = "eth0") -> int:
        """Frames that the instance has received."""
        (shown,) = json.loads(self.inside("ip", "-json", "-statistics", "link", "show", "dev", name))
        return int(shown["stats64"]["rx"]["packets"])


def run(*argv: str, text: str = "") -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, input=text).stdout


@pytest.fixture
def wire() -> Iterator[Wire]:
    with own_network([]):
        others = [subprocess.Popen(["unshare", "--net", "sleep", "600"]) for _ in range(2)]
        try:
            mine = Path("/proc/thread-self/ns/net").readlink()
            for one in others:
                wait_until(lambda one=one: Path(f"/proc/{one.pid}/ns/net").readlink() != mine, "its network")  # type: ignore[misc]
            neighbour, instance = (one.pid for one in others)
            lines = f"""link add ens1 type veth peer name far netns {neighbour}
                link set ens1 up
                addr add 10.99.0.1/24 dev ens1
                link add hold type bridge
                link set hold up
                link add veth7 type veth peer name eth0 netns {instance}
                link set veth7 master hold up\n"""
            run("ip", "-batch", "-", text=lines)
            found = Wire(neighbour, instance)
            far = f"link set far up\naddr add {PEER}/24 dev far\n"
            run("nsenter", f"--net=/proc/{neighbour}/ns/net", "ip", "-batch", "-", text=far)
            for words in ("link set lo up", f"addr add {ADDRESS}/24 dev eth0", "link set eth0 up"):
                found.inside("ip", *words.split())
            yield found
        finally:
            for one in others:
                one.kill()
                one.wait()


def perform(commands: Commands) -> None:
    for argv, text in commands:
        run(*argv, text=text)


def test_an_isolated_instance_is_attached_and_detached(wire: Wire) -> None:
    """A detached interface neither sends nor receives, also after the carrier was lost; it keeps its routes."""
    host = Local("host-a")
    assert ports.find_ports(host, wire.instance) == {"eth0": "veth7"} and ports.find_uplink(host, "veth7") == "hold"
    perform(
        replace_commands(MacvlanRequest("eth0", "ens1", MAC, f"{ADDRESS}/24", (f"default via {PEER}",)), wire.instance)
    )
    port = f"eth0@{wire.instance}"
    assert ports.find_ports(host, wire.instance) == {"eth0": port} and ports.find_uplink(host, port) == "ens1"
    routes = wire.inside("ip", "route")
    assert f"default via {PEER}" in routes and "10.99.0.0/24" in routes

    before = wire.heard()
    assert not ports.is_attached(host, port, "ens1") and not wire.reached()
    assert wire.heard() == before, "it receives no broadcast either"

    ports.attach(host, {port: "ens1"})
    assert ports.is_attached(host, port, "ens1") and not ports.is_attached(host, port, "lo")
    assert wire.reached() and wire.heard() > before
    ports.attach(host, {port: "ens1"})  # again: no error

    ports.detach(host, [port])
    ports.detach(host, [port])
    assert carrier.exists(port) and carrier_of(port) and not wire.reached()
    far = ("nsenter", f"--net=/proc/{wire.neighbour}/ns/net", "ip", "link", "set", "far")
    run(*far, "down")
    wait_until(lambda: not carrier_of(port), "the loss of the carrier")
    run(*far, "up")
    wait_until(lambda: carrier_of(port), "the carrier")
    assert not ports.is_attached(host, port, "ens1") and not wire.reached()
    assert wire.inside("ip", "route") == routes

    ports.attach(host, {port: "ens1"})
    assert wire.reached()
    ports.detach(host, [port], down=True)
    assert '"UP"' not in wire.inside("ip", "-json", "link", "show", "dev", "eth0")
    assert not ports.is_attached(host, f"eth0@{1 << 22}", "ens1") and not carrier.exists(f"eth0@{1 << 22}")


def carrier_of(port: str) -> bool:
    """As the guard reads it; /sys shows the interfaces of the network that it was mounted in."""
    shown = json.loads(run("ip", "-json", "link", "show", "dev", "ens1"))
    assert split_macvlan(port)
    return "LOWER_UP" in shown[0]["flags"]
