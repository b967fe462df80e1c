"""What ``sms deploy`` gives to an engine: the objects or jobs of an export, one text for each workload, in order."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Item:
    """Objects of Kubernetes, or a job of Nomad.

    Attributes:
        name: of the StatefulSet or the job.
        kind: ``service``; ``node`` for a job on every compute node; ``namespace`` of the others.
        text: YAML, or HCL.
        units: services in it, in starting order.
        after: items that are to be ready before.
        stop_s: seconds that its stop may take.
        secrets: names of the secret files that it needs, as in the site file.
        state: whether it has state that outlives a restart.
        lease: folder of the main service with the lease of its one writer; empty if it has none.
        reload: commands in the main service that make nodes fetch a changed configuration.
    """

    name: str
    kind: str
    text: str
    units: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    stop_s: int = 30
    secrets: tuple[str, ...] = ()
    state: bool = False
    reload: tuple[tuple[str, ...], ...] = ()
    lease: str = ""


@dataclass(frozen=True)
class Bundle:
    """All that an engine runs of a site; ``controller``: name of the item with Slurm's controller, or empty."""

    engine: str
    cluster: str
    namespace: str
    image: str
    controller: str
    items: tuple[Item, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, in hexadecimal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def waves(self) -> list[list[Item]]:
        """Return the items in groups: those of a group depend on earlier groups only."""
        left = list(self.items)
        found: list[list[Item]] = []
        while left:
            names = {one.name for one in left}
            ready = [one for one in left if not names & set(one.after)] or left  # a circle: all at once
            found.append(ready)
            left = [one for one in left if one not in ready]
        return found

    def find(self, name: str) -> Item | None:
        """Return the item of that name."""
        return next((one for one in self.items if one.name == name), None)
