"""``sms node``: the inventory by hand, by export and import, and from a state manager."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import pytest
import yaml

from tests.bmcs import answer
from tests.unit.nodes.conftest import BMCS, HOST, NET, VM, Cluster, mac

pytestmark = pytest.mark.slow


def test_add_edit_remove(cluster: Cluster) -> None:
    cluster.sms("add", "node009", "--mac", "020-00-0a-4d", "--address", "10.99.0.1", "--xname", "here", status=2)
    for words in ("is not a MAC address", "is not in the provisioning network", "is not the xname"):
        assert words in cluster.stderr, "every problem at once"
    cluster.sms("add", "node009", status=2)
    assert "has no MAC address" in cluster.stderr
    options = ("--mac", "02-00-0A-4D-00-09", "--xname", "x1000c0s0b0n0", "--group", "a,b")
    assert cluster.sms("add", "node009", *options) == f"added node009: {mac(9)}\n"
    cluster.sms("add", "node009", "--mac", mac(8), status=3)
    cluster.sms("add", "node010", "--mac", mac(9), "--profile", "none", status=2)
    assert f"{mac(9)} is a MAC address of node009" in cluster.stderr and "no profile 'none'" in cluster.stderr
    cluster.sms("add", "node010", "--mac", mac(8), "--address", VM, status=2)
    assert "the provisioning VM" in cluster.stderr
    cluster.sms("add", "node010", "--mac", mac(8), "--address", HOST, status=2)
    assert f"{HOST} is the address of the admin host host-a" in cluster.stderr
    cluster.sms("edit", "node009", "--mac", "", status=2)
    cluster.sms("edit", "node009", f"--mac=-{mac(9)}", status=2)
    assert "needs a MAC address" in cluster.stderr
    output = cluster.sms("edit", "x1000c0s0b0n0", "--group", "+gpu", "--group=-a", "--mac", f"+{mac(10)}")
    assert "groups: a, b -> b, gpu" in output
    node = cluster.nodes()["node009"]
    assert node["macs"] == [mac(9), mac(10)] and node["groups"] == ["b", "gpu"]
    cluster.sms("edit", "node009", status=2)
    assert "nothing to change" in cluster.stderr
    cluster.sms("edit", "node009", "--group", "+c,d", status=2)
    assert "node009 is unchanged" in cluster.sms("edit", "node009", "--group", "+gpu")
    assert "address: - ->" in cluster.sms("edit", "node009", "--address", f"{NET}.9", "-n")
    assert cluster.nodes()["node009"]["address"] is None
    cluster.sms("edit", "node009", "--address", f"{NET}.9", "--xname=", "--profile", "gpu")
    cluster.sms("edit", "node009", "--profile=")
    node = cluster.nodes()["node009"]
    assert (node["address"], node["xname"], node["profile"]) == (f"{NET}.9", None, "")
    assert "macs" in cluster.sms("show", "node009")
    cluster.sms("show", "node000", status=3)
    assert "would remove 1: node009" in cluster.sms("remove", "@gpu", "-n")
    cluster.sms("remove", "node009", status=3)
    cluster.sms("remove", "node009", "--yes")
    assert cluster.nodes() == {} and "no nodes" in cluster.sms("list")


def test_unknown_machines_are_listed(cluster: Cluster) -> None:
    assert "no unknown machine" in cluster.sms("list", "--unknown")
    link = HTTPConnection("127.0.0.1", cluster.vm.backend)
    link.request("GET", f"/boot/v1/bootscript?mac={mac(99)}", headers={"X-Real-IP": f"{NET}.99"})
    link.getresponse().read()
    link.close()
    assert f"{mac(99)}  {NET}.99" in cluster.sms("list", "--unknown")
    assert json.loads(cluster.sms("list", "--unknown", "--json"))[0]["mac"] == mac(99)


def test_export_and_import(cluster: Cluster) -> None:
    for number in range(3):
        cluster.sms("add", f"n{number}", "--mac", mac(number), "--address", f"{NET}.{20 + number}", "--group", "g")
    file = cluster.folder / "nodes.yaml"
    cluster.sms("export", "-o", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = cluster.sms("export")
    assert before == file.read_text()
    assert "nodes: 3 same" in cluster.sms("import", str(file), "-n")
    cluster.sms("remove", "n2", "--yes")
    assert "nodes: 1 new, 2 same" in cluster.sms("import", str(file))
    assert cluster.sms("export") == before
    file.write_text(yaml.safe_dump({"nodes": [{"name": "n1", "role": "Compute"}]}))
    assert "nodes: 1 same" in cluster.sms("import", str(file))
    assert cluster.sms("export") == before
    assert "nodes: 1 changed" in cluster.sms("import", str(file), "--replace", "-n")
    file.write_text(before)
    cluster.sms("add", "other", "--mac", mac(50))
    assert "would remove: nodes: other" in cluster.sms("import", str(file), "--replace", "-n")
    cluster.sms("import", str(file), "--replace", status=3)
    cluster.sms("import", str(file), "--replace", "--yes")
    assert cluster.sms("export") == before
    document = yaml.safe_load(before)
    document["nodes"][1]["macs"] = list(document["nodes"][0]["macs"])
    document["nodes"][1].pop("interfaces", None)
    file.write_text(yaml.safe_dump(document))
    cluster.sms("import", str(file), status=3)
    assert "has it" in cluster.stderr or "twice" in cluster.stderr
    assert cluster.sms("export") == before, "all of it, or nothing"
    for text in ("a: &a [1]\nnodes: *a\n", "nodes: [\n", "hello", "nodes: 5\n", "other: []\n"):
        file.write_text(text)
        cluster.sms("import", str(file), status=2)
        assert str(file) in cluster.stderr
    cluster.sms("import", str(cluster.folder / "none.yaml"), status=2)
    file.write_text(yaml.safe_dump({"nodes": [{"name": "n7", "mac": mac(7)}]}))
    cluster.sms("import", str(file), "-n", status=2)
    assert "n7: a node has no 'mac'; did you mean macs?" in cluster.stderr
    cluster.sms("edit", "n1", "--xname", "x1000c0s0b0n0")
    file.write_text(yaml.safe_dump({"nodes": [{"name": "x1000c0s0b0n0"}]}))
    lines = cluster.sms("import", str(file)).splitlines()
    assert "nodes: 1 changed" in lines and "note: n1 is renamed x1000c0s0b0n0" in lines
    names = [node["name"] for node in json.loads(cluster.sms("list", "--json"))]
    assert "x1000c0s0b0n0" in names and "n1" not in names


SMD: dict[str, Any] = {
    "/hsm/v2/State/Components": {
        "Components": [
            {"ID": "x1000c0s0b0n0", "Type": "Node", "State": "Ready", "NID": 7, "Role": "Compute", "Enabled": True},
            {"ID": "x1000c0s0b0", "Type": "NodeBMC", "State": "Ready"},
            {"ID": "odd", "Type": "Node"},
        ]
    },
    "/hsm/v2/Inventory/EthernetInterfaces": [
        {
            "MACAddress": "02000a4d0007",
            "ComponentID": "x1000c0s0b0n0",
            "IPAddresses": [{"IPAddress": "198.51.100.7", "Network": "NMN"}],
        }
    ],
    "/hsm/v2/Inventory/RedfishEndpoints": {
        "RedfishEndpoints": [{"ID": "x1000c0s0b0", "FQDN": "x1000c0s0b0", "User": "root", "Password": "hidden"}]
    },
    "/hsm/v2/groups": [{"label": "blue", "members": {"ids": ["x1000c0s0b0n0", "x9"]}}],
}


@contextmanager
def state_manager(cluster: Cluster, token: str) -> Iterator[str]:
    """Run a State Manager that requires a token."""

    def speak(request: Any, link: Any) -> bytes:
        if request.headers.get("authorization") != f"Bearer {token}":
            return answer(401, {})
        found = SMD.get(request.path.removeprefix("/apis/smd"))
        return answer(404, {}) if found is None else answer(200, found)

    cluster.start(BMCS[8], speak)
    yield f"https://{BMCS[8]}:{cluster.port}/apis/smd"


def test_import_from_a_state_manager(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ca = ("--ca", str(cluster.vm.tls / "ca.pem"))
    with state_manager(cluster, "let-me-in") as url:
        cluster.sms("import", "--from-smd", url, *ca, status=3)
        assert "SMS_SMD_TOKEN" in cluster.stderr
        token = cluster.folder / "token"
        token.write_text("let-me-in\n")
        token.chmod(0o644)
        cluster.sms("import", "--from-smd", url, *ca, "--token-file", str(token), status=2)
        assert f"chmod 600 {token}" in cluster.stderr
        monkeypatch.setenv("SMS_SMD_TOKEN", "let-me-in")
        output = cluster.sms("import", "--from-smd", url, *ca)
        # Later changes by hand survive a second import.
        edits = ("--profile", "gpu", "--group", "+mine", "--address", f"{NET}.30")
        cluster.sms("edit", "nid000007", *edits)
        mine = cluster.nodes()["nid000007"]
        assert (mine["profile"], sorted(mine["groups"])) == ("gpu", ["blue", "mine"])
        assert "nodes: 1 same" in cluster.sms("import", "--from-smd", url, *ca, "-n")
        cluster.sms("import", "--from-smd", url, *ca)
        assert cluster.nodes()["nid000007"] == mine
        cluster.sms("edit", "nid000007", "--group=-mine", "--profile=")
        cluster.sms("import", "--from-smd", url.replace("https", "http"), *ca, status=2)
        assert "would be sent unencrypted" in cluster.stderr
    assert "nodes: 1 new" in output and "'odd': is not a known xname" in output and "'x9' is not a component" in output
    node = cluster.nodes()["nid000007"]
    assert node["xname"] == "x1000c0s0b0n0" and node["macs"] == ["02:00:0a:4d:00:07"] and node["groups"] == ["blue"]
    assert node["bmc"] == "https://x1000c0s0b0"
    assert "hidden" not in cluster.sms("export")
