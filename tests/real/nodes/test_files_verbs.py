"""``sms files`` and ``sms user`` as an administrator uses them, against the VM's server in a network namespace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.operations.site.init import read_profile
from tests.places import ROOT
from tests.provisioning import Vm, client_environment

pytestmark = [pytest.mark.real, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a network namespace")]

RUNTIME = ROOT / "definitions" / "runtime"
ADDRESS, NODE_ADDRESS = "10.77.0.2", "10.77.0.107"
MAC = "02:00:0a:4d:00:6b"
SITE = """
provisioning:
  address: 10.77.0.2/24
  mac: "02:00:0a:4d:00:02"
  files:
    - {path: /etc/motd, source: motd.j2, template: true, services: true}
accounts: {passwd: passwd, group: group}
secrets: {munge_key: munge.key}
"""


class Desk:
    """An administrator's folder, beside a VM."""

    def __init__(self, folder: Path, nginx: str, holder: int) -> None:
        self.prefix = ("nsenter", "-t", str(holder), "-n")
        self.vm = Vm(folder, nginx=nginx, address=ADDRESS, prefix=self.prefix, cluster="lab")
        self.folder = folder
        (folder / "sms.yaml").write_text(read_profile("lab") + SITE)
        (folder / "motd.j2").write_text("{{ node.name }} of {{ cluster }}\n")
        (folder / "passwd").write_text("alice:x:2001:2001::/home/alice:/bin/sh\n")
        (folder / "group").write_text("alice:x:2001:\n")
        (folder / "munge.key").write_bytes(os.urandom(64))
        (folder / "munge.key").chmod(0o600)

    def sms(self, *argv: str, status: int = 0) -> str:
        command = [
            *self.prefix,
            sys.executable,
            "-m",
            "appliance",
            "-q",
            "--site",
            str(self.folder / "sms.yaml"),
            *argv,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == status, (
            f"{argv}: {done.returncode}\n{done.stdout}{done.stderr}\n{self.vm.said()[-2000:]}"
        )
        return done.stdout + ("" if "--json" in argv else done.stderr)

    def client(self, root: Path) -> subprocess.Popen[bytes]:
        """The services container's client, which looks once in an hour."""
        for folder in ("etc/sms/tls", "run/sms", "var/lib/sms", "opt/sms/accounts"):
            (root / folder).mkdir(parents=True)
        for name, text in (("passwd", "root:x:0:0::/root:/bin/sh\n"), ("group", "root:x:0:\n"), ("shadow", "")):
            for place in ("etc", "opt/sms/accounts"):
                (root / place / name).write_text(text)
        tls = self.vm.ca
        self.vm.trust(root, "etc/sms/tls", (tls / "services.pem").read_bytes(), (tls / "services.key").read_bytes())
        config = {"server": f"https://{ADDRESS}:8443/sms/v1/sync", "interval_s": 3600}
        (root / "etc/sms/filesync.json").write_text(json.dumps(config))
        sync = {"slurmctld": {"sync": ["/etc/slurm/slurm.conf", "/etc/motd"]}}
        (root / "etc/sms/services.json").write_text(json.dumps({"services": sync}))
        return subprocess.Popen(
            [*self.prefix, sys.executable, str(RUNTIME / "sms-filesync")],
            env=client_environment(root),
            stdout=subprocess.DEVNULL,
        )


@pytest.fixture
def holders() -> Iterator[list[int]]:
    """Two network namespaces with a cable between them: the VM's, and a node's."""
    started = [
        subprocess.Popen(["unshare", "--net", "sh", "-c", "echo up; exec sleep 600"], stdout=subprocess.PIPE)
        for _ in "ab"
    ]
    try:
        for each in started:
            assert each.stdout
            assert each.stdout.readline() == b"up\n"
        vm, node = (each.pid for each in started)
        inside(vm, f"ip link add vm0 type veth peer name node0 address {MAC} netns {node}")
        for holder, port, address in ((vm, "vm0", ADDRESS), (node, "node0", NODE_ADDRESS)):
            inside(holder, f"ip link set lo up && ip addr add {address}/24 dev {port} && ip link set {port} up")
        yield [vm, node]
    finally:
        for each in started:
            each.kill()
            each.wait()


def inside(holder: int, script: str) -> None:
    subprocess.run(["nsenter", "-t", str(holder), "-n", "sh", "-c", script], check=True, timeout=30)


@pytest.fixture
def desk(need: Callable[[str], str], holders: list[int]) -> Iterator[Desk]:
    folder = Path(tempfile.mkdtemp(prefix="sms-vm-"))
    made = Desk(folder, need("nginx"), holders[0])
    try:
        yield made
    finally:
        made.vm.stop()
        shutil.rmtree(folder)


def test_a_node_that_boots_gets_its_files(
    desk: Desk, holders: list[int], tmp_path: Path, need: Callable[[str], str]
) -> None:
    """The boot script's token, the certificate, the files; and a token that is spent is replaced."""
    need("openssl")
    need("curl")
    desk.vm.start(lambda: desk.sms("files", "list"))
    desk.sms("node", "add", "node7", "--mac", MAC, "--address", NODE_ADDRESS)
    tls = ("--cacert", f"{desk.vm.ca}/ca.pem", "--cert", f"{desk.vm.ca}/admin.pem", "--key", f"{desk.vm.ca}/admin.key")
    image = {"kernel": f"http://{ADDRESS}/vmlinuz", "initrd": f"http://{ADDRESS}/initrd", "params": "sms.image=x"}
    boot = json.dumps({"hosts": ["node7"], **image})
    url = f"https://{ADDRESS}:8443/boot/v1/bootparameters"
    argv = [*desk.prefix, "curl", "-sSf", *tls, "-H", "Content-Type: application/json", "-d", boot, url]
    subprocess.run(argv, check=True, timeout=60)
    desk.sms("files", "add", "/etc/motd", str(desk.folder / "motd.j2"), "--template", "--later")
    for folder in ("etc/sms/tls", "run/sms", "var/lib/sms", "proc"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("passwd", "group", "shadow"):
        (tmp_path / "etc" / name).write_text("root:x:0:0::/root:/bin/sh\n" if name == "passwd" else "")
    shutil.copy(desk.vm.ca / "ca.pem", tmp_path / "etc/sms/tls")
    words = f"sms.server=https://{ADDRESS}:8443 sms.node=node7 sms.token={'0' * 32} BOOTIF=01-{MAC.replace(':', '-')}"
    (tmp_path / "proc/cmdline").write_text(words)
    node = ("nsenter", "-t", str(holders[1]), "-n")

    def run(*argv: str, status: int = 0) -> str:
        done = subprocess.run(
            [*node, sys.executable, str(RUNTIME / argv[0]), *argv[1:]],
            env=client_environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr + desk.vm.said()[-2000:]
        return done.stdout

    run("sms-enroll", "--wait", "30")
    run("sms-filesync", "--once")
    assert (tmp_path / "etc/motd").read_text() == "node7 of lab\n"
    shown = json.loads(desk.sms("node", "show", "node7", "--json"))
    assert shown["certificate"]["accepted"] and shown["certificate"]["mac"] == MAC and shown["refused"] == []
    # Its entry is removed and added again: the certificate counts no longer, and it gets another one automatically.
    desk.sms("node", "remove", "node7", "--yes")
    desk.sms("node", "add", "node7", "--mac", MAC, "--address", NODE_ADDRESS)
    subprocess.run(
        [*desk.prefix, "curl", "-sSf", *tls, "-H", "Content-Type: application/json", "-d", boot, url], check=True
    )
    assert "another machine had the name node7" in run("sms-filesync", "--once", status=1)
    run("sms-enroll", "--renew")
    run("sms-filesync", "--once")
    # Revoked: refused by the web server, too.
    serial = json.loads(desk.sms("node", "show", "node7", "--json"))["certificate"]["serial"]
    (desk.vm.tls / "revoked.map").write_text(f"{serial} 1;\n")
    assert "it was revoked" in run("sms-filesync", "--once", status=1)
    run("sms-enroll", "--renew")
    run("sms-filesync", "--once")


def differences(said: str) -> dict[str, str]:
    return {one["path"]: one["what"] for one in json.loads(said)["differences"]}


def test_masters_and_users_from_the_command_line(desk: Desk, tmp_path: Path) -> None:
    assert "is it switched off? `sms vm start`" in desk.sms("files", "list", status=3)
    desk.vm.start(lambda: desk.sms("files", "list"))
    every = ["/etc/group", "/etc/motd", "/etc/munge/munge.key", "/etc/passwd", "/etc/slurm/slurm.conf"]
    assert differences(desk.sms("files", "push", "--dry-run", "--json")) == dict.fromkeys(every, "add")
    assert desk.sms("files", "list", "--json").strip() == "[]", "a dry run changes nothing"
    said = desk.sms("files", "push", "--wait", "1s")
    assert [line.split(":")[0] for line in said.splitlines() if line.startswith("+ ")] == [
        f"+ {path}" for path in every
    ]
    assert f"{len(every)} files: {len(every)} uploaded" in said
    check_by_hand(desk)
    look_once(desk)
    desk.sms("files", "push", "--wait", "1s", status=4)
    assert reported(desk.sms("files", "report", "--json"))["state"] == "waits", "it has looked, and is to report"
    client = desk.client(tmp_path / "container")
    try:
        check_push(desk, tmp_path / "container")
        check_failure(desk, tmp_path / "container")
        check_changes(desk, tmp_path / "container")
        check_users(desk, tmp_path / "container")
    finally:
        client.kill()
        client.wait()


def reported(said: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in json.loads(said) if one["client"] == "services")
    return found


def look_once(desk: Desk) -> None:
    """As the container's client begins."""
    tls = desk.vm.ca
    own = ("--cacert", f"{tls}/ca.pem", "--cert", f"{tls}/services.pem", "--key", f"{tls}/services.key")
    url = f"https://{ADDRESS}:8443/sms/v1/sync/manifest.json"
    subprocess.run([*desk.prefix, "curl", "-sSf", "-o", "/dev/null", *own, url], check=True, timeout=60)


def check_failure(desk: Desk, root: Path) -> None:
    """A client that has reported is waited for no longer, whatever it lacks."""
    (root / "etc/motd").unlink()
    (root / "etc/motd").mkdir()
    (root / "etc/motd/in the way").touch()
    before = (desk.folder / "motd.j2").read_text()
    (desk.folder / "motd.j2").write_text("other words\n")
    pushed = json.loads(desk.sms("files", "push", "--wait", "10m", "--json", status=4))
    (found,) = (one for one in pushed["clients"] if one["client"] == "services")
    assert found["state"] == "lacks"
    assert list(found["failed"]) == ["/etc/motd"]
    shutil.rmtree(root / "etc/motd")
    (desk.folder / "motd.j2").write_text(before)
    desk.sms("files", "push", "--wait", "1m")


def check_push(desk: Desk, root: Path) -> None:
    conf = root / "etc/slurm/slurm.conf"
    assert desk.sms("files", "push", "--wait", "10m", status=4) and not conf.exists()
    assert reported(desk.sms("files", "report", "--json"))["missing"] == ["/etc/slurm/slurm.conf"]
    conf.parent.mkdir()  # as `sms apply` does
    conf.write_text(desk.sms("files", "show", "/etc/slurm/slurm.conf", "--content"))
    desk.sms("files", "push", "--wait", "1m")
    assert reported(desk.sms("files", "report", "--json"))["state"] == "has all"
    assert (root / "etc/motd").read_text() == "sms-services of lab\n"
    assert "alice" in (root / "etc/passwd").read_text()
    assert set(differences(desk.sms("files", "push", "--dry-run", "--json")).values()) == {"same"}
    assert "BEGIN" not in desk.sms("files", "list")


def check_changes(desk: Desk, root: Path) -> None:
    (desk.folder / "motd.j2").write_text("{{ node.nmae }}\n")
    said = desk.sms("files", "push", status=3)
    assert "the template /etc/motd fails for" in said
    assert "nmae" in said
    (desk.folder / "motd.j2").write_text("new on {{ node.name }}\n")
    said = desk.sms("files", "push", "--dry-run")
    assert "+new on {{ node.name }}" in said
    assert "~ /etc/motd: content" in said
    desk.sms("files", "push")
    assert (root / "etc/motd").read_text() == "new on sms-services\n"
    desk.sms("files", "rollback", "/etc/motd")
    assert (root / "etc/motd").read_text() == "sms-services of lab\n"
    assert "* " in desk.sms("files", "show", "/etc/motd")
    assert desk.sms("files", "show", "/etc/motd", "--content") == "{{ node.name }} of {{ cluster }}\n"
    assert "standard input is not a terminal" in desk.sms("files", "remove", "/etc/motd", status=3)
    said = desk.sms("files", "remove", "-n", "/etc/motd")
    assert "would be removed from all nodes, services (template); the site file defines it" in said
    assert (root / "etc/motd").exists()
    desk.sms("files", "remove", "/etc/motd", "--yes")
    assert not (root / "etc/motd").exists()
    assert "there is no master file /etc/nothing" in desk.sms("files", "remove", "/etc/nothing", status=3)
    assert "invalid mode" in desk.sms("files", "add", "/etc/x", "sms.yaml", "--mode", "abc", status=2)


def check_by_hand(desk: Desk) -> None:
    """What is added without a place in the site file: what is not named of it stays."""
    path, long = "/etc/site.conf", f"/etc/{'long-' * 30}name"
    source = desk.folder / "site.conf"
    source.write_text("one\n")
    add = ("files", "add", path, str(source), "--later")
    assert "the inventory has no nowhere, @gpu" in desk.sms(*add, "--node", "nowhere", "--group", "gpu", status=3)
    said = desk.sms(*add, "--mode", "600", "--owner", "munge", "--node", "nowhere", "--services", "--force")
    assert f"{path}: version 1: 0600 munge:munge, for nowhere, services" in said
    source.write_text("two\n")
    assert "version 2: 0600 munge:munge, for nowhere, services" in desk.sms(*add)
    said = desk.sms(*add, "--all-nodes", "--no-services")
    assert "version 3: 0600 munge:munge, for all nodes\n" in said
    passwd = ("files", "add", "/etc/passwd")
    assert "1 fields, not 7" in desk.sms(*passwd, str(source), "--later", status=2)
    assert "the site file also defines it" in desk.sms(*passwd, str(desk.folder / "passwd"), "--later")
    desk.sms("files", "rollback", "/etc/passwd", "--later")
    desk.sms("files", "add", long, str(source), "--later")
    listed = desk.sms("files", "list")
    assert f"{long}  " in listed
    assert "/etc/site.conf  " in listed
    for name in (path, long):
        assert "would be removed from all nodes\n" in desk.sms("files", "remove", "-n", name)
        desk.sms("files", "remove", name, "--later")
    said = desk.sms("files", "report", "--path", "/nosuch", status=3)
    assert "there is no master file /nosuch" in said
    assert "no client is online\n  services  no report yet, " in desk.sms("files", "report")


def check_users(desk: Desk, root: Path) -> None:
    people = desk.folder / "people"
    people.mkdir()
    names = [f"user{number}" for number in range(20)]
    lines = [f"{name}:x:{3000 + number}:3000::/home/{name}:/bin/sh" for number, name in enumerate(names)]
    (people / "passwd").write_text("root:x:0:0::/root:/bin/sh\n" + "\n".join(lines) + "\n")
    (people / "group").write_text("users3:x:3000:\n")
    said = desk.sms("user", "sync", "--from", str(people), "--dry-run")
    assert "without --dry-run it would be refused: /etc/passwd: 1 of 1 would be removed" in said
    assert "1 of 1 would be removed" in desk.sms("user", "sync", "--from", str(people), status=3)
    done = json.loads(desk.sms("user", "sync", "--from", str(people), "--force", "--json"))
    assert done["changes"]["/etc/passwd"] == {"added": names, "changed": [], "removed": ["alice"]}
    assert done["left_out"] == 1
    here = (root / "etc/passwd").read_text()
    assert "user19" in here
    assert "alice" not in here
    assert here.startswith("root:x:0:0::/root:/bin/sh\n")
    (people / "passwd").write_text("\n".join(lines[:10]) + "\n")
    assert "10 of 20 would be removed (50 %)" in desk.sms("user", "sync", "--from", str(people), status=3)
    (people / "passwd").write_text("\n".join(lines) + "\neve:x:0x0:3000::/:/bin/sh\nmal\x1b[2J:x:1:1::/:/bin/sh\n")
    said = desk.sms("user", "sync", "--from", str(people), status=2)
    assert "passwd:21: eve: has a uid or gid that is not a number" in said
    assert "\x1b" not in said
    assert differences(desk.sms("files", "push", "--dry-run", "--json"))["/etc/passwd"] == "held"
