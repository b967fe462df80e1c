"""Data model of a classification, the result of `sms classify`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, get_args

Verdict = Literal["time-critical", "deferrable"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
GROUPS: dict[str, str] = {"time-critical": "SMS-services", "deferrable": "SMS-mgmt"}
"""Names of the two groups in "Decoupled management nodes" (2018)."""
LOW_CONFIDENCE = 0.7
"""Verdicts below this confidence are marked and reported: three of ten are wrong."""


@dataclass(frozen=True)
class Capture:
    """The capture files.

    Attributes:
        files: names as given; "-" is standard input.
        start: time of the first packet, RFC 3339 in UTC; "" without packets.
        truncated: whether a file ended in the middle of a record.
        skipped: number of skipped records by reason.
        problems: the first hundred unreadable places, as sentences with file and byte offset.
        covered_s: the duration without the gaps in and between files; gaps: (begin, end) of the longest 64, in seconds
            after the start.
        cut_packets: packets captured only in part; cut_at: the maximum captured bytes of one of them.
        remarks: limits of the capture, as sentences, the most serious first.
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
    gaps: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Provenance:
    """Provenance: the program's version, the version of the format, and the options that affect the result."""

    version: str = ""
    shape: int = 1
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sms:
    """The management node. ``found``: how it was found, or "given"."""

    mac: str
    addresses: tuple[str, ...]
    found: str


@dataclass(frozen=True)
class Nodes:
    """The compute nodes; ``addresses`` holds the first thousand.

    Attributes:
        booted: number of boots in the capture.
        boots_hidden: nodes booted, but ``booted`` is 0, because the packets are cut or not understood.
        cluster: whether the capture looks like that of a cluster; if not, no verdict of the rules is confident.
    """

    count: int
    addresses: tuple[str, ...]
    booted: int = 0
    boots_hidden: bool = False
    cluster: bool = True


ServerRole = Literal["management node", "server", "node"]


@dataclass(frozen=True)
class Server:
    """Another machine that nodes, or the management node, depend on; its services are not in ``services``.

    Attributes:
        mac: its link address; "" if unknown, as behind a router.
        role: "management node" if it serves a scheduler or boots, "node" if it is a compute node as well.
        services: names of the catalogue, else of IANA's registry, else protocol/port, sorted.
        nodes: machines of nodes that use it; 0 if only the management node does, or if only answers to DHCP were seen.
        packets, bytes: of these services.
    """

    addresses: tuple[str, ...]
    mac: str
    role: ServerRole
    services: tuple[str, ...]
    nodes: int
    packets: int
    bytes: int


@dataclass(frozen=True)
class Connections:
    """New connections by the side that opened them; midstream ones were open when the capture began."""

    node: int
    sms: int
    midstream: int
    unanswered: int = 0


@dataclass(frozen=True)
class Interval:
    """Intervals between one client's contacts, in seconds: median and interquartile range (jitter)."""

    median: float
    jitter: float


@dataclass(frozen=True)
class Latency:
    """Time from a request to the first byte of its answer, in milliseconds."""

    p50: float
    p99: float


@dataclass(frozen=True)
class Service:
    """A service that was seen, and its verdict.

    Attributes:
        name: of the catalogue, else of IANA's registry, else protocol/port.
        title: a short description; "" if unknown.
        ports: "tcp/6817"; "tcp/dynamic" for dynamic ports.
        confidence: 0..1, grows with time and nodes seen.
        budget_s: tolerated outage in seconds, until nodes notice; budget_why: how it was computed.
        budget_from: its source: values seen in this capture, the catalogue's number, or a rule of the protocol.
        contacts: connections, and packets of clients after a second of silence.
        clients: nodes that used it, or that the SMS reached where it opens; never more than ``Nodes.count``.
        packets_each, bytes_each: (to the server, from it).
        first_s, last_s: seconds after the start of the capture.
        carried: whether it can run in the services container; advice: what to do if it cannot.
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
    """An outside address that nodes reach through the management node, with its ports."""

    address: str
    packets: int
    bytes: int
    ports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Routed:
    """Traffic routed through the management node; ``destinations`` holds the first hundred by bytes."""

    packets: int
    bytes: int
    destinations: tuple[Destination, ...] = ()


Finding = Literal["hardly used", "too short", "not shown", "elsewhere"]


@dataclass(frozen=True)
class Unseen:
    """A service of the catalogue that was not seen; ``needed_capture_s`` of capture show it with 95 % probability.

    Attributes:
        finding: what that means: nodes hardly use it; the capture is too short to decide; it could not have shown the
            service, whatever its length (it is filtered, or nobody worked); or nodes use it at other machines.
    """

    name: str
    needed_capture_s: float
    why: str = ""
    finding: Finding = "too short"


@dataclass(frozen=True)
class TrafficKind:
    """One kind of traffic that is not a service."""

    what: str
    packets: int
    bytes: int


@dataclass(frozen=True)
class Unclassified:
    """Traffic assigned to no service: the totals, and the first twenty kinds by bytes."""

    packets: int
    bytes: int
    top: tuple[TrafficKind, ...] = ()


@dataclass(frozen=True)
class Party:
    """A row and a column of the matrix: a node, adjacent nodes, or all machines of another role.

    Attributes:
        name: the first address, "first to last" of several nodes, else what it is.
        machines: how many nodes; of other roles, how many addresses.
    """

    name: str
    role: Literal["sms", "server", "node", "outside", "group", "other"]
    machines: int = 1


class Talk(NamedTuple):
    """Traffic of connections that one party opened to another (indexes of the parties), both ways."""

    client: int
    server: int
    packets: int
    bytes: int


@dataclass(frozen=True)
class Matrix:
    """Who opens connections to whom."""

    parties: tuple[Party, ...] = ()
    talks: tuple[Talk, ...] = ()


@dataclass(frozen=True)
class Change:
    """A service that differs from an earlier classification.

    Attributes:
        kind: verdict (it moved to the other group), appeared, gone, changed (in other ways); "" if nothing did.
        before, after: the verdicts; "" where the service was not seen.
        details: the other differences, as sentences.
    """

    name: str
    kind: Literal["verdict", "appeared", "gone", "changed", ""]
    before: str
    after: str
    details: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The kind, as users read it."""
        return "moved" if self.kind == "verdict" else self.kind

    @property
    def text(self) -> str:
        """The change in one line: verdicts and details."""
        was = f"was {self.before}" if self.before else ""
        verdicts = {"gone": was, "changed": self.after}.get(self.kind) or ", ".join(filter(None, (self.after, was)))
        return "; ".join((f"{self.name}: {verdicts}", *self.details))


@dataclass(frozen=True)
class Comparison:
    """What is different from an earlier classification.

    Attributes:
        file: its name.
        context: differences of the captures themselves, as sentences.
        changes: services that differ; those that moved to the other group first.
        same: number of services that do not.
    """

    file: str
    context: tuple[str, ...]
    changes: tuple[Change, ...]
    same: int


@dataclass(frozen=True)
class Classification:
    """The result of `sms classify`. Packets of services, elsewhere and unclassified add up to the capture's.

    Routed traffic is also one of the services; `routed` has its destinations.

    Attributes:
        elsewhere: understood, but not between nodes and management node: nodes among themselves, outside addresses.
        servers: other machines that serve nodes or the management node; their packets are in ``elsewhere``.
        bin_s: seconds per part of a timeline.
        matrix: the traffic between machines, without port scans.
        compared: with an earlier classification; None without one.
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
    made: Provenance = field(default_factory=Provenance)
    servers: tuple[Server, ...] = ()
    matrix: Matrix = field(default_factory=Matrix)
    compared: Comparison | None = None

    @property
    def parts(self) -> int:
        """How many parts of the timelines the capture covers; it may have ended before the last of them."""
        longest = max((len(line) for one in self.services for line in (one.timeline, one.timeline_boot)), default=0)
        begun = self.capture.duration_s / self.bin_s if self.bin_s > 0 else math.inf
        return min(longest, math.floor(begun) + 1) if 0 <= begun < longest else longest

    def as_dict(self) -> dict[str, Any]:
        """Return the published format (docs/classification.schema.json), for JSON and YAML."""
        data = _plain(asdict(self))
        for entry, service in zip(data["services"], self.services, strict=True):
            entry["group"] = service.group
        if self.compared is None:
            del data["compared"]
        return dict(data)


def _plain(value: Any) -> Any:
    """Convert tuples to lists and round floats to six significant digits."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
