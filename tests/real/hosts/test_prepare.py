"""`sms host prepare` and `sms doctor` from the lab's admin host, over SSH, against host-a."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance import lab
from appliance.host.base import Result
from appliance.progress import Silent
from tests.hostnet import find_changes, read_network
from tests.real.labs import need_machine

pytestmark = pytest.mark.real

NAME = "t-prep"
SMS = str(Path(sys.prefix) / "bin" / "sms")
RULE = re.compile('iifname "br-pub" oifname "br-pub".* accept|-A FORWARD -i br-pub -o br-pub -j ACCEPT')
"""By which the firewall passes packets between ports of the other bridge, in both forms."""
BRIDGE = "br-new"
PORT = "spare0"
PEER = "spare1"


@pytest.fixture(scope="module")
def cluster() -> Iterator[lab.Lab]:
    """A lab whose host-a has an interface to spare, and site files that want it in a bridge."""
    need_machine()
    # Not by `lab down --all`: that removes the nodes' root, too, which all labs of this machine are made of.
    lab.down(NAME)
    shutil.rmtree(f"/var/lib/sms-lab/{NAME}", ignore_errors=True)
    lab.up(NAME, 1, Silent())
    try:
        opened = lab.Lab.open(NAME)
        opened.host("host-a").run("ip", "link", "add", PORT, "type", "veth", "peer", "name", PEER)
        opened.host("host-a").run("ip", "link", "set", PEER, "up")
        write_site(opened, "new.yaml", BRIDGE, PORT)
        opened.host("admin").run(SMS, "--site", "/etc/sms/new.yaml", "key", "create")
        yield opened
    finally:
        lab.down(NAME)
        shutil.rmtree(f"/var/lib/sms-lab/{NAME}", ignore_errors=True)


def write_site(cluster: lab.Lab, name: str, bridge: str, port: str, known_hosts: str = "known_hosts") -> None:
    """A site file that has another bridge for the provisioning network."""
    text = (cluster.etc / "sms.yaml").read_text()
    text = text.replace("bridge: br-prov\n", f"bridge: {bridge}\n    port: {port}\n")
    (cluster.etc / name).write_text(text.replace("known_hosts: known_hosts", f"known_hosts: {known_hosts}"))


def sms(cluster: lab.Lab, site: str, *argv: str, on: str = "admin") -> Result:
    return cluster.host(on).run(SMS, "--site", f"/etc/sms/{site}", *argv, ok=None, timeout=240)


def prepare(cluster: lab.Lab, *options: str) -> dict[str, Any]:
    result = sms(cluster, "new.yaml", "host", "prepare", "host-a", "--json", *options)
    assert result.status == 0, result.stderr.decode()
    play: dict[str, Any] = json.loads(result.stdout)
    return play


def missing(cluster: lab.Lab, *, on: str = "admin") -> tuple[int, dict[str, dict[str, str]]]:
    """The status of `sms doctor` for host-a, and what it finds missing."""
    result = sms(cluster, "new.yaml", "doctor", "--host", "host-a", "--json", on=on)
    checks = json.loads(result.stdout)["checks"]
    return result.status, {check["what"]: check for check in checks if check["state"] == "missing"}


def test_prepare_makes_what_doctor_misses_and_then_changes_nothing(cluster: lab.Lab) -> None:
    host = cluster.host("host-a")
    host.run("rm", "-rf", "/etc/apptainer/network", "/usr/bin/singularity")
    host.run("sysctl", "-w", "net.bridge.bridge-nf-call-iptables=1", ok=None)
    status, found = missing(cluster)
    assert status == 4
    assert set(found) == {f"bridge {BRIDGE}", "the name singularity"}
    assert found[f"bridge {BRIDGE}"]["mend"] == "sms host prepare host-a"

    rehearsed = prepare(cluster, "--dry-run")
    assert "Create the bridge" in rehearsed["changed"]
    assert any("/usr/bin/singularity" in diff for diff in rehearsed["diffs"])
    assert missing(cluster) == (status, found)

    host.run("iptables", "-P", "FORWARD", "DROP")  # as Docker does
    network = read_network(host)
    first = prepare(cluster)
    assert {"Create the bridge", "Link Apptainer's old name"} <= set(first["changed"])
    made = re.compile(rf"\b({BRIDGE}|{PORT}|{PEER})\b")  # the peer gets its carrier
    others = [line for line in find_changes(network, read_network(host)) if not made.search(line)]
    assert len(others) == 2 and all(RULE.search(line) for line in others), others
    assert "Install the pinned Apptainer beside Debian's libraries" not in first["changed"]
    assert host.works("test", "-L", "/usr/bin/singularity")
    assert "Create the folder of the container networks" in first["changed"]
    assert missing(cluster) == (0, {})
    assert missing(cluster, on="host-a") == (0, {})
    shown = json.loads(host.run("ip", "-json", "-details", "link", "show", "dev", BRIDGE).stdout)[0]
    assert shown["linkinfo"]["info_data"]["stp_state"] == 0
    file = host.read(f"/etc/network/interfaces.d/sms-{BRIDGE}")
    if host.works("test", "-e", "/sbin/ifup"):
        assert f"pre-up ip link set dev {PORT} master {BRIDGE} up" in (file or b"").decode()
    else:  # no program would read the file; a message says so instead
        assert file is None and any("does not persist across reboots" in note for note in first["notes"])
    assert host.run("stat", "-c", "%a", "/var/lib/sms/overlays").text == "700"

    second = prepare(cluster)
    assert (second["changed"], second["failed"]) == ([], [])
    # On the host itself, without SSH: the same.
    here = sms(cluster, "new.yaml", "host", "prepare", "host-a", "--json", on="host-a")
    assert json.loads(here.stdout)["changed"] == []


def test_the_firewall_passes_the_sites_bridges_and_nothing_else(cluster: lab.Lab) -> None:
    """With Docker's policy: two machines on a bridge of the site reach each other, those on another bridge do not."""
    host = cluster.host("host-a")
    assert host.run("iptables", "-S", "FORWARD").text.startswith("-P FORWARD DROP")
    assert (host.read("/proc/sys/net/bridge/bridge-nf-call-iptables") or b"").strip() == b"1"
    host.run("ip", "link", "add", "br-dock", "type", "bridge")
    host.run("ip", "link", "set", "br-dock", "up")
    for bridge, passes in ((BRIDGE, True), ("br-dock", False)):
        for name in ("m1", "m2"):
            host.run("ip", "netns", "add", name)
            host.run("ip", "link", "add", f"p-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            host.run("ip", "link", "set", f"p-{name}", "master", bridge, "up")
            host.run("ip", "-n", name, "address", "add", f"10.99.7.{name[1]}/24", "dev", "eth0")
            host.run("ip", "-n", name, "link", "set", "eth0", "up")
        ping = ("nsenter", "--net=/run/netns/m1", "ping", "-c", "5", "-i", "0.2", "-W", "1", "10.99.7.2")
        assert host.works(*ping) is passes, bridge
        for name in ("m1", "m2"):
            # the links of a deleted namespace go a while later
            host.run("ip", "link", "delete", f"p-{name}")
            host.run("ip", "netns", "delete", name)
    host.run("ip", "link", "delete", "br-dock")


def unprepare(cluster: lab.Lab, *options: str, on: str = "admin") -> dict[str, Any]:
    result = sms(cluster, "new.yaml", "host", "unprepare", "host-a", "--json", *options, on=on)
    assert result.status == 0, result.stderr.decode()
    play: dict[str, Any] = json.loads(result.stdout)
    return play


def test_what_prepare_did_is_taken_back(cluster: lab.Lab) -> None:
    """Not while somebody needs it; bridges of others stay; another prepare makes the same again."""
    host, keys = cluster.host("host-a"), "/root/.ssh/authorized_keys"
    before = read_network(host)
    host.run("ip", "link", "add", "other0", "type", "veth", "peer", "name", "other1")
    host.run("ip", "link", "set", "other0", "master", BRIDGE)
    refused = sms(cluster, "new.yaml", "host", "unprepare", "host-a")
    assert refused.status == 1 and "has other ports: other0" in refused.stderr.decode()
    host.run("ip", "link", "delete", "other0")

    assert "Remove the bridge" in unprepare(cluster, "--dry-run")["changed"]
    assert find_changes(before, read_network(host)) == []
    done = unprepare(cluster)
    assert not done["failed"] and any("br-pub: left as it is" in note for note in done["notes"]), done
    left = read_network(host)
    assert not [line for line in find_changes(left, before) if line.startswith("-") and BRIDGE in line]
    assert not host.works("ip", "link", "show", "dev", BRIDGE) and host.works("ip", "link", "show", "dev", "br-pub")
    assert not host.works("iptables", "-C", "FORWARD", "-i", "br-pub", "-o", "br-pub", "-j", "ACCEPT")
    assert unprepare(cluster)["changed"] == []
    assert set(missing(cluster)[1]) == {f"bridge {BRIDGE}"}

    assert b" sms:" in (host.read(keys) or b""), "over SSH they stay"
    assert unprepare(cluster, on="host-a")["changed"] and b" sms:" not in (host.read(keys) or b"")
    prepare(cluster)
    made = re.compile(rf"\b({BRIDGE}|{PORT}|{PEER})\b")
    assert not [line for line in find_changes(before, read_network(host)) if not made.search(line)]


def test_a_port_that_the_host_needs_is_refused_and_the_bridge_not_made(cluster: lab.Lab) -> None:
    write_site(cluster, "cut.yaml", "br-cut", "br-pub")
    result = sms(cluster, "cut.yaml", "host", "prepare", "host-a")
    assert result.status == 1
    said = result.stderr.decode()
    assert "this SSH connection uses br-pub: making it a port of br-cut would disconnect the host" in said
    assert "hint: use another interface" in said
    assert not cluster.host("host-a").works("ip", "link", "show", "br-cut")


def test_a_bridge_that_cannot_be_made_whole_is_not_left_half(cluster: lab.Lab) -> None:
    write_site(cluster, "half.yaml", "br-half", "lo")
    result = sms(cluster, "half.yaml", "host", "prepare", "host-a")
    assert result.status == 1
    assert "cannot create bridge br-half: " in result.stderr.decode()
    host = cluster.host("host-a")
    assert not host.works("ip", "link", "show", "br-half")
    assert not host.works("test", "-e", "/etc/network/interfaces.d/sms-br-half")


CRAY_CARDS = {"bond0.nmn0": "10.252.1.4/17", "bond0.can0": "198.51.100.4/24"}
"""As on a management node: the ports that the starter file names carry the addresses of the host."""
CRAY_EDITS = {
    "- name: ncn-m001": "- name: host-a",
    "address: 10.252.1.4": "address: 10.78.0.11",
    "- name: ncn-m002": "- name: host-b",
    "address: 10.252.1.5": "address: 10.78.0.12",
    "address: 198.51.100.10/24": "address: 10.78.0.2/24",
    "gateway: 198.51.100.1": "gateway: 10.78.0.254",
    "# key: /root/.ssh/id_ed25519": "key: keys/id_ed25519",
    "# known_hosts: /etc/sms/known_hosts": "known_hosts: /etc/sms/known_hosts",
}
"""What an administrator replaces below the marks (CHANGE), and where this lab has its host keys."""


@pytest.mark.full
def test_the_starter_file_for_cray_ex_prepares_hosts_whose_cards_carry_addresses(cluster: lab.Lab) -> None:
    host = cluster.host("host-a")
    for name, address in CRAY_CARDS.items():
        host.run("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name[-4:]}-far")
        host.run("ip", "addr", "add", address, "dev", name)
        host.run("ip", "link", "set", name, "up")
    assert sms(cluster, "none.yaml", "init", "--profile", "cray-ex", "-o", "/etc/sms/cray.yaml").status == 0
    text = (cluster.etc / "cray.yaml").read_text()
    for old, new in CRAY_EDITS.items():
        assert text.count(f" {old}\n") + text.startswith(old) + text.count(f"\n{old}\n") == 1, old
        text = text.replace(f"{old}\n", f"{new}\n")
    (cluster.etc / "cray.yaml").write_text(text.replace("(CHANGE) ", ""))

    assert sms(cluster, "cray.yaml", "config", "check").status == 0
    before = host.run("ip", "-o", "addr").text
    result = sms(cluster, "cray.yaml", "host", "prepare", "host-a", "--json")
    assert result.status == 0, result.stderr.decode()
    assert host.run("ip", "-o", "addr").text == before, "nothing about the host's own interfaces changes"
    checks = json.loads(sms(cluster, "cray.yaml", "doctor", "--host", "host-a", "--json").stdout)["checks"]
    found = {check["what"]: check["state"] for check in checks}
    assert [found[what] for what in ("macvlan", *(f"interface {name}" for name in CRAY_CARDS))] == ["ok"] * 3


@pytest.mark.full
def test_a_vlan_below_a_bridge(cluster: lab.Lab) -> None:
    """A kernel without 802.1Q refuses it, nothing is left; with it, the card keeps its addresses."""
    host = cluster.host("host-a")
    host.run("ip", "link", "add", "card0", "type", "veth", "peer", "name", "card0-far")
    host.run("ip", "addr", "add", "10.99.0.1/24", "dev", "card0")
    write_site(cluster, "vlan.yaml", "br-vlan", "card0\n    vlan: 20")
    result = sms(cluster, "vlan.yaml", "host", "prepare", "host-a")
    if not has_vlans(cluster):
        said = result.stderr.decode()
        assert result.status == 1 and "cannot create bridge br-vlan: Error: Unknown device type" in said, said
        for left in ("br-vlan", "card0.20"):
            assert not host.works("ip", "link", "show", left)
        assert not host.works("test", "-e", "/etc/network/interfaces.d/sms-br-vlan")
        pytest.skip("this kernel has no 802.1Q (CONFIG_VLAN_8021Q): the refusal was tested, a VLAN was not created")
    assert result.status == 0, result.stderr.decode()
    assert "card0.20" in host.run("ip", "-o", "link", "show", "master", "br-vlan").text
    assert "10.99.0.1/24" in host.run("ip", "-o", "addr", "show", "dev", "card0").text
    assert json.loads(sms(cluster, "vlan.yaml", "host", "prepare", "host-a", "--json").stdout)["changed"] == []


def has_vlans(cluster: lab.Lab) -> bool:
    """Whether the kernel can create a VLAN interface, tried on an interface of the test."""
    host = cluster.host("host-a")
    try:
        return host.works("ip", "link", "add", "link", "card0", "name", "try0.1", "type", "vlan", "id", "1")
    finally:
        host.run("ip", "link", "delete", "try0.1", ok=None)


def test_a_host_with_another_key_is_refused(cluster: lab.Lab) -> None:
    known = (cluster.etc / "known_hosts").read_text().splitlines()
    other = next(line for line in known if "host-b" in line).split(" ", 1)[1]
    for name, text, words in (
        ("none", "", "not found in known_hosts"),
        ("wrong", f"host-a,10.78.0.11 {other}\n", "host key does not match known_hosts"),
    ):
        (cluster.etc / f"known-{name}").write_text(text)
        write_site(cluster, f"{name}.yaml", BRIDGE, PORT, known_hosts=f"known-{name}")
        result = sms(cluster, f"{name}.yaml", "host", "prepare", "host-a")
        assert result.status == 1
        assert words in result.stderr.decode()


RULES = """
table bridge strange {
    chain frames { type filter hook forward priority 0; policy accept; udp dport 53 drop; }
}
table ip others {
    chain own { type nat hook postrouting priority 100; oifname "eth9" masquerade; }
}
"""


def test_doctor_names_what_sms_did_not_make(cluster: lab.Lab) -> None:
    """The starter that `chmod 4777` changed, a rule for the site's bridges, a bridge that is joined to one."""
    host = cluster.host("host-a")

    def found() -> dict[str, tuple[str, str]]:
        checks = json.loads(sms(cluster, "sms.yaml", "doctor", "--host", "host-a", "--json").stdout)["checks"]
        names = ("Apptainer's files", "rules for the site's interfaces", "other bridges")
        return {each["what"]: (each["state"], each["detail"]) for each in checks if each["what"] in names}

    host.run("nft", "flush", "ruleset")  # rules of a `prepare` before this
    before = found()
    assert before["rules for the site's interfaces"] == ("ok", "none")
    assert before["Apptainer's files"][0] in ("ok", "warning"), before
    starter = f"{host.run('apptainer', 'buildcfg', 'LIBEXECDIR').text}/apptainer/bin/starter"
    host.run("nft", "-f", "-", input=RULES.encode())
    host.run("chmod", "4777", starter)
    for words in ("add br-strange type bridge", "set br-strange up", "add out0 type veth peer name out1"):
        host.run("ip", "link", *words.split())
    for end, bridge in (("out0", "br-strange"), ("out1", "br-prov")):
        host.run("ip", "link", "set", end, "master", bridge, "up")
    try:
        after = found()
    finally:
        host.run("nft", "flush", "ruleset")
        host.run("chmod", "755", starter)
        host.run("ip", "link", "del", "out0")
        host.run("ip", "link", "del", "br-strange")
    assert {state for what, (state, _) in after.items() if what != "Apptainer's files"} == {"warning"}
    assert after["Apptainer's files"][0] == "missing" and f"{starter} has mode 4777" in after["Apptainer's files"][1]
    rules = after["rules for the site's interfaces"][1]
    assert "bridge strange frames: udp dport 53 drop" in rules and "eth9" not in rules
    assert "br-prov and br-strange (out1, out0)" in after["other bridges"][1]
    assert found() == before


KEY = "/root/.ssh/id_between"
FOREIGN = ["# by hand", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHBYvQv0Fg0mJ3PL6vHqM0m5m4p4l5sVn3nXy0mZ0m0m operator"]


def over_ssh(cluster: lab.Lab, on: str, *argv: str) -> Result:
    """Run ssh to host-a with the key between admin hosts only."""
    options = ["BatchMode=yes", "IdentitiesOnly=yes", f"IdentityFile={KEY}", "UserKnownHostsFile=/etc/sms/known_hosts"]
    words = [word for option in options for word in ("-o", option)]
    # Without the lab's ssh_config, which names its own key.
    return cluster.host(on).run("ssh", "-F", "none", *words, *argv, ok=None)


def test_the_key_of_another_admin_host_works_only_from_there_and_forwards_nothing(cluster: lab.Lab) -> None:
    """The line that `sms` wrote before is replaced, that of a former admin host removed, all others stay."""
    near, far, admin = (cluster.host(name) for name in ("host-a", "host-b", "admin"))
    far.run("mkdir", "-p", "-m", "700", "/root/.ssh")
    far.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "root@host-b", "-f", KEY)
    admin.run("mkdir", "-p", "-m", "700", "/root/.ssh")
    admin.run("cp", "-p", "/etc/sms/keys/id_ed25519", KEY)
    text = (cluster.etc / "new.yaml").read_text().replace("key: keys/id_ed25519", f"key: {KEY}")
    (cluster.etc / "between.yaml").write_text(text)
    name = next(line.split()[1] for line in text.splitlines() if line.startswith("cluster: "))
    stale = [
        f'restrict,from="192.0.2.9" {FOREIGN[1].rsplit(" ", 1)[0]} sms:{name}:{host}' for host in ("host-b", "gone")
    ]
    path = "/root/.ssh/authorized_keys"
    before = (near.read(path) or b"").decode().splitlines()
    before = [line for line in before if f" sms:{name}:" not in line]  # of the other tests
    public = " ".join((far.read(f"{KEY}.pub") or b"").decode().split()[:2])
    by_hand = f"{public} by hand"
    near.write(path, "\n".join([*before, *FOREIGN, *stale, by_hand, ""]).encode(), mode=0o600)
    result = sms(cluster, "between.yaml", "host", "prepare", "host-a", "--json")
    assert result.status == 0, result.stderr.decode()
    line = f'restrict,pty,from="10.78.0.12" {public} sms:{name}:host-b'
    assert (near.read(path) or b"").decode().splitlines() == [*before, *FOREIGN, line, by_hand]
    assert any("accept the key of host-b from everywhere" in note for note in json.loads(result.stdout)["notes"])
    near.write(path, "\n".join([*before, *FOREIGN, line, ""]).encode(), mode=0o600)

    assert over_ssh(cluster, "host-b", "-tt", "root@10.78.0.11", "tty").text.startswith("/dev/pts/")
    listed = json.loads(sms(cluster, "between.yaml", "host", "list", "--json", on="host-b").stdout)
    assert [each["reachable"] for each in listed] == [True, True]
    forwarded = over_ssh(cluster, "host-b", "-W", "127.0.0.1:22", "root@10.78.0.11")
    assert forwarded.status and b"SSH-2.0" not in forwarded.stdout, forwarded
    admin.write(KEY, far.read(KEY) or b"", mode=0o600)
    stolen = over_ssh(cluster, "admin", "root@10.78.0.11", "true")
    assert stolen.status == 255 and b"Permission denied" in stolen.stderr
    admin.run("cp", "-p", "/etc/sms/keys/id_ed25519", KEY)


def test_only_the_build_host_has_the_signing_key_and_signs(cluster: lab.Lab) -> None:
    text = (cluster.etc / "new.yaml").read_text().replace("keys/sign.pem", "/root/own/sign.pem")
    text = text.replace("keys/sign.pub", "keys/own.pub") + "build: {host: admin}\n"
    (cluster.etc / "own.yaml").write_text(text)
    for verb in (("key", "create"), ("build",), ("vm", "build"), ("image", "build", "compute")):
        refused = sms(cluster, "own.yaml", *verb, on="host-a")
        if b"provisioning" not in refused.stderr:  # this site has no VM
            assert refused.status == 3 and b"run it on admin" in refused.stderr, (verb, refused)
    assert sms(cluster, "own.yaml", "key", "create").status == 0
    signing = "private signing key"

    def examine(*words: str, on: str = "admin") -> tuple[str, str]:
        checks = json.loads(sms(cluster, "own.yaml", "doctor", *words, "--json", on=on).stdout)["checks"]
        (found,) = [check for check in checks if check["what"] == signing]
        return found["state"], found["detail"] + found["mend"]

    assert examine()[0] == examine("--host", "host-a")[0] == examine(on="host-a")[0] == "ok"
    copy = "/var/lib/sms/images/left.pem"
    key = cluster.host("admin").read("/root/own/sign.pem") or b""
    cluster.host("host-a").run("mkdir", "-p", "/var/lib/sms/images")
    cluster.host("host-a").write(copy, key, mode=0o600)
    state, words = examine("--host", "host-a")
    assert state == "missing" and f"shred -u {copy}" in words
    before = sms(cluster, "own.yaml", "host", "prepare", "host-a", "--dry-run")
    assert (
        before.status == 3 and f"has a private signing key, and build.host is admin: {copy}" in before.stderr.decode()
    )
    cluster.host("host-a").run("rm", copy)
    assert examine("--host", "host-a")[0] == "ok"
    (cluster.etc / "own.yaml").write_text(text.replace("build: {host: admin}\n", ""))
    assert examine()[0] == "warning", "every machine with the key signs"


INTERRUPTED = """
"$1" --site /etc/sms/new.yaml host prepare host-a & pid=$!
until pgrep -f "[s]sh .*sms-ansible[-]" >/dev/null || ! kill -0 $pid; do sleep 0.1; done
kill -TERM $pid
wait $pid
"""


def test_an_interrupted_run_leaves_no_process_and_no_folder(cluster: lab.Lab) -> None:
    admin = cluster.host("admin")
    result = admin.run("sh", "-c", INTERRUPTED, "interrupted", SMS, ok=None)
    assert result.status == 130, result.stderr.decode()
    assert "sms-ansible-" not in admin.run("sh", "-c", "ps -eo args; ls /tmp").text


def test_hosts_are_listed(cluster: lab.Lab) -> None:
    lines = json.loads(sms(cluster, "new.yaml", "host", "list", "--json").stdout)
    assert [(line["name"], line["reachable"], line["running"]) for line in lines] == [
        ("host-a", True, False),
        ("host-b", True, False),
    ]
