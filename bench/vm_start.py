"""Duration of `sms vm start` until all services of the provisioning VM are ready, and its phases."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.host.local import Local
from appliance.lab import Lab
from appliance.lab.up import check_machine
from bench.rig import Rig, Samples, result
from bench.rig.bed import CARRIER
from bench.rig.console import Mark, Watch, now, phases
from bench.rig.metal import UNITS, MetalLab, open_metal_lab, read_units

GOAL_S = 40
FIRMWARE = "firmware"
MANAGER = ("Userspace", "Finish")
"""systemd's timestamps since the start of the kernel: start of systemd, and end of the boot."""
RUNS = 3
ENDS = (
    ("sms: checks, disks, certificates", r"^power on$"),
    (FIRMWARE, r"BdsDxe: starting|systemd-boot|EFI stub"),
    ("boot loader, kernel, initramfs", r"systemd\[1\]|Welcome|login:|^serves$"),
    ("systemd", r"login:|^serves$"),
    ("services, and sms sees them", r"^serves$"),
)


def find_vm_pid(lab: Lab) -> int | None:
    """Return the PID of the VM on this machine."""
    for word in Local().run("ip", "netns", "pids", lab.layout.namespace(CARRIER), ok=None).text.split():
        try:
            if Path(f"/proc/{word}/cmdline").read_bytes().startswith(b"qemu-system-x86_64\0-name\0sms-vm-"):
                return int(word)
        except OSError:
            continue
    return None


@dataclass
class VmStart:
    """One start: its console, the verb's JSON output, and the guest's timestamps of ``MANAGER`` in seconds."""

    watch: Watch
    reply: dict[str, Any]
    clock: dict[str, float]

    @property
    def phases(self) -> list[dict[str, Any]]:
        """The phases of the start."""
        return phases(self.watch.marks, ENDS)

    @property
    def first_program(self) -> float:
        """Seconds from power-on to systemd: the firmware's from the console, the kernel's from its clock."""
        return {one["phase"]: float(one["s"]) for one in self.phases}[FIRMWARE] + self.clock["userspace"]


def start(row: MetalLab) -> VmStart:
    """Start the VM once."""
    row.sms("vm", "stop", ok=(0, 3))
    log = row.lab.layout.disk / CARRIER / "vm" / "lab" / "console.log"
    log.unlink(missing_ok=True)
    began = now()
    with Watch(log, lambda: find_vm_pid(row.lab)) as watch:
        reply = json.loads(row.sms("vm", "start", "--host", CARRIER, "--wait", "10m", "--json"))
        here = watch.mark()
        time.sleep(0.2)
    watch.marks = [Mark(began, 0.0), *watch.marks, Mark(here.at, here.cpu, "serves")]
    watch.marks.sort(key=lambda mark: mark.at)
    argv = ("systemctl", "show", *(f"-p{name}TimestampMonotonic" for name in MANAGER))
    lines = (line.partition("=") for line in row.sms("vm", "exec", "--", *argv, ok=None).split())
    clock = {name.removesuffix("TimestampMonotonic").lower(): int(value or 0) / 1e6 for name, _, value in lines}
    return VmStart(watch, reply, clock)


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Compare with the same start up to the end of firmware and kernel, which any virtual machine needs."""
    check_machine(metal=True)
    with open_metal_lab(rig.progress, 1) as row:
        start(row)  # warm up: creates the state disk and caches the image
        takes = []
        for number in range(min(RUNS, rig.runs)):
            with rig.progress.step(f"start the VM, {number + 1} of {min(RUNS, rig.runs)}"):
                takes.append(start(row))
        units = row.sms("vm", "exec", "--", "systemctl", "show", "--property", UNITS, "*", ok=None)
    whole = Samples(take.watch.marks[-1].at - take.watch.marks[0].at for take in takes)
    middle = min(range(len(whole)), key=lambda number: abs(whole[number] - whole.median))
    median = takes[middle]
    yield result(
        "vm_start",
        whole,
        "the same start up to its first program",
        Samples.tried(lambda: [take.first_program for take in takes]),
        below=GOAL_S,
        cpu_s=Samples(take.watch.marks[-1].cpu for take in takes).median,
        phases=median.phases,
        parts=median.reply["parts"],
        kernel_clock={name: round(seconds, 2) for name, seconds in median.clock.items()},
        units=read_units(units),
        load=[round(each, 1) for each in os.getloadavg()],
    )
