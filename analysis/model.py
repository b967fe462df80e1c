"""A classification: what `sms classify` found, in the shape it is written, printed and drawn from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["time-critical", "deferrable"]
GROUPS: dict[str, str] = {"time-critical": "SMS-services", "deferrable": "SMS-mgmt"}
"""The paper's names of the two groups."""


@dataclass(frozen=True)
class Capture:
    """What was read.

    Attributes:
        files: names as they were given; "-" is standard input.
        start: first packet, RFC 3339 in UTC; "" when there was none.
        truncated: whether a file ended in the middle of a record.
        skipped: records not understood, by reason.
        problems: the first hundred places that could not be read, as sentences with file and byte offset.
        covered_s: the duration without the gaps between files.
        cut_packets: packets of which only the beginning was captured; cut_at: the most bytes that such a one has.
        remarks: what one should know before believing the rest, as sentences, the gravest first.
    """

    files: tuple[str, ...]
    packets: int
    bytes: int
    start: str
    duration_s: float
    truncated: bool
    skipped: dict[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    covered_s: float = 0.0
    cut_packets: int = 0
    cut_at: int = 0
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Made:
    """What made the classification: the program's version, the shape's, and the options that change what is in it."""

    version: str = ""
    shape: int = 1
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sms:
    """The management node. ``found`` says how it was found, or that it was given."""

    mac: str
    addresses: tuple[str, ...]
    found: str


@dataclass(frozen=True)
class Nodes:
    """The compute nodes; ``addresses`` holds the first thousand.

    Attributes:
        booted: boots that the capture shows.
        boots_hidden: nodes booted, and yet ``booted`` is 0: the packets that tell are cut or not understood.
    """

    count: int
    addresses: tuple[str, ...]
    booted: int = 0
    boots_hidden: bool = False


@dataclass(frozen=True)
class Connections:
    """New connections by who opened them; midstream were open when the capture began."""

    node: int
    sms: int
    midstream: int
    unanswered: int = 0


@dataclass(frozen=True)
class Interval:
    """How regular one client's contacts are: median, and the range between the quartiles, in seconds."""

    median: float
    jitter: float


@dataclass(frozen=True)
class Latency:
    """From a request to the first byte of its answer, in milliseconds."""

    p50: float
    p99: float


@dataclass(frozen=True)
class Service:
    """A service that was seen, and the verdict on it.

    Attributes:
        name: of the catalogue, else of IANA's registry, else protocol/port.
        title: what it is, in a few words; "" where nobody knows.
        ports: "tcp/6817"; "tcp/dynamic" for ports given out by the system.
        confidence: 0..1, grows with time and nodes seen.
        budget_s: seconds it can be away before nodes notice; budget_why says how that was reckoned.
        budget_from: what it rests on: values seen in this capture, the catalogue's number, or the protocol's rule.
        contacts: connections, and what clients said after a second of silence; what the paper counts as traffic.
        clients: distinct addresses that used it (nodes where nodes open, nodes reached where the SMS opens).
        packets_each, bytes_each: (towards the server, from it).
        first_s, last_s: seconds after the capture's beginning.
        carried: whether the services container can carry it; advice says what to do where it cannot.
        overridden: whether the verdict is the site's own.
        timeline, timeline_boot: contacts by part of the capture (all parts are equally long).
    """

    name: str
    verdict: Verdict
    ports: tuple[str, ...] = ()
    title: str = ""
    confidence: float = 0.0
    budget_s: float = 0.0
    budget_why: str = ""
    budget_from: Literal["observed", "catalogue", "protocol"] = "catalogue"
    initiator: Literal["node", "sms", "both"] = "node"
    phase: Literal["boot", "steady", "both"] = "steady"
    clients: int = 0
    contacts: int = 0
    connections: Connections = field(default_factory=lambda: Connections(0, 0, 0))
    packets: int = 0
    bytes: int = 0
    packets_each: tuple[int, int] = (0, 0)
    bytes_each: tuple[int, int] = (0, 0)
    first_s: float = 0.0
    last_s: float = 0.0
    interval_s: Interval | None = None
    latency_ms: Latency | None = None
    reasons: tuple[str, ...] = ()
    carried: bool = False
    advice: str = ""
    overridden: bool = False
    timeline: tuple[int, ...] = ()
    timeline_boot: tuple[int, ...] = ()

    @property
    def group(self) -> str:
        """SMS-services or SMS-mgmt."""
        return GROUPS[self.verdict]


@dataclass(frozen=True)
class Destination:
    """An address outside that nodes reach through the management node, and what for."""

    address: str
    packets: int
    bytes: int
    ports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Routed:
    """Traffic through the management node; ``destinations`` holds the first hundred by bytes."""

    packets: int
    bytes: int
    destinations: tuple[Destination, ...] = ()


@dataclass(frozen=True)
class Unseen:
    """A service of the catalogue that was not seen; so long a capture would be 95 % sure to show it."""

    name: str
    needed_capture_s: float
    why: str = ""


@dataclass(frozen=True)
class Heap:
    """Traffic by what it is, most bytes first."""

    what: str
    packets: int
    bytes: int


@dataclass(frozen=True)
class Unclassified:
    """Traffic that no service was made of: all of it counted, the first twenty kinds named."""

    packets: int
    bytes: int
    top: tuple[Heap, ...] = ()


@dataclass(frozen=True)
class Classification:
    """All that `sms classify` says. Packets of services, elsewhere and unclassified add up to the capture's.

    What is routed is one of the services too; `routed` tells more of it.

    Attributes:
        elsewhere: understood, but not between nodes and management node: nodes among themselves, outside addresses.
        bin_s: seconds that a part of a timeline lasts.
    """

    capture: Capture
    sms: Sms
    nodes: Nodes
    services: tuple[Service, ...]
    routed: Routed
    unseen: tuple[Unseen, ...]
    elsewhere: Unclassified
    unclassified: Unclassified
    bin_s: float = 1.0
    made: Made = field(default_factory=Made)

    def as_dict(self) -> dict[str, Any]:
        """The published shape (docs/classification.schema.json), ready for JSON and YAML."""
        data = _plain(asdict(self))
        for entry, service in zip(data["services"], self.services, strict=True):
            entry["group"] = service.group
        return dict(data)


def _plain(value: Any) -> Any:
    """Tuples as lists, floats without the noise of their last digits."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
