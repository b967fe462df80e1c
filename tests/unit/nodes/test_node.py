"""``sms node`` against the real service behind TLS, with real servers as controllers."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from appliance.cli import main
from appliance.errors import Refused
from appliance.operations.context import open_cluster
from appliance.operations.nodes.bmc import Login
from appliance.operations.nodes.power import Boot
from appliance.operations.nodes.power import boot as boot_nodes
from appliance.progress import Silent
from tests import places
from tests.bmcs import PASSWORD, Machine, answer, hangs, says, serve, tree
from tests.provd import SERVICES
from tests.redfish import emulator
from tests.servers import server_context
from tests.unit.nodes.conftest import BMCS, NET, SILENT, SYSTEM, VM, Cluster, Impatient, Terminal, mac

pytestmark = pytest.mark.slow


def test_discovery_fills_the_inventory(cluster: Cluster) -> None:
    for number in range(3):
        cluster.bmc(number, power="Off")
    table = cluster.sms("discover", "--port", str(cluster.port), f"{NET}.[100-109]", "--group", "compute")
    assert "10 addresses: 3 controllers, 0 broken, 7 without an answer; 3 new" in table
    nodes = cluster.nodes()
    assert list(nodes) == ["node001", "node002", "node003"]
    first = nodes["node001"]
    assert first["macs"] == [mac(0)] and first["address"] == f"{NET}.11" and first["groups"] == ["compute"]
    assert first["bmc"] == f"https://{BMCS[0]}:{cluster.port}{SYSTEM}"
    assert first["details"]["serial"] == "S1" and first["details"]["memory_gib"] == 64
    again = cluster.discover(f"{NET}.[100-109]")
    assert [one["what"] for one in again["nodes"]] == ["same"] * 3
    cluster.bmc(3)
    grown = cluster.discover(f"{NET}.100-{NET}.109")
    assert [one["what"] for one in grown["nodes"]] == ["same"] * 3 + ["new"]
    assert cluster.nodes()["node004"]["address"] == f"{NET}.14"
    assert all(machine.power() != "" for machine in cluster.machines.values())


def test_settings_of_an_admin_are_kept(cluster: Cluster) -> None:
    cluster.sms("add", "login1", "--mac", mac(0), "--address", f"{NET}.50", "--profile", "gpu")
    cluster.bmc(0)
    (one,) = cluster.discover(BMCS[0])["nodes"]
    assert (one["what"], one["name"]) == ("changed", "login1"), "empty fields are filled"
    node = cluster.nodes()["login1"]
    assert node["bmc"].startswith("https://") and node["profile"] == "gpu" and node["address"] == f"{NET}.50"
    cluster.machines[BMCS[0]].tree[f"{SYSTEM}/EthernetInterfaces/0"]["MACAddress"] = mac(77)
    cluster.machines[BMCS[0]].tree[SYSTEM]["BiosVersion"] = "2.0"
    (one,) = cluster.discover(BMCS[0])["nodes"]
    assert one["what"] == "differs" and one["differences"] == [f"macs: {mac(0)} was not found, {mac(77)} is new"]
    assert cluster.nodes()["login1"]["macs"] == [mac(0)]
    assert cluster.nodes()["login1"]["details"]["bios"] == "2.0", "facts are discovery's own"
    (one,) = cluster.discover(BMCS[0], "--update", "--dry-run")["nodes"]
    assert cluster.nodes()["login1"]["macs"] == [mac(0)]
    cluster.discover(BMCS[0], "--update")
    assert cluster.nodes()["login1"]["macs"] == [mac(77)]


def test_conflicts_change_nothing(cluster: Cluster) -> None:
    cluster.sms("add", "a", "--mac", mac(0), "--bmc", f"https://{BMCS[5]}:{cluster.port}{SYSTEM}")
    cluster.sms("add", "b", "--mac", mac(5))
    cluster.bmc(5)
    (one,) = cluster.discover(BMCS[5], status=4)["nodes"]
    assert one["what"] == "conflict" and f"{mac(5)} is a MAC address of b" in one["differences"]
    twin = Machine(tree({"1": [mac(5)]}))
    twin.tree[SYSTEM]["UUID"] = "another"
    cluster.start(BMCS[6], twin)
    found = cluster.discover(f"{NET}.105-106", status=4)["nodes"]
    assert [one["what"] for one in found] == ["conflict", "conflict"]
    assert sorted(cluster.nodes()) == ["a", "b"]


def test_broken_controllers_do_not_affect_others(cluster: Cluster) -> None:
    seen: list[Any] = []

    def elsewhere(request: Any, link: Any) -> bytes:
        return answer(302, b"", f"Location: https://{BMCS[9]}:{cluster.port}/\r\n")

    def witness(request: Any, link: Any) -> bytes:
        seen.append(request)
        return answer(401, {})

    cluster.bmc(0)
    cluster.bmc(1, hangs)
    cluster.bmc(2, lambda *_: answer(401, {}))
    cluster.bmc(3, says(b"SSH-2.0-OpenSSH_9.2\r\n"))
    cluster.bmc(4, elsewhere)
    cluster.bmc(5, SILENT)  # type: ignore[arg-type]
    machine = cluster.bmc(6)
    assert machine
    del machine.tree[f"{SYSTEM}/EthernetInterfaces/0"]
    context = server_context(cluster.vm.tls, cluster.folder, [BMCS[0]])  # of another address
    cluster.stack.enter_context(serve(BMCS[7], cluster.port, context, Machine(tree({"1": [mac(7)]}))))
    found = cluster.discover(f"{NET}.100-108", "--timeout", "3s", status=4)
    why = {one["target"]: one["why"] for one in found["broken"]}
    assert why == {
        BMCS[1]: "hangs",
        BMCS[2]: "wrong credentials",
        BMCS[3]: "no Redfish",
        BMCS[4]: "no Redfish",
        BMCS[5]: "hangs",
        BMCS[7]: "certificate",
    }
    assert [one["what"] for one in found["nodes"]] == ["new", "conflict"], "one has no MAC address"
    assert list(cluster.nodes()) == ["node001"]
    assert seen == [], "a redirection is not followed"
    shown = cluster.sms("discover", "--port", str(cluster.port), f"{NET}.102", status=4)
    assert "provisioning.bmc.user and the password" in shown


def test_nodes_rejected_by_the_inventory_are_reported(cluster: Cluster) -> None:
    """An address of the site file is in use: one of the new nodes is rejected, the others are created."""
    for number in range(3):
        cluster.bmc(number)
    cluster.sms("add", "other", "--mac", mac(90))
    card = {"mac": mac(90), "addresses": [{"address": f"{NET}.12"}]}
    more = {"nodes": [{"name": "other", "interfaces": [card]}]}
    (cluster.folder / "more.yaml").write_text(yaml.safe_dump(more))
    cluster.sms("import", str(cluster.folder / "more.yaml"))
    found = cluster.discover(f"{NET}.100-102", status=4)
    assert list(found["failed"]) == ["node002"] and f"{NET}.12" in found["failed"]["node002"]
    assert sorted(cluster.nodes()) == ["node001", "node003", "other"]


def test_controllers_get_xnames(cluster: Cluster) -> None:
    cluster.bmc(0)
    cluster.sms("add", "n1", "--mac", mac(0), "--xname", "x1000c0s0b0n0")
    cluster.discover(BMCS[0])
    (one,) = yaml.safe_load(cluster.sms("export"))["endpoints"]
    assert (one["id"], one["address"], one["details"]["firmware"]) == ("x1000c0s0b0", BMCS[0], "2.61")


def test_power_of_many(cluster: Cluster) -> None:
    for number in range(4):
        cluster.bmc(number)
    cluster.discover(f"{NET}.100-103", "--group", "compute")
    assert cluster.sms("power", "status", "@compute").split() == ["On", "4", "node[001-004]"]
    cluster.sms("power", "off", "node[001-002]", status=3)
    assert "--yes" in cluster.stderr and cluster.machines[BMCS[0]].power() == "On"
    assert "would switch off 2: node[001-002]" in cluster.sms("power", "off", "node[001-002]", "-n")
    cluster.sms("power", "off", "node[001-002]", "--yes")
    assert [machine.power() for machine in cluster.machines.values()] == ["Off", "Off", "On", "On"]
    outcomes = json.loads(cluster.sms("power", "on", "@all", "--json"))
    assert [(one["state"], one["changed"]) for one in outcomes] == [
        ("On", True),
        ("On", True),
        ("On", False),
        ("On", False),
    ]
    cluster.sms("power", "reset", "node003")
    cluster.sms("power", "off", "--soft", "node003")
    assert cluster.machines[BMCS[2]].power() == "Off"
    cluster.sms("power", "status", "node[001-005]", status=3)
    assert "the inventory has no node005" in cluster.stderr
    cluster.sms("add", "bare", "--mac", mac(60))
    shown = cluster.sms("power", "status", "node001", "bare", status=1)
    assert "bare has no controller" in shown and "sms node edit bare --bmc" in shown and "node001" in shown


def read(machine: Machine | None) -> int:
    """Return how many requests a controller has had."""
    assert machine
    return len(machine.asked)


def test_the_password_goes_to_controllers_networks_only(cluster: Cluster) -> None:
    """Root in the VM has a certificate of the site's CA and can name any URL; nothing is sent to a foreign one."""
    spy = Machine(tree({"1": [mac(1)]}))
    cluster.start(VM, spy)
    cluster.start(f"{NET}.11", spy)
    (cluster.folder / "sms.yaml").write_text(
        (cluster.folder / "sms.yaml").read_text().replace(f"{NET}.0/24", f"{NET}.96/27")
    )
    for number, address in enumerate((VM, f"{NET}.11", f"[::ffff:{VM}]", "127.0.0.9")):
        name = f"spied{number}"
        cluster.sms("add", name, "--mac", mac(70 + number))
        cluster.inventory("PATCH", f"/sms/v1/nodes/{name}", {"bmc": f"https://{address}:{cluster.port}{SYSTEM}"})
        shown = cluster.sms("power", "status", name, status=1)
        assert "the password is not sent there" in shown, address
        assert "the password is not sent there" in cluster.sms("boot", name, "--no-cycle", "--target", "disk", status=1)
    found = cluster.discover(VM, f"{NET}.11", status=4)
    assert [one["message"].rpartition(": ")[2] for one in found["broken"]] == ["the password is not sent there"] * 2
    assert spy.asked == []


@pytest.mark.parametrize(
    ("addresses", "chosen"),
    [
        (["2001:db8::9", "10.0.9.9"], "10.0.9.9"),
        (["10.9.9.9", "fe80::9%eth0", "10.0.9.9"], "10.0.9.9"),
        (["2001:db8::9"], "is not in the controllers' networks"),
        (["10.0.9.9", "10.0.9.2"], "is the provisioning VM"),
    ],
)
def test_a_controller_with_several_addresses(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], chosen: str
) -> None:
    """The password goes to its address in the controllers' networks; the others are not used."""
    found = [(0, 0, 0, "", (address, 0)) for address in addresses]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    login = Login("u", "p", (IPv4Network("10.0.9.0/24"),), (IPv4Address("10.0.9.2"),))
    try:
        outcome = login.controller("https://bmc007/redfish/v1/Systems/1").address
    except Refused as error:
        outcome = error.message
    assert chosen in outcome


def test_a_changed_controller_is_confirmed_on_this_machine(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, spy = cluster.bmc(0), cluster.bmc(1)
    cluster.discover(BMCS[0])
    url = f"https://{BMCS[1]}:{cluster.port}{SYSTEM}"
    cluster.sms("power", "status", "node001")
    seen = read(machine), read(spy)
    cluster.inventory("PATCH", "/sms/v1/nodes/node001", {"bmc": url})
    for words in (("power", "off"), ("power", "status"), ("boot", "--target", "disk")):
        cluster.sms(*words, "node001", "--yes", status=3)
        assert f"another controller for node001: {url} (before: https://{BMCS[0]}" in cluster.stderr
        assert f"sms node edit node001 --bmc {url}" in cluster.stderr
    assert (read(machine), read(spy)) == seen
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdin", Terminal("n\n"))
        cluster.sms("power", "status", "node001", "--yes", status=3)
        assert (read(machine), read(spy)) == seen
        patched.setattr("sys.stdin", Terminal("y\n"))
        cluster.sms("power", "status", "node001")
    cluster.sms("power", "status", "node001")
    assert read(spy) > seen[1]
    cluster.inventory("PATCH", "/sms/v1/nodes/node001", {"bmc": url.replace(BMCS[1], BMCS[0])})
    cluster.sms("power", "status", "node001", status=3)
    cluster.sms("edit", "node001", "--bmc", url.replace(BMCS[1], BMCS[0]))
    cluster.sms("power", "status", "node001")
    (kept,) = (cluster.folder / "state" / "nodes").glob("lab-*.controllers")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    kept.write_text("garbage")
    cluster.sms("power", "status", "node001", status=3)
    assert "cannot read" in cluster.stderr


def test_certificates_of_a_node_are_shown_and_revoked(cluster: Cluster) -> None:
    """No admin host answers to SSH here: the list is kept, and the status says that it is not installed."""

    def key(*words: str, status: int = 0) -> str:
        cluster.capsys.readouterr()
        assert main(["-q", "--site", str(cluster.folder / "sms.yaml"), "key", "ca", *words]) == status
        return cluster.capsys.readouterr().out

    cluster.sms("add", "node001", "--mac", mac(1), "--address", f"{NET}.11")
    cluster.provd.as_node("node001")
    serial = json.loads(cluster.sms("show", "node001", "--json"))["certificate"]["serial"]
    stranger = {**SERVICES, "X-SMS-Subject": "CN=node001,OU=node", "X-Real-IP": f"{NET}.99"}
    assert cluster.provd.ask("GET", "/sms/v1/sync/manifest.json", headers=stranger).status == 403
    assert f"1 from {NET}.99" in cluster.sms("show", "node001")
    assert serial in key("log") and "REVOKED" not in key("log")
    assert serial in key("revoke", "node001", status=4)
    assert [one["serial"] for one in json.loads(key("log", "--json")) if one["revoked"]] == [serial]
    assert "revoked already" in key("revoke", "node001", status=4)
    key("revoke", "nobody", status=3)
    with cluster.vm.off():
        assert "CN=admin,OU=admin" in key("log"), "what was issued here"
        key("revoke", "node001", status=3)


@pytest.mark.parametrize(("lacks", "words"), [("networks", "provisioning.bmc.networks"), ("ca", "provisioning.bmc.ca")])
def test_networks_and_ca_of_controllers_must_be_set(lacks: str, words: str, cluster: Cluster) -> None:
    """The site's own CA is not a default: the VM has certificates of it."""
    site = cluster.folder / "sms.yaml"
    document = yaml.safe_load(site.read_text())
    del document["provisioning"]["bmc"][lacks]
    site.write_text(yaml.safe_dump(document))
    cluster.sms("add", "node001", "--mac", mac(1), "--bmc", f"https://{BMCS[0]}")
    cluster.sms("power", "status", "node001", status=3)
    assert words in cluster.stderr


def test_power_while_the_vm_is_off(cluster: Cluster) -> None:
    cluster.bmc(0)
    cluster.discover(BMCS[0])
    (kept,) = (cluster.folder / "state" / "nodes").glob("lab-*.json")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    with cluster.vm.off():
        assert "node001" in cluster.sms("power", "off", "node001")
        assert cluster.machines[BMCS[0]].power() == "Off"
        assert "node001" in cluster.sms("list")
        cluster.sms("edit", "node001", "--group", "+x", status=3)
        assert "sms vm start" in cluster.stderr
        cluster.sms("discover", BMCS[0], status=3)
        kept.write_text("garbage")
        cluster.sms("power", "on", "node001", status=3)
        assert "has no cached inventory" in cluster.stderr
    assert "node001" in cluster.sms("power", "on", "node001")


def test_the_age_of_the_cache_is_printed(cluster: Cluster) -> None:
    cluster.bmc(0)
    cluster.discover(BMCS[0])
    (kept,) = (cluster.folder / "state" / "nodes").glob("lab-*.json")
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "at": 1_700_000_000}))
    with cluster.vm.off():
        assert main(["--site", str(cluster.folder / "sms.yaml"), "node", "power", "status", "node001"]) == 0
    errors = cluster.capsys.readouterr().err
    assert "does not answer: using the inventory of" in errors and " ago; nodes may have changed since" in errors


def test_boot(cluster: Cluster) -> None:
    machine = cluster.bmc(0, power="Off")
    cluster.discover(BMCS[0])
    assert machine
    cluster.sms("boot", "node001", status=3)
    assert "sms image push compute" in cluster.stderr and machine.power() == "Off"
    digest = "0" * 64
    image = cluster.folder / "vm" / "images" / "compute" / digest
    image.mkdir(parents=True)
    files = {name: {"sha256": digest, "bytes": 1} for name in ("vmlinuz", "initrd.img", "root.squashfs")}
    (image / "manifest.json").write_text(json.dumps({"kind": "node", "profile": "compute", "files": files}))
    (image.parent / "current").write_text(digest)
    cluster.sms("boot", "node001")
    boot = machine.tree[SYSTEM]["Boot"]
    assert machine.power() == "On" and boot["BootSourceOverrideTarget"] == "Pxe"
    cluster.sms("boot", "node001", "--target", "disk", "--no-cycle")
    assert machine.tree[SYSTEM]["Boot"]["BootSourceOverrideTarget"] == "Hdd"
    cluster.sms("boot", "node001", "--target", "uefi", status=2)
    cluster.sms("boot", "node001", "--wait", "1s", status=1)
    cluster.sms("boot", "node001", "--wait", "1s", "--no-cycle", status=2)
    nodes: list[Any] = list(cluster.nodes().values())
    with pytest.raises(KeyboardInterrupt, match="node001 was restarted; stopped waiting"):
        boot_nodes(
            open_cluster(cluster.folder / "sms.yaml", None, Silent()).showing(Impatient()), nodes, Boot(wait_s=60)
        )
    slurmd = serve(f"{NET}.11", 6818, None, hangs)
    with slurmd:
        assert cluster.sms("boot", "node001", "--wait", "10s").split() == ["up", "1", "node001"]


def test_the_emulator_of_sushy_tools(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """sushy-tools' controller has no Processors, and two systems with different paths."""
    (cluster.folder / "emulator").mkdir()
    with emulator(cluster.folder / "emulator", systems=2, macs=(mac(1), mac(2))) as bmc:
        document = yaml.safe_load((cluster.folder / "sms.yaml").read_text())
        document["provisioning"]["bmc"]["ca"] = str(bmc.ca)
        (cluster.folder / "sms.yaml").write_text(yaml.safe_dump(document))
        monkeypatch.setenv("SMS_BMC_USER", bmc.controller().user)
        cluster.port = urlsplit(bmc.url).port or 0
        found = cluster.discover("127.0.0.1")
        assert [(one["what"], one["power"]) for one in found["nodes"]] == [("new", "On")] * 2
        nodes = cluster.nodes()
        assert {node["macs"][0] for node in nodes.values()} == {mac(1), mac(2)}
        cluster.sms("power", "off", "node001", "--timeout", "1m")
        powers = [bmc.power(node["bmc"].rpartition("/")[2]) for node in nodes.values()]
        assert powers == ["Off", "On"]


def by_environment(path: Path, patch: pytest.MonkeyPatch) -> None:
    path.unlink()
    patch.setenv("SMS_BMC_PASSWORD", PASSWORD)


CREDENTIALS: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], Any], str]] = {
    "others may read": (lambda path, _: path.chmod(0o640), "chmod 600"),
    "not there": (lambda path, _: path.unlink(), "cannot read"),
    "empty": (lambda path, _: path.write_text("\n"), "one line"),
    "in the environment": (by_environment, ""),
}


@pytest.mark.parametrize("name", CREDENTIALS)
def test_credentials(name: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    change, words = CREDENTIALS[name]
    cluster.bmc(0)
    change(cluster.folder / "bmc.password", monkeypatch)
    cluster.discover(BMCS[0], status=3 if words else 0)
    assert words in cluster.stderr
    asked = cluster.machines[BMCS[0]].asked
    assert bool(asked) == (not words), "nobody was asked without"


MISTAKES: dict[str, tuple[list[str], str]] = {
    "a range that is none": (["discover", "10.0.0.0/33"], "is not a range"),
    "a range backwards": (["discover", "10.0.0.9-10.0.0.1"], "its end is before its start"),
    "too many": (["discover", "10.0.0.0/8"], "more than 4096 addresses"),
    "IPv6": (["discover", "fe80::/64"], "IPv4"),
    "a port in it": (["discover", "10.0.0.1:8000"], "--port"),
    "a pattern without a number": (["discover", "10.77.7.100", "--name-pattern", "node"], "is not a pattern"),
    "a pattern with too much": (["discover", "10.77.7.100", "--name-pattern", "n%d%s"], "is not a pattern"),
    "a first address elsewhere": (["discover", "10.77.7.100", "--first", "10.0.0.1"], "is not an address in"),
    "no port": (["discover", "--port", "70000", "10.77.7.100"], "is not a port"),
    "a host list that is none": (["power", "status", "node[1-"], "brackets"),
    "the node first": (["power", "node1", "on"], "sms node power on node1"),
    "a word that is near": (["power", "of", "node1"], "did you mean off?"),
    "names of nobody": (["discover", "foo.invalid,bar.invalid"], "foo.invalid: no such host"),
    "a dash": (["edit", "node1", "--group", "-gpu"], "--group=-VALUE"),
    "soft on": (["power", "on", "--soft", "node1"], "--soft is only valid with off"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, cluster: Cluster) -> None:
    words, message = MISTAKES[name]
    cluster.sms(*words, status=2)
    assert message in cluster.stderr


def test_a_site_without_a_vm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = yaml.safe_load((places.ROOT / "definitions" / "profiles" / "lab.yaml").read_text())
    document.pop("provisioning", None)
    document["state"] = str(tmp_path / "state")
    (tmp_path / "sms.yaml").write_text(yaml.safe_dump(document))
    assert main(["-q", "--site", str(tmp_path / "sms.yaml"), "node", "list"]) == 2
    assert "no provisioning VM" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["sms.yaml"]
