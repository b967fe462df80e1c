"""A hostile VM against the verbs of the admin host: what root in the provisioning VM can answer.

The verbs, their client and the service behind the attacker are real; the attacker has the VM's address, certificate
and keys.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import json
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.site import ca
from appliance.operations.vm.inside import run_in_vm
from appliance.operations.vm.vm import query_health
from appliance.plan.vm.vm import VmPlaces
from appliance.progress import Silent
from appliance.tools import provision
from tests import places
from tests.bmcs import PASSWORD, ROOT, Machine, serve, tree
from tests.cases import run_verb, sample
from tests.hostile.vm import CHANGES, FORBIDDEN, HOSTILE, RAW, SLOW, Attacker, agent, redirect
from tests.ownnet import own_network
from tests.provd import Provd, make_config, running
from tests.servers import free_port

pytestmark = [pytest.mark.real, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a network of its own")]

NET = "10.77.7"
VM, PUBLIC, BMC, FOREIGN = f"{NET}.2", f"{NET}.3", f"{NET}.100", f"{NET}.10"
MOTD = b"welcome\n"
SYSTEM = f"{ROOT}/Systems/1"


class Site:
    """A site whose VM is hostile: verbs, and what they have printed."""

    def __init__(self, folder: Path, attacker: Attacker, service: Provd, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.attacker, self.service, self.capsys = folder, attacker, service, capsys
        self.tls = folder / "tls"

    def sms(self, *words: str) -> tuple[int, str]:
        """Run a verb; return its exit status, and all that it has printed."""
        return run_verb(self.capsys, self.folder / "sms.yaml", *words)

    def fill(self) -> None:
        """Give the real service something of each kind."""
        put: Callable[..., Any] = self.service.ask
        for number, name in enumerate(("node001", "node002"), 1):
            body = {"macs": [f"02:00:0a:4d:00:0{number}"], "address": f"{NET}.1{number}", "groups": ["gpu"]}
            assert put("PUT", f"/sms/v1/nodes/{name}", {**body, "bmc": f"https://{BMC}{SYSTEM}"}).status < 300
        digest = hashlib.sha256(MOTD).hexdigest()
        headers = {"X-SMS-Scheme": "https", "X-SMS-Verify": "SUCCESS", "X-SMS-Subject": "CN=tester,OU=admin"}
        octets = {**headers, "Content-Type": "application/octet-stream"}
        assert put("PUT", f"/sms/v1/blobs/{digest}", MOTD, headers=octets).status < 300
        assert put("PUT", "/sms/v1/files/etc/motd", {"sha256": digest, "nodes": ["node001"]}).status < 300
        self.service.as_node("node001")


def write_site(folder: Path) -> None:
    document = yaml.safe_load((places.ROOT / "definitions" / "profiles" / "lab.yaml").read_text())
    document["state"] = str(folder / "state")
    document["networks"]["provisioning"] |= {"address": f"{NET}.1/24"}
    document["admin_hosts"][0]["address"] = f"{NET}.4"
    nodes = [{"name": "node[001-004]", "address": f"{NET}.[11-14]"}]
    document["slurm"] = {"nodes": nodes, "partitions": [{"name": "batch", "default": True}]}
    bmc = {"user": "root", "password_file": "bmc.password", "networks": [f"{NET}.96/27"], "ca": "tls/ca.pem"}
    vm = {"address": f"{VM}/24", "mac": "02:00:0a:4d:00:02", "profiles": {"compute": {}}}
    document["provisioning"] = {**vm, "bmc": bmc}
    (folder / "sms.yaml").write_text(yaml.safe_dump(document))
    (folder / "bmc.password").write_text(f"{PASSWORD}\n")
    (folder / "bmc.password").chmod(0o600)
    (folder / "nodes.yaml").write_text(yaml.safe_dump({"nodes": [{"name": "node001", "macs": ["02:00:0a:4d:00:01"]}]}))


@pytest.fixture
def site(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("SMS_SITE", "SMS_BMC_USER", "SMS_BMC_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    write_site(tmp_path)
    ca.make_ca(tmp_path / "tls")
    with ExitStack() as stack:
        stack.enter_context(own_network([f"{each}/24" for each in (VM, PUBLIC, BMC, FOREIGN)]))
        (tmp_path / "vm").mkdir()
        services = {"address": f"{NET}.1", "hostname": "sms-services"}
        config = make_config(tmp_path / "vm", address=VM, gateway="", services=services, pool=None)
        service = stack.enter_context(running(config))
        attacker = Attacker(service.port)
        made = Site(tmp_path, attacker, service, capsys)
        made.fill()
        stack.enter_context(serve(VM, 8443, certificate_of_the_vm(tmp_path), attacker))
        yield made


def certificate_of_the_vm(folder: Path) -> ssl.SSLContext:
    """Return the VM's own side of TLS."""
    server, _ = ca.vm_pairs(folder / "tls", hostname="sms-provision", addresses=[VM])
    return context_of(folder, server.certificate, server.key)


def context_of(folder: Path, certificate: bytes, key: bytes) -> ssl.SSLContext:
    pair = folder / "pair.pem"
    pair.write_bytes(key + certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair)
    return context


VERBS = [
    ("node", "list"),
    ("node", "list", "@gpu"),
    ("node", "list", "--json"),
    ("node", "list", "--unknown"),
    ("node", "show", "node001"),
    ("node", "export"),
    ("node", "export", "--json"),
    ("node", "edit", "node001", "--profile", "compute"),
    ("node", "add", "node003", "--mac", "02:00:0a:4d:00:03"),
    ("node", "import", "nodes.yaml"),
    ("node", "boot", "node001", "--no-cycle", "--yes"),
    ("files", "list"),
    ("files", "show", "/etc/motd"),
    ("files", "show", "/etc/motd", "--content"),
    ("files", "report"),
    ("files", "report", "--path", "/etc/motd"),
    ("files", "push", "--dry-run"),
    ("files", "push", "--wait", "1s"),
    ("files", "add", "/etc/motd", "nodes.yaml", "--wait", "1s"),
    ("files", "rollback", "/etc/motd", "--later"),
    ("image", "list", "--nodes"),
    ("key", "ca", "log"),
    ("node", "remove", "node002", "--yes"),
]
"""Every kind of verb that reads a response of the VM."""


def check(site: Site, words: tuple[str, ...]) -> None:
    """Run a verb: it ends with a status of its own, prints only text that is safe, and writes nothing elsewhere."""
    status, shown = site.sms(*words)
    assert status in (0, 1, 2, 3, 4), (words, status, shown)
    assert "Traceback" not in shown, (words, shown[-3000:])
    assert [each for each in FORBIDDEN if each in shown] == [], (words, shown[-3000:])
    assert PASSWORD not in shown
    assert not list(site.folder.rglob("PWNED*")) and not Path("/PWNED").exists()


SAMPLE = ("escape sequences in texts", "objects for texts", "huge numbers", "missing keys", "deep JSON")


@pytest.mark.parametrize("name", sample([*CHANGES, *RAW], *SAMPLE))
def test_no_response_confuses_a_verb(name: str, site: Site) -> None:
    assert site.sms("node", "list")[0] == 0, "the honest response is accepted"
    site.attacker.change, site.attacker.attack = CHANGES.get(name), RAW.get(name)
    for words in VERBS:
        check(site, words)
    site.attacker.change = site.attacker.attack = None
    status, shown = site.sms("node", "list", "--json")
    assert status == 0 and "PWNED" not in shown, "nothing of it was kept"


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_response_ends(name: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte in time, but never the last one."""
    monkeypatch.setattr(provision, "ANSWER_S", 1)
    monkeypatch.setattr(provision, "RESPONSE_S", 1)
    site.attacker.attack = SLOW[name]
    status, shown = site.sms("files", "list")
    assert status == 1 and "it takes longer than" in shown


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirection_is_not_followed(status: int, site: Site) -> None:
    """Not to another host, not to a file."""
    other = Attacker(site.service.port)
    with serve(PUBLIC, 8443, certificate_of_the_vm(site.folder), other):
        for target in (f"https://{PUBLIC}:8443", "file:///etc/shadow", "http://127.0.0.1"):
            site.attacker.attack = redirect(status, target)
            for words in (
                ("node", "list"),
                ("files", "show", "/etc/motd", "--content"),
                ("files", "rollback", "/etc/motd"),
            ):
                code, shown = site.sms(*words)
                assert code == 1 and f"status {status}" in shown, (words, shown)
    assert other.asked == []


def test_content_that_is_not_of_its_digest_is_refused(site: Site) -> None:
    def other_content(found: Any) -> Any:
        text = base64.b64encode(b"other\n").decode()
        return {**found, "content": text} if isinstance(found, dict) and "content" in found else found

    assert site.sms("files", "show", "/etc/motd", "--content") == (0, MOTD.decode())
    site.attacker.change = other_content
    status, shown = site.sms("files", "show", "/etc/motd", "--content")
    assert status == 1 and "is another one" in shown and "other" not in shown.partition("is another")[0]


class Issuer:
    """What root in the VM can sign with."""

    def __init__(self, folder: Path) -> None:
        self.pairs = ca.vm_pairs(folder / "tls", hostname="sms-provision", addresses=[VM])
        self.folder = folder

    def server(self, address: str, *, self_made: bool = False) -> ssl.SSLContext:
        """A server's certificate for a foreign address, signed with the key of the VM's issuer or of its web server."""
        server, issuer = self.pairs
        signer = server if self_made else issuer
        own = x509.load_pem_x509_certificate(signer.certificate)
        signing = serialization.load_pem_private_key(signer.key, password=None)
        assert isinstance(signing, ec.EllipticCurvePrivateKey)
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, address)]))
            .issuer_name(own.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=9))
            .add_extension(names, critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(signing, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        text = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return context_of(self.folder, made.public_bytes(pem) + signer.certificate, text)


def name_controller(url: str) -> Callable[[Any], Any]:
    """Return an attack: the inventory names this controller for every node."""

    def change(found: Any) -> Any:
        for node in found.get("nodes", ()) if isinstance(found, dict) else ():
            node["bmc"] = url
        return found

    return change


POWER: list[tuple[str, ...]] = [("node", "power", word, "node001", "--yes") for word in ("status", "off", "reset")]
POWER.append(("node", "boot", "node001", "--yes", "--target", "disk"))


def test_the_password_reaches_no_machine_of_the_vm(site: Site) -> None:
    """Other addresses, its own, other spellings of them, other schemes: the site's CA certifies the VM, too."""
    spy, port = Machine(tree({"1": ["02:00:0a:4d:00:01"]})), free_port([FOREIGN])
    with ExitStack() as stack:
        stack.enter_context(serve(FOREIGN, port, Issuer(site.folder).server(FOREIGN), spy))
        stack.enter_context(serve(VM, port, certificate_of_the_vm(site.folder), spy))
        urls = [
            f"https://{VM}:{port}",
            f"https://{FOREIGN}:{port}",
            f"https://[::ffff:{VM}]:{port}",
            f"http://{BMC}:{port}",
        ]
        urls += [f"https://{BMC}@{VM}:{port}", f"https://{VM}:{port}#{BMC}", f"https://{VM}:{port}\\@{BMC}", f"//{BMC}"]
        urls += [f"https://{int.from_bytes(map(int, VM.split('.')))}:{port}", f"https://0x0a4d0702:{port}", HOSTILE]
        for url in urls:
            site.attacker.change = name_controller(url + ("" if "@" in url or "#" in url else SYSTEM))
            for words in POWER:
                status, shown = site.sms(*words)
                assert status in (1, 3) and PASSWORD not in shown and "Traceback" not in shown, (url, shown)
    assert spy.asked == []


def test_a_controllers_certificate_is_not_one_that_the_vm_signed(site: Site) -> None:
    """At a controller's own address, which the attacker has taken over: neither of the VM's keys certifies it."""
    port = free_port([BMC])
    site.attacker.change = name_controller(f"https://{BMC}:{port}{SYSTEM}")
    for self_made in (False, True):
        spy = Machine(tree({"1": ["02:00:0a:4d:00:01"]}))
        with serve(BMC, port, Issuer(site.folder).server(BMC, self_made=self_made), spy):
            for words in POWER:
                status, shown = site.sms(*words)
                assert status == 1 and "certificate" in shown, shown
        assert spy.asked == []
    spy = Machine(tree({"1": ["02:00:0a:4d:00:01"]}))
    with serve(BMC, port, certificate_of_the_vm(site.folder), spy):
        assert "certificate" in site.sms(*POWER[0])[1]
    assert spy.asked == []


def test_another_controller_is_not_confirmed_without_a_terminal(site: Site) -> None:
    """Nor is the hint, which an administrator copies, a command of the attacker."""
    port = free_port([BMC])
    honest = ca.issue_server(site.tls, hostname="bmc", addresses=[BMC])
    machine = Machine(tree({"1": ["02:00:0a:4d:00:01"]}))
    with serve(BMC, port, context_of(site.folder, honest.certificate, honest.key), machine):
        site.attacker.change = name_controller(f"https://{BMC}:{port}{SYSTEM}")
        assert site.sms(*POWER[0])[0] == 0
        before = len(machine.asked)
        for url in (f"https://{NET}.101:{port}{SYSTEM}", f"https://{BMC}:{port}/;touch PWNED", f"https://{BMC}$(id)/"):
            site.attacker.change = name_controller(url)
            status, shown = site.sms(*POWER[1])
            assert status == 3 and "another controller for node001" in shown
            hint = shown.partition("--bmc ")[2].strip()
            assert hint == quote(url)
    assert len(machine.asked) == before


def test_names_of_nodes_are_no_commands(site: Site) -> None:
    """They are part of hints, and of the names of files on this machine."""

    def rename(found: Any) -> Any:
        for node in found.get("nodes", ()) if isinstance(found, dict) else ():
            node["name"] = "x; touch PWNED"
        return found

    site.attacker.change = rename
    for words in (("node", "list", "--json"), ("node", "power", "status", "@all"), ("node", "boot", "@gpu", "--yes")):
        status, shown = site.sms(*words)
        assert "PWNED" not in shown and "Traceback" not in shown, (words, status, shown)


def replies(text: str) -> Callable[[bytes], bytes]:
    """Return a guest agent whose programs all print this, and that is honest otherwise."""
    out = base64.b64encode(text.encode(errors="surrogateescape")).decode()

    def reply(line: bytes) -> bytes:
        asked = json.loads(line.rpartition(b"\xff")[2])
        found: Any = {"pid": 7, "exited": True, "exitcode": 0, "out-data": out, "err-data": out}
        if asked["execute"] == "guest-sync-delimited":
            return b"\xff" + json.dumps({"return": asked["arguments"]["id"]}).encode() + b"\n"
        return json.dumps({"return": found}).encode() + b"\n"

    return reply


def says(data: bytes) -> Callable[[bytes], bytes]:
    """Return a guest agent that answers each command but the first with these bytes."""
    honest = replies("")
    return lambda line: honest(line) if b"guest-sync" in line else data


HEALTH = f"unit {HOSTILE} {HOSTILE}\nunit nginx {HOSTILE}\nstate 9 x\nhttps {HOSTILE}\napi 200 " + "[" * 100_000 + "\n"
AGENTS: dict[str, Callable[[bytes], bytes]] = {
    "escape sequences": replies(HEALTH),
    "an object that is none": replies('api 200 {"refused": {"a": 1}}\nstate 999999999999999999999 1'),
    "an error": says(json.dumps({"error": {"desc": HOSTILE * 100}}).encode() + b"\n"),
    "an error that is none": says(b'{"error": [[]]}\n'),
    "a wrong pid": says(b'{"return": {"pid": "7", "exited": 1}}\n'),
    "no base64": says(b'{"return": {"pid": 7, "exited": true, "out-data": "%%%", "err-data": 7}}\n'),
    "a huge status": says(b'{"return": {"pid": 7, "exited": true, "exitcode": ' + b"9" * 4000 + b"}}\n"),
    "a huge signal": says(b'{"return": {"pid": 7, "exited": true, "signal": "KILL"}}\n'),
    "no JSON": says(HOSTILE.encode()),
    "deep JSON": says(b"[" * 200_000 + b"\n"),
    "an endless line": says(b" " * (65 << 20)),
    "events": says(b'{"event": "x"}\n' * 1000),
    "never ends": says(b'{"return": {"pid": 7, "exited": false}}\n'),
    "nothing": says(b""),
}
SAMPLE_AGENTS = ("escape sequences", "a huge status", "no base64", "never ends")


@pytest.mark.parametrize("name", sample(AGENTS, *SAMPLE_AGENTS))
def test_no_guest_agent_confuses_the_host(name: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a program in the VM, and what it says is shown, and decides whether the VM is healthy."""
    cluster = open_cluster(site.folder / "sms.yaml", None, Silent())
    monkeypatch.setattr("appliance.operations.vm.inside.need_running", lambda *_: None)
    with agent(Path(str(VmPlaces(cluster.site).guest)), AGENTS[name]):
        for work in (check_health, run_program)[name == "never ends" :]:
            try:
                work(cluster)
            except SmsError as error:
                assert len(error.message) < 5000


def check_health(cluster: Cluster) -> None:
    health = query_health(cluster, Local())
    shown = f"{health.services}{health.failures}"
    assert not health.ok and len(shown) < 1 << 20
    assert not [each for each in FORBIDDEN if each in shown]


def run_program(cluster: Cluster) -> None:
    assert 0 <= run_in_vm(cluster, Local(), ["true"], timeout_s=3).status < 256
