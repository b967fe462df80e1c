"""Plans of a discovery, without a network: ranges, names, MAC addresses, decisions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.config.hostlist import expand, fold
from appliance.errors import ConfigError
from appliance.operations.nodes.power import profile_for
from appliance.plan.nodes.discover import Found, decide
from appliance.plan.nodes.nodes import choose_groups, choose_nodes, clean_mac, find_problems
from appliance.plan.nodes.scan import check_pattern, find_targets, free_addresses, free_names

NETWORK = IPv4Network("10.77.0.0/24")

MACS: list[tuple[Any, str]] = [
    ("02:00:0a:4d:00:97", "02:00:0a:4d:00:97"),
    ("02-00-0A-4D-00-97", "02:00:0a:4d:00:97"),
    ("0200.0a4d.0097", "02:00:0a:4d:00:97"),
    ("02000A4D0097", "02:00:0a:4d:00:97"),
    ("00:00:00:00:00:00", ""),
    ("ff:ff:ff:ff:ff:ff", ""),
    ("01:00:5e:00:00:01", ""),
    ("02:00:0a:4d:00", ""),
    ("80:00:02:08:fe:80:00:00:00:00:00:00:00:02:c9:03:00:01:23:45", ""),
    ("N/A", ""),
    ("", ""),
    (None, ""),
    (5, ""),
    (["02:00:0a:4d:00:97"], ""),
]


@pytest.mark.parametrize(("value", "found"), MACS)
def test_clean_mac(value: Any, found: str) -> None:
    assert clean_mac(value) == found


TARGETS: dict[str, tuple[list[str], list[str]]] = {
    "an address": (["10.0.0.7"], ["10.0.0.7"]),
    "a network": (["10.0.0.0/30"], ["10.0.0.1", "10.0.0.2"]),
    "one of a network": (["10.0.0.7/30"], ["10.0.0.5", "10.0.0.6"]),
    "a pair": (["10.0.0.0/31"], ["10.0.0.0", "10.0.0.1"]),
    "a single one": (["10.0.0.9/32"], ["10.0.0.9"]),
    "from and to": (["10.0.0.254-10.0.1.1"], ["10.0.0.254", "10.0.0.255", "10.0.1.0", "10.0.1.1"]),
    "a short end": (["10.0.0.8-10"], ["10.0.0.8", "10.0.0.9", "10.0.0.10"]),
    "a host list of addresses": (["10.0.0.[9-11]"], ["10.0.0.9", "10.0.0.10", "10.0.0.11"]),
    "names": (["bmc[2-1,3]"], []),
    "names with dashes": (["bmc-r1-[1-2]"], ["bmc-r1-1", "bmc-r1-2"]),
    "each once, in order": (["10.0.0.9", "10.0.0.8-9", "b10", "b9"], ["10.0.0.8", "10.0.0.9", "b9", "b10"]),
}


@pytest.mark.parametrize("name", TARGETS)
def test_find_targets(name: str) -> None:
    words, found = TARGETS[name]
    if not found:
        with pytest.raises(ConfigError):
            find_targets(words)
        return
    assert find_targets(words) == found


@pytest.mark.parametrize(
    "word", ["", "10.0.0", "10.0.0.256", "10.0.0.1-", "-", "a b", "../x", "10.0.0.0/8", "x[1-9999]"]
)
def test_invalid_ranges(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_targets([word])
    assert caught.value.hint


@given(st.text(max_size=30))
def test_arbitrary_ranges(word: str) -> None:
    try:
        found = find_targets([word])
    except ConfigError:
        return
    assert all(one and not set(one) & set("/ \n") for one in found)


@pytest.mark.parametrize(
    "pattern", ["node", "%d%d", "n%s", "n%03d%s", "-%d", "n%d.x", "n%(a)d", "n%99999d", "%", "n%-3d", "%d", "%dh"]
)
def test_invalid_patterns(pattern: str) -> None:
    with pytest.raises(ConfigError):
        check_pattern(pattern)


def test_free_names_and_addresses() -> None:
    names = free_names(check_pattern("node%03d"), {"node002"})
    assert list(itertools.islice(names, 3)) == ["node001", "node003", "node004"]
    assert list(free_addresses(IPv4Address("10.77.0.252"), NETWORK, {"10.77.0.253"})) == ["10.77.0.252", "10.77.0.254"]


FOLDS = [
    (["node001", "node002", "node003", "node007"], "node[001-003,007]"),
    (["n1"], "n1"),
    (["n9", "n10", "n11"], "n[9-11]"),
    (["n099", "n100", "n101"], "n[099-101]"),
    (["b", "a2", "a1", "x1000c0s0b0n0"], "a[1-2],x1000c0s0b0n0,b"),
    ([], ""),
]


@pytest.mark.parametrize(("names", "folded"), FOLDS)
def test_fold(names: list[str], folded: str) -> None:
    assert fold(names) == folded


@given(st.lists(st.from_regex(r"[a-c]{0,2}[0-9]{1,4}", fullmatch=True), max_size=40))
def test_what_is_folded_is_expanded_again(names: list[str]) -> None:
    folded = fold(names)
    assert sorted(expand(folded)) == sorted(set(names)) if names else folded == ""


def node(name: str, *macs: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "macs": list(macs), **more}


PROBLEMS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "well": (node("n1", "02:00:00:00:00:01", address="10.77.0.5", xname="x1000c0s0b0n0", bmc="https://b/redfish"), []),
    "a word of DHCP": (node("1h", "02:00:00:00:00:01"), ["DHCP takes it for a keyword or a lease time"]),
    "a name": (node("n_1", "02:00:00:00:00:01"), ["is not a node name"]),
    "a MAC": (node("n1", "02:00:00:00:00"), ["is not a MAC address"]),
    "of a group": (node("n1", "03:00:00:00:00:01"), ["is a multicast MAC address"]),
    "twice": (node("n1", "02:00:00:00:00:01", "0200.0000.0001"), ["is listed twice"]),
    "another's": (node("n1", "02:00:00:00:00:99"), ["is a MAC address of other"]),
    "no address": (node("n1", address="10.77.0"), ["is not an IPv4 address"]),
    "an address elsewhere": (node("n1", address="10.78.0.1"), ["is not in the provisioning network"]),
    "the last address": (node("n1", address="10.77.0.255"), ["the first or the last"]),
    "the VM's": (node("n1", address="10.77.0.2"), ["is the address of the VM"]),
    "another's address": (node("n1", address="10.77.0.9"), ["is the address of other"]),
    "an xname": (node("n1", xname="x1000c0s0b0"), ["is not the xname of a node"]),
    "another's xname": (node("n1", xname="x1c0s0b0n9"), ["is the xname of other"]),
    "a controller": (node("n1", bmc="http://b"), ["is not the URL of a controller"]),
    "a group": (node("n1", groups=["a b"]), ["is not a group name"]),
    "all of it": (node("", "x", address="y", xname="z", bmc="f"), ["name", "MAC", "IPv4", "xname", "URL"]),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_find_problems(name: str) -> None:
    one, words = PROBLEMS[name]
    other = node("other", "02:00:00:00:00:99", address="10.77.0.9", xname="x1c0s0b0n9")
    found = find_problems(one, [other], NETWORK, {"10.77.0.2": "the VM"})
    assert len(found) == len(words)
    assert all(word in problem for word, problem in zip(words, found, strict=True)), found


@pytest.mark.parametrize(
    ("current", "changes", "found"),
    [
        (["a"], ["+b"], ["a", "b"]),
        (["a", "b"], ["-a", "+c"], ["b", "c"]),
        (["a"], ["-x"], ["a"]),
        (["a"], ["b", "c"], ["b", "c"]),
        (["a"], ["+b", "c"], None),
    ],
)
def test_choose_groups(current: list[str], changes: list[str], found: list[str] | None) -> None:
    if found is None:
        with pytest.raises(ValueError, match="not both"):
            choose_groups(current, changes)
    else:
        assert choose_groups(current, changes) == found


def test_choose_nodes() -> None:
    nodes = [node("a", groups=["g"]), node("b", xname="x1c0s0b0n0"), node("c", groups=["g", "h"])]

    def names(*words: str) -> tuple[list[str], list[str]]:
        chosen, unknown = choose_nodes(words, nodes)
        return [one["name"] for one in chosen], unknown

    assert names("@g", "c", "b") == (["a", "c", "b"], [])
    assert names("@all") == (["a", "b", "c"], [])
    assert names("x1c0s0b0n0", "z", "@none", "") == (["b"], ["z", "@none", ""])


URL = "https://10.0.9.1/redfish/v1/Systems/1"
M1, M2, M3 = "02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:00:03"

Case = tuple[list[Found], list[dict[str, Any]], bool, list[tuple[str, str, dict[str, Any]]]]
DECISIONS: dict[str, Case] = {
    "new": (
        [Found(URL, (M1,))],
        [],
        False,
        [("new", "n1", {"macs": [M1], "bmc": URL, "details": {}, "address": "a-n1"})],
    ),
    "new, with its place": (
        [Found(URL, (M1,), "x1c0s0b0n0")],
        [],
        False,
        [("new", "n1", {"macs": [M1], "bmc": URL, "details": {}, "address": "a-n1", "xname": "x1c0s0b0n0"})],
    ),
    "without a MAC": ([Found(URL, ())], [], False, [("conflict", "", {})]),
    "the same": ([Found(URL, (M1,))], [node("x", M1, bmc=URL)], False, [("same", "x", {})]),
    "a gap": ([Found(URL, (M1,))], [node("x", M1)], False, [("changed", "x", {"bmc": URL})]),
    "known by its controller": ([Found(URL, (M1,))], [node("x", bmc=URL)], False, [("changed", "x", {"macs": [M1]})]),
    "a controller's address becomes a path": (
        [Found(URL, (M1,))],
        [node("x", M1, bmc="https://10.0.9.1")],
        False,
        [("changed", "x", {"bmc": URL})],
    ),
    "another controller": ([Found(URL, (M1,))], [node("x", M1, bmc="https://other")], False, [("differs", "x", {})]),
    "another controller, taken": (
        [Found(URL, (M1,))],
        [node("x", M1, bmc="https://other")],
        True,
        [("changed", "x", {"bmc": URL})],
    ),
    "one MAC more": ([Found(URL, (M1, M2))], [node("x", M1, bmc=URL)], False, [("differs", "x", {})]),
    "one MAC more, taken": (
        [Found(URL, (M2, M1))],
        [node("x", M1, bmc=URL)],
        True,
        [("changed", "x", {"macs": [M1, M2]})],
    ),
    "another card, taken": (
        [Found(URL, (M3, M2))],
        [node("x", M1, M2, bmc=URL)],
        True,
        [("changed", "x", {"macs": [M2, M3]})],
    ),
    "no MAC now": ([Found(URL, ())], [node("x", M1, bmc=URL)], True, [("same", "x", {})]),
    "two nodes' MACs": ([Found(URL, (M1, M2))], [node("x", M1), node("y", M2)], True, [("conflict", "", {})]),
    "another's MAC": ([Found(URL, (M1,))], [node("x", bmc=URL), node("y", M1)], True, [("conflict", "", {})]),
    "one MAC at two": (
        [Found(URL, (M1,)), Found(URL + "2", (M1,))],
        [],
        False,
        [("new", "n1", {"macs": [M1], "bmc": URL, "details": {}, "address": "a-n1"}), ("conflict", "", {})],
    ),
    "one machine behind two": (
        [Found(URL, (M1,), facts={"uuid": "u"}), Found(URL + "2", (M1,), facts={"uuid": "u"})],
        [],
        False,
        [("new", "n1", {"macs": [M1], "bmc": URL, "details": {"uuid": "u"}, "address": "a-n1"}), ("same", "", {})],
    ),
    "new facts": (
        [Found(URL, (M1,), facts={"bios": "2"})],
        [node("x", M1, bmc=URL, details={"bios": "1", "rack": "r7"})],
        False,
        [("changed", "x", {"details": {"bios": "2", "rack": "r7"}})],
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions(name: str) -> None:
    found, nodes, update, expected = DECISIONS[name]
    names = iter(("n1", "n2", "n3"))
    address: Callable[[str], str] = lambda name: f"a-{name}"  # noqa: E731
    made = list(decide(found, nodes, name=lambda: next(names), address=address, update=update))
    assert [(one.what, one.name, dict(one.change)) for one in made] == expected
    assert all(one.differences for one in made if one.what in ("conflict", "differs"))


def test_profile_for() -> None:
    profiles: dict[str, list[str]] = {"compute": [], "gpu": ["gpu"], "big": ["big", "gpu"]}
    found = [profile_for(groups, profiles) for groups in ([], ["x"], ["gpu"], ["x", "big"])]
    assert found == ["compute", "compute", "big", "big"]
    assert profile_for(["x"], {"gpu": ["gpu"]}) == ""
