"""The provisioning VM's inventory as `sms` writes and reads it, over HTTP, from the real service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.operations.nodes.convert import read_document
from appliance.provision import names
from tests.provd import Provd, make_config, running


def many(count: int = 450) -> dict[str, Any]:
    """Return an inventory of ``count`` nodes."""
    return {
        "nodes": [
            {
                "name": f"nid{number:06d}",
                "xname": f"x{1000 + number // 256}c{number // 32 % 8}s{number // 4 % 8}b{number // 2 % 2}n{number % 2}",
                "nid": number + 1,
                "address": f"10.80.{number // 250}.{number % 250 + 1}",
                "macs": [f"02:00:00:00:{number // 256:02x}:{number % 256:02x}"],
                "groups": ["compute", f"row{number % 4}"],
                "profile": "compute",
            }
            for number in range(count)
        ]
    }


def test_a_node_is_made_read_changed_renamed_and_removed(provd: Provd) -> None:
    given = {"macs": ["02-00-0A-4D-00-97"], "address": "10.77.0.151", "xname": "X1000c0s00b0n0", "groups": ["gpu"]}
    assert provd.ask("PUT", "/sms/v1/nodes/n1", given).status == 201
    node = provd.good("GET", "/sms/v1/nodes/n1")
    assert node["macs"] == ["02:00:0a:4d:00:97"] and node["xname"] == "x1000c0s0b0n0" and node["role"] == "Compute"
    assert provd.good("GET", "/sms/v1/nodes/x1000c0s0b0n0") == node
    assert provd.ask("PUT", "/sms/v1/nodes/n1", given).status == 200
    provd.good("PATCH", "/sms/v1/nodes/n1", {"profile": "gpu", "enabled": False})
    node |= {"profile": "gpu", "enabled": False}
    assert provd.good("GET", "/sms/v1/nodes/n1") == node
    renamed = provd.good("PATCH", "/sms/v1/nodes/n1", {"name": "n7", "xname": "x1000c0s0b0n1", "macs": []})
    assert renamed == {**node, "name": "n7", "xname": "x1000c0s0b0n1", "macs": [], "interfaces": []}
    assert provd.good("GET", "/hsm/v2/groups/gpu")["members"]["ids"] == ["x1000c0s0b0n1"]
    assert provd.ask("DELETE", "/sms/v1/nodes/n7").status == 204
    assert provd.good("GET", "/sms/v1/nodes") == {"nodes": []}
    assert provd.ask("GET", "/sms/v1/nodes/n7").status == 404


def test_a_patch_of_macs_keeps_what_is_known_of_them(provd: Provd) -> None:
    interface = {"mac": "02:00:0a:4d:00:97", "description": "left port", "addresses": [{"address": "192.0.2.9"}]}
    provd.good("PUT", "/sms/v1/nodes/n1", {"interfaces": [interface], "address": "10.77.0.151"})
    node = provd.good("PATCH", "/sms/v1/nodes/n1", {"macs": ["02:00:0a:4d:00:99", "02:00:0a:4d:00:97"]})
    assert node["macs"] == ["02:00:0a:4d:00:99", "02:00:0a:4d:00:97"]
    assert node["interfaces"][1]["description"] == "left port"
    assert node["interfaces"][1]["addresses"] == [{"address": "192.0.2.9", "network": ""}]


REFUSED = {
    "MAC of another": ({"macs": ["02:00:0a:4d:00:01"]}, 409, "n0 has it"),
    "address of another": ({"address": "10.77.0.101"}, 409, "n0 has it"),
    "address of another's second interface": ({"address": "10.77.0.102"}, 409, "n0 has it"),
    "xname of another": ({"xname": "x0c0s0b0n0"}, 409, "exists already"),
    "NID of another": ({"nid": 7}, 409, "n0 has it"),
    "the VM's address": ({"address": "10.77.0.2"}, 409, "sms-provision has it"),
    "the container's address": ({"address": "10.77.0.3"}, 409, "sms-services has it"),
    "the gateway's address": ({"address": "10.77.0.1"}, 409, "gateway has it"),
    "outside of the network": ({"address": "10.78.0.9"}, 400, "not in the provisioning network 10.77.0.0/24"),
    "in the pool": ({"address": "10.77.0.220"}, 400, "pool"),
    "the network's own": ({"address": "10.77.0.0"}, 400, "network or broadcast"),
    "broadcast": ({"address": "10.77.0.255"}, 400, "network or broadcast"),
    "no address": ({"address": "10.77.0.256"}, 400, "is not an address"),
    "wrong MAC": ({"macs": ["02:00:0a:4d:00"]}, 400, "not a MAC address"),
    "MAC of a group": ({"macs": ["01:00:5e:00:00:01"]}, 400, "not a MAC address"),
    "MAC twice": ({"macs": ["02:00:0a:4d:00:09", "020000000009", "02000a4d0009"]}, 400, "listed twice"),
    "wrong xname": ({"xname": "x0c0s0b0"}, 400, "not the xname of a node"),
    "wrong profile": ({"profile": "../etc"}, 400, "not a valid profile"),
    "wrong controller": ({"bmc": "https://x y"}, 400, "controller"),
    "wrong state": ({"state": "Confused"}, 400, "not a valid state"),
    "wrong group": ({"groups": ["a b"]}, 400, "not a valid group label"),
    "no such key": ({"colour": "red"}, 400, "colour"),
    "no text": ({"profile": 5}, 400, "profile: 5 is not of type"),
    "large NID": ({"nid": 2**40}, 400, "nid"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rejected_nodes(case: str, provd: Provd) -> None:
    body, status, words = REFUSED[case]
    addresses = [{"address": "10.77.0.102"}]
    interface = {"mac": "02:00:0a:4d:00:01", "addresses": addresses}
    provd.good(
        "PUT",
        "/sms/v1/nodes/n0",
        {"interfaces": [interface], "address": "10.77.0.101", "xname": "x0c0s0b0n0", "nid": 7},
    )
    before = provd.good("GET", "/sms/v1/export")
    answer = provd.ask("PUT", "/sms/v1/nodes/n1", body)
    assert answer.status == status and words in " ".join(answer.json["problems"]), answer.data
    assert answer.headers["content-type"] == "application/problem+json"
    assert provd.good("GET", "/sms/v1/export") == before


@pytest.mark.parametrize("name", ["a b", "-a", "a" * 64, "ü", "a_b", "a.b", "%00", "a\nb"])
def test_invalid_names(name: str, provd: Provd) -> None:
    quoted = name.replace("\n", "%0A")
    assert provd.ask("PUT", f"/sms/v1/nodes/{quoted}", {}).status == 400


@pytest.mark.parametrize("name", ["ignore", "Infinite", "45", "1h", "2W", "10s"])
def test_names_that_dhcp_misinterprets(name: str, provd: Provd) -> None:
    answer = provd.ask("PUT", f"/sms/v1/nodes/{name}", {})
    assert answer.status == 400 and "DHCP takes it for" in answer.detail
    provd.good("PUT", "/sms/v1/nodes/n1", {})
    assert provd.ask("PATCH", "/sms/v1/nodes/n1", {"name": name}).status == 400
    for good in ("45a", "1hh", "n45", "ignored", "1-h"):
        provd.good("PUT", f"/sms/v1/nodes/{good}", {})


def test_names_are_case_insensitive(provd: Provd) -> None:
    provd.good("PUT", "/sms/v1/nodes/Node1", {})
    assert provd.ask("PUT", "/sms/v1/nodes/node1", {}).status == 200
    assert [each["name"] for each in provd.good("GET", "/sms/v1/nodes")["nodes"]] == ["Node1"]


@pytest.mark.slow
def test_hundreds_of_nodes_are_imported_and_exported_unchanged(tmp_path: Path) -> None:
    with running(make_config(tmp_path, address="10.80.255.2", prefix=16, gateway="", services={}, pool=None)) as provd:
        assert provd.good("POST", "/sms/v1/import", many()) == {"nodes": 450}
        document = provd.good("GET", "/sms/v1/export")
        assert len(document["nodes"]) == 450 and document["groups"][0]["label"] == "compute"
        text = provd.ask("GET", "/sms/v1/export?format=yaml").text
        assert yaml.safe_load(text) == document == read_document(text)
        # Importing an export changes nothing.
        assert provd.good("POST", "/sms/v1/import?mode=replace", document) == {"nodes": 450}
        assert provd.good("GET", "/sms/v1/export") == document
        assert len(provd.good("GET", "/sms/v1/nodes?group=row1")["nodes"]) == 113
        assert provd.good("GET", "/sms/v1/health")["nodes"] == 450


def test_an_import_with_invalid_nodes_reports_all_problems_and_changes_nothing(tmp_path: Path) -> None:
    document = many()
    document["nodes"][17]["address"] = "10.81.0.1"
    document["nodes"][80]["macs"] = document["nodes"][81]["macs"]
    document["nodes"][300]["macs"] = ["nonsense"]
    document["nodes"][449]["name"] = document["nodes"][0]["name"]
    with running(make_config(tmp_path, address="10.80.255.2", prefix=16, gateway="", services={}, pool=None)) as provd:
        provd.good("PUT", "/sms/v1/nodes/there", {})
        answer = provd.ask("POST", "/sms/v1/import", document)
        assert answer.status == 400
        problems = "\n".join(answer.json["problems"])
        for words in (
            "nid000017: 10.81.0.1",
            "MAC 02:00:00:00:00:51 of nid000081: nid000080",
            "nonsense",
            "nid000000 is",
        ):
            assert words in problems, problems
        assert [each["name"] for each in provd.good("GET", "/sms/v1/nodes")["nodes"]] == ["there"]


def test_nodes_of_one_document_may_swap_addresses(provd: Provd) -> None:
    one = {"name": "n1", "macs": ["02:00:0a:4d:00:01"], "address": "10.77.0.11", "nid": 1}
    two = {"name": "n2", "macs": ["02:00:0a:4d:00:02"], "address": "10.77.0.12", "nid": 2}
    provd.good("POST", "/sms/v1/import", {"nodes": [one, two]})
    swapped = [{**one, "name": "n2"}, {**two, "name": "n1"}]
    provd.good("POST", "/sms/v1/import", {"nodes": swapped})
    assert provd.good("GET", "/sms/v1/nodes/n1")["address"] == "10.77.0.12"


def test_an_import_keeps_keys_that_are_not_given(provd: Provd) -> None:
    mac = "02:00:0a:4d:00:01"
    given = {"xname": "x0c0s0b0n0", "nid": 1, "macs": [mac], "address": "10.77.0.11", "groups": ["byhand"]}
    more = {"profile": "gpu", "bmc": "https://10.77.0.90", "role": "Service", "enabled": False}
    provd.good("PUT", "/sms/v1/nodes/n1", {**given, **more, "details": {"rack": "3"}})
    provd.good("POST", "/hsm/v2/groups", {"label": "blue", "description": "by hand", "tags": ["t"]})
    boot = {"kernel": "http://s/k", "params": "quiet", "cloud-init": {"user-data": {"a": "b"}}}
    provd.good("PUT", "/boot/v1/bootparameters", {"hosts": ["x0c0s0b0n0"], **boot})
    endpoint = {"id": "x0c0s0b0", "fqdn": "b0", "address": "10.77.0.90", "mac": "02:00:0a:4d:00:aa", "enabled": False}
    loose = {"mac": "02:00:0a:4d:00:bb", "component": "x0c0s0b0n0", "description": "second"}
    provd.good("POST", "/sms/v1/import", {"endpoints": [endpoint], "interfaces": [loose]})
    before = provd.good("GET", "/sms/v1/export")
    nothing = {
        "nodes": [{"name": "n1"}],
        "groups": [{"label": "blue"}, {"label": "byhand", "members": []}],
        "endpoints": [{"id": "x0c0s0b0"}],
        "interfaces": [{"mac": "02:00:0a:4d:00:bb"}],
        "boot": [{"scope": "host", "key": "x0c0s0b0n0"}],
    }
    provd.good("POST", "/sms/v1/import", nothing)
    assert provd.good("GET", "/sms/v1/export") == before
    provd.good("POST", "/sms/v1/import", {"nodes": [{"name": "n1", "profile": "", "groups": []}]})
    node = provd.good("GET", "/sms/v1/nodes/n1")
    assert (node["profile"], node["groups"], node["bmc"]) == ("", [], "https://10.77.0.90")
    # A MAC address of another node cannot be taken over.
    taken = {"nodes": [{"name": "n1", "enabled": True}, {"name": "n2", "macs": [mac]}]}
    assert provd.ask("POST", "/sms/v1/import", taken).status == 409
    provd.good("POST", "/sms/v1/import?mode=replace", {"nodes": [{"name": "n1"}]})
    left = provd.good("GET", "/sms/v1/export")
    assert left["nodes"][0]["macs"] == [] and left["nodes"][0]["bmc"] == "" and left["boot"] == left["groups"] == []


def test_a_replacing_import_removes_everything_else(provd: Provd) -> None:
    provd.good("PUT", "/sms/v1/nodes/old", {"groups": ["a"], "macs": ["02:00:0a:4d:00:01"]})
    provd.good("PUT", "/boot/v1/bootparameters", {"hosts": ["old"], "params": "x"})
    provd.good("POST", "/sms/v1/import?mode=replace", {"nodes": [{"name": "new", "macs": ["02:00:0a:4d:00:01"]}]})
    document = provd.good("GET", "/sms/v1/export")
    assert [each["name"] for each in document["nodes"]] == ["new"]
    assert document["boot"] == document["groups"] == []


def test_a_changed_network_does_not_block_other_changes(tmp_path: Path) -> None:
    """Existing nodes keep addresses of the old network until they are changed; others can be changed."""
    with running(make_config(tmp_path)) as provd:
        provd.good("PUT", "/sms/v1/nodes/n1", {"address": "10.77.0.151"})
    with running(make_config(tmp_path, address="10.99.0.2", gateway="", services={}, pool=None)) as provd:
        provd.good("PUT", "/sms/v1/nodes/n2", {"address": "10.99.0.151"})
        assert provd.ask("PATCH", "/sms/v1/nodes/n1", {"profile": "x"}).status == 400
        provd.good("PATCH", "/sms/v1/nodes/n1", {"profile": "x", "address": None})


def test_the_inventory_survives_a_restart(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with running(config) as provd:
        provd.good("PUT", "/sms/v1/nodes/n1", {"address": "10.77.0.151", "details": {"firmware": "1.2"}})
        before = provd.good("GET", "/sms/v1/export")
    with running(config) as provd:
        assert provd.good("GET", "/sms/v1/export") == before


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no body"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"nid": NaN}', "not JSON"),
        (b'{"details": {"a": 1e999}}', "too large"),
        (b'{"bmc": "\\ud800"}', "cannot be stored"),
        (b'{"bmc": "\\u0000"}', "cannot be stored"),
        (b"[" * 100000, "not JSON"),
        (b'"text"', "is not of type 'object'"),
    ],
)
def test_invalid_bodies(data: bytes, words: str, provd: Provd) -> None:
    answer = provd.ask("PUT", "/sms/v1/nodes/n1", data)
    assert answer.status == 400 and words in answer.detail, answer.data


def test_the_size_of_a_body_is_limited(provd: Provd) -> None:
    answer = provd.ask("PUT", "/sms/v1/nodes/n1", json.dumps({"bmc": "x" * (1 << 20)}).encode())
    assert answer.status == 413


@pytest.mark.parametrize(
    ("text", "mac"),
    [
        ("02:00:0A:4D:00:97", "02:00:0a:4d:00:97"),
        ("02-00-0a-4d-00-97", "02:00:0a:4d:00:97"),
        ("0200.0a4d.0097", "02:00:0a:4d:00:97"),
        ("02000a4d0097", "02:00:0a:4d:00:97"),
        ("00:00:00:00:00:00", ""),
        ("ff:ff:ff:ff:ff:ff", ""),
        ("33:33:00:00:00:01", ""),
        ("02:00:0a:4d:00:9g", ""),
        ("", ""),
    ],
)
def test_mac_addresses(text: str, mac: str) -> None:
    assert names.clean_mac(text) == mac


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("x1000c7s7b1n1", "Node"),
        ("x0c0s14b0", "NodeBMC"),
        ("x1000c7", "Chassis"),
        ("x1000c7b0", "ChassisBMC"),
        ("x1000c7r3b0", "RouterBMC"),
        ("x3000m0", "CabinetPDUController"),
        ("x3000c0w14", "MgmtSwitch"),
        ("s0", "System"),
        ("x1000c7s7b1n", ""),
        ("node1", ""),
        ("x1000c7s7b1n1\n", ""),
    ],
)
def test_xnames(text: str, kind: str) -> None:
    assert names.type_of(text) == kind


def test_xnames_are_normalized() -> None:
    assert names.clean_xname("X0C0S014B00N0") == "x0c0s14b0n0"
    assert names.bmc_of("x0c0s14b0n0") == "x0c0s14b0"
