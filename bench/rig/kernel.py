"""Boot files of a virtual machine: Debian's kernel, a custom initramfs, the root file system as a disk image."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from pathlib import Path

from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.lab.layout import CONTAINER
from bench.rig.bare import network_commands

# Needed by the root file system and the services; those built into the kernel are skipped.
MODULES = (
    *("virtio_pci", "virtio_rng", "virtio_blk", "ext4", "virtio_net", "veth", "af_packet"),
    *("nf_tables", "nft_chain_nat", "nft_masq", "nft_ct", "nf_conntrack", "nft_counter"),
    *("nft_limit", "nft_connlimit"),
)
# First program of the VM. The root file system is an image on a virtual disk, as usual.
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
ln -s /proc/self/fd /dev/fd
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


def make_files(root: Path) -> dict[str, Path]:
    """Create kernel, initramfs and disk image beside the unpacked root, once per root; return their paths."""
    files = {kind: root.with_name(f"{root.name}.{kind}") for kind in ("kernel", "initramfs", "disk")}
    if all(path.is_file() for path in files.values()):
        return files
    local = Local()
    with tempfile.TemporaryDirectory(prefix="sms-bench-") as folder:
        work = Path(folder)
        version = _unpack_kernel(work)
        _make_initramfs(work, version, files["initramfs"])
        shutil.copy(work / f"boot/vmlinuz-{version}", files["kernel"])
    # The size of the container's overlay. Renamed at the end, so that an interrupted run is repeated.
    beside = files["disk"].with_name(f"{files['disk'].name}.new")
    local.run("mke2fs", "-q", "-F", "-t", "ext4", "-L", "root", "-d", str(root), str(beside), "1G", timeout=300)
    beside.rename(files["disk"])
    return files


def _unpack_kernel(work: Path) -> str:
    """Unpack Debian's kernel for virtual machines and a static busybox; return the kernel's version."""
    local = Local()
    depends = local.run("apt-cache", "depends", "--important", "linux-image-cloud-amd64").text
    found = re.search(r"linux-image-(\S+-cloud-amd64)", depends.partition("\n")[2])
    if not found:
        raise SmsError("apt has no package linux-image-cloud-amd64")
    argv = ("apt-get", "-q", "download", f"linux-image-{found.group(1)}", "busybox-static")
    local.run("env", "-C", str(work), *argv, timeout=300)
    for package in work.glob("*.deb"):
        local.run("dpkg", "-x", str(package), str(work))
    local.run(str(work / "bin/busybox"), "depmod", "-b", str(work), found.group(1))
    return found.group(1)


def module_order(modules_dep: str) -> list[str]:
    """Return the paths of the required modules, each after its dependencies."""
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
    """Create the initramfs: busybox, the modules in load order, and the two init programs."""
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
