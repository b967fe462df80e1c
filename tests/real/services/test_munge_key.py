"""`sms apply` and `sms files push` where the VM gives files to nodes: munge key, slurm.conf, programs, accounts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from appliance.lab.layout import PROVISIONING
from appliance.operations.lab import demo
from appliance.plan.nodes.files import CONF
from appliance.provision.enrol import issue_node
from tests.places import ROOT
from tests.provisioning import Vm
from tests.real.conftest import NODES, Playground
from tests.waiting import wait_until

pytestmark = pytest.mark.real
VM = "10.77.0.2"
KEY = "/etc/munge/munge.key"
NEXT = "/var/lib/munge/munge.key.next"
LEFT = (
    "/etc/slurm/*.conf /etc/slurm/prolog.sh /etc/sms/filesync.json /etc/sms/tls /run/sms/tls /opt/sms/bin "
    "/usr/local/bin/systemctl"
)
"""What a client and its server leave on a node."""
SYSTEMCTL = "#!/bin/sh\nexec supervisorctl -c /lab/supervisord.conf restart munged\n"
"""Nodes of the lab have no systemd. The client asks it to restart munged, and nothing else in these tests."""


@dataclass
class Provisioned:
    """The lab with the VM's server, without the machine; nodes run its client. ``clients``: what ends each."""

    lab: Playground
    site: str
    vm: Vm
    clients: dict[str, ExitStack] = field(default_factory=dict)

    def sms(self, *words: str, ok: tuple[int, ...] = (0,)) -> Any:
        """The JSON of a verb with this site."""
        return json.loads(self.lab.sms("--site", self.site, "-q", *words, "--json", ok=ok).stdout)

    def digest(self, host: str, path: str = KEY) -> str:
        """SHA-256 of a key on a node, or in the container; empty if it is not there."""
        words = ("sha256sum", path)
        done = self.lab.sms("exec", "--", *words) if host == "" else self.lab.host(host).run(*words, ok=None)
        return done.text.partition(" ")[0]

    def everywhere(self) -> set[str]:
        """The keys of nodes and container."""
        return {self.digest(host) for host in ("", *self.lab.lab.nodes)}


@pytest.fixture
def provisioned(running: Playground, need: Callable[[str], str]) -> Iterator[Provisioned]:
    server, tls = running.host("host-b"), running.lab.etc / "tls"
    folder = Path(tempfile.mkdtemp(prefix="sms-vm-"))
    old = (running.lab.etc / "keys" / "munge.key").read_bytes()

    def change(document: dict[str, Any]) -> None:
        document["provisioning"] = {"address": f"{VM}/24", "mac": "02:00:0a:4d:00:02"}
        document["filesync"] = {"interval_s": 3600}

    addresses = (server, f"{VM}/24"), (running.host("host-a"), "10.77.0.9/24")
    for host, address in addresses:
        host.run("ip", "address", "add", address, "dev", "br-prov")
    network = ("nsenter", "-t", str(server.pid), "-n", "--")
    vm = Vm(folder, nginx=need("nginx"), address=VM, prefix=network, cluster="lab")
    found = Provisioned(running, running.variant("provisioned.yaml", change), vm)
    shutil.copytree(vm.ca, tls)
    try:
        nodes = [host for host in running.lab.layout.hosts if host.name in running.lab.nodes]
        vm.add_nodes({host.name: host.addresses[PROVISIONING] for host in nodes})
        vm.start(lambda: found.sms("files", "list"))
        with ExitStack() as stack:
            for name in running.lab.nodes:
                found.clients[name] = stack.enter_context(ExitStack())
                found.clients[name].enter_context(client(running, vm, name))
            found.sms("apply", "--force")
            found.sms("files", "push")
            assert found.everywhere() == {hashlib.sha256(old).hexdigest()}
            yield found
            (running.lab.etc / "keys" / "munge.key").write_bytes(old)
            found.sms("apply", "--force", ok=(0, 4))
    finally:
        (running.lab.etc / "keys" / "munge.key").write_bytes(old)
        running.sms("apply", "--force")
        vm.stop()
        shutil.rmtree(tls)
        shutil.rmtree(folder)
        for host, address in addresses:
            host.run("ip", "address", "del", address, "dev", "br-prov")


@contextmanager
def client(running: Playground, vm: Vm, name: str) -> Iterator[None]:
    """A node's client of the VM, with a certificate, and what it needs, as an image brings it."""
    node, private = running.host(name), ec.generate_private_key(ec.SECP256R1())
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    config = {"server": f"https://{VM}:8443/sms/v1/sync", "interval_s": 3600, "node": True}
    programs = [one for one in (ROOT / "definitions/runtime").iterdir() if one.is_file()]
    files = {f"/opt/sms/bin/{one.name}": one.read_bytes() for one in programs}
    files |= {
        "/etc/sms/filesync.json": json.dumps(config).encode(),
        "/etc/sms/tls/ca.pem": (vm.ca / "ca.pem").read_bytes(),
        "/run/sms/tls/cert.pem": issue_node(vm.tls, name, private.public_key(), uuid="").encode(),
        "/run/sms/tls/key.pem": pem,
        "/usr/local/bin/systemctl": SYSTEMCTL.encode(),
    }
    node.run("mkdir", "-p", *sorted({path.rpartition("/")[0] for path in files}))
    for path, data in files.items():
        node.write(path, data, mode=0o755)
    with node.hold("python3", "-u", "/opt/sms/bin/sms-filesync"):
        try:
            yield
        finally:
            node.run("pkill", "-f", "sms-filesync", ok=None)
            # Slurm's commands of later tests would read the slurm.conf that was pushed, not that of the controller.
            node.run("sh", "-c", f"rm -rf {LEFT}")


def new_key(found: Provisioned) -> str:
    """Write another key into the site's folder; return its digest."""
    key = os.urandom(1024)
    (found.lab.lab.etc / "keys" / "munge.key").write_bytes(key)
    return hashlib.sha256(key).hexdigest()


def test_nodes_and_container_swap_their_key(provisioned: Provisioned) -> None:
    """A job goes on, and another one starts on the other nodes at once. A push alone leaves the key alone."""
    node = provisioned.lab.host("node1")
    demo.wait_idle(node, NODES)
    job = demo.as_alice(node, "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 300")
    wait_until(lambda: node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING", "the job")
    digest = new_key(provisioned)
    assert digest not in provisioned.everywhere()
    pushed = provisioned.sms("files", "push", ok=(0, 4))
    assert {one["path"]: one["what"] for one in pushed["differences"]}[KEY] == "held"
    assert digest not in provisioned.everywhere()
    assert provisioned.sms("apply", "-n")["refused"] == []
    done = provisioned.sms("apply")
    assert done["unusable"] == [] and done["changed"] == [KEY]
    others = demo.as_alice(node, "srun", f"-N{NODES - 1}", "hostname").splitlines()
    assert len(set(others)) == NODES - 1
    assert provisioned.everywhere() == {digest}
    assert node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING"
    wait_until(lambda: provisioned.digest("node2", NEXT) == "", "the copy beside it is removed")
    node.run("scancel", job)


def test_what_the_vm_has_costs_no_job(provisioned: Provisioned) -> None:
    """Neither a push of a site file that `sms apply` refuses, nor a VM that is hostile or of an old snapshot."""
    lab, vm = provisioned.lab, provisioned.vm
    node = lab.host("node1")
    demo.wait_idle(node, NODES)
    job = demo.as_alice(node, "sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 600")
    wait_until(lambda: node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING", "the job")
    conf, stored = provisioned.digest("", CONF), provisioned.digest("node1", CONF)
    document = yaml.safe_load((lab.lab.etc / "provisioned.yaml").read_text())
    before = document["slurm"]["partitions"]
    passwd = lab.lab.etc / "passwd"

    def write(**slurm: Any) -> None:
        document["slurm"].update(slurm)
        (lab.lab.etc / "provisioned.yaml").write_text(yaml.safe_dump(document))

    write(partitions=[{"name": "night", "default": True}])
    assert "refused" in provisioned.sms("apply", "-n", ok=(3,))
    pushed = provisioned.sms("files", "push", ok=(0, 4))
    assert {one["path"]: one["what"] for one in pushed["differences"]}[CONF] == "held"
    for words in (("rollback", CONF), ("add", CONF, "/etc/hostname"), ("remove", CONF, "--yes")):
        lab.sms("--site", provisioned.site, "files", *words, ok=(3,))
    old = passwd.read_bytes()
    passwd.write_bytes(b"")
    assert "refused" in provisioned.sms("files", "push", "-n", ok=(3,))
    lab.sms("--site", provisioned.site, "files", "push", ok=(3,))
    passwd.write_bytes(old)
    # The VM itself
    evil = b"ClusterName=lab\nSlurmctldHost=x\n"
    digest = hashlib.sha256(evil).hexdigest()
    request(vm, "PUT", f"blobs/{digest}", evil, "application/octet-stream")
    request(vm, "PUT", f"files{CONF}", json.dumps({"sha256": digest, "services": True, "nodes": ["none"]}).encode())
    number = request(vm, "POST", "sync/push")["push"]
    wait_until(lambda: reported(vm, "services")["push"] >= number, "the container has seen it")
    assert reported(vm, "services")["missing"] == [CONF]
    assert provisioned.digest("", CONF) == conf
    assert node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING"
    assert lab.sms("exec", "--", "getent", "passwd", "alice").stdout
    # Programs first, then the setting.
    (lab.lab.etc / "prolog.sh").write_text("#!/bin/sh\n")
    write(partitions=before, files={"prolog.sh": "prolog.sh"}, extra=["Prolog=/etc/slurm/prolog.sh"])
    lab.sms("--site", provisioned.site, "apply", ok=(3,))
    pushed = provisioned.sms("files", "push", ok=(0, 4))
    found = {one["path"]: one["what"] for one in pushed["differences"]}
    assert (found[CONF], found["/etc/slurm/prolog.sh"]) == ("held", "add")
    assert provisioned.sms("apply")["unusable"] == []
    assert provisioned.sms("files", "push")["clients"]
    assert provisioned.digest("", CONF) == provisioned.digest("node1", CONF) not in (conf, stored)
    assert demo.as_alice(node, "srun", f"-N{NODES - 1}", "hostname")
    assert node.run("squeue", "-h", "-j", job, "-o", "%T").text == "RUNNING"
    node.run("scancel", job)
    write(partitions=before, files={}, extra=[])
    provisioned.sms("apply")


def reported(vm: Vm, name: str) -> dict[str, Any]:
    """The VM's view of a client."""
    return next(dict(one) for one in request(vm, "GET", "sync/reports")["clients"] if one["client"] == name)


def request(vm: Vm, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> Any:
    """What root in the VM can do: with its interface, from its network."""
    tls = ("--cacert", f"{vm.ca}/ca.pem", "--cert", f"{vm.ca}/admin.pem", "--key", f"{vm.ca}/admin.key")
    sent = ("-H", f"Content-Type: {kind}", "--data-binary", "@-") if body else ()
    argv = [*vm.prefix, "curl", "-sSf", "-X", method, *tls, *sent, f"{vm.url}/sms/v1/{path}"]
    return json.loads(subprocess.run(argv, input=body, capture_output=True, check=True, timeout=60).stdout or b"null")


@pytest.mark.full
def test_a_vm_that_hangs_holds_up_nothing(provisioned: Provisioned) -> None:
    """It accepts connections, and answers none: what needs it ends with a message, and all else goes on."""
    node, own = provisioned.lab.host("node1"), [process.pid for process in provisioned.vm.processes]
    children = subprocess.run(["pgrep", "-P", ",".join(map(str, own))], capture_output=True, text=True, check=True)
    stopped = [*own, *map(int, children.stdout.split())]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: provisioned.lab.status()["healthy"], "health, at all times", 1)
        assert {service["name"]: service["ok"] for service in provisioned.lab.status()["services"]}["filesync"]
        pushed = provisioned.lab.sms("--site", provisioned.site, "files", "push", ok=(1, 3)).stderr
        assert b"does not respond" in pushed, pushed
        demo.run_job(node)
        assert "node2" in demo.syslog_arrives(provisioned.lab.lab, provisioned.lab.host("node2"))
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert provisioned.sms("files", "push", ok=(0, 4))["differences"] is not None


@pytest.mark.full
def test_a_node_that_takes_no_key(provisioned: Provisioned) -> None:
    """Refused while it takes jobs, and nothing is changed; with --force it is drained, and named."""
    before, last = provisioned.everywhere(), provisioned.lab.lab.nodes[-1]
    provisioned.clients[last].close()
    digest = new_key(provisioned)
    provisioned.lab.sms("--site", provisioned.site, "apply", ok=(3,))
    assert provisioned.everywhere() == before
    assert last in provisioned.sms("apply", "--force", ok=(4,))["unusable"][0]
    node = provisioned.lab.host("node1")
    assert "drain" in node.run("sinfo", "-h", "-n", last, "-o", "%T").text
    assert provisioned.digest("") == digest and {provisioned.digest(last)} == before
    assert demo.as_alice(node, "srun", f"-N{NODES - 1}", "hostname")
    node.run("scontrol", "update", f"NodeName={last}", "State=RESUME")
