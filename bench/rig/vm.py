"""Peer: the same root file system and services in a booting virtual machine."""

from __future__ import annotations

import re
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

FLAGS = (
    *("-M", "q35", "-accel", "tcg,thread=multi,tb-size=128", "-m", "1024", "-smp", "2"),
    *("-cpu", "qemu64,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,-svm"),
    *("-display", "none", "-nodefaults", "-serial", "stdio", "-no-reboot", "-device", "virtio-rng-pci"),
)
DONE = re.compile(rb"BENCH probes ended with status (\d+)")


@contextmanager
def _taps(bed: Bed) -> Iterator[list[str]]:
    """Create taps for both networks on the lab's switch; yield QEMU's arguments for them."""
    switch = ("ip", "-n", bed.lab.layout.namespace("switch"))
    arguments: list[str] = []
    taps = {f"v-{interface}": network for network, interface in INTERFACES.items()}
    try:
        for number, (tap, network) in enumerate(taps.items()):
            Local().run(*switch, "tuntap", "add", tap, "mode", "tap")
            Local().run(*switch, "link", "set", tap, "master", BRIDGES[network], "up")
            arguments += ["-netdev", f"tap,id=n{number},ifname={tap},script=no,downscript=no"]
            address = mac(CONTAINER_ADDRESSES[network])
            arguments += ["-device", f"virtio-net-pci,netdev=n{number},mac={address},romfile="]
        yield arguments
    finally:
        for tap in taps:
            Local().run(*switch, "link", "del", tap, ok=None)


def boot(bed: Bed, files: dict[str, Path], timeout_s: float = 180) -> float:
    """Boot the VM; return the seconds from QEMU's start until all services answer. Disk writes are discarded."""
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
    """Return the time when the VM reports on its serial console that every probe passed.

    Raises:
        SmsError: QEMU ended, or a probe failed.
    """
    assert process.stdout
    output: list[bytes] = []
    for line in process.stdout:
        output.append(line)
        if found := DONE.search(line):
            if found.group(1) == b"0":
                return time.monotonic()
            break
    tail = b"".join(output[-12:]).decode(errors="replace").splitlines()
    raise SmsError("\n    ".join(["the services did not start in the VM", *tail]))
