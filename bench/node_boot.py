"""Boot time of two diskless nodes from power-on to idle, in parallel, and its phases."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any

from appliance.errors import SmsError
from appliance.lab.up import check_machine
from bench.rig import Rig, Samples, result
from bench.rig.bed import CARRIER
from bench.rig.console import Mark, Watch, phases
from bench.rig.metal import PROFILE, UNITS, MetalLab, open_metal_lab, read_units, serve_nodes

MACHINES = 2
GOAL_S = 30
TIMEOUT_S = 600
RUNS = 3
ENDS = (
    ("firmware", r"iPXE initialising devices"),
    ("iPXE starts", r"Configuring \(net0"),
    ("iPXE: DHCP", r"^Configuring \(net0.*ok$"),
    ("iPXE: boot script", r"/bootscript.* ok$"),
    ("iPXE: kernel", r"vmlinuz.* ok$"),
    ("iPXE: initramfs", r"initrd\.img.* ok$"),
    ("kernel", r"sms: .* the kernel is up"),
    ("initramfs: drivers", r"sms: .* asking for an address"),
    ("initramfs: DHCP", r"sms: .* fetching "),
    ("initramfs: manifest, signature", r"sms: .* fetching .*root\.squashfs"),
    ("initramfs: image", r"sms: .* verifying its digest"),
    ("initramfs: digest, mounts", r"sms: .* starting the system of"),
    ("systemd, Python", r"sms-filesync: a node boots"),
    ("enrolment", r"has its certificate"),
    ("files", r"sms-filesync: synced"),
    ("munge, slurmd, registration", r"^idle$"),
)
"""Phases of a boot, and the console line that ends each; the last one is reported by slurmctld."""
WATCH = "while scontrol -o show nodes; do echo; sleep 0.25; done"


class Idle:
    """Watches the nodes' state in slurmctld until all are idle."""

    def __init__(self, watches: dict[str, Watch]) -> None:
        self.watches = watches
        self.marks: dict[str, Mark] = {}
        self.done = threading.Event()
        self.began = time.time()

    def read(self, stream: Any) -> None:
        """Parse the output of repeated `scontrol -o show nodes`."""
        for line in stream:
            values = dict(word.partition("=")[::2] for word in line.decode(errors="replace").split())
            name, started = values.get("NodeName", ""), values.get("SlurmdStartTime", "")
            if name not in self.watches or name in self.marks or values.get("State") != "IDLE":
                continue
            if re.match(r"\d{4}-", started) and datetime.fromisoformat(started).timestamp() >= self.began - 1:
                here = self.watches[name].mark()
                self.marks[name] = Mark(here.at, here.cpu, "idle")
                if len(self.marks) == len(self.watches):
                    self.done.set()


@contextmanager
def watch_idle(row: MetalLab, watches: dict[str, Watch]) -> Iterator[Idle]:
    """Watch the nodes' state for the duration of the context."""
    idle = Idle(watches)
    argv = [*row.lab.host(CARRIER).prefix, "sms", "exec", "--", "sh", "-c", WATCH]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    reader = threading.Thread(target=idle.read, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        yield idle
    finally:
        process.terminate()
        process.wait(timeout=30)
        reader.join(timeout=30)


def boot(row: MetalLab) -> dict[str, Watch]:
    """Power on and wait until slurmctld reports the nodes idle; return their consoles."""
    row.sms("node", "power", "off", *row.names, "--yes", on=CARRIER)
    with ExitStack() as stack:
        watches = {}
        for name in row.names:
            log = row.lab.layout.consoles / f"{name}.log"
            log.unlink(missing_ok=True)
            watches[name] = stack.enter_context(Watch(log, row.pid_of(name)))
        idle = stack.enter_context(watch_idle(row, watches))
        row.sms("node", "boot", *row.names, "--yes", on=CARRIER)
        if not idle.done.wait(TIMEOUT_S):
            lines = {name: watch.marks[-1].line for name, watch in watches.items() if watch.marks}
            raise SmsError(f"not idle after {TIMEOUT_S} s: {lines}")
    for name, watch in watches.items():
        last = idle.marks[name]
        watch.marks = [*(mark for mark in watch.marks if mark.at <= last.at), last]
    return watches


def measure(rig: Rig) -> Iterator[dict[str, Any]]:
    """Compare with the same boot up to its first program: firmware, iPXE and kernel, which any network boot needs."""
    check_machine(metal=True)
    with open_metal_lab(rig.progress, MACHINES) as row:
        serve_nodes(row, rig.progress)
        takes: list[dict[str, Watch]] = []
        for number in range(min(RUNS, rig.runs)):
            with rig.progress.step(f"boot {MACHINES} nodes, {number + 1} of {min(RUNS, rig.runs)}"):
                takes.append(boot(row))
        yield from (_result(row, name, [take[name] for take in takes]) for name in row.names)


def _result(row: MetalLab, name: str, watches: list[Watch]) -> dict[str, Any]:
    whole = Samples(watch.marks[-1].at - watch.marks[0].at for watch in watches)
    tables = [phases(watch.marks, ENDS) for watch in watches]
    middle = min(range(len(whole)), key=lambda number: abs(whole[number] - whole.median))
    units = row.inside("srun", "-w", name, "systemctl", "show", "--property", UNITS, "*", ok=None)
    more: dict[str, Any] = {
        "cpu_s": Samples(watch.marks[-1].cpu for watch in watches).median,
        "phases": tables[middle],
        "units": read_units(units),
        "load": [round(each, 1) for each in os.getloadavg()],
        "at_once": MACHINES,
        "profile": PROFILE,
    }
    peer = "the same boot up to its first program"
    kernel = Samples.tried(lambda: [until(table, "kernel") for table in tables])
    return result(f"node_boot/{name}", whole, peer, kernel, below=GOAL_S, **more)


def until(table: list[dict[str, Any]], phase: str) -> float:
    """Return the seconds up to the end of a phase."""
    last = [one["phase"] for one in table].index(phase)
    return sum(float(one["s"]) for one in table[: last + 1])
