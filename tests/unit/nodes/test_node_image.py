"""Node profiles, plans and the initramfs: tables, real files, real cpio and busybox."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from appliance.catalog.node import NodeProfile, read_node_profile
from appliance.config.model import SystemUser
from appliance.config.provisioning import Profile
from appliance.config.read import read_model
from appliance.errors import ConfigError
from appliance.plan.nodes.image import (
    NodeInputs,
    account_lines,
    cpio,
    find_secrets,
    mmdebstrap_argv,
    needed_modules,
    packages_of,
    plan_node,
)
from appliance.share import share
from appliance.tools.sealed import read_key, seal

Need = Callable[[str], str]
NODES = share("definitions", "nodes")
INIT = NODES / "init"


def planned(site: Profile | None = None, **what: Any) -> Any:
    profile = read_node_profile(NODES, "compute")
    given: dict[str, Any] = {"sources": ["deb x"], "versions": {"slurmd": "22.05"}, "files": {}, "initramfs": {}}
    inputs = NodeInputs(**{**given, "tools": {"finish": b"x"}, **what})
    return plan_node("compute", profile, site or Profile(), inputs)


def test_the_shipped_profile() -> None:
    profile = read_node_profile(NODES, "compute")
    assert {"slurmd", "munge", "rsyslog", "rsyslog-relp", "chrony", "systemd-sysv", "busybox-static"} <= set(
        profile.packages
    )
    assert read_node_profile(NODES, "gpu") == profile, "one without a file of its own begins with the usual one"
    assert "linux-image-amd64" in packages_of(profile, Profile(packages=("nvtop",)))
    assert {"linux-image-cloud-amd64", "nvtop"} <= set(
        packages_of(profile, Profile(packages=("nvtop",), kernel="cloud"))
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mask: ['../x']", "mask"),
        ("drivers: [/etc]", "drivers"),
        ("modules: ['a b']", "modules"),
        ('arguments: "a\\nb"', "arguments"),
        ("colour: red", "colour"),
    ],
)
def test_an_invalid_profile(line: str, words: str) -> None:
    text = "summary: x\nbase: debian-12\npackages: [a]\nkernels: {}\n"
    text += "" if line.startswith("drivers") else "drivers: []\n"
    with pytest.raises(ConfigError, match=words):
        read_model(f"{text}{line}\n", "x.yaml", NodeProfile)


@pytest.mark.parametrize(
    ("what", "changes", "root"),
    [
        ({}, False, False),
        ({"sources": ["deb y"]}, False, False),
        ({"versions": {"slurmd": "22.06"}}, True, True),
        ({"files": {"etc/sms/tls/ca.pem": (b"ca", 0o644)}}, True, False),
        ({"initramfs": {"init": (b"x", 0o755)}}, True, False),
        ({"tools": {"finish": b"y"}}, True, False),
        ({"site": Profile(arguments="debug")}, True, False),
        ({"site": Profile(groups=("gpu",))}, True, False),
        ({"site": Profile(packages=("nvtop",))}, True, True),
    ],
)
def test_what_changes_the_keys_of_an_image(what: dict[str, Any], changes: bool, root: bool) -> None:
    before, after = planned(), planned(**what)
    assert (before.key != after.key, before.root_key != after.root_key) == (changes, root)


def test_arguments_of_the_site_come_last() -> None:
    assert planned(Profile(arguments="mitigations=off")).arguments.endswith("console=ttyS0,115200 mitigations=off")


def test_mounts_of_a_build_end_with_it() -> None:
    argv = mmdebstrap_argv(planned(), "/x/root.tar.zst", "/x")
    assert argv[:4] == ("setpriv", "--pdeathsig", "KILL", "unshare")
    assert {"--mount", "--kill-child", "private"} <= set(argv)
    assert argv[-2:] == ("/x/root.tar.zst", "-")


DEPENDENCIES = """\
kernel/drivers/net/virtio_net.ko: kernel/net/core/failover.ko kernel/drivers/virtio/virtio.ko
kernel/drivers/net/ethernet/intel/e1000/e1000.ko:
kernel/drivers/net/ethernetish.ko:
kernel/drivers/virtio/virtio.ko:
kernel/net/core/failover.ko:
kernel/fs/squashfs/squashfs.ko:
kernel/net/packet/af_packet.ko:
"""


@pytest.mark.parametrize(
    ("drivers", "names", "paths"),
    [
        (["drivers/net/ethernet"], [], ["drivers/net/ethernet/intel/e1000/e1000.ko"]),
        (
            ["drivers/net/virtio_net.ko"],
            [],
            ["drivers/net/virtio_net.ko", "drivers/virtio/virtio.ko", "net/core/failover.ko"],
        ),
        ([], ["squashfs", "af_packet", "loop"], ["fs/squashfs/squashfs.ko", "net/packet/af_packet.ko"]),
        (["drivers/gpu"], [], []),
    ],
)
def test_modules_include_their_dependencies(drivers: list[str], names: list[str], paths: list[str]) -> None:
    assert needed_modules(DEPENDENCIES, drivers, names) == [f"kernel/{path}" for path in paths]


def test_cpio_reads_the_archive(need: Need, tmp_path: Path) -> None:
    archive = cpio({"init": (b"#!/bin/sh\n", 0o755), "etc/x/y": (b"abc", 0o644)}, {"bin/sh": "busybox"})
    subprocess.run([need("cpio"), "-idm", "--quiet"], input=archive, cwd=tmp_path, check=True)
    assert (tmp_path / "init").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "etc/x/y").read_bytes() == b"abc"
    assert (tmp_path / "bin/sh").readlink() == Path("busybox")


@pytest.mark.parametrize(
    ("names", "shadow", "found"),
    [
        ([], "root:*:1::\nmunge:!:1::\nx:!*:1::", []),
        (["etc/munge/munge.key"], "", ["etc/munge/munge.key"]),
        (["etc/ssh/ssh_host_ed25519_key", "etc/ssh/ssh_host_ed25519_key.pub"], "", ["etc/ssh/ssh_host_ed25519_key"]),
        (["opt/sms/tls/ca.key", "etc/sms/tls/ca.pem"], "", ["opt/sms/tls/ca.key"]),
        (["etc/shadow-"], "root:$y$j9T$x:1::", ["etc/shadow-", "/etc/shadow: a password of root"]),
    ],
)
def test_find_secrets(names: list[str], shadow: str, found: list[str]) -> None:
    assert find_secrets(names, shadow) == found


# Functions of the init program, run by busybox's shell if it is installed.


def shell() -> list[str]:
    return ["busybox", "sh"] if shutil.which("busybox") else ["sh"]


def run_init(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run functions of init without its main part; system paths are redirected to a folder."""
    text = INIT.read_text().partition("\nmount_kernel\n")[0]
    for path in (
        "/proc/cmdline",
        "/proc/uptime",
        "/dev/console",
        "/run/",
        "/root/etc",
        "/sys/class/net",
        "/etc/sms",
        "/image/",
        " /image\n",
    ):
        text = text.replace(path, f"{path[: -len(path.lstrip())]}{tmp_path}{path.lstrip()}")
    text = text.replace("PATH=/bin\n", "").replace(">" + str(tmp_path / "dev/console"), f">>{tmp_path}/dev/console")
    for folder in ("proc", "dev", "run", "root/etc/chrony/sources.d", "root/etc/rsyslog.d", "sys/class/net"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc/uptime").write_text("5.00 1.00\n")
    # Replace what would wait or reboot.
    quiet = "sleep() { :; }\nreboot() { echo rebooted; exit 9; }\n"
    return subprocess.run([*shell(), "-c", f"{text}\n{quiet}{script}"], capture_output=True, text=True, timeout=60)


def give(tmp_path: Path, cmdline: str) -> None:
    (tmp_path / "proc").mkdir(exist_ok=True)
    (tmp_path / "proc/cmdline").write_text(f"{cmdline}\n")


@pytest.mark.parametrize(
    ("word", "value"), [("sms.node", "n1"), ("sms.image", "http://x/?a=b"), ("sms", ""), ("node", ""), ("quiet", "")]
)
def test_kernel_arguments(word: str, value: str, tmp_path: Path) -> None:
    give(tmp_path, "quiet sms.node=n1 sms.image=http://x/?a=b")
    assert run_init(tmp_path, f"word {word}").stdout.strip() == value


@pytest.mark.parametrize(
    ("cmdline", "ports"),
    [("", "eth0 eth1"), ("BOOTIF=01-02-00-0A-4d-00-66", "eth1"), ("BOOTIF=01-02-00-0a-4d-00-99", "")],
)
def test_the_port_that_the_firmware_used(cmdline: str, ports: str, tmp_path: Path) -> None:
    give(tmp_path, cmdline)
    for name, mac in (("eth0", "02:00:0a:4d:00:65"), ("eth1", "02:00:0a:4d:00:66"), ("lo", "00:00:00:00:00:00")):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "address").write_text(f"{mac}\n")
        if name != "lo":
            (tmp_path / "sys/class/net" / name / "device").mkdir()
    assert run_init(tmp_path, "ports").stdout.split() == ports.split()


@pytest.mark.parametrize("name", ["x;reboot", "a/b", "$(id)"])
def test_invalid_node_names(name: str, tmp_path: Path) -> None:
    give(tmp_path, f"sms.node={name}")
    done = run_init(tmp_path, "ip=10.77.0.101 dns= ntpsrv= logsrv= write_lease")
    assert done.returncode == 9 and "is not a node name" in (tmp_path / "dev/console").read_text()


def test_dhcp_options_are_written_to_the_system(tmp_path: Path) -> None:
    give(tmp_path, "sms.node=n1 sms.server=https://10.77.0.2:8443")
    done = run_init(tmp_path, "ip=10.77.0.101 dns='10.0.0.1 10.0.0.2' ntpsrv=10.77.0.1 logsrv=10.77.0.1 write_lease")
    assert done.returncode == 0, done.stderr
    etc = tmp_path / "root/etc"
    assert (etc / "hostname").read_text() == "n1\n"
    assert (etc / "hosts").read_text() == "127.0.0.1 localhost\n10.77.0.101 n1\n"
    assert (etc / "resolv.conf").read_text() == "nameserver 10.0.0.1\nnameserver 10.0.0.2\n"
    assert (etc / "chrony/sources.d/sms.sources").read_text() == "server 10.77.0.1 iburst\n"
    (sender,) = (etc / "rsyslog.d/sms.conf").read_text().split("\n")[1:-1]
    assert 'type="omfwd" port="514" protocol="tcp"' in sender and 'target="10.77.0.1"' in sender
    assert "SMS_NODE=n1\n" in (tmp_path / "run/sms/node.env").read_text()


def test_lines_are_forwarded_over_relp(tmp_path: Path) -> None:
    give(tmp_path, "sms.node=n1 sms.log=relp")
    done = run_init(tmp_path, "ip=10.77.0.101 dns= ntpsrv= logsrv='10.77.0.1 10.77.0.9' write_lease")
    assert done.returncode == 0, done.stderr
    load, *senders = (tmp_path / "root/etc/rsyslog.d/sms.conf").read_text().splitlines()
    assert load == 'module(load="omrelp")'
    assert [sender.split()[:3] for sender in senders] == [
        ['action(type="omrelp"', 'port="2514"', f'target="{address}"'] for address in ("10.77.0.1", "10.77.0.9")
    ]


@pytest.mark.parametrize("cmdline", ["quiet", "sms.image=http://x/y", "sms.image=http://x/y sms.sha256=abc"])
def test_an_image_without_a_digest_is_never_fetched(cmdline: str, tmp_path: Path) -> None:
    give(tmp_path, cmdline)
    done = run_init(tmp_path, "wget() { echo fetched; }\nget_image")
    assert done.stdout == "rebooted\n"
    assert "names no image" in (tmp_path / "dev/console").read_text()


def make_keys(folder: Path) -> dict[str, Any]:
    """Pairs of each type, and their public keys as an initramfs has them."""
    folder.mkdir(parents=True)
    pairs: dict[str, Any] = {
        "ed25519": ed25519.Ed25519PrivateKey.generate(),
        "ec": ec.generate_private_key(ec.SECP256R1()),
        "rsa": rsa.generate_private_key(65537, 2048),
    }
    for name, pair in pairs.items():
        private, public = folder / f"{name}.pem", folder / f"{name}.pub"
        private.write_bytes(pair.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        private.chmod(0o600)
        public.write_bytes(pair.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        assert read_key(public) == (name, public.read_bytes())
    return pairs


ROOT_FS = "root.squashfs"
BUILD = "b1" * 32


def sealed(folder: Path, private: Path, **about: object) -> str:
    """A sealed image; returns the digest of its root."""
    folder.mkdir(parents=True)
    for name in (ROOT_FS, "vmlinuz", "initrd.img"):
        (folder / name).write_bytes(name.encode())
    names = {"kind": "node", "key": BUILD, "packages": {ROOT_FS: "1", "key": "2"}, "groups": ["a"]}
    seal(folder, private, about={**names, **about})
    return hashlib.sha256((folder / ROOT_FS).read_bytes()).hexdigest()


def get_image(tmp_path: Path, served: Path, digest: str, more: str = "") -> tuple[bool, str]:
    """Run ``get_image`` of init; return whether it ended with an image that may be mounted, and its console."""
    give(tmp_path, f"sms.image=http://10.77.0.2/images/compute/{digest}/{ROOT_FS} sms.sha256={digest}")
    stub = f'mount() {{ :; }}\nfetch() {{ cp "{served}/${{1##*/}}" "$2" || fail "$1"; }}\n'
    done = run_init(tmp_path, f"{stub}{more}get_image && echo mounted")
    assert done.stdout in ("mounted\n", "rebooted\n"), done.stderr
    return done.stdout == "mounted\n", (tmp_path / "dev/console").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ed25519", "ec", "rsa"])
def test_a_manifest_with_a_valid_signature(kind: str, tmp_path: Path, need: Need) -> None:
    need("openssl")
    make_keys(tmp_path / "keys")
    initramfs(tmp_path, "rsa", "ec", "ed25519")
    digest = sealed(tmp_path / "served", tmp_path / "keys" / f"{kind}.pem")
    mounted, console = get_image(tmp_path, tmp_path / "served", digest)
    assert mounted, console
    assert (tmp_path / "image" / ROOT_FS).read_bytes() == ROOT_FS.encode()


def initramfs(tmp_path: Path, *kinds: str) -> None:
    """What a build puts into the initramfs."""
    there = tmp_path / "etc" / "sms"
    (there / "keys").mkdir(parents=True)
    (there / "build").write_text(f"{BUILD}\n")
    for number, kind in enumerate(kinds):
        shutil.copy(tmp_path / "keys" / f"{kind}.pub", there / "keys" / f"{number}.{kind}")


def alter(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


UNSIGNED = "manifest.json is not signed with a key of this site"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("manifest", UNSIGNED),
        ("signature", UNSIGNED),
        ("no signature", UNSIGNED),
        ("empty", UNSIGNED),
        ("another key", UNSIGNED),
        ("no keys", UNSIGNED),
        ("no openssl", UNSIGNED),
        ("image", "is not the image it should be: its digest is"),
        ("boot script", "manifest.json is that of another image than"),
        ("older", "is signed, but that of another image than this initramfs is of"),
        ("no build", "is signed, but that of another image than this initramfs is of"),
    ],
)
def test_what_is_not_signed_is_not_mounted(fault: str, why: str, tmp_path: Path, need: Need) -> None:
    need("openssl")
    make_keys(tmp_path / "keys")
    initramfs(tmp_path, *(() if fault == "no keys" else ("ed25519",)))
    served = tmp_path / "served"
    about = {"key": "a0" * 32} if fault == "older" else {"kind": "vm", "key": ""} if fault == "no build" else {}
    digest = sealed(served, tmp_path / "keys" / ("ec.pem" if fault == "another key" else "ed25519.pem"), **about)
    if fault == "manifest":
        alter(served / "manifest.json", b'"node"', b'"nodE"')
    elif fault == "signature":
        (served / "manifest.sig").write_bytes(base64.b64encode(bytes(64)))
    elif fault in ("no signature", "empty"):
        (served / "manifest.sig").write_bytes(b"")
        if fault == "empty":
            (served / "manifest.json").write_bytes(b"")
    elif fault == "image":
        alter(served / ROOT_FS, b"root", b"toor")
    elif fault == "boot script":
        # With an image of the attacker's that the boot script names.
        alter(served / ROOT_FS, b"root", b"toor")
        digest = hashlib.sha256((served / ROOT_FS).read_bytes()).hexdigest()
    mounted, console = get_image(
        tmp_path, served, digest, "openssl() { return 127; }\n" if fault == "no openssl" else ""
    )
    assert not mounted
    assert why in console
    assert "no right image could be fetched" in console
    assert ("fetching http://10.77.0.2/images/compute/" + digest + "/root.squashfs" in console) == (fault == "image")


@pytest.mark.parametrize(
    ("steps", "ends", "words"),
    [
        # result of each call of wget
        (["ok"], 0, ""),
        (["wget: connection refused", "wget: timed out", "ok"], 0, "connection refused"),
        (["wget: server returned error: HTTP/1.1 416 Requested Range Not Satisfiable"], 0, ""),
        (["wget: server returned error: HTTP/1.1 404 Not Found"], 9, "404"),
        (["wget: connection refused"] * 9, 9, "connection refused"),
    ],
)
def test_interrupted_downloads_are_resumed(steps: list[str], ends: int, words: str, tmp_path: Path) -> None:
    give(tmp_path, "sms.patience=3")
    (tmp_path / "steps").write_text("".join(f"{step}\n" for step in steps))
    script = f"""
    cd {tmp_path}
    timeout() {{ shift; "$@"; }}
    cut() {{ count=$(cat clock 2>/dev/null || echo 0); echo $((count + 1)) | tee clock; }}
    wget() {{ step=$(head -n 1 steps); sed -i 1d steps; [ "$step" != ok ] || return 0; echo "$step" >&2; return 1; }}
    fetch http://10.77.0.2/x file"""
    done = run_init(tmp_path, script)
    assert done.returncode == ends, done.stderr
    console = (tmp_path / "dev/console").read_text() if (tmp_path / "dev/console").exists() else ""
    assert words in console


@pytest.mark.parametrize(
    ("given", "lease"),
    [
        ({"opt7": "0a4d0001"}, "logsrv='10.77.0.1 '"),
        ({"opt7": "0a4d00010a4d0002"}, "logsrv='10.77.0.1 10.77.0.2 '"),
        ({"opt7": "", "hostname": "n1'; reboot; '"}, "hostname='n1 reboot '"),
    ],
)
def test_dhcp_options_are_sanitized(given: dict[str, str], lease: str, tmp_path: Path) -> None:
    text = (NODES / "udhcpc").read_text().replace("/run/lease", f"{tmp_path}/lease")
    values = {"interface": "eth9", "ip": "10.77.0.101", "mask": "24", "dns": "", "ntpsrv": "", "router": "", "mtu": ""}
    environment = {**os.environ, **values, "hostname": "n1", **given}
    script = f"ip() {{ :; }}\n{text}"
    subprocess.run([*shell(), "-c", script, "udhcpc", "bound"], env=environment, check=False, capture_output=True)
    # `-c` takes the program's name first.
    assert lease in (tmp_path / "lease").read_text().splitlines()


def test_system_users_of_the_site(tmp_path: Path) -> None:
    users = {"slurm": SystemUser(uid=202, gid=203), "munge": SystemUser(uid=201, gid=201)}
    usual, given = planned(), planned(users=users)
    assert usual.root_key != given.root_key and usual.key != given.key
    hooks = [each for each in mmdebstrap_argv(given, "a.tar", "/work") if each.startswith("--essential-hook=")]
    assert len(hooks) == 1 and not any("essential-hook" in each for each in mmdebstrap_argv(usual, "a.tar", "/work"))
    (tmp_path / "etc").mkdir()
    subprocess.run(["sh", "-euc", account_lines(users), "sh", str(tmp_path)], check=True)
    assert (tmp_path / "etc/passwd").read_text().splitlines() == [
        "munge:*:201:201::/nonexistent:/usr/sbin/nologin",
        "slurm:*:202:203::/nonexistent:/usr/sbin/nologin",
    ]
    assert (tmp_path / "etc/group").read_text() == "munge:x:201:\nslurm:x:203:\n"


def test_no_reply_of_a_dhcp_server_runs_anything(tmp_path: Path) -> None:
    """Its shell reads what udhcpc wrote: of each value only letters, digits and some signs are left."""
    lease, mark = tmp_path / "lease", tmp_path / "ran"
    trick = f"a'; touch {mark}; '$(touch {mark})`touch {mark}`\ntouch {mark}\n\""
    given = {
        "ip": "10.0.0.7",
        "interface": "eth0",
        **dict.fromkeys(("hostname", "dns", "ntpsrv", "router", "opt7"), trick),
    }
    script = (NODES / "udhcpc").read_text().replace("/run/lease", str(lease))
    read = f'ip() {{ :; }}\n{script}\n. {lease}; printf %s "$hostname"'
    done = subprocess.run(
        [*shell(), "-c", read, "udhcpc", "bound"], env={**os.environ, **given}, capture_output=True, timeout=60
    )
    assert done.returncode == 0 and not mark.exists(), done.stderr
    assert done.stdout.startswith(b"a touch ") and b"'" not in done.stdout
