"""SMD's interface: requests of OpenCHAMI's and CSM's documentation and clients, to the real service."""

from __future__ import annotations

from typing import Any

import pytest

from tests.provd import Provd

STATE = "/hsm/v2/State/Components"
ENDPOINTS = "/hsm/v2/Inventory/RedfishEndpoints"
INTERFACES = "/hsm/v2/Inventory/EthernetInterfaces"


def discovered(provd: Provd) -> None:
    """Send what ``ochami discover static`` sends for its manual's example: one BMC, one node, three interfaces."""
    component = {"ID": "x1000c1s0b0n0", "Type": "Node", "State": "On", "Enabled": True, "NID": 1}
    assert provd.ask("POST", STATE, {"Components": [component]}).status == 204
    manager = {
        "uri": "https://demo.openchami.cluster:8443/redfish/v1/Managers/x1000c1s0b0",
        "uuid": "c17b1e5c-2b4e-4d4b-8b3f-ac7a2c4a1f11",
        "name": "x1000c1s0b0",
        "ethernet_interfaces": [
            {
                "uri": "",
                "mac": "de:ca:fc:0f:ee:ee",
                "ip": "172.16.0.101",
                "name": "x1000c1s0b0",
                "description": "Interface for BMC x1000c1s0b0",
                "enabled": False,
            }
        ],
        "actions": None,
        "description": "",
        "type": "NodeBMC",
    }
    system = {
        "uri": "https://demo.openchami.cluster:8443/redfish/v1/Systems/x1000c1s0b0n0",
        "uuid": "a9a4e5dd-4b0d-4d5b-9a5c-02bb0a9b6f0e",
        "name": "node01",
        "ethernet_interfaces": [
            {"mac": "de:ad:be:ee:ee:f1", "ip": "10.77.0.11", "description": "Interface 0 for node01"},
            {"mac": "de:ad:be:ee:ee:f2", "ip": "10.15.3.100", "description": "Interface 1 for node01"},
            {"mac": "02:00:00:91:31:b3", "ip": "192.168.0.1", "description": "Interface 2 for node01"},
            {"mac": "", "ip": "", "description": "a port without an address"},
        ],
        "actions": ["On", "ForceOff", "GracefulShutdown"],
    }
    endpoint = {
        "ID": "x1000c1s0b0",
        "Type": "NodeBMC",
        "Name": "bmc01",
        "FQDN": "x1000c1s0b0.openchami.cluster",
        "MACAddr": "de:ca:fc:0f:ee:ee",
        "IPAddress": "172.16.0.101",
        "User": "root",
        "Password": "calvin",
        "SchemaVersion": 1,
        "Systems": [system],
        "Managers": [manager],
    }
    answer = provd.ask("POST", ENDPOINTS, endpoint)
    assert (answer.status, answer.json) == (201, [{"URI": f"{ENDPOINTS}/x1000c1s0b0"}])
    group = {"label": "compute", "description": "The compute group", "members": {"ids": ["x1000c1s0b0n0"]}}
    assert provd.ask("POST", "/hsm/v2/groups", group).json == [{"URI": "/hsm/v2/groups/compute"}]


def test_what_ochami_discovers_becomes_a_node(provd: Provd) -> None:
    discovered(provd)
    node = provd.good("GET", "/sms/v1/nodes/x1000c1s0b0n0")
    assert node["address"] == "10.77.0.11" and node["nid"] == 1 and node["groups"] == ["compute"]
    assert node["macs"] == ["de:ad:be:ee:ee:f1", "de:ad:be:ee:ee:f2", "02:00:00:91:31:b3"]
    assert node["bmc"] == "172.16.0.101" and node["state"] == "On"
    assert node["interfaces"][1]["addresses"] == [{"address": "10.15.3.100", "network": ""}]
    bmc = provd.good("GET", f"{STATE}/x1000c1s0b0")
    assert (bmc["Type"], bmc["State"], bmc["Enabled"]) == ("NodeBMC", "On", True)
    (interface,) = provd.good("GET", f"{INTERFACES}?ComponentID=x1000c1s0b0")
    assert interface["IPAddresses"] == [{"IPAddress": "172.16.0.101", "Network": ""}]
    assert b"calvin" not in provd.ask("GET", "/sms/v1/export").data


def test_ochami_overwrite_changes_in_place(provd: Provd) -> None:
    discovered(provd)
    system = {"uuid": "a9", "ethernet_interfaces": [{"mac": "de:ad:be:ee:ee:f1", "ip": "10.77.0.12"}]}
    body = {"ID": "x1000c1s0b0", "FQDN": "x1000c1s0b0.other.cluster", "SchemaVersion": 1, "Systems": [system]}
    answer = provd.ask("PUT", f"{ENDPOINTS}/x1000c1s0b0", body)
    assert answer.status == 200 and answer.json["Domain"] == "other.cluster"
    assert provd.good("GET", "/sms/v1/nodes/x1000c1s0b0n0")["address"] == "10.77.0.12"
    assert provd.ask("POST", ENDPOINTS, body).status == 409


COMPONENT = {
    "ID": "x0c0s0b0n0",
    "Type": "Node",
    "State": "Ready",
    "Flag": "OK",
    "Enabled": True,
    "SoftwareStatus": "string",
    "Role": "Compute",
    "SubRole": "Worker",
    "NID": 1,
    "Subtype": "string",
    "NetType": "Sling",
    "Arch": "X86",
    "Class": "River",
    "ReservationDisabled": False,
    "Locked": False,
}
"""The example of ochami's manual."""


def test_a_component_as_the_manual_has_it(provd: Provd) -> None:
    assert provd.ask("POST", STATE, {"Components": [COMPONENT]}).status == 204
    left_out = ("Subtype", "ReservationDisabled", "Locked")
    shown = {key: value for key, value in COMPONENT.items() if key not in left_out}
    assert provd.good("GET", f"{STATE}/x0c0s0b0n0") == shown
    assert provd.good("GET", f"{STATE}/ByNID/1") == shown
    assert provd.good("GET", STATE) == {"Components": [shown]}
    assert provd.good("GET", f"{STATE}?stateonly=true") == {
        "Components": [{"ID": "x0c0s0b0n0", "Type": "Node", "State": "Ready", "Flag": "OK"}]
    }
    # Existing components are unchanged; Force changes their state only.
    again = {**COMPONENT, "State": "Off", "Role": "Service"}
    assert provd.ask("POST", STATE, {"Components": [again]}).status == 204
    assert provd.good("GET", f"{STATE}/x0c0s0b0n0")["State"] == "Ready"
    assert provd.ask("PUT", f"{STATE}/x0c0s0b0n0", {"Component": again, "Force": True}).status == 204
    assert provd.good("GET", f"{STATE}/x0c0s0b0n0") == {**shown, "State": "Off"}
    assert provd.good("DELETE", f"{STATE}/x0c0s0b0n0") == {"code": 0, "message": "deleted 1 entry"}
    assert provd.ask("GET", f"{STATE}/x0c0s0b0n0").status == 404
    assert provd.ask("DELETE", STATE).status == 404


PATCHES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "state": ("StateData", {"State": "Standby", "Flag": "Alert"}, {"State": "Standby", "Flag": "Alert"}),
    "state alone": ("StateData", {"State": "off"}, {"State": "Off", "Flag": "OK"}),
    "flag": ("FlagOnly", {"Flag": "Warning"}, {"Flag": "Warning"}),
    "enabled": ("Enabled", {"Enabled": False}, {"Enabled": False}),
    "software": ("SoftwareStatus", {"SoftwareStatus": "AdminDown"}, {"SoftwareStatus": "AdminDown"}),
    "role": ("Role", {"Role": "Application", "SubRole": "UAN"}, {"Role": "Application", "SubRole": "UAN"}),
    "NID": ("NID", {"NID": 42}, {"NID": 42}),
    "NID as text": ("NID", {"NID": "42"}, {"NID": 42}),
}


@pytest.mark.parametrize("case", PATCHES)
def test_patches_of_one_and_of_several(case: str, provd: Provd) -> None:
    what, body, expected = PATCHES[case]
    provd.good("POST", STATE, {"Components": [COMPONENT, {**COMPONENT, "ID": "x0c0s0b0n1", "NID": 2}]})
    assert provd.ask("PATCH", f"{STATE}/x0c0s0b0n0/{what}", body).status == 204
    assert expected.items() <= provd.good("GET", f"{STATE}/x0c0s0b0n0").items()
    bulk = {"ComponentIDs": ["x0c0s0b0n1"], **body}
    if what == "NID":
        bulk = {"Components": [{"ID": "x0c0s0b0n0", "NID": 7}, {"ID": "x0c0s0b0n1", "NID": 42}]}
    assert provd.ask("PATCH", f"{STATE}/Bulk{what}", bulk).status == 204
    assert expected.items() <= provd.good("GET", f"{STATE}/x0c0s0b0n1").items()
    assert provd.ask("PATCH", f"{STATE}/x9c0s0b0n0/{what}", body).status == 404
    if what in ("StateData", "FlagOnly"):
        wrong = dict.fromkeys(body, "Confused")
        assert provd.ask("PATCH", f"{STATE}/x0c0s0b0n0/{what}", wrong).status == 400


FILTERS = {
    "type=Node": ["x0c0s0b0n0", "x0c0s0b0n1", "x0c0s1b0n0"],
    "type=nodebmc": ["x0c0s0b0"],
    "type=Node&nid_start=2&nid_end=850": ["x0c0s0b0n1"],
    "id=x0c0s0b0n0&id=X0c0s0b00n1": ["x0c0s0b0n0", "x0c0s0b0n1"],
    "state=Off": ["x0c0s0b0n1"],
    "state=!Off&type=Node": ["x0c0s0b0n0", "x0c0s1b0n0"],
    "role=Service": ["x0c0s1b0n0"],
    "enabled=false": ["x0c0s1b0n0"],
    "group=blue": ["x0c0s0b0n0"],
    "group=NULL&type=Node": ["x0c0s0b0n1", "x0c0s1b0n0"],
    "nid=1": ["x0c0s0b0n0"],
    "arch=ARM": [],
}


def test_filters(provd: Provd) -> None:
    nodes = [
        {"ID": "x0c0s0b0n0", "State": "On", "NID": 1},
        {"ID": "x0c0s0b0n1", "State": "Off", "NID": 2},
        {"ID": "x0c0s1b0n0", "State": "On", "Role": "Service", "Enabled": False},
        {"ID": "x0c0s0b0", "State": "On"},
    ]
    provd.good("POST", STATE, {"Components": nodes})
    provd.good("POST", "/hsm/v2/groups", {"label": "blue", "members": {"ids": ["x0c0s0b0n0"]}})
    for query, expected in FILTERS.items():
        assert [each["ID"] for each in provd.good("GET", f"{STATE}?{query}")["Components"]] == expected, query
    assert provd.ask("GET", f"{STATE}?nid_start=x").status == 400


ADDED = {
    "FQDN holds the xname": {"FQDN": "x0c0s14b0.mgmt.domain.name.com", "RediscoverOnUpdate": True},
    "ID beside the FQDN": {"ID": "x0c0s14b0", "FQDN": "somebmcname.mgmt.domain.name.com"},
    "FQDN is an address": {"ID": "x0c0s14b0", "FQDN": "10.100.164.207", "RediscoverOnUpdate": True},
    "a named array": {"RedfishEndpoints": [{"ID": "x0c0s14b0", "Hostname": "x0c0s14b0", "Domain": "example.org"}]},
}
"""The four cases of SMD's documentation."""


@pytest.mark.parametrize("case", ADDED)
def test_endpoints_as_smds_examples_add_them(case: str, provd: Provd) -> None:
    assert provd.ask("POST", ENDPOINTS, ADDED[case]).json == [{"URI": f"{ENDPOINTS}/x0c0s14b0"}]
    shown = provd.good("GET", f"{ENDPOINTS}/x0c0s14b0")
    assert (shown["ID"], shown["Type"], shown["Enabled"]) == ("x0c0s14b0", "NodeBMC", True)
    assert provd.good("GET", f"{ENDPOINTS}?id=x0c0s14b0&type=NodeBMC") == {"RedfishEndpoints": [shown]}
    assert provd.ask("POST", ENDPOINTS, ADDED[case]).status == 409
    patched = provd.good("PATCH", f"{ENDPOINTS}/x0c0s14b0", {"Enabled": False})
    assert patched == {**shown, "Enabled": False}
    assert provd.good("DELETE", ENDPOINTS)["message"] == "deleted 1 entries"
    assert provd.ask("GET", f"{ENDPOINTS}/x0c0s14b0").status == 404
    assert provd.ask("DELETE", f"{ENDPOINTS}/x0c0s14b0").status == 404


@pytest.mark.parametrize(
    "body", [{"ID": "x0c0s14b0n0"}, {"FQDN": "bmc.example.org"}, {"ID": "x0c0s0b0", "MACAddr": "z"}]
)
def test_invalid_endpoints(body: dict[str, str], provd: Provd) -> None:
    assert provd.ask("POST", ENDPOINTS, body).status == 400


def test_credentials_of_endpoints_are_not_kept(provd: Provd) -> None:
    provd.good("POST", ENDPOINTS, {"ID": "x0c0s16b0", "FQDN": "x0c0s16b0", "User": "root", "Password": "geheimnis"})
    provd.good("PATCH", f"{ENDPOINTS}/x0c0s16b0", {"Password": "geheimnis"})
    assert b"geheimnis" not in provd.ask("GET", ENDPOINTS).data
    assert not any(b"geheimnis" in path.read_bytes() for path in provd.folder.glob("inventory.db*"))


def test_interfaces_as_smds_document_has_them(provd: Provd) -> None:
    provd.good("POST", STATE, {"Components": [{"ID": "x0c0s1b0n0", "State": "On"}]})
    body = {
        "Description": "string",
        "MACAddress": "a4:bf:00:2b:73:10",
        "IPAddresses": [{"IPAddress": "10.252.0.1", "Network": "HMN"}],
        "ComponentID": "x0c0s1b0n0",
    }
    answer = provd.ask("POST", INTERFACES, body)
    assert (answer.status, answer.json) == (201, {"URI": f"{INTERFACES}/a4bf002b7310"})
    shown = provd.good("GET", f"{INTERFACES}/a4bf002b7310")
    assert shown.pop("LastUpdate").endswith("Z")
    assert shown == {"ID": "a4bf002b7310", "Type": "Node", **body}
    assert len(provd.good("GET", f"{INTERFACES}?IPAddress=10.252.0.1&Network=HMN&Type=Node")) == 1
    assert provd.good("GET", f"{INTERFACES}?NewerThan=2100-01-01T00:00:00Z") == []
    assert len(provd.good("GET", f"{INTERFACES}?OlderThan=2100-01-01T00:00:00Z&MACAddress=a4bf002b7310")) == 1
    assert provd.ask("GET", f"{INTERFACES}?NewerThan=yesterday").status == 400
    assert "x0c0s1b0n0 has it" in provd.ask("POST", INTERFACES, body).detail
    other = {"MACAddress": "a4:bf:00:2b:73:11", "IPAddresses": [{"IPAddress": "10.252.0.1"}]}
    assert provd.ask("POST", INTERFACES, other).status == 409


def test_addresses_of_an_interface(provd: Provd) -> None:
    provd.good("POST", STATE, {"Components": [{"ID": "x0c0s1b0n0"}, {"ID": "x0c0s1b0n1"}]})
    provd.good("POST", INTERFACES, {"MACAddress": "a4bf002b7310", "ComponentID": "x0c0s1b0n0"})
    one = f"{INTERFACES}/a4bf002b7310"
    answer = provd.ask("POST", f"{one}/IPAddresses", {"IPAddress": "10.77.0.21", "Network": "NMN"})
    assert (answer.status, answer.json["URI"]) == (201, f"{one}/IPAddresses/10.77.0.21")
    # The node boots with the first address in the provisioning network.
    assert provd.good("GET", "/sms/v1/nodes/x0c0s1b0n0")["address"] == "10.77.0.21"
    provd.good("POST", f"{one}/IPAddresses", {"IPAddress": "10.1.0.21", "Network": "HSN"})
    assert provd.ask("POST", f"{one}/IPAddresses", {"IPAddress": "10.1.0.21"}).status == 409
    provd.good("PATCH", f"{one}/IPAddresses/10.1.0.21", {"Network": "CAN"})
    assert provd.good("GET", f"{one}/IPAddresses") == [
        {"IPAddress": "10.77.0.21", "Network": ""},
        {"IPAddress": "10.1.0.21", "Network": "CAN"},
    ]
    assert provd.ask("POST", f"{one}/IPAddresses", {"IPAddress": "10.77.0.2"}).status == 409
    # An address of the pool is stored, but never used for booting.
    provd.good("POST", f"{one}/IPAddresses", {"IPAddress": "10.77.0.222"})
    # A moved interface keeps its addresses.
    provd.good("PATCH", one, {"ComponentID": "x0c0s1b0n1"})
    assert provd.good("GET", "/sms/v1/nodes/x0c0s1b0n0")["address"] is None
    assert provd.good("GET", "/sms/v1/nodes/x0c0s1b0n1")["address"] == "10.77.0.21"
    provd.good("DELETE", f"{one}/IPAddresses/10.77.0.21")
    assert provd.good("GET", "/sms/v1/nodes/x0c0s1b0n1")["address"] is None
    assert provd.ask("DELETE", f"{one}/IPAddresses/10.77.0.21").status == 404
    provd.good("DELETE", INTERFACES)
    assert provd.ask("DELETE", one).status == 404


def test_groups_as_smds_document_has_them(provd: Provd) -> None:
    ids = ["x1c0s1b0n0", "x1c0s1b0n1", "x1c0s2b0n0", "x1c0s2b0n1"]
    provd.good("POST", STATE, {"Components": [{"ID": each} for each in ids]})
    group = {
        "label": "blue",
        "description": "This is the blue group",
        "tags": ["optional_tag1", "optional_tag2"],
        "exclusiveGroup": "optional_excl_group",
        "members": {"ids": ids},
    }
    assert provd.ask("POST", "/hsm/v2/groups", group).json == [{"URI": "/hsm/v2/groups/blue"}]
    assert provd.good("GET", "/hsm/v2/groups/blue") == group
    assert provd.good("GET", "/hsm/v2/groups?tag=optional_tag1") == [group]
    assert provd.ask("POST", "/hsm/v2/groups", group).status == 409
    red = {"label": "red", "exclusiveGroup": "optional_excl_group", "members": {"ids": [ids[0]]}}
    answer = provd.ask("POST", "/hsm/v2/groups", red)
    assert answer.status == 409 and "is in blue, which excludes it" in answer.detail
    provd.good("PATCH", "/hsm/v2/groups/blue", {"description": "new", "tags": ["new_tag", "existing_tag"]})
    assert provd.good("GET", "/hsm/v2/groups/labels") == ["blue"]
    members = "/hsm/v2/groups/blue/members"
    assert provd.good("DELETE", f"{members}/{ids[3]}")["code"] == 0
    assert provd.ask("DELETE", f"{members}/{ids[3]}").status == 404
    assert provd.ask("POST", members, {"id": ids[3]}).json == [{"URI": f"{members}/{ids[3]}"}]
    assert provd.ask("POST", members, {"id": ids[3]}).status == 409
    assert provd.ask("PUT", members, {"label": "blue", "ids": ids[:2]}).status == 201
    assert provd.good("GET", members) == {"ids": ids[:2]}
    assert provd.good("GET", f"/hsm/v2/memberships/{ids[0]}")["groupLabels"] == ["blue"]
    assert len(provd.good("GET", "/hsm/v2/memberships?group=blue")) == 2
    answer = provd.ask("POST", members, {"id": "x9c0s0b0n0"})
    assert answer.status == 400 and "there is no x9c0s0b0n0" in answer.detail
    provd.good("DELETE", "/hsm/v2/groups/blue")
    assert provd.ask("GET", "/hsm/v2/groups/blue").status == 404


def test_both_interfaces_show_one_inventory(provd: Provd) -> None:
    provd.good("PUT", "/sms/v1/nodes/node1", {"macs": ["02:00:0a:4d:00:97"], "address": "10.77.0.151", "nid": 5})
    assert provd.good("GET", f"{STATE}/node1")["NID"] == 5
    (interface,) = provd.good("GET", f"{INTERFACES}?ComponentID=node1")
    assert interface["IPAddresses"][0]["IPAddress"] == "10.77.0.151"
    provd.good("PATCH", f"{STATE}/node1/StateData", {"State": "Ready"})
    assert provd.good("GET", "/sms/v1/nodes/node1")["state"] == "Ready"
    assert provd.good("GET", "/hsm/v2/service/ready")["code"] == 0
    assert provd.ask("GET", "/hsm/v2/service/liveness").status == 204
