"""How long `sms vm start` takes until everything in the provisioning VM serves, and what that is made of."""

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
from bench.rig.metal import UNITS, Row, open_row, read_units

GOAL_S = 40
FIRMWARE = "firmware"
MANAGER = ("Userspace", "Finish")
"""What systemd knows of a start, from the kernel's first moment on: when systemd began, and when all was started."""
RUNS = 3
ENDS = (
    ("sms: checks, disks, certificates", r"^power on$"),
    (FIRMWARE, r"BdsDxe: starting|systemd-boot|EFI stub"),
    ("boot loader, kernel, initramfs", r"systemd\[1\]|Welcome|login:|^serves$"),
    ("systemd", r"login:|^serves$"),
    ("services, and sms sees them", r"^serves$"),
)


def find_vm_pid(lab: Lab) -> int | None:
    """The VM's process as this machine has it."""
    for word in Local().run("ip", "netns", "pids", lab.layout.namespace(CARRIER), ok=None).text.split():
        try:
            if Path(f"/proc/{word}/cmdline").read_bytes().startswith(b"qemu-system-x86_64\0-name\0sms-vm-"):
                return int(word)
        except OSError:
            continue
    return None


@dataclass
class Take:
    """A start: its console, what the verb says of itself, and the machine's own clock in seconds by ``MANAGER``."""

    watch: Watch
    said: dict[str, Any]
    clock: dict[str, float]

    @property
    def phases(self) -> list[dict[str, Any]]:
        """What it is made of."""
        return phases(self.watch.marks, ENDS)

    @property
    def first_program(self) -> float:
        """Seconds from power-on to systemd: the firmware's, by the console, and the kernel's, by its own clock."""
        return {one["phase"]: float(one["s"]) for one in self.phases}[FIRMWARE] + self.clock["userspace"]


def start(row: Row) -> Take:
    """Start it once."""
    row.sms("vm", "stop", ok=(0, 3))
    log = row.lab.layout.disk / CARRIER / "vm" / "lab" / "console.log"
    log.unlink(missing_ok=True)
    began = now()
    with Watch(log, lambda: find_vm_pid(row.lab)) as watch:
        said = json.loads(row.sms("vm", "start", "--host", CARRIER, "--wait", "10m", "--json"))
        here = watch.mark()
        time.sleep(0.2)
    watch.marks = [Mark(began, 0.0), *watch.marks, Mark(here.at, here.cpu, "serves")]
    watch.marks.sort(key=lambda mark: mark.at)
    argv = ("systemctl", "show", *(f"-p{name}TimestampMonotonic" for name in MANAGER))
    lines = (line.partition("=") for line in row.sms("vm", "exec", "--", *argv, ok=None).split())
    clock = {name.removesuffix("TimestampMonotonic").lower(): int(value or 0) / 1e6 for name, _, value in lines}
    return Take(watch, said, clock)


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Beside the same start up to the end of its firmware and kernel, which any virtual machine takes."""
    check_machine(metal=True)
    with open_row(rig.progress, 1) as row:
        start(row)  # once before: the state's disk is made, and the image is in the cache
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
        parts=median.said["parts"],
        kernel_clock={name: round(seconds, 2) for name, seconds in median.clock.items()},
        units=read_units(units),
        load=[round(each, 1) for each in os.getloadavg()],
    )
