"""A move of the services under way: source and target, its record, and what it has done so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.engines.owners import Owner
from appliance.operations.history import note
from appliance.operations.lease import Leases
from appliance.operations.services.unfinished import moved_path
from appliance.plan.migration.state import StateMove, Tree
from appliance.shared.records import to_json

VERB = "move"
"""In the history."""


@dataclass
class Move:
    """A move under way.

    Attributes:
        record: as it was written last.
        resumes: the target has the state already.
        interrupted: an earlier run of this move was killed, before which the source may have run.
        ran: the source ran when this run began.
        stopped: this run has stopped the source, or a part of it.
        unread: the state, until it is known whether the image of the target can read it.
    """

    cluster: Cluster
    host: Host
    source: Owner
    target: Owner
    leases: Leases
    record: StateMove
    resumes: bool = False
    interrupted: bool = False
    ran: bool = False
    stopped: bool = False
    unread: Tree | None = None
    generation: int = 0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def served(self) -> bool:
        """Whether the source had the services: where a step fails, it is started again."""
        return not self.source.lost and (self.ran or self.interrupted)

    def enter(self, phase: str, **changes: Any) -> None:
        """Write the record durably, and the phase to the history; then the step may begin."""
        self.record = self.record.at(phase, **changes)
        self.host.write(record_path(self.cluster), to_json(self.record), mode=0o600)
        note(self.cluster, self.host, VERB, phase, source=self.source.name, target=self.target.name, **changes)

    @contextmanager
    def timed(self, part: str, text: str) -> Iterator[Any]:
        """Measure and show a part."""
        began = self.cluster.env.clock.monotonic()
        with self.cluster.env.progress.step(text) as step:
            yield step
        self.parts[part] = round(self.cluster.env.clock.monotonic() - began, 3)


def record_path(cluster: Cluster) -> str:
    """Return the path of the record of the last move, on the host that ran it."""
    return moved_path(cluster)
