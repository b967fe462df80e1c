"""The lab with machines without a disk, and the provisioning VM beside the services container."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from appliance.lab import Lab
from appliance.operations.context import open_cluster
from appliance.operations.lab.lab import lab_up
from appliance.operations.nodes.image import build_node
from appliance.operations.vm.build import build_vm
from appliance.progress import Progress
from bench.rig.bed import CARRIER, LAB, _build, _remove_lab

PROFILE = "compute"
UNITS = "Id,InactiveExitTimestampMonotonic,ActiveEnterTimestampMonotonic,InactiveEnterTimestampMonotonic"


@dataclass(frozen=True)
class Row:
    """A lab with machines; images are built."""

    lab: Lab

    @property
    def names(self) -> list[str]:
        """The machines' names."""
        return [machine.name for machine in self.lab.layout.machines]

    def sms(self, *words: str, on: str = "admin", ok: tuple[int, ...] | None = (0,)) -> str:
        """What `sms` prints on a host of the lab."""
        return self.lab.host(on).run("sms", "-q", *words, ok=ok, timeout=900).text

    def inside(self, *argv: str, ok: tuple[int, ...] | None = (0,)) -> str:
        """A command in the services container."""
        return self.sms("exec", "--host", CARRIER, "--", *argv, ok=ok)

    def pid_of(self, name: str) -> Callable[[], int | None]:
        """A machine's process, asked for until it is there."""
        return lambda: self.lab.metal(name).pid


@contextmanager
def open_row(progress: Progress, machines: int, *, name: str = f"{LAB}-metal") -> Iterator[Row]:
    """Make the lab and the images that are not there yet; at the end nothing of the lab stays."""
    with ExitStack() as undo:
        undo.callback(_remove_lab, name, progress)
        lab_up(name, 0, progress, metal=machines)
        lab = Lab.open(name)
        cluster = open_cluster(lab.etc / "sms.yaml", None, progress)
        _build(cluster, lab.etc / "sms.lock", progress)
        build_vm(cluster, progress)
        build_node(cluster, PROFILE, progress)
        yield Row(lab)


def serve_nodes(row: Row, progress: Progress) -> None:
    """Everything up to the power button: container, VM, image, inventory, files."""
    with progress.step("start container and VM"):
        row.sms("start", "--host", CARRIER)
        row.sms("vm", "start", "--host", CARRIER, "--wait", "10m")
    with progress.step("push image and files"):
        row.sms("image", "push", PROFILE)
        bmcs = [machine.bmc for machine in row.lab.layout.machines]
        row.sms("node", "discover", f"{bmcs[0]}-{bmcs[-1]}", on=CARRIER, ok=(0, 4))
        row.sms("files", "push", "--wait", "30s", ok=(0, 4))


def read_units(text: str, *, most: int = 25) -> list[dict[str, object]]:
    """Which units took longest, from what `systemctl show --property=UNITS '*'` prints: the seconds (of the kernel's
    clock) when each began, and how long it took.
    """
    found = []
    for block in text.split("\n\n"):
        values = dict(line.partition("=")[::2] for line in block.splitlines())
        begin, end = (int(values.get(f"{key}TimestampMonotonic") or 0) for key in ("InactiveExit", "ActiveEnter"))
        end = end or int(values.get("InactiveEnterTimestampMonotonic") or 0)
        if begin and end >= begin:
            found.append({"unit": values["Id"], "at": round(begin / 1e6, 2), "s": round((end - begin) / 1e6, 2)})
    longest = sorted(found, key=lambda one: -float(str(one["s"])))[:most]
    return sorted(longest, key=lambda one: float(str(one["at"])))
