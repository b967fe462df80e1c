"""Peer: the same root file system and services in a virtual machine that boots."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.host.local import Local
from appliance.lab.layout import BRIDGES, CONTAINER, CONTAINER_ADDRESSES, mac
from bench.rig.bare import INTERFACES, network_commands
from bench.rig.bed import Bed
from bench.rig.measure import Skip

PACKAGE = "qemu-system-x86"
FLAGS = (
    *("-M", "q35", "-accel", "tcg,thread=multi,tb-size=128", "-m", "1024", "-smp", "2"),
    *("-cpu", "qemu64,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,-svm"),
    *("-display", "none", "-nodefaults", "-serial", "stdio", "-no-reboot", "-device", "virtio-rng-pci"),
)
# What the root and the services need; those built into the kernel are passed over.
MODULES = (
    *("virtio_pci", "virtio_rng", "virtio_blk", "ext4", "virtio_net", "veth", "af_packet"),
    *("nf_tables", "nft_chain_nat", "nft_masq", "nft_ct", "nf_conntrack", "nft_counter"),
)
DONE = re.compile(rb"BENCH probes ended with status (\d+)")

# First program of the VM. The root is an image on a virtual disk, as a VM's usually is.
INITRAMFS_INIT = """\
#!/bin/busybox sh
/bin/busybox mkdir /proc /sys /dev /new
/bin/busybox mount -t devtmpfs dev /dev
while read module; do /bin/busybox insmod "/modules/$module"; done </modules/order
/bin/busybox mount -t ext4 /dev/vda /new
/bin/busybox mount --move /dev /new/dev
/bin/busybox mount -t tmpfs tmp /new/tmp
/bin/busybox cp /vm-init /new/tmp/vm-init
exec /bin/busybox switch_root /new /bin/sh /tmp/vm-init
"""
VM_INIT = """\
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
chmod 1777 /tmp
echo %(name)s >/proc/sys/kernel/hostname
%(network)s
/opt/sms/bin/sms-init &
until [ -d /run/sms ]; do sleep 0.05; done
/opt/sms/bin/sms-probe --wait 120
echo "BENCH probes ended with status $?"
wait
"""


def need_qemu(install: bool) -> None:
    """Install QEMU if that was asked for.

    Raises:
        Skip: it is not there.
    """
    if shutil.which("qemu-system-x86_64"):
        return
    if not install:
        raise Skip(f"no qemu-system-x86_64; --install installs {PACKAGE}")
    argv = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qy", "install", "--no-install-recommends", PACKAGE)
    Local().run(*argv, timeout=600)


def make_files(root: Path) -> dict[str, Path]:
    """Kernel, initramfs and disk image, beside the unpacked root; made once for each root."""
    files = {kind: root.with_name(f"{root.name}.{kind}") for kind in ("kernel", "initramfs", "disk")}
    if all(path.is_file() for path in files.values()):
        return files
    local = Local()
    with tempfile.TemporaryDirectory(prefix="sms-bench-") as folder:
        work = Path(folder)
        version = _unpack_kernel(work)
        _make_initramfs(work, version, files["initramfs"])
        shutil.copy(work / f"boot/vmlinuz-{version}", files["kernel"])
    # Room as the container's overlay has it.
    local.run("mke2fs", "-q", "-F", "-t", "ext4", "-L", "root", "-d", str(root), str(files["disk"]), "1G", timeout=300)
    return files


def _unpack_kernel(work: Path) -> str:
    """Debian's kernel for virtual machines and a static busybox, unpacked and not installed."""
    local = Local()
    depends = local.run("apt-cache", "depends", "--important", "linux-image-cloud-amd64").text
    found = re.search(r"linux-image-(\S+-cloud-amd64)", depends.partition("\n")[2])
    if not found:
        raise Skip("apt knows no linux-image-cloud-amd64")
    words = ("apt-get", "-q", "download", f"linux-image-{found.group(1)}", "busybox-static")
    local.run("env", "-C", str(work), *words, timeout=300)
    for package in work.glob("*.deb"):
        local.run("dpkg", "-x", str(package), str(work))
    local.run(str(work / "bin/busybox"), "depmod", "-b", str(work), found.group(1))
    return found.group(1)


def module_order(modules_dep: str) -> list[str]:
    """Paths of the wanted modules, each after those it needs."""
    needs = {line.partition(":")[0]: line.partition(":")[2].split() for line in modules_dep.splitlines()}
    paths = {Path(path).name.split(".")[0].replace("-", "_"): path for path in needs}
    order: dict[str, None] = {}

    def add(path: str) -> None:
        for need in needs[path]:
            add(need)
        order[path] = None

    for name in MODULES:
        if name in paths:
            add(paths[name])
    return list(order)


def _make_initramfs(work: Path, version: str, target: Path) -> None:
    """Busybox, the modules in their order, and the two init programs."""
    modules = work / "lib/modules" / version
    tree = work / "initramfs"
    (tree / "bin").mkdir(parents=True)
    (tree / "modules").mkdir()
    shutil.copy(work / "bin/busybox", tree / "bin/busybox")
    order = module_order((modules / "modules.dep").read_text())
    for path in order:
        shutil.copy(modules / path.removeprefix(f"/lib/modules/{version}/"), tree / "modules")
    (tree / "modules/order").write_text("".join(f"{Path(path).name}\n" for path in order))
    (tree / "vm-init").write_text(VM_INIT % {"name": shlex.quote(CONTAINER), "network": network_commands()})
    (tree / "init").write_text(INITRAMFS_INIT)
    (tree / "init").chmod(0o755)
    pack = 'cd "$1" && find . | "$2" cpio -o -H newc | gzip -1 >"$3"'
    Local().run("sh", "-c", pack, "pack", str(tree), str(work / "bin/busybox"), str(target))


@contextmanager
def _taps(bed: Bed) -> Iterator[list[str]]:
    """Both networks' taps on the lab's switch; gives QEMU's arguments for them."""
    switch = ("ip", "-n", bed.lab.layout.namespace("switch"))
    words: list[str] = []
    taps = {f"v-{interface}": network for network, interface in INTERFACES.items()}
    try:
        for number, (tap, network) in enumerate(taps.items()):
            Local().run(*switch, "tuntap", "add", tap, "mode", "tap")
            Local().run(*switch, "link", "set", tap, "master", BRIDGES[network], "up")
            words += ["-netdev", f"tap,id=n{number},ifname={tap},script=no,downscript=no"]
            address = mac(CONTAINER_ADDRESSES[network])
            words += ["-device", f"virtio-net-pci,netdev=n{number},mac={address},romfile="]
        yield words
    finally:
        for tap in taps:
            Local().run(*switch, "link", "del", tap, ok=None)


def boot(bed: Bed, files: dict[str, Path], timeout_s: float = 180) -> float:
    """Boot the VM; seconds from QEMU's start to the last service's answer. Nothing is written to its disk."""
    append = "console=ttyS0 quiet mitigations=off panic=-1"
    with _taps(bed) as networks:
        argv = (
            *("ip", "netns", "exec", bed.lab.layout.namespace("switch"), "qemu-system-x86_64", *FLAGS, *networks),
            *("-kernel", str(files["kernel"]), "-initrd", str(files["initramfs"]), "-append", append),
            *("-drive", f"file={files['disk']},format=raw,if=virtio,snapshot=on"),
        )
        began = time.monotonic()
        process = subprocess.Popen(
            ("timeout", "--kill-after", "5", str(timeout_s), *argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            return _wait_for_probes(process) - began
        finally:
            process.terminate()
            process.communicate()


def _wait_for_probes(process: subprocess.Popen[bytes]) -> float:
    """When the VM says on its serial line that every probe passed.

    Raises:
        Skip: it does not come so far.
    """
    assert process.stdout
    said: list[bytes] = []
    for line in process.stdout:
        said.append(line)
        if found := DONE.search(line):
            if found.group(1) == b"0":
                return time.monotonic()
            break
    tail = b"".join(said[-12:]).decode(errors="replace")
    raise Skip(f"the services do not come up in the VM: {tail}")
