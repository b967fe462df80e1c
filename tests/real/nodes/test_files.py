"""Master files and their clients: the VM's server behind its web server, nodes and the container as processes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import io
import json
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from appliance.errors import SmsError
from appliance.operations.site.ca import issue_client, make_ca
from appliance.provision.enrol import issue_node
from tests.places import ROOT
from tests.provisioning import Vm, client_environment
from tests.waiting import wait_until

pytestmark = [pytest.mark.real, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files belong to root")]

RUNTIME = ROOT / "definitions" / "runtime"
PASSWD = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
GROUP = "root:x:0:\nnogroup:x:65534:\n"
CONF, KEY, MOTD = "/etc/site.conf", "/etc/munge/munge.key", "/etc/motd"


@pytest.fixture
def vm(need: Callable[[str], str]) -> Iterator[Vm]:
    folder = Path(tempfile.mkdtemp(prefix="sms-vm-"))
    made = Vm(folder, nginx=need("nginx"))
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder)


def put(vm: Vm, path: str, data: bytes, **details: Any) -> dict[str, Any]:
    """Make a content the newest version of a master file."""
    digest = hashlib.sha256(data).hexdigest()
    vm.admin.send(f"/sms/v1/blobs/{digest}", io.BytesIO(data), len(data))
    done: dict[str, Any] = vm.admin.request("PUT", f"/sms/v1/files{path}", {"sha256": digest, **details})
    return done


class Client:
    """A node, or the services container, in a folder of its own."""

    def __init__(self, vm: Vm, root: Path, name: str, *, interval_s: float = 3600, port: int = 0) -> None:
        self.vm, self.root, self.name = vm, root, name
        self.server = f"https://127.0.0.1:{port or vm.port}"
        for folder in ("etc/sms/tls", "proc", "run/sms", "var/lib/sms", "opt/sms/accounts"):
            (root / folder).mkdir(parents=True)
        for name_, text in (("passwd", PASSWD), ("group", GROUP), ("shadow", "root:*:1::::::\n")):
            (root / "etc" / name_).write_text(text)
        self.command_line("")
        config: dict[str, Any] = {"interval_s": interval_s, "node": name != "services"}
        if name == "services":
            config["server"] = self.server + "/sms/v1/sync"
            usual = {"run": ["true"], "user": "root", "setup": "", "needs": [], "sync": [CONF]}
            (root / "etc/sms/services.json").write_text(json.dumps({"services": {"slurmctld": usual}}))
            for file in ("passwd", "group"):
                shutil.copy(root / "etc" / file, root / "opt/sms/accounts")
        (root / "etc/sms/filesync.json").write_text(json.dumps(config))
        self.process: subprocess.Popen[bytes] | None = None

    def command_line(self, token: str) -> None:
        words = f"quiet sms.server={self.server} sms.node={self.name} sms.token={token}\n"
        (self.root / "proc/cmdline").write_text(words)

    def trust(self) -> Client:
        """A certificate without the way to it."""
        if self.name == "services":
            pair = issue_client(self.vm.ca, "services", "services")
            self.vm.trust(self.root, "etc/sms/tls", pair.certificate, pair.key)
        else:
            key = ec.generate_private_key(ec.SECP256R1())
            pem = key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            chain = issue_node(self.vm.tls, self.name, key.public_key(), uuid="").encode()
            self.vm.trust(self.root, "run/sms/tls", chain, pem)
        return self

    def run(self, program: str, *argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(RUNTIME / program), *argv]
        environment = client_environment(self.root)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def once(self) -> subprocess.CompletedProcess[str]:
        return self.run("sms-filesync", "--once")

    def start(self) -> None:
        command = [sys.executable, str(RUNTIME / "sms-filesync")]
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env=client_environment(self.root), stdout=log, stderr=log)

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def read(self, path: str) -> bytes | None:
        file = Path(f"{self.root}{path}")
        return file.read_bytes() if file.exists() else None

    def wait_server(self, *, there: bool) -> None:
        """Until it reports that its server answers, or that it does not."""
        for _ in range(800):
            status = json.loads(self.read("/run/sms/filesync.json") or b"{}")
            if status and status["detail"].startswith(self.server) != there:
                return
            time.sleep(0.05)
        pytest.fail(f"{self.name}: its server is not {there=}: {(self.root / 'log').read_text()}")

    def wait_for(self, path: str, data: bytes | None) -> None:
        for _ in range(600):
            if self.read(path) == data:
                return
            time.sleep(0.05)
        log = (self.root / "log").read_text() if (self.root / "log").exists() else ""
        pytest.fail(f"{self.name} has {self.read(path)!r} in {path}, not {data!r}\n{log}\n{self.vm.said()}")


@pytest.fixture
def clients(vm: Vm, tmp_path: Path) -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def make(name: str, **options: Any) -> Client:
        made.append(Client(vm, tmp_path / name, name, **options).trust())
        return made[-1]

    yield make
    for client in made:
        client.stop()


def report(vm: Vm, name: str) -> dict[str, Any]:
    every = vm.admin.request("GET", "/sms/v1/sync/reports")["clients"]
    found: dict[str, Any] = next(each for each in every if each["client"] == name)
    return found


def test_what_changes_reaches_everybody_within_one_look(vm: Vm, clients: Callable[..., Client]) -> None:
    vm.add_node("node1", "127.0.0.1")
    vm.add_node("node2", "127.0.0.2", groups=("gpu",))
    vm.start()
    put(vm, CONF, b"ClusterName=one\n", services=True)
    put(vm, KEY, b"0123456789abcdef", mode="0400")
    put(vm, MOTD, b"{{ node.name }} at {{ node.address }} of {{ cluster }}\n", template=True, services=True)
    put(vm, "/etc/gpu.conf", b"gpu\n", groups=["gpu"])
    put(vm, "/etc/passwd", b"root:x:0:0::/:/bin/evil\nalice:x:2001:2001::/:/bin/sh\n", services=True)
    one, container = (clients(name, interval_s=0.5) for name in ("node1", "services"))
    relay = Cutting(vm.port, "127.0.0.2")
    two = clients("node2", interval_s=0.5, port=relay.port)
    for client in (one, two, container):
        client.start()
    for client in (one, two, container):
        client.wait_for(CONF, b"ClusterName=one\n")
        client.wait_for("/etc/passwd", PASSWD.encode() + b"alice:x:2001:2001::/:/bin/sh\n")
    one.wait_for(MOTD, b"node1 at 127.0.0.1 of test\n")
    two.wait_for(MOTD, b"node2 at 127.0.0.2 of test\n")
    two.wait_for("/etc/gpu.conf", b"gpu\n")
    assert one.read("/etc/gpu.conf") is None
    assert container.read(KEY) is None, "the container takes what its services ask for, and no more"
    assert stat.S_IMODE((one.root / KEY[1:]).stat().st_mode) == 0o400
    assert put(vm, CONF, b"ClusterName=two\n", services=True)["version"] == 2
    assert put(vm, CONF, b"ClusterName=two\n", services=True)["changed"] is False
    for client in (one, two, container):
        client.wait_for(CONF, b"ClusterName=two\n")
    vm.stop()
    time.sleep(1.2)
    assert all(client.process and client.process.poll() is None for client in (one, two, container))
    assert one.read(CONF) == b"ClusterName=two\n", "with the VM switched off all stays as it is"
    relay.listener.close()


def test_a_push_wakes_everybody_and_tells_who_has_what(vm: Vm, clients: Callable[..., Client]) -> None:
    vm.add_node("node1", "127.0.0.1")
    vm.start()
    put(vm, CONF, b"ClusterName=one\n", services=True)
    one, container = clients("node1"), clients("services")  # they look once in an hour
    for client in (one, container):
        client.start()
        client.wait_for(CONF, b"ClusterName=one\n")
    put(vm, CONF, b"ClusterName=two\n", services=True)
    assert report(vm, "node1")["missing"] == [CONF]
    for _ in range(200):
        if vm.admin.request("POST", "/sms/v1/sync/push")["waiting"] == 2:
            break
        time.sleep(0.05)
    for client in (one, container):
        client.wait_for(CONF, b"ClusterName=two\n")
    for _ in range(200):
        reported = [report(vm, name) for name in ("node1", "services")]
        if not any(each["missing"] for each in reported):
            break
        time.sleep(0.05)
    assert [each["missing"] for each in reported] == [[], []]
    assert reported[0]["has"][CONF]["sha256"] == hashlib.sha256(b"ClusterName=two\n").hexdigest()
    vm.admin.request("POST", "/sms/v1/sync/rollback", {"path": CONF})
    assert one.once().returncode == 0
    assert one.read(CONF) == b"ClusterName=one\n"


def test_clients_come_back_with_the_server(vm: Vm, clients: Callable[..., Client]) -> None:
    vm.add_node("node1", "127.0.0.1")
    vm.start()
    put(vm, CONF, b"ClusterName=one\n", services=True)
    both = [clients(name) for name in ("node1", "services")]  # they look once in an hour
    for client in both:
        client.start()
        client.wait_for(CONF, b"ClusterName=one\n")
    vm.stop()
    for client in both:
        client.wait_server(there=False)
    vm.start()
    for client in both:
        client.wait_server(there=True)
    put(vm, CONF, b"ClusterName=two\n", services=True)
    vm.admin.request("POST", "/sms/v1/sync/push")
    for client in both:
        client.wait_for(CONF, b"ClusterName=two\n")


class Cutting:
    """Stands before the server; connects to it from an address, and cuts each connection off after so many bytes."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        self.target, self.address, self.limit = port, address, 1 << 40
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client = self.listener.accept()[0]
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target), source_address=(self.address, 0))
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._carry, args=(client, server, 1 << 40), daemon=True).start()
            threading.Thread(target=self._carry, args=(server, client, self.limit), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, limit: int) -> None:
        try:
            while limit > 0 and (data := source.recv(65536)):
                target.sendall(data[:limit])
                limit -= len(data)
        except OSError:
            pass
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def test_an_interrupted_transfer_keeps_the_old_file(vm: Vm, clients: Callable[..., Client]) -> None:
    vm.add_node("node1", "127.0.0.1")
    vm.start()
    before, after = os.urandom(2 << 20), os.urandom(2 << 20)
    put(vm, "/opt/site/big", before)
    cutting = Cutting(vm.port)
    node = clients("node1", port=cutting.port)
    assert node.once().returncode == 0
    put(vm, "/opt/site/big", after)
    put(vm, "/opt/site/small", b"small\n")
    cutting.limit = 1 << 20
    done = node.once()
    assert done.returncode == 1, done.stdout
    assert node.read("/opt/site/big") == before
    left = sorted(path.name for path in (node.root / "opt/site").iterdir())
    assert left == ["big", "small"], "nothing half written is left, and nothing else is held up"
    cutting.limit = 1 << 40
    assert node.run("sms-filesync", "--once", "--wait", "20").returncode == 0
    assert node.read("/opt/site/big") == after
    assert node.read("/opt/site/small") == b"small\n"
    cutting.listener.close()


def test_what_is_removed_at_the_master_goes_everywhere(vm: Vm, clients: Callable[..., Client]) -> None:
    vm.add_node("node1", "127.0.0.1")
    vm.start()
    node = clients("node1")
    (node.root / "etc/issue").write_bytes(b"of the image\n")
    (node.root / "etc/mine").write_bytes(b"never of the server's\n")
    for path in (MOTD, "/etc/issue", "/etc/edited", "/etc/passwd"):
        put(vm, path, b"alice:x:2001:2001::/:/bin/sh\n")
    vm.admin.request("POST", "/sms/v1/sync/push")
    assert node.once().returncode == 0
    assert node.read("/etc/issue") == b"alice:x:2001:2001::/:/bin/sh\n"
    (node.root / "etc/edited").write_bytes(b"by hand\n")
    for path in (MOTD, "/etc/issue", "/etc/edited", "/etc/passwd"):
        vm.admin.request("DELETE", f"/sms/v1/files{path}")
    assert node.once().returncode == 0
    assert node.read(MOTD) is None
    assert node.read("/etc/issue") == b"of the image\n"
    assert node.read("/etc/edited") == b"by hand\n"
    assert node.read("/etc/mine") == b"never of the server's\n"
    assert b"alice" in (node.read("/etc/passwd") or b""), "users are never taken away with a file"
    assert report(vm, "node1")["left"] == ["/etc/passwd"]
    # A VM that has lost its disk has no files at all: that removes nothing.
    put(vm, MOTD, b"back\n")
    assert node.once().returncode == 0
    vm.stop()
    for file in vm.state.glob("inventory.db*"):
        file.unlink()
    vm.add_node("node1", "127.0.0.1")
    vm.start()
    done = node.once()
    assert (done.returncode, node.read(MOTD)) == (0, b"back\n"), done.stdout
    # Nor while it is filled again, until the first push has ended.
    put(vm, "/etc/other", b"first of many\n")
    assert node.once().returncode == 0
    assert (node.read(MOTD), node.read("/etc/other")) == (b"back\n", b"first of many\n")
    vm.admin.request("POST", "/sms/v1/sync/push")
    assert node.once().returncode == 0
    assert node.read(MOTD) is None


def test_a_node_gets_its_certificate_once(vm: Vm, tmp_path: Path, need: Callable[[str], str]) -> None:
    need("openssl")
    vm.add_node("node1", "127.0.0.1")
    vm.add_node("node2", "127.0.0.2")
    vm.start()
    put(vm, MOTD, b"for {{ node.name }}\n", template=True)
    node = Client(vm, tmp_path / "node1", "node1")
    (node.root / "etc/sms/tls/ca.pem").write_bytes((vm.ca / "ca.pem").read_bytes())
    node.command_line("0" * 32)
    assert "status 403" in node.run("sms-enroll").stdout, "a wrong token"
    node.command_line(vm.make_token("node2"))
    assert "status 403" in node.run("sms-enroll").stdout, "the token of a node at another address"
    node.command_line(vm.make_token("node1", token_s=-1))
    assert "status 403" in node.run("sms-enroll").stdout, "a token that has ended"
    token = vm.make_token("node1")
    node.command_line(token)
    done = node.run("sms-enroll")
    assert done.returncode == 0, done.stdout + done.stderr + vm.said()
    for name in ("cert.pem", "key.pem"):
        assert stat.S_IMODE((node.root / "run/sms/tls" / name).stat().st_mode) == 0o600
        assert (node.root / "etc/sms/tls" / name).is_symlink()
    shown = x509.load_pem_x509_certificate((node.root / "run/sms/tls/cert.pem").read_bytes())
    assert shown.subject.rfc4514_string().endswith(",CN=node1,OU=node"), "behind the UUID"
    assert (shown.not_valid_after_utc - shown.not_valid_before_utc).days <= 8
    assert "status 403" in node.run("sms-enroll").stdout, "a token that has been used"
    assert node.once().returncode == 0
    assert node.read(MOTD) == b"for node1\n"
    before = (node.root / "run/sms/tls/cert.pem").read_bytes()
    assert node.run("sms-enroll", "--renew").returncode == 0
    assert (node.root / "run/sms/tls/cert.pem").read_bytes() != before
    assert node.once().returncode == 0
    assert token not in vm.said()
    assert hashlib.sha256(token.encode()).hexdigest().encode() not in vm.state.joinpath("inventory.db").read_bytes()


def test_no_client_is_mistaken_for_another(vm: Vm, clients: Callable[..., Client], tmp_path: Path) -> None:
    vm.add_node("node1", "127.0.0.1")
    vm.start()
    put(vm, KEY, b"secret of nodes\n", nodes=["node2"])
    put(vm, MOTD, b"hello\n")
    node = clients("node1")
    digest = hashlib.sha256(b"secret of nodes\n").hexdigest()
    body = json.dumps({"token": vm.make_token("node1"), "csr": ""}).encode()

    def ask(method: str, path: str, tls: Path | None = None, ca: Path | None = None, data: bytes = b"") -> int:
        context = ssl.create_default_context(cafile=str(ca or vm.ca / "ca.pem"))
        if tls:
            context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
        link = http.client.HTTPSConnection("127.0.0.1", vm.port, timeout=20, context=context)
        link.request(method, path, data or None, {"Content-Type": "application/json"} if data else {})
        return link.getresponse().status

    own = node.root / "run/sms/tls"
    assert ask("GET", "/sms/v1/sync/manifest.json", own) == 200
    assert ask("GET", f"/sms/v1/sync/files/{digest}", own) == 404, "of another node"
    assert ask("GET", "/sms/v1/sync/manifest.json") == 401, "without a certificate"
    assert ask("GET", "/sms/v1/files", own) == 403
    assert ask("PUT", f"/sms/v1/blobs/{digest}", own) == 403
    assert ask("POST", "/sms/v1/sync/push", own) == 403
    assert ask("POST", "/sms/v1/enrol", data=body) == 403, "from a port that anybody may have"
    # Headers that say so are the web server's alone.
    plain = http.client.HTTPConnection("127.0.0.1", vm.plain, timeout=20)
    headers = {"X-SMS-Scheme": "https", "X-SMS-Verify": "SUCCESS", "X-SMS-Subject": "CN=admin,OU=admin"}
    plain.request("GET", "/sms/v1/sync/manifest.json", headers=headers)
    assert plain.getresponse().status == 404
    # Another authority's certificates are accepted neither here nor by a client.
    make_ca(tmp_path / "foreign")
    pair = issue_client(tmp_path / "foreign", "admin", "admin")
    foreign = tmp_path / "shown"
    vm.trust(foreign, "own", pair.certificate, pair.key)
    assert ask("GET", "/sms/v1/files", foreign / "own") == 400
    shutil.copy(tmp_path / "foreign" / "ca.pem", node.root / "etc/sms/tls/ca.pem")
    done = node.once()
    assert done.returncode == 1
    assert "CERTIFICATE_VERIFY_FAILED" in done.stdout
    assert node.read(MOTD) is None


def test_a_disk_that_is_full_loses_nothing(vm: Vm, clients: Callable[..., Client]) -> None:
    vm.add_node("node1", "127.0.0.1")
    folder = vm.state / "files"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=67m,mode=755", "sms-test", str(folder)], check=True)
    try:
        vm.start()
        put(vm, MOTD, b"good\n")
        with pytest.raises(SmsError, match="the VM's disk is full"):
            put(vm, "/opt/site/big", os.urandom(4 << 20))
        (folder / "filler").write_bytes(bytes(66 << 20))
        with pytest.raises(SmsError, match="disk"):
            put(vm, MOTD, b"worse\n")
        node = clients("node1")
        assert node.once().returncode == 0
        assert node.read(MOTD) == b"good\n"
        assert [path.name for path in folder.glob("??/.*")] == []
    finally:
        vm.stop()
        subprocess.run(["umount", str(folder)], check=True)


def node_address(number: int) -> str:
    return f"127.2.{number // 200}.{number % 200 + 1}"


def node_context(vm: Vm, number: int) -> ssl.SSLContext:
    """TLS as a node does, with a certificate and a key of its own."""
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files = vm.folder / "shown.pem", vm.folder / "shown.key"
    files[0].write_text(issue_node(vm.tls, f"node{number}", key.public_key(), uuid=""))
    files[1].write_bytes(pem)
    context = ssl.create_default_context(cafile=str(vm.ca / "ca.pem"))
    context.load_cert_chain(*files)
    return context


async def wait_all(vm: Vm, many: int) -> int:
    """So many nodes that wait for a push, and then one; how many received it."""
    question = b"GET /sms/v1/sync/wait?after=0&seconds=60 HTTP/1.1\r\nHost: vm\r\nConnection: close\r\n\r\n"

    # All before the first connection, which would otherwise be idle for too long.
    contexts = [node_context(vm, number) for number in range(many)]

    async def wait(number: int) -> bytes:
        place: Any = {"ssl": contexts[number], "local_addr": (node_address(number), 0)}
        reader, writer = await asyncio.open_connection("127.0.0.1", vm.port, **place)
        writer.write(question)
        answer = await reader.read()
        writer.close()
        return answer

    waiting = [asyncio.create_task(wait(number)) for number in range(many)]
    for _ in range(300):
        await asyncio.sleep(0.1)
        done = await asyncio.to_thread(vm.admin.request, "GET", "/sms/v1/sync/reports")
        if done["waiting"] >= many:
            break
    await asyncio.to_thread(vm.admin.request, "POST", "/sms/v1/sync/push")
    return sum(b'{"push":1}' in answer for answer in await asyncio.gather(*waiting))


def test_450_clients_wait_at_once(vm: Vm) -> None:
    vm.add_nodes({f"node{number}": node_address(number) for number in range(450)})
    vm.start()
    assert asyncio.run(wait_all(vm, 450)) == 450


def test_a_client_that_is_gone_waits_no_more(vm: Vm, clients: Callable[..., Client]) -> None:
    vm.add_node("node1", "127.0.0.1")
    vm.start()
    put(vm, MOTD, b"x\n")
    node = clients("node1")
    node.start()
    node.wait_for(MOTD, b"x\n")
    assert node.process
    node.process.send_signal(signal.SIGKILL)
    wait_until(lambda: vm.admin.request("GET", "/sms/v1/sync/reports")["waiting"] == 0, "nothing waits", 30)


def test_a_service_that_ends_lets_those_go_that_wait(vm: Vm, clients: Callable[..., Client]) -> None:
    vm.add_node("node1", "127.0.0.1")
    vm.start()
    put(vm, MOTD, b"x\n")
    node = clients("node1")
    node.start()
    node.wait_for(MOTD, b"x\n")
    wait_until(lambda: vm.admin.request("GET", "/sms/v1/sync/reports")["waiting"], "it waits")
    provd = vm.processes[0]
    provd.send_signal(signal.SIGTERM)
    provd.wait(timeout=30)
