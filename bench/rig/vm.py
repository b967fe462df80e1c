"""Peer: the same root file system and services in a virtual machine that boots."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.lab.layout import BRIDGES, CONTAINER_ADDRESSES, mac
from bench.rig.bare import INTERFACES
from bench.rig.bed import Bed
from bench.rig.measure import need

PACKAGE = "qemu-system-x86"
FLAGS = (
    *("-M", "q35", "-accel", "tcg,thread=multi,tb-size=128", "-m", "1024", "-smp", "2"),
    *("-cpu", "qemu64,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,-svm"),
    *("-display", "none", "-nodefaults", "-serial", "stdio", "-no-reboot", "-device", "virtio-rng-pci"),
)
DONE = re.compile(rb"BENCH probes ended with status (\d+)")


def need_qemu(install: bool) -> None:
    """Install QEMU if that was asked for.

    Raises:
        SmsError: it is not there.
    """
    if shutil.which("qemu-system-x86_64"):
        return
    if not install:
        need("qemu-system-x86_64", f"{PACKAGE}, which --install installs")
    argv = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qy", "install", "--no-install-recommends", PACKAGE)
    Local().run(*argv, timeout=600)


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
        SmsError: it does not come so far.
    """
    assert process.stdout
    said: list[bytes] = []
    for line in process.stdout:
        said.append(line)
        if found := DONE.search(line):
            if found.group(1) == b"0":
                return time.monotonic()
            break
    tail = b"".join(said[-12:]).decode(errors="replace").splitlines()
    raise SmsError("\n    ".join(["the services do not come up in the VM", *tail]))
