"""What ``sms deploy`` does with an engine, the same for each of them; ``kubernetes.py`` and ``nomad.py`` do it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from appliance.engines.deploy import Bundle, Item
from appliance.host.base import Result
from appliance.operations.context import Cluster


@dataclass(frozen=True)
class Part:
    """A container or a task. ``why`` it is not ready; ``detail``: the answer of its probe, if that is known."""

    name: str
    ready: bool
    restarts: int
    why: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Instance:
    """A pod or an allocation.

    Attributes:
        current: whether it is of what was deployed last.
        image: of the pod, with its digest; empty for an allocation, whose tasks verify their image themselves.
    """

    name: str
    node: str
    ready: bool
    current: bool
    parts: tuple[Part, ...]
    image: str = ""
    why: str = ""

    @property
    def restarts(self) -> int:
        """Restarts of all its parts."""
        return sum(part.restarts for part in self.parts)


@dataclass(frozen=True)
class WorkloadState:
    """A workload on its engine: ``wanted`` number of instances, those that there are, and its volume, if it has one."""

    name: str
    kind: str
    exists: bool
    wanted: int
    instances: tuple[Instance, ...] = ()
    volume: str = ""
    problem: str = ""

    @property
    def ready(self) -> bool:
        """Whether all wanted instances are there, are of what was deployed last, and are ready."""
        good = [one for one in self.instances if one.ready and one.current]
        enough = len(good) >= self.wanted and (self.wanted > 0 or self.kind == "node")
        return self.exists and not self.problem and enough and len(good) == len(self.instances)

    @property
    def why(self) -> str:
        """Why it is not ready, in a few words."""
        if self.problem:
            return self.problem
        if not self.exists:
            return "it is not there"
        for one in self.instances:
            for part in one.parts:
                if not part.ready:
                    return f"{one.name}: {part.name}: {part.why or 'not ready'}"
            if not one.ready or not one.current:
                return f"{one.name}: {one.why or 'not ready'}"
        if not self.wanted and self.kind == "service":
            return "it is stopped, or scaled to 0"
        return f"{len(self.instances)} of {self.wanted} run"


def with_answers(state: WorkloadState, answers: dict[tuple[str, str], tuple[bool, str]]) -> WorkloadState:
    """Return a state whose parts have the answers of their probes; one that does not answer is not ready."""
    instances = []
    for one in state.instances:
        parts = []
        for part in one.parts:
            ok, detail = answers.get((one.name, part.name), (part.ready, part.detail))
            parts.append(replace(part, ready=part.ready and ok, detail=detail, why=part.why or ("" if ok else detail)))
        instances.append(replace(one, parts=tuple(parts), ready=one.ready and all(part.ready for part in parts)))
    return replace(state, instances=tuple(instances))


@dataclass(frozen=True)
class SecretState:
    """A secret on the engine.

    Attributes:
        name: as in the site file; ``where``: its place on the engine, for messages.
        items: the workloads that read it there.
        value: its content; None: it is not there. Empty while workloads that run may have an earlier one.
        own: whether sms has written it, or nobody has.
    """

    name: str
    where: str
    items: tuple[str, ...]
    value: bytes | None = field(repr=False)
    own: bool


def decode_secret(text: str) -> bytes:
    """Return the content of a secret on an engine; a text that is not base64 has none, and differs from the site's."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""


@dataclass(frozen=True)
class Difference:
    """What a deployment would do with an item: ``create``, ``change`` or ``unchanged``, and the text of it."""

    name: str
    change: str
    text: str = ""


class Engine(Protocol):
    """An engine that runs workloads."""

    name: str

    def check(self, cluster: Cluster, bundle: Bundle, *, send: bool = True) -> None:
        """Check that it answers, permits a deployment, and can run the image.

        Args:
            send: whether the image is sent where it is missing; without that nothing is changed.

        Raises:
            Refused: it does not.
        """

    def differences(self, bundle: Bundle) -> list[Difference]:
        """Return what a deployment would do; nothing is changed."""

    def secrets(self, bundle: Bundle) -> list[SecretState]:
        """Return the secrets that the workloads need."""

    def prepare(self, bundle: Bundle, secrets: Sequence[tuple[SecretState, bytes]]) -> list[str]:
        """Create the namespace, and write secrets; return what was written.

        A running workload that has an earlier one is started again.

        Args:
            secrets: those to write, with their new content.
        """

    def apply(self, item: Item) -> None:
        """Make an item what its text says; do not wait."""

    def nudge(self, state: WorkloadState) -> None:
        """Remove an instance of an earlier deployment that is not ready and would block the next one."""

    def states(self, bundle: Bundle) -> list[WorkloadState]:
        """Return the state of each workload, in the bundle's order."""

    def probe(self, bundle: Bundle, states: Sequence[WorkloadState]) -> list[WorkloadState]:
        """Return the states with the answer of each service's probe, on compute nodes as well."""

    def log(self, bundle: Bundle, state: WorkloadState, lines: int) -> str:
        """Return the last lines of the part that is not ready."""

    def stop(self, item: Item) -> None:
        """Stop a workload and keep its state; do not wait."""

    def control(self, bundle: Bundle, *argv: str, timeout: float = 60) -> Result:
        """Run a command of Slurm where the controller runs; whatever its status.

        Raises:
            SmsError: the controller does not run.
        """

    def has_node(self, node: str) -> bool:
        """Return whether a machine of that name is the engine's."""

    def drain_node(self, bundle: Bundle, node: str, timeout_s: float) -> list[str]:
        """Stop what the engine runs on a machine and start nothing there; return what was done."""

    def drained(self) -> list[str]:
        """Return the machines on which the engine starts nothing: somebody has drained them; none if not permitted."""

    def undo_drain(self, node: str) -> None:
        """Let the engine use a machine again."""
