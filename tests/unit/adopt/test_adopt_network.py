"""The network of the old node: its routes as they are read, and all of it after what moves was given and taken back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.agent import adopt_network
from appliance.agent.adopt_network import _is_ipv6, _without, parse_routes
from appliance.shared.adopt import OldInterface, SavedInterface
from appliance.shared.records import from_value
from tests.ownnet import own_network
from tests.unit.adopt.requests import INTERFACE

IPV4 = """\
default via 192.0.2.254 dev bond0 proto static linkdown
default via 192.0.2.253 dev bond0.7 proto static
10.1.0.0/16 dev bond0 proto kernel scope link src 10.1.0.1
10.9.0.0/16 proto static \\	nexthop via 10.1.0.2 dev bond0 weight 1 \\	nexthop via 10.1.0.3 dev bond0 weight 1
10.8.0.0/16 via 10.1.0.254 dev bond0 table 77 onlink
local 10.1.0.1 dev bond0 table local proto kernel scope host src 10.1.0.1
broadcast 10.1.255.255 dev bond0 table local proto kernel scope link src 10.1.0.1
"""
IPV6 = """\
2001:db8::/64 dev bond0 proto kernel metric 256 pref medium
2001:db8:1::/64 dev bond0 proto ra metric 256 expires 86000sec pref medium
fe80::/64 dev bond0 proto kernel metric 256 pref medium
default via 2001:db8::1 dev bond0 metric 1024 pref medium
local 2001:db8::2 dev bond0 table local proto kernel metric 0 pref medium
"""


def test_routes_over_an_interface() -> None:
    assert parse_routes(IPV4, "bond0") == [
        "default via 192.0.2.254 dev bond0 proto static",
        "10.1.0.0/16 dev bond0 proto kernel scope link src 10.1.0.1",
        "10.9.0.0/16 proto static nexthop via 10.1.0.2 dev bond0 weight 1 nexthop via 10.1.0.3 dev bond0 weight 1",
        "10.8.0.0/16 via 10.1.0.254 dev bond0 table 77 onlink",
    ]
    assert parse_routes(IPV6, "bond0") == [
        "2001:db8::/64 dev bond0 proto kernel metric 256 pref medium",
        "default via 2001:db8::1 dev bond0 metric 1024 pref medium",
    ]
    assert parse_routes("", "bond0") == []


def test_family_of_routes_and_addresses() -> None:
    assert [_is_ipv6(one) for one in parse_routes(IPV6, "bond0")] == [True, True]
    assert [_is_ipv6(one) for one in parse_routes(IPV4, "bond0")] == [False] * 4
    assert not _is_ipv6("10.1.0.1/16 brd 10.1.255.255 label bond0:1") and _is_ipv6("2001:db8::2/64 nodad")


@pytest.mark.parametrize(
    ("route", "keeps", "left"),
    [
        ("default via 10.1.0.254 dev bond0", ["10.1.0.9/16"], "default via 10.1.0.254 dev bond0"),
        ("default via 10.1.0.254 dev bond0 src 10.1.0.1", [], "default via 10.1.0.254 dev bond0"),
        ("10.1.0.0/16 dev bond0 scope link src 10.1.0.1", ["10.1.0.9/16"], "10.1.0.0/16 dev bond0 scope link"),
        ("10.1.0.0/16 dev bond0 scope link src 10.1.0.1", ["192.0.2.9/24"], ""),
        ("10.2.0.0/16 dev bond0 src 10.1.0.9", ["10.1.0.9/16"], "10.2.0.0/16 dev bond0 src 10.1.0.9"),
        ("10.1.0.2 dev bond0 src 10.1.0.1", ["10.1.0.9/16"], ""),
    ],
)  # fmt: skip
def test_routes_without_moved_addresses(route: str, keeps: list[str], left: str) -> None:
    """A network in which no address stays cannot be reached; others keep their routes, without the source."""
    assert _without(route, from_value(OldInterface, {**INTERFACE, "keeps": keeps})) == left


OLD: dict[str, Any] = {
    **INTERFACE,
    "name": "net0",
    "moves": ["10.1.0.1/16", "10.1.0.2/16", "2001:db8::1/64"],
    "keeps": ["10.1.0.9/16", "2001:db8::9/64"],
}
ADDRESSES = ("10.1.0.1/16 brd 10.1.255.255", "10.1.0.9/16", "10.1.0.2/16 label net0:x", "192.0.2.7/32")
CONFIGURE = [
    *(f"address add {one} dev net0" for one in ADDRESSES),
    *(f"-6 address add {one}/64 dev net0 nodad" for one in ("2001:db8::1", "2001:db8::9")),
    "route add default via 10.1.0.254 src 10.1.0.1 metric 7",
    "route add 10.9.0.0/16 via 10.1.0.253",
    "route add 10.8.0.0/16 dev net0 src 10.1.0.1 table 77",
    "-6 route add default via 2001:db8::fe dev net0",
]


def ip(*lines: str) -> None:
    for line in lines:
        subprocess.run(["ip", *line.split()], check=True)


def now() -> dict[str, Any]:
    """The interface and its routes."""
    (link,) = json.loads(subprocess.check_output(["ip", "-json", "address", "show", "dev", "net0"]))
    # Only IPv4 uses the first address of a network.
    infos = sorted(
        (one for one in link["addr_info"] if one["scope"] != "link"),
        key=lambda one: one["local"] if one["family"] == "inet6" else "",
    )
    both = [subprocess.check_output(["ip", f, "-o", "route", "show", "table", "all"], text=True) for f in ("-4", "-6")]
    routes = [line for shown in both for line in parse_routes(shown, "net0")]
    keys = ("local", "prefixlen", "broadcast", "label", "secondary")
    return {
        "mac": link["address"],
        "addresses": [tuple(one.get(key) for key in keys) for one in infos],
        "routes": sorted(routes),
    }


BUSY = """\
#!/bin/sh
# As with drivers that refuse another MAC address while the interface is up.
case "$*" in *-batch*) ;; *) exec {ip} "$@" ;; esac
while read -r line; do
    case "$line" in "link set dev net0 address"*) {ip} link show net0 up | grep -q . && continue ;; esac
    echo "$line" | {ip} "$@"
done
"""


@pytest.mark.parametrize("busy", [False, True])
def test_all_is_as_before_after_a_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    if busy:
        (tmp_path / "ip").write_text(BUSY.format(ip=shutil.which("ip")))
        (tmp_path / "ip").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with own_network(()):
        ip("link add net0 type veth peer name net1", "link set net1 up")
        ip(f"link set net0 address {INTERFACE['mac']}", "link set net0 up", *CONFIGURE)
        wanted = from_value(OldInterface, OLD)
        adopt_network.check_interface(wanted)
        saved = adopt_network.save_interface(replace(wanted, witnesses=()))
        before = now()
        for _ in range(2):  # a repetition does no harm
            adopt_network.release(wanted, saved)
        found = now()
        assert found["mac"] == INTERFACE["spare_mac"]
        assert sorted(one[0] for one in found["addresses"]) == ["10.1.0.9", "192.0.2.7", "2001:db8::9"]
        for route in ("default via 10.1.0.254 dev net0 metric 7", "10.9.0.0/16 via 10.1.0.253 dev net0"):
            assert route in found["routes"]
        assert any(one.startswith("default via 2001:db8::fe dev net0") for one in found["routes"])
        assert adopt_network.has_any_moved(wanted) is False
        for _ in range(2):
            adopt_network.restore(wanted, saved)
            assert now() == before


def test_who_serves_is_unknown_where_nobody_answers() -> None:
    with own_network(()):
        ip("link add net0 type veth", "link set net0 up", *CONFIGURE[:1])
        wanted = from_value(OldInterface, OLD)
        for witnesses in (("10.1.0.254",), ()):
            saved = SavedInterface("net0", (), (), witnesses)
            assert adopt_network.ask_who_serves([wanted], [saved]) == adopt_network.UNKNOWN
        ip("link set net0 down")
        assert adopt_network.ask_who_serves([wanted], [saved]) == adopt_network.UNKNOWN
