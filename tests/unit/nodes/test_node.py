"""``sms node`` against the real service behind TLS, with real servers as controllers."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
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
from appliance.tools.provision import Api
from tests import places
from tests.bmcs import PASSWORD, ROOT, Answer, Machine, answer, hangs, says, serve, tree
from tests.front import Front, front
from tests.ownnet import own_network
from tests.provd import SERVICES, Provd, make_config, running
from tests.redfish import emulator
from tests.servers import free_port, server_context

pytestmark = pytest.mark.slow

NET = "10.77.7"
"""Network in a namespace of its own: no packet leaves it."""
VM = f"{NET}.2"
HOST = f"{NET}.3"
BMCS = [f"{NET}.{number}" for number in range(100, 110)]
SYSTEM = f"{ROOT}/Systems/1"


def mac(number: int) -> str:
    return f"02:00:0a:4d:00:{number:02x}"


@dataclass
class Cluster:
    """A site with a VM and controllers."""

    folder: Path
    vm: Front
    port: int
    capsys: pytest.CaptureFixture[str]
    stack: ExitStack
    provd: Provd
    machines: dict[str, Machine] = field(default_factory=dict)

    def bmc(self, number: int, behave: Answer | None = None, **more: Any) -> Machine | None:
        """Start a controller at this address; without ``behave`` it works and controls a machine."""
        address = BMCS[number]
        made = None if behave else Machine(tree({"1": [mac(number)]}, **more))
        self.start(address, behave or made)
        if made:
            self.machines[address] = made
        return made

    def start(self, address: str, behave: Any) -> None:
        context = server_context(self.vm.tls, self.folder, [address]) if behave is not SILENT else None
        self.stack.enter_context(serve(address, self.port, context, behave))

    def sms(self, *words: str, status: int = 0) -> str:
        """Run a verb and return its standard output; ``stderr`` has standard error."""
        self.capsys.readouterr()
        try:
            found = main(["-q", "--site", str(self.folder / "sms.yaml"), "node", *words])
        except SystemExit as end:
            found = int(end.code or 0)
        out, self.stderr = self.capsys.readouterr()
        assert found == status, f"{found}: {out}{self.stderr}"
        assert PASSWORD not in out + self.stderr
        return out

    stderr: str = ""

    def discover(self, *words: str, status: int = 0) -> dict[str, Any]:
        found = self.sms("discover", "--port", str(self.port), "--json", *words, status=status)
        report = dict(json.loads(found)) if found else {}
        assert not report or bool(report["problems"]) == (status == 4), report
        return report

    def inventory(self, method: str, path: str, body: Any) -> None:
        """Change the inventory as root in the VM can."""
        tls = self.vm.tls
        Api(f"https://{VM}:8443", tls / "ca.pem", tls / "admin.pem", tls / "admin.key").request(method, path, body)

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["name"]: node for node in json.loads(self.sms("list", "--json"))}


SILENT = object()


class Terminal(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


class Impatient(Silent):
    """Simulates Ctrl-C at a step that waits."""

    @contextmanager
    def step(self, text: str) -> Iterator[Silent]:
        if text.startswith("wait"):
            raise KeyboardInterrupt
        yield self


def write_site(folder: Path) -> None:
    document = yaml.safe_load((places.ROOT / "definitions" / "profiles" / "lab.yaml").read_text())
    document["state"] = str(folder / "state")
    document["networks"]["provisioning"] |= {"address": f"{NET}.1/24"}
    document["admin_hosts"][0]["address"] = HOST
    nodes = [{"name": "node[001-004]", "address": f"{NET}.[11-14]"}]
    document["slurm"] = {"nodes": nodes, "partitions": [{"name": "batch", "default": True}]}
    document["provisioning"] = {
        "address": f"{VM}/24",
        "mac": "02:00:0a:4d:00:02",
        "profiles": {"compute": {}, "gpu": {"groups": ["gpu"]}},
        "bmc": {
            "user": "root",
            "password_file": "bmc.password",
            "networks": [f"{NET}.0/24", "127.0.0.1/32"],
            "ca": "tls/ca.pem",
        },
    }
    (folder / "sms.yaml").write_text(yaml.safe_dump(document))
    (folder / "bmc.password").write_text(f"{PASSWORD}\n")
    (folder / "bmc.password").chmod(0o600)


@pytest.fixture
def cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name in ("SMS_SITE", "SMS_BMC_USER", "SMS_BMC_PASSWORD", "SMS_SMD_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    write_site(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(own_network([f"{VM}/24", f"{NET}.11/24", *(f"{bmc}/24" for bmc in BMCS)]))
        (tmp_path / "vm").mkdir()
        services = {"address": f"{NET}.1", "hostname": "sms-services"}
        config = make_config(tmp_path / "vm", address=VM, gateway="", services=services, pool=None, busy_s=5)
        service = stack.enter_context(running(config))
        vm = stack.enter_context(front(tmp_path, VM, service.port))
        yield Cluster(tmp_path, vm, free_port(BMCS), capsys, stack, service)


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
    nodes = list(cluster.nodes().values())
    with pytest.raises(KeyboardInterrupt, match="node001 was restarted; stopped waiting"):
        boot_nodes(open_cluster(cluster.folder / "sms.yaml", None, Silent()), nodes, Boot(wait_s=60), Impatient())
    slurmd = serve(f"{NET}.11", 6818, None, hangs)
    with slurmd:
        assert cluster.sms("boot", "node001", "--wait", "10s").split() == ["up", "1", "node001"]


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


CREDENTIALS: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], Any], str]] = {
    "others may read": (lambda path, _: path.chmod(0o640), "chmod 600"),
    "not there": (lambda path, _: path.unlink(), "cannot read"),
    "empty": (lambda path, _: path.write_text("\n"), "one line"),
    "in the environment": (lambda path, patch: [path.unlink(), patch.setenv("SMS_BMC_PASSWORD", PASSWORD)], ""),
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
