"""Routes of the old node as they are read, and as they are without the addresses that move."""

from __future__ import annotations

import pytest

from appliance.agent.adopt_network import _is_ipv6, _without, parse_routes
from appliance.shared.adopt import OldInterface
from appliance.shared.records import from_value
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
