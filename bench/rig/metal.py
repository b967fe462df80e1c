"""A lab with diskless machines, and the provisioning VM beside the services container."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from appliance.lab import Extras, Lab
from appliance.operations.context import open_cluster
from appliance.operations.lab.lab import lab_up
from appliance.operations.nodes.image import build_node
from appliance.operations.vm.build import build_vm
from appliance.progress import Progress
from bench.rig.bed import CARRIER, LAB, _build, _remove_lab

PROFILE = "compute"
UNITS = "Id,InactiveExitTimestampMonotonic,ActiveEnterTimestampMonotonic,InactiveEnterTimestampMonotonic"


@dataclass(frozen=True)
class MetalLab:
    """A lab with machines and built images."""

    lab: Lab

    @property
    def names(self) -> list[str]:
        """The machines' names."""
        return [machine.name for machine in self.lab.layout.machines]

    def sms(self, *arguments: str, on: str = "admin", ok: tuple[int, ...] | None = (0,)) -> str:
        """Run `sms` on a host of the lab; return its output."""
        return self.lab.host(on).run("sms", "-q", *arguments, ok=ok, timeout=900).text

    def inside(self, *argv: str, ok: tuple[int, ...] | None = (0,)) -> str:
        """Run a command in the services container; return its output."""
        return self.sms("exec", "--host", CARRIER, "--", *argv, ok=ok)

    def pid_of(self, name: str) -> Callable[[], int | None]:
        """Return a function that returns the PID of a machine, or None until it runs."""
        return lambda: self.lab.metal(name).pid


@contextmanager
def open_metal_lab(progress: Progress, machines: int) -> Iterator[MetalLab]:
    """Create the lab and missing images; remove the lab at the end."""
    name = f"{LAB}-metal"
    with ExitStack() as undo:
        undo.callback(_remove_lab, name, progress)
        lab_up(name, 0, progress, Extras(metal=machines))
        lab = Lab.open(name)
        cluster = open_cluster(lab.etc / "sms.yaml", None, progress)
        _build(cluster, lab.etc / "sms.lock", progress)
        build_vm(cluster)
        build_node(cluster, PROFILE)
        yield MetalLab(lab)


def serve_nodes(lab: MetalLab, progress: Progress) -> None:
    """Prepare everything that a node's boot needs: container, VM, image, inventory, files."""
    with progress.step("start container and VM"):
        lab.sms("start", "--host", CARRIER)
        lab.sms("vm", "start", "--host", CARRIER, "--wait", "10m")
    with progress.step("push image and files"):
        lab.sms("image", "push", PROFILE)
        bmcs = [machine.bmc for machine in lab.lab.layout.machines]
        lab.sms("node", "discover", f"{bmcs[0]}-{bmcs[-1]}", on=CARRIER, ok=(0, 4))
        lab.sms("files", "push", "--wait", "30s", ok=(0, 4))


def read_units(text: str, *, limit: int = 25) -> list[dict[str, object]]:
    """Return start (kernel clock) and duration in seconds of the slowest units, from `systemctl show`."""
    found = []
    for block in text.split("\n\n"):
        values = dict(line.partition("=")[::2] for line in block.splitlines())
        begin, end = (int(values.get(f"{key}TimestampMonotonic") or 0) for key in ("InactiveExit", "ActiveEnter"))
        end = end or int(values.get("InactiveEnterTimestampMonotonic") or 0)
        if begin and end >= begin:
            found.append({"unit": values["Id"], "at": round(begin / 1e6, 2), "s": round((end - begin) / 1e6, 2)})
    longest = sorted(found, key=lambda one: -float(str(one["s"])))[:limit]
    return sorted(longest, key=lambda one: float(str(one["at"])))
