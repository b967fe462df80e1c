"""Conversion of a State Manager's lists: valid entries are converted, invalid ones are left out with a note."""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import SmsError
from appliance.operations.nodes.convert import LISTS, Converted, Smd, from_smd, read_document
from appliance.operations.nodes.import_ import as_yaml

NETWORK = IPv4Network("10.77.0.0/24")
RESERVED = {"10.77.0.2": "the VM"}
NODE = {"ID": "x1000c0s0b0n0", "Type": "Node", "State": "Ready", "Flag": "OK", "Enabled": True, "NID": 1, "Arch": "X86"}


def convert(components: list[Any], **more: Any) -> Converted:
    return from_smd(Smd(components, **more), pattern="nid%06d", network=NETWORK, reserved=RESERVED)


def mac(number: int, **more: Any) -> dict[str, Any]:
    return {"ID": f"02000a4d00{number:02x}", "MACAddress": f"02:00:0A:4D:00:{number:02X}", **more}


def ip(*addresses: str) -> list[dict[str, str]]:
    return [{"IPAddress": address, "Network": "NMN"} for address in addresses]


def test_a_node() -> None:
    made = convert(
        [NODE],
        interfaces=[
            mac(2, ComponentID="x1000c0s0b0n0", IPAddresses=ip("10.99.0.1")),
            mac(3, ComponentID="x1000c0s0b0n0", IPAddresses=ip("10.77.0.9", "10.99.0.2"), Description="boot"),
        ],
        endpoints=[{"ID": "x1000c0s0b0", "FQDN": "x1000c0s0b0.local", "User": "root", "Password": "secret"}],
        component_endpoints=[{"ID": "x1000c0s0b0n0", "RedfishURL": "x1000c0s0b0.local/redfish/v1/Systems/Node0"}],
        groups=[{"label": "blue", "description": "d", "exclusiveGroup": "c", "members": {"ids": ["x1000c0s0b0n0"]}}],
    )
    (node,) = made.document["nodes"]
    assert (node["name"], node["nid"], node["address"]) == ("nid000001", 1, "10.77.0.9")
    assert [one["mac"] for one in node["interfaces"]] == ["02:00:0a:4d:00:03", "02:00:0a:4d:00:02"], (
        "it boots by the first"
    )
    assert node["interfaces"][0]["addresses"] == [{"address": "10.99.0.2", "network": "NMN"}]
    assert node["bmc"] == "https://x1000c0s0b0.local/redfish/v1/Systems/Node0"
    assert made.document["groups"][0]["members"] == ["x1000c0s0b0n0"]
    assert made.notes == [] and "secret" not in str(made.document)


LEFT: dict[str, tuple[dict[str, Any], str]] = {
    "no xname": ({"components": [{"ID": "node1"}]}, "'node1': is not a known xname"),
    "twice": ({"components": [NODE, NODE]}, "is a duplicate"),
    "no interface": ({"components": [NODE]}, "has no interface"),
    "no MAC": ({"interfaces": [mac(1), {"MACAddress": "not one"}]}, "'not one': is not a MAC address of a machine"),
    "one MAC twice": ({"interfaces": [mac(1), mac(1)]}, "is a duplicate"),
    "the VM's address": ({"interfaces": [mac(1, IPAddresses=ip("10.77.0.2"))]}, "10.77.0.2 is the address of the VM"),
    "an address twice": (
        {"interfaces": [mac(1, IPAddresses=ip("10.9.0.1")), mac(2, IPAddresses=ip("10.9.0.1"))]},
        "02:00:0a:4d:00:02: 10.9.0.1 is the address of 02:00:0a:4d:00:01",
    ),
    "no address": ({"interfaces": [mac(1, IPAddresses=ip("here"))]}, "here is not an address of a machine"),
    "a NID twice": ({"components": [NODE, {**NODE, "ID": "x1000c0s0b0n1"}]}, "NID 1 is a duplicate"),
    "an endpoint": ({"endpoints": [{"ID": "bmc1"}]}, "endpoint 'bmc1': is not an xname"),
    "a group's label": ({"groups": [{"label": "a b"}]}, "group 'a b': is not a label"),
    "a member": ({"groups": [{"label": "a", "members": {"ids": ["x9", 5]}}]}, "'x9' is not a component"),
}


@pytest.mark.parametrize("name", LEFT)
def test_invalid_entries_are_noted(name: str) -> None:
    given, note = LEFT[name]
    made = convert(**{"components": [], **given})
    assert note in "; ".join(made.notes)


def test_interfaces_of_the_first_api_version() -> None:
    """In SMD's first version an interface has one address instead of a list."""
    made = convert([NODE], interfaces=[mac(1, ComponentID=NODE["ID"], IPAddress="10.77.0.5")])
    assert made.document["nodes"][0]["address"] == "10.77.0.5"


def test_nodes_without_nid_are_named_by_xname() -> None:
    made = convert([{"ID": "X1000C0S00B0N0", "NID": -1}, {"ID": "x1000c0s1b0n0", "NID": "7"}])
    assert [node["name"] for node in made.document["nodes"]] == ["x1000c0s0b0n0", "x1000c0s1b0n0"]


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            ("NID", "Role", "State", "Enabled", "IPAddresses", "members", "label", "tags", "FQDN", "MACAddress"), ANY
        ),
        "ID": ANY | st.sampled_from(["x1c0s0b0n0", "x1c0s0b0", "x1c0s0b0n1"]),
        "ComponentID": st.sampled_from(["x1c0s0b0n0", "", "odd"]) | ANY,
    },
)
LISTED = st.lists(ENTRY, max_size=4)


@given(LISTED, LISTED, LISTED, LISTED, LISTED)
def test_arbitrary_lists_are_converted(a: Any, b: Any, c: Any, d: Any, e: Any) -> None:
    made = from_smd(Smd(a, b, c, d, e), pattern="nid%06d", network=NETWORK, reserved=RESERVED)
    assert set(made.document) <= set(LISTS)
    assert all(note.isprintable() for note in made.notes)
    assert read_document(as_yaml(made.document)) == made.document


def test_empty_collections() -> None:
    assert convert([]).document == {name: [] for name in LISTS if name != "boot"}


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [1]\nnodes: *a",
        "nodes: [",
        "- 1",
        "",
        "nodes: {}",
        "nodes: [1]",
        "nodes: [{}]",
        "x: []",
        "\0",
        "!!python/name:os.x",
    ],
)
def test_invalid_documents(text: str) -> None:
    with pytest.raises(SmsError) as caught:
        read_document(text)
    assert caught.value.hint


def test_text_stays_text() -> None:
    """YAML 1.1 reads this MAC address as a number in base 60."""
    found = read_document("nodes:\n- name: n1\n  macs: [10:20:30:40:50:10]\n  nid: 7\n  enabled: true\n")
    assert found["nodes"] == [{"name": "n1", "macs": ["10:20:30:40:50:10"], "nid": 7, "enabled": True}]
