"""State of diskless machines: power and serial console."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.lab.layout import Layout, Machine


@dataclass(frozen=True)
class Metal:
    """Current state of a machine: ``pid`` of its QEMU on this machine, None while it is off."""

    machine: Machine
    console: Path
    pid: int | None

    @property
    def on(self) -> bool:
        """Whether its power is on."""
        return self.pid is not None


def query_machines(layout: Layout) -> list[Metal]:
    """Return the state of every machine of a lab, from the processes: controllers may be down."""
    words = Local().run("ip", "netns", "pids", layout.namespace("switch"), ok=None).text.split()
    running = {name: int(pid) for pid in words if (name := _guest(pid))}
    return [
        Metal(machine, layout.consoles / f"{machine.name}.log", running.get(machine.name))
        for machine in layout.machines
    ]


def find_metal(layout: Layout, name: str) -> Metal:
    """Return the state of one machine.

    Raises:
        SmsError: the lab has none of this name.
    """
    found = {one.machine.name: one for one in query_machines(layout)}
    if name not in found:
        has = f"it has {', '.join(found)}" if found else f"sms lab up --name {layout.name} --metal 2"
        raise SmsError(f"lab {layout.name} has no machine {name}", hint=has)
    return found[name]


def _guest(pid: str) -> str:
    """Return the name of the machine that a process runs, or an empty string."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return next((word.removeprefix("guest=") for word in words if word.startswith("guest=")), "")
