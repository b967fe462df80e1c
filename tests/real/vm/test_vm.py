"""The provisioning VM for real: built, booted on host-a of a lab, queried, snapshotted, restored, moved, switched off.

One machine for all of it, in the order of the file: a boot takes half a minute.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from appliance.errors import Busy
from appliance.host.base import Result
from appliance.host.netns import Netns
from appliance.lab import Lab
from appliance.operations.context import open_cluster
from appliance.operations.site import ca
from appliance.operations.site.ca import make_ca
from appliance.operations.vm.build import build_vm
from appliance.progress import Silent
from tests.copies import give
from tests.hostnet import find_changes, read_network
from tests.real.labs import fresh_lab

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

NAME = "t-vm-real"
ADDRESS, PUBLIC = "10.77.0.2", "10.78.0.3"
SECTION = {
    "address": f"{ADDRESS}/24",
    "mac": "02:00:0a:4d:00:02",
    "public": {"address": f"{PUBLIC}/24", "mac": "02:00:0a:4e:00:03"},
    "memory_mb": 512,
    "disk_mb": 1024,
}
DISKS = "/var/lib/sms/vm/lab"
SHARED = "/srv/shared/vm"
IMAGES = "/var/lib/sms/vm/images"
WAIT = "15m"
MARK = "/var/lib/sms-provision/marker"


class World:
    """A lab, and `sms vm` on its hosts."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.network = read_network(lab.host("host-a"))

    def host(self, name: str) -> Netns:
        """A host of the lab."""
        return self.lab.host(name)

    def vm(self, *words: str, ok: tuple[int, ...] | None = (0,), on: str = "admin", site: str = "sms.yaml") -> Result:
        """`sms vm` on a host."""
        argv = ("sms", "-q", "--site", f"/etc/sms/{site}", "vm", *words)
        return self.host(on).run(*argv, ok=ok, timeout=1000)

    def status(self) -> dict[str, Any]:
        """`sms vm status --json`."""
        found: dict[str, Any] = json.loads(self.vm("status", "--json", ok=(0, 4)).stdout)
        return found

    def until_healthy(self, seconds: float = 180) -> dict[str, Any]:
        """The status once the VM is healthy: emulated on a busy host, nginx may be slow to answer after a reload."""
        end = time.monotonic() + seconds
        while not (found := self.status())["healthy"]:
            assert time.monotonic() < end, found
            time.sleep(1)
        return found

    def inside(self, script: str) -> str:
        """A shell script in the VM."""
        return self.vm("exec", "--", "sh", "-c", script).text

    def variant(self, name: str, **changes: Any) -> str:
        """A site file beside the lab's, whose VM has other settings."""
        document = yaml.safe_load((self.lab.etc / "sms.yaml").read_text())
        document["provisioning"] |= changes
        (self.lab.etc / name).write_text(yaml.safe_dump(document))
        return name

    def with_copies(self) -> str:
        """A site file whose snapshots are pushed to host-b: into its store, and by Borg over SSH."""
        document = yaml.safe_load((self.lab.etc / "sms.yaml").read_text())
        borg = {"repository": "ssh://root@host-b/var/lib/sms/repo", "passphrase": "keys/borg.pass"}
        borg |= {"ssh_key": "keys/id_ed25519", "known_hosts": "known_hosts"}
        document["snapshots"] = {"borg": borg, "standby": ["host-a", "host-b"]}
        (self.lab.etc / "copies.yaml").write_text(yaml.safe_dump(document))
        (self.lab.etc / "keys" / "borg.pass").write_text("lab\n")
        (self.lab.etc / "keys" / "borg.pass").chmod(0o600)
        return "copies.yaml"

    def copies(self, *words: str, ok: tuple[int, ...] = (0,)) -> Any:
        """`sms overlay WORDS --vm --json` on host-a."""
        argv = ("sms", "-q", "--site", "/etc/sms/copies.yaml", "overlay", *words, "--vm", "--json")
        return json.loads(self.host("host-a").run(*argv, ok=ok, timeout=1000).stdout)

    def leftovers(self, name: str) -> str:
        """What a machine has left on a host: processes, taps, sockets, seeds, half files."""
        script = (
            "pgrep -x -r D,R,S,T qemu-system-x86; ip -o link show | grep smsvm; ls -A /run/sms/vm/lab 2>/dev/null; "
            "cd $1 || exit; ls | grep -E 'new|raw|restored|arrived|restore.json'; ls snapshots | grep part"
        )
        return self.host(name).run("sh", "-c", script, "left", DISKS, ok=None).text

    def check_unprivileged(self, name: str) -> None:
        """QEMU runs as its own user, without capabilities and in its sandbox; the disks are root's."""
        host = self.host(name)
        script = 'cat "/proc/$(cat /run/sms/vm/lab/pid)/status"; id -u "$1"'
        account = f"sms-vm-{hashlib.sha256(b'lab').hexdigest()[:6]}"
        *lines, user = host.run("sh", "-c", script, "status", account).text.splitlines()
        status = {line.split(":")[0]: line.split(":", 1)[1].split() for line in lines}
        assert status["Uid"] == [user] * 4 and user != "0"
        assert {int(status[f"Cap{kind}"][0], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
        assert status["NoNewPrivs"] == ["1"] and status["Seccomp"] == ["2"]
        assert host.run("find", "/var/lib/sms/vm", "/srv/shared", "/run/sms/vm", "!", "-user", "root").text == ""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A fresh lab, its site file with a VM, and the VM's image."""
    missing = [name for name in ("qemu-system-x86_64", "mmdebstrap", "mcopy") if not shutil.which(name)]
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {', '.join(missing)}")
    with fresh_lab(NAME, 1) as lab:
        path = lab.etc / "sms.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "provisioning": SECTION}))
        if not (lab.etc / "tls").exists():
            make_ca(lab.etc / "tls")
        build(path)
        found = World(lab)
        yield found
        for host in ("host-a", "host-b"):
            found.vm("stop", "--host", host, "--timeout", "20s", ok=None)


def build(path: Path) -> None:
    """Build the image where it is not there; another lab's build of it is waited for."""
    for left in range(60, 0, -1):
        try:
            build_vm(open_cluster(path, None, Silent()))
        except Busy:
            assert left > 1, "another build does not end"
            time.sleep(5)
        else:
            return


def start_and_kill(world: World) -> None:
    """A start whose sms is killed once QEMU runs."""
    argv = ["nsenter", "-t", str(world.host("host-a").pid), "-m", "-u", "-i", "-n", "-p", "-r", "-w", "--"]
    begun = subprocess.Popen([*argv, "sms", "-q", "vm", "start"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    for _ in range(1200):
        if world.host("host-a").works("test", "-S", "/run/sms/vm/lab/qmp.sock") or begun.poll() is not None:
            break
        time.sleep(0.1)
    assert begun.poll() is None, begun.stderr and begun.stderr.read()
    # nsenter has forked: its child is sms.
    for child in Path(f"/proc/{begun.pid}/task/{begun.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    begun.kill()
    begun.wait()


def test_a_start_that_lacks_something_is_refused_and_leaves_nothing(world: World) -> None:
    """No image, no bridge, no memory, no room: each its words, and nothing is changed."""
    large = world.variant("large.yaml", memory_mb=1 << 20)
    refused = world.vm("start", "--host", "host-a", site=large, ok=(3,))
    assert b"MiB of memory are free" in refused.stderr
    world.host("host-b").run("sh", "-c", "mkdir -p /mnt/small && mount -t tmpfs -o size=64m tmpfs /mnt/small")
    small = world.variant("small.yaml", directory="/mnt/small")
    refused = world.vm("start", "--host", "host-b", site=small, ok=(3,))
    assert b"MiB are free for its disks" in refused.stderr
    world.host("host-b").run("ip", "link", "set", "br-pub", "name", "br-gone", ok=None)
    world.host("host-b").run("ip", "link", "set", "br-prov", "down")
    refused = world.vm("start", "--host", "host-b", ok=(3,))
    assert b"bridge br-prov does not exist or is down" in refused.stderr
    world.host("host-b").run("ip", "link", "set", "br-prov", "up")
    world.host("host-b").run("ip", "link", "set", "br-gone", "name", "br-pub", ok=None)
    refused = world.vm("start", on="host-a", ok=(3,))
    assert b"no image of the VM" in refused.stderr
    assert world.leftovers("host-a") == world.leftovers("host-b") == ""


def test_it_starts_although_sms_was_killed_and_serves(world: World) -> None:
    """The first start is killed half-way; the next continues with what it began."""
    world.vm("start", "--host", "host-a", "--dry-run")
    # The image is brought over by a start from admin that is refused at its last check.
    world.host("host-a").run("mkdir", "-p", "-m", "0700", IMAGES)
    key = Path(IMAGES, "current").resolve().name
    for name in ("disk.qcow2", "manifest.sig", "manifest.json"):
        give(world.host("host-a"), f"{IMAGES}/{key}/{name}", f"{IMAGES}/{key}/{name}")
    world.host("host-a").run("ln", "-sfn", key, f"{IMAGES}/current")
    start_and_kill(world)
    started = json.loads(world.vm("start", "--host", "host-a", "--wait", WAIT, "--json").stdout)
    assert started["already"]
    assert find_changes(world.network, read_network(world.host("host-a")), own=True) == []
    status = world.status()
    assert status["healthy"] and status["running"] and status["guest_agent"] and status["host"] == "host-a"
    assert set(status["services"].values()) == {"ok"}
    assert {"sms-provd", "nginx", "sms-dnsmasq", "api", "disk"} <= set(status["services"])
    assert status["accel"] in ("kvm", "tcg") and status["digest"]
    # More than systemd's 90 s, which sms-provd takes where it is emulated beside other work.
    assert world.inside("systemctl show -P TimeoutStartUSec sms-provd nginx").split() == ["15min", "15min"]
    world.check_unprivileged("host-a")


def test_its_interface_answers_by_tls_to_who_may_ask(world: World) -> None:
    """With the admin's certificate; not without one; not in the clear."""
    curl = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--cacert", "/etc/sms/tls/ca.pem"]
    own = ["--cert", "/etc/sms/tls/admin.pem", "--key", "/etc/sms/tls/admin.key"]
    url = f"https://{ADDRESS}:8443/sms/v1/nodes"
    host = world.host("host-a")
    assert host.run(*curl, *own, url).text == "200"
    assert host.run(*curl, url).text in ("401", "403")
    assert host.run(*curl, f"http://{ADDRESS}/sms/v1/nodes").text == "404"


SCAN = """
import resource, select, socket, sys, time
address, ports = sys.argv[1], range(int(sys.argv[2]), int(sys.argv[3]) + 1)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
for first in range(0, len(ports), 4000):
    links, poll = {}, select.epoll()
    for port in ports[first:first + 4000]:
        link = socket.socket()
        link.setblocking(False)
        link.connect_ex((address, port))
        poll.register(link, select.EPOLLOUT)
        links[link.fileno()] = link, port
    end = time.monotonic() + 5
    while time.monotonic() < end:
        for number, _ in poll.poll(0.2):
            poll.unregister(number)
            link, port = links[number]
            print(port, "refused" if link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) else "open")
    for link, _ in links.values():
        link.close()
"""
"""Which of these TCP ports of an address answer: the others drop what comes."""
LISTENER = """
setsid python3 -c '
import socket, time
kept = [socket.create_server(("", port)) for port in (999, 8444)]
kept.append(socket.create_server(("::", 998), family=socket.AF_INET6))
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(("", 997))
while True: datagrams.sendto(b"seen", datagrams.recvfrom(9)[1])
' >/dev/null 2>&1 & sleep 3
"""
DATAGRAM = """
import socket, sys
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.settimeout(3)
for _ in range(3):
    link.sendto(b"see", (sys.argv[1], 997))
    try: print(link.recv(9)); break
    except OSError: pass
"""


@pytest.mark.parametrize("last", [1024, pytest.param(65535, marks=pytest.mark.full)])
def test_its_firewall_lets_in_what_its_services_need(world: World, last: int) -> None:
    """Nodes reach the web server, DHCP and TFTP; the public network HTTPS; whatever else listens in the VM, nobody."""
    node, admin = world.host("node1"), world.host("admin")
    if not world.inside("ss -Hltn sport = :999"):
        world.inside(LISTENER)
    local = world.inside(
        f"python3 -c '{DATAGRAM}' {ADDRESS}; curl -s -o /dev/null -w %{{exitcode}} {ADDRESS}:999 -m 1; true"
    )
    assert "seen" in local and "28" in local, "they do listen"

    def scan(host: Netns, address: str, first: int = 1, last: int = last) -> dict[str, str]:
        found = host.run("python3", "-c", SCAN, address, str(first), str(last), timeout=300).text
        return dict(line.split() for line in found.splitlines())

    assert scan(node, ADDRESS) | scan(node, ADDRESS, 8400, 8500) == {"80": "open", "8443": "open"}
    assert scan(admin, PUBLIC) | scan(admin, PUBLIC, 8400, 8500) == {"8443": "open"}
    for host, address in ((node, ADDRESS), (admin, PUBLIC)):
        assert host.run("python3", "-c", DATAGRAM, address).text == ""
    tftp = ("curl", "-s", "-m", "20", "-o", "/dev/null", "-w", "%{size_download}", f"tftp://{ADDRESS}/undionly.kpxe")
    assert int(node.run(*tftp).text) > 50000
    assert node.run("ping", "-c", "1", "-W", "5", ADDRESS).text


def test_its_services_listen_on_the_provisioning_address(world: World) -> None:
    """HTTPS on the public one, too: admin hosts that are not in the provisioning network need it."""
    tcp = world.inside("ss -Hltn | awk '{ print $4 }' | sort").split()
    assert [each for each in tcp if each.rpartition(":")[2] not in ("998", "999", "8444")] == [
        f"{ADDRESS}:80",
        f"{ADDRESS}:8443",
        f"{PUBLIC}:8443",
    ]
    udp = world.inside("ss -Hlun | awk '{ print $4 }' | sort").split()
    card = world.inside(f"ip -o -4 addr show to {ADDRESS} | awk '{{ print $2 }}'")
    others = [each for each in udp if each.rpartition(":")[2] != "997"]
    assert f"0.0.0.0%{card}:67" in others and f"{ADDRESS}:69" in others
    assert all(
        each == f"{ADDRESS}:69" or f"%{card}]" in each or f"%{card}:" in each or "fd53" in each for each in others
    )


def test_it_is_closed_before_it_has_a_network_and_serves_on_late_addresses(world: World) -> None:
    """The filter is loaded before a card gets an address; the web server starts without one."""
    shown = world.inside(
        "systemctl show --value -p ActiveEnterTimestampMonotonic sms-firewall; "
        "systemctl show --value -p ExecMainStartTimestampMonotonic systemd-networkd"
    )
    loaded, began = map(int, shown.split())
    assert 0 < loaded <= began
    world.inside(
        f"card=$(ip -o -4 addr show to {ADDRESS} | awk '{{ print $2 }}'); ip addr del {ADDRESS}/24 dev $card && "
        f"systemctl restart nginx && systemctl is-active nginx && ip addr add {ADDRESS}/24 dev $card"
    )
    assert (
        world.host("node1").run("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"http://{ADDRESS}/").text
        == "404"
    )
    assert world.status()["services"]["sms-firewall"] == "ok"


def test_secrets_are_in_memory_only(world: World) -> None:
    """Not in the command line, not in the run folder, not on the VM's disks."""
    host = world.host("host-a")
    assert not host.works("test", "-e", "/run/sms/vm/lab/seed.tar")
    assert world.inside("findmnt -no FSTYPE /etc/sms") == "tmpfs"
    line = world.inside("sed -n 2p /etc/sms/tls/issuer.key")
    assert len(line) > 40
    script = 'grep -q -- "$1" "$2" && exit 9; grep -q -- "$1" "$3" && exit 9; exit 0'
    assert host.works("sh", "-c", script, "look", line, f"{DISKS}/root.qcow2", f"{DISKS}/state.qcow2")
    pid = host.read("/run/sms/vm/lab/pid")
    assert pid and line.encode() not in (host.read(f"/proc/{pid.decode().strip()}/cmdline") or b"")


def test_commands_run_inside(world: World) -> None:
    """Output, exit status, standard input, a program that is not there."""
    ran = world.vm("exec", "--", "sh", "-c", "echo out; echo err >&2; exit 7", ok=(7,))
    assert (ran.stdout, ran.stderr) == (b"out\n", b"err\n")
    argv = ("sms", "-q", "vm", "exec", "--input", "--", "tee", MARK)
    assert world.host("admin").run(*argv, input=b"before\n").text == "before"
    assert world.vm("exec", "--", "no-such-program", ok=(127,)).stderr


def test_it_waits_for_its_disk_on_a_slow_host(world: World) -> None:
    """Emulated on a busy host, udev once took longer than 30 s; systemd would have given up what needs the disk."""
    disk = r"dev-disk-by\\x2dlabel-sms\\x2dstate.device"
    assert world.inside(f"systemctl show -P JobRunningTimeoutUSec {disk}") == "10min"


def test_the_console_was_written_down(world: World) -> None:
    """From the firmware to the prompt."""
    log = world.vm("console", "--log").text
    assert "BdsDxe: starting" in log and "root@sms-provision" in log


def test_a_start_gives_new_certificates_when_it_is_time(world: World) -> None:
    """The VM runs on; another issuer vouches for nodes, and the interface answers by another certificate."""
    host, digests = (
        world.host("host-a"),
        "cd /etc/sms/tls && sha256sum issuer.pem server.pem && stat -c %U:%G:%a issuer.key",
    )
    before = world.inside(digests).splitlines()
    assert world.status()["issuer_days"] > 80
    late = json.loads(host.read("/run/sms/vm/lab/vm.json") or b"") | {"issuer_ends": time.time() + 86400}
    host.write("/run/sms/vm/lab/vm.json", json.dumps(late).encode(), mode=0o600)
    assert "nodes get no certificates after" in world.vm("status", ok=(4,)).text
    world.vm("start", "--host", "host-a", "--wait", WAIT)
    after = world.inside(digests).splitlines()
    assert before[:2] != after[:2] and before[2] == after[2] == "root:sms-provision:640"
    assert world.until_healthy()["issuer_days"] > 80


def test_a_revoked_certificate_is_refused_at_once(world: World) -> None:
    """The admin's is replaced, the running VM refuses the previous one; so it does after its next start."""
    admin, host = world.host("admin"), world.host("host-a")
    sms = ("sms", "-q", "--site", "/etc/sms/sms.yaml")
    host.run("sh", "-c", "cp /etc/sms/tls/admin.pem /root/old.pem && cp /etc/sms/tls/admin.key /root/old.key")
    curl = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--cacert", "/etc/sms/tls/ca.pem"]
    url = f"https://{ADDRESS}:8443/sms/v1/nodes"
    old = [*curl, "--cert", "/root/old.pem", "--key", "/root/old.key", url]
    assert host.run(*old).text == "200"
    said = admin.run(*sms, "key", "ca", "revoke", "admin").text
    assert "revoked" in said and "the VM on host-a refuses them" in said
    assert host.run(*old).text == "403"
    assert host.run(*curl, "--cert", "/etc/sms/tls/admin.pem", "--key", "/etc/sms/tls/admin.key", url).text == "200"
    log = json.loads(host.run(*sms, "key", "ca", "log", "--json").stdout)
    assert [bool(one["revoked"]) for one in log if one["subject"] == "CN=admin,OU=admin"] == [True, False]
    assert world.inside("wc -l </etc/sms/tls/revoked.map") == "1"
    for name in ("host-a", "host-b"):
        found = json.loads(world.host(name).read("/var/lib/sms/lab.revoked") or b"")
        assert [one["subject"] for one in found["revoked"]] == ["CN=admin,OU=admin"]


def test_a_scheduled_run_renews_while_the_vm_runs(world: World) -> None:
    """Also on a host without the lease: the services container was never started here."""
    host, digests = world.host("host-a"), "cd /etc/sms/tls && sha256sum issuer.pem server.pem"
    before = world.inside(digests)
    run = ("sms", "-q", "--site", "/etc/sms/sms.yaml", "overlay", "snapshot", "--scheduled")
    host.run(*run)
    assert world.inside(digests) == before, "nothing is due"
    folder = world.lab.etc / "tls"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ca, "ISSUER_DAYS", 20)
        ca._store(folder, ca.ISSUER, ca.issue_issuer(folder))
    note = json.loads(host.read("/run/sms/vm/lab/vm.json") or b"") | {"issuer_ends": time.time() + 20 * 86400}
    host.write("/run/sms/vm/lab/vm.json", json.dumps(note).encode(), mode=0o600)
    host.run(*run)
    assert not {*before.split()[::2]} & {*world.inside(digests).split()[::2]}
    assert world.until_healthy()["issuer_days"] > 80


def test_it_runs_once(world: World) -> None:
    """Here it is there already, elsewhere it is refused."""
    again = json.loads(world.vm("start", "--host", "host-a", "--json", "--wait", WAIT).stdout)
    assert again["already"]
    refused = world.vm("start", "--host", "host-b", ok=(3,))
    assert b"runs on host-a already" in refused.stderr
    assert b"runs on host-a" in world.vm("restore", "latest", ok=(3,)).stderr


WRITER = """
cat >/var/lib/sms-provision/writer.sh <<'END'
i=0
while [ "$i" -lt 1000000 ]; do i=$((i + 1)); echo "$i" >>/var/lib/sms-provision/lines; done
END
rm -f /var/lib/sms-provision/lines
setsid sh /var/lib/sms-provision/writer.sh >/dev/null 2>&1 &
"""


def test_a_snapshot_is_of_one_moment_while_it_is_written_to(world: World) -> None:
    """Writers are frozen for a moment and continue; the snapshot is complete."""
    world.inside(WRITER)
    taken = json.loads(world.vm("snapshot", "first", "--reason", "a test", "--json").stdout)
    assert taken["running"] and taken["verified"] and taken["frozen_ms"] > 0
    world.inside("pkill -f [w]riter.sh; sleep 0.2; test -s /var/lib/sms-provision/lines")
    world.inside(f"echo after >{MARK}; sync")
    assert b"already" in world.vm("snapshot", "first", ok=(3,)).stderr
    listed = json.loads(world.vm("snapshot", "--list", "--json").stdout)
    assert [(one["name"], one["reason"]) for one in listed] == [("first", "a test")]
    world.vm("snapshot", "--verify", "first")


OLD = """python3 -c '
import sqlite3
db = sqlite3.connect("/var/lib/sms-provision/inventory.db")
db.execute("UPDATE components SET changed = 1")
db.execute("UPDATE master_versions SET made = 1")
db.commit()'"""
"""Drills compare what has not changed for some minutes."""


@pytest.mark.full  # tests/unit/snapshots/test_vm_state.py has it with real disks and a real repository
def test_its_state_is_copied_elsewhere_by_schedule_and_can_be_restored_from_there(world: World) -> None:
    """While it runs; with the secrets of its master files; a drill compares the copies with the running VM."""
    site = ("sms", "-q", "--site", f"/etc/sms/{world.with_copies()}")
    host, boot = world.host("host-a"), world.inside("cat /proc/sys/kernel/random/boot_id")
    host.write("/root/munge.key", os.urandom(128), mode=0o600)
    host.run(*site, "node", "add", "node7", "--mac", "02:00:0a:4d:00:97", "--address", "10.77.0.97")
    host.run(*site, "files", "add", "/etc/munge/munge.key", "/root/munge.key", "--mode", "0400", "--later")
    world.inside(f"{OLD}; echo copied >/var/lib/sms-provision/copied; sync")
    run = world.copies("snapshot", "--scheduled")
    assert run["ok"] and run["number"] == 1 and not run["missed"], run
    (here,) = world.copies("list")["snapshots"]
    assert here["running"] and here["frozen_ms"] > 0 and here["health"]["ok"] and here["sequence"]
    (standby,) = world.copies("list", "--host", "host-b")["snapshots"]
    (archive,) = world.copies("pull", "--from", "borg", "--list")
    assert here["uuid"] == standby["uuid"] == archive["uuid"]
    overlay = host.run(*site, "overlay", "pull", "--from", "borg", "--list", "--json").stdout
    assert json.loads(overlay) == [], "the overlay's verbs do not see it"
    for source in ("borg", "host-b"):
        drill = world.copies("drill", "--from", source)
        assert drill["ok"] and drill["production"] == "host-a", drill
        seen = {one["what"]: one["seen"] for one in drill["checks"]}
        assert "migrated" in seen["the inventory"] and "1, 1 of them secret" in seen["master files"], seen
        assert "1 components and 1 master files" in seen["compared with production"], seen
    host.run(*site, "node", "add", "node8", "--mac", "02:00:0a:4d:00:98", "--address", "10.77.0.98")
    world.inside(OLD)
    drill = world.copies("drill", "--from", "host-b", ok=(4,))
    assert [one["what"] for one in drill["checks"] if not one["ok"]] == ["compared with production"], drill
    host.run(*site, "node", "remove", "node8", "--yes")
    assert world.inside("cat /proc/sys/kernel/random/boot_id") == boot
    world.until_healthy()
    assert host.run("ls", "-A", "/var/lib/sms/drills").text == ""
    assert host.run("find", "/var/lib/sms/snapshots", "-type", "f", "-perm", "/077").text == ""


def test_it_is_switched_off_and_leaves_nothing_running(world: World) -> None:
    """And a second stop is none."""
    stopped = json.loads(world.vm("stop", "--json").stdout)
    assert stopped["how"] in ("guest agent", "power button")
    assert world.leftovers("host-a") == ""
    assert find_changes(world.network, read_network(world.host("host-a")), own=True) == []
    assert json.loads(world.vm("stop", "--json").stdout)["how"] == "not running"
    status = world.status()
    assert not status["running"] and not status["healthy"] and status["host"] == "host-a"


@pytest.mark.full
def test_unchanged_state_is_not_copied_again_and_lost_state_is_restored_from_elsewhere(world: World) -> None:
    """Off, one more run has what the stop wrote; then nothing is new. Without disks and store, Borg has all of it."""
    host = world.host("host-a")
    first = world.copies("snapshot", "--scheduled")
    again = world.copies("snapshot", "--scheduled")
    assert first["ok"] and again["ok"] and first["number"] == again["number"] and "not changed" in again["notes"][0]
    numbers = [one["number"] for one in world.copies("list")["snapshots"]]
    assert numbers == [1, 2] and not world.copies("list")["snapshots"][-1]["running"]
    store = "/var/lib/sms/snapshots/lab.vm"
    host.run("sh", "-c", 'mv "$1" "$1.lost" && mv "$2" "$2.lost"', "lose", DISKS, store)
    refused = world.vm("restore", "latest", "--from", "borg", site="copies.yaml", ok=(3,))
    assert b"name the admin host that gets the disks" in refused.stderr
    refused = world.vm("restore", "latest", "--from", "host-a", "--host", "host-a", site="copies.yaml", ok=(3,))
    assert b"no snapshots on host-a" in refused.stderr
    world.vm("restore", "latest", "--from", "borg", "--host", "host-a", "-n", site="copies.yaml")
    assert not host.works("test", "-e", DISKS)
    world.vm("restore", "latest", "--from", "borg", "--host", "host-a", site="copies.yaml")
    holder = json.loads(host.read(f"{DISKS}/holder.json") or b"")
    before = json.loads(host.read(f"{DISKS}.lost/holder.json") or b"")
    assert holder["generation"] > before["generation"] and holder["cluster_uuid"] == before["cluster_uuid"]
    look = 'qemu-img convert -O raw "$1" /tmp/look.raw && debugfs -R "cat /copied" /tmp/look.raw; rm /tmp/look.raw'
    assert "copied" in host.run("sh", "-c", look, "look", f"{DISKS}/state.qcow2").text
    # The old ones are kept where there are any, and the next snapshot is newer than all others.
    kept = json.loads(
        world.vm("restore", "1", "--from", "host-b", "--host", "host-a", "--json", site="copies.yaml").stdout
    )["kept"]
    assert host.works("test", "-s", f"{DISKS}/snapshots/{kept}/state.qcow2")
    assert world.copies("snapshot", "--scheduled")["ok"]
    newest = world.copies("list")["snapshots"][-1]
    assert newest["generation"] == holder["generation"] and not newest.get("came")
    (latest,) = [one for one in world.copies("pull", "--from", "borg", "--list") if one["uuid"] == newest["uuid"]]
    assert latest == world.copies("pull", "--from", "borg", "--list")[-1]
    host.run("sh", "-c", 'rm -rf "$1" && mv "$1.lost" "$1"', "again", DISKS)
    assert world.leftovers("host-a") == ""


def test_an_image_that_was_changed_does_not_boot(world: World) -> None:
    """One byte of it; or another key's signature."""
    host = world.host("host-a")
    disk = host.run("readlink", "-f", f"{IMAGES}/current/disk.qcow2").text
    before = host.run("sha256sum", disk).text
    change = 'printf "\\%03o" "$(( $(od -An -tu1 -j4096 -N1 "$1") ^ 1 ))" | xargs -0 printf | '
    flip = change + 'dd of="$1" bs=1 seek=4096 conv=notrunc status=none'
    host.run("sh", "-c", flip, "flip", disk)
    refused = world.vm("start", on="host-a", ok=(3,))
    assert b"does not match its signed manifest" in refused.stderr
    host.run("sh", "-c", flip, "flip", disk)
    assert host.run("sha256sum", disk).text == before
    folder = disk.rpartition("/")[0]
    host.run("sh", "-c", 'chmod o+w "$1"', "chmod", folder)
    assert b"others can write" in world.vm("start", on="host-a", ok=(3,)).stderr
    host.run("chmod", "0700", folder)
    host.run("sh", "-c", 'mv "$1" "$1.away"', "away", f"{folder}/manifest.sig")
    assert b"is not signed" in world.vm("start", on="host-a", ok=(3,)).stderr
    host.run("sh", "-c", 'mv "$1.away" "$1"', "back", f"{folder}/manifest.sig")
    assert world.leftovers("host-a") == ""


def test_a_snapshot_is_restored_and_an_interrupted_restore_resumes(world: World) -> None:
    """The disks before it are kept; killed between the two disks, the next run finishes it."""
    restored = json.loads(world.vm("restore", "first", "--json").stdout)
    listed = {one["name"] for one in json.loads(world.vm("snapshot", "--list", "--json").stdout)}
    assert listed == {"first", restored["kept"]}
    host = world.host("host-a")
    # As a kill -9 leaves it after the first of two disks: written down, one exchanged, one not.
    script = """
    cd "$1" && mkdir -p snapshots/before-cut && cp snapshots/first/snapshot.json snapshots/before-cut/
    printf before-cut >restore.json
    cp --sparse=always snapshots/first/state.qcow2 state.restored
    cp --sparse=always snapshots/first/root.qcow2 root.qcow2.tmp
    mv root.qcow2 snapshots/before-cut/ && mv root.qcow2.tmp root.qcow2
    """
    host.run("sh", "-c", script, "cut", DISKS)
    world.vm("stop", "--host", "host-a")
    assert world.leftovers("host-a") == ""
    assert host.works("test", "-f", f"{DISKS}/snapshots/before-cut/state.qcow2")
    world.vm("snapshot", "--prune", "3")
    gone = [one["name"] for one in json.loads(world.vm("snapshot", "--prune", "1", "-n", "--json").stdout)]
    assert len(gone) == 1 and "first" not in gone, "the newest verified one stays"


@pytest.mark.full
def test_it_moves_to_another_host_and_has_what_it_had(world: World) -> None:
    """Copied and compared; the host that it left does not start it any more."""
    moved = json.loads(world.vm("migrate", "host-b", "--json").stdout)
    assert moved["target"] == "host-b" and not moved["live"] and moved["copied_bytes"]
    assert b"disks are on host-b" in world.vm("start", "--host", "host-a", ok=(3,)).stderr
    # It could start it without the machine that has built the image.
    assert world.host("host-b").run("readlink", f"{IMAGES}/current").text == Path(IMAGES, "current").resolve().name
    # From here on its disks lie where both hosts see them.
    share = 'mkdir -m 0700 "$2" && cp -a --sparse=always "$1" "$2"'
    world.host("host-b").run("sh", "-c", share, "share", DISKS, SHARED)
    shared = world.variant("shared.yaml", directory=SHARED)
    world.vm("start", "--host", "host-b", "--wait", WAIT, site=shared)
    assert world.inside(f"cat {MARK}") == "before"
    # What a writer had written at that moment: lines in order, none torn but the last.
    check = "awk 'NR != $1 { bad = 1 } END { exit bad || NR < 1 }' /var/lib/sms-provision/lines"
    world.inside(check)
    assert world.status()["host"] == "host-b"


@pytest.mark.full
def test_it_moves_while_it_runs(world: World) -> None:
    """The same boot on the other host; the one that it left touches neither machine nor disks any more."""
    here, there = "host-b", "host-a"
    boot = world.inside("cat /proc/sys/kernel/random/boot_id")
    moved = json.loads(world.vm("migrate", there, "--json", site="shared.yaml").stdout)
    here, there = there, here
    assert moved["live"] and moved["target"] == here and not moved["copied_bytes"]
    assert world.inside("cat /proc/sys/kernel/random/boot_id") == boot
    assert abs(int(world.inside("date +%s")) - time.time()) < 3
    assert world.leftovers(there) == ""
    world.check_unprivileged(here)
    for words in (("snapshot", "x", "--host", there), ("restore", "first", "--host", there)):
        assert f"runs on {here}".encode() in world.vm(*words, site="shared.yaml", ok=(3,)).stderr
    stopped = world.vm("stop", "--host", there, "--json", site="shared.yaml")
    assert json.loads(stopped.stdout)["how"] == "not running"
    world.inside(f"echo moved >>{MARK}; sync")
    world.vm("snapshot", "moved", site="shared.yaml")
    assert world.status()["host"] == here


CHECKER = """
cat >/var/lib/sms-provision/checker.py <<'END'
import mmap, os
pages, turn = 4096, 0
area = memoryview(mmap.mmap(-1, pages << 12)).cast("Q")
while True:
    for at in range(0, pages << 9, 512):
        if area[at] != turn:
            open("/var/lib/sms-provision/lost", "a").write("%d: %d, not %d\\n" % (at, area[at], turn))
        area[at] = turn + 1
    turn += 1
    with open("/var/lib/sms-provision/turns.new", "w") as stream:
        stream.write("%d" % turn)
    os.replace("/var/lib/sms-provision/turns.new", "/var/lib/sms-provision/turns")
END
setsid python3 /var/lib/sms-provision/checker.py >/dev/null 2>&1 &
"""
MOVES = 50


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_it_moves_fifty_times(world: World) -> None:
    """Every move succeeds, while its memory and its disk are written: no write is lost, and it is the same boot."""
    shared = world.variant("shared.yaml", directory=SHARED)
    world.host("host-a").run("mkdir", "-p", "-m", "0700", SHARED)
    status = json.loads(world.vm("status", "--json", site=shared, ok=(0, 3, 4)).stdout or b'{"running": false}')
    here = status["host"] if status["running"] else "host-b"
    world.vm("start", "--host", here, "--wait", WAIT, site=shared)
    boot = world.inside("cat /proc/sys/kernel/random/boot_id")
    world.inside(CHECKER)
    paused = []
    for _ in range(MOVES):
        there = "host-a" if here == "host-b" else "host-b"
        moved = json.loads(world.vm("migrate", there, "--json", site=shared).stdout)
        assert moved["live"] and moved["target"] == there
        paused.append(moved["paused_ms"])
        turns = int(world.inside("cat /var/lib/sms-provision/turns"))
        print(f"move {len(paused)}: paused {moved['paused_ms']:.0f} ms, {turns} turns", flush=True)
        here = there
    print(f"{MOVES} moves, paused for {min(paused):.0f} to {max(paused):.0f} ms")
    assert world.inside("cat /proc/sys/kernel/random/boot_id") == boot
    assert int(world.inside("cat /var/lib/sms-provision/turns")) > turns
    assert world.inside("cat /var/lib/sms-provision/lost 2>/dev/null || echo none") == "none"
    assert world.inside("dmesg --level emerg,alert,crit,err | grep -ciE 'ext4|i/o error|bug:|oops' || true") == "0"
    world.until_healthy()
