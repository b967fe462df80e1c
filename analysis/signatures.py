"""How a service is told by its traffic: what the catalogue says of it, in the words of this room."""

from __future__ import annotations

from dataclasses import dataclass

TCP, UDP, SCTP, ICMP, ICMPV6 = 6, 17, 132, 1, 58
PROTOCOLS = {"tcp": TCP, "udp": UDP, "sctp": SCTP, "icmp": ICMP, "icmpv6": ICMPV6}
ANY_PORT = 0


@dataclass(frozen=True)
class FirstBytes:
    """What the first bytes that a client sends tell: each lies between ``low`` and ``high``, both included.

    With ``port`` ANY_PORT it is tried on every connection to a port that nothing else names.
    """

    protocol: int
    port: int
    offset: int
    low: bytes
    high: bytes


@dataclass(frozen=True)
class Signature:
    """A service as its traffic shows it.

    Attributes:
        name: the catalogue's name, which ``sms build`` knows it by.
        ports: (protocol, port) where the management node, or a node's daemon, listens.
        first: what the first bytes tell; stands before ``ports``.
        routed: whether this is the traffic through the management node to addresses outside.
        critical: what the catalogue thinks of it, where too little was seen.
        boot: nodes need it while they boot only.
        poll: nodes poll it and fetch only what has changed.
        every_s: seconds between two contacts of one node, as a rule; what `unseen` reckons with.
        budget_s: seconds until nodes notice that it is away.
        budget_why: what happens then, and where that is written.
        carried: whether the services container can carry it.
        silent: it has no traffic of its own, so that not seeing it means nothing (munge, cron).
        advice: what to do where nodes need it and the container cannot carry it.
        verdict: the site's own verdict, which stands before what was seen; empty without one.
        verdict_why: why the site says so.
    """

    name: str
    summary: str = ""
    ports: tuple[tuple[int, int], ...] = ()
    first: tuple[FirstBytes, ...] = ()
    routed: bool = False
    critical: bool = False
    boot: bool = False
    poll: bool = False
    every_s: float = 0.0
    budget_s: float = 0.0
    budget_why: str = ""
    carried: bool = False
    silent: bool = False
    advice: str = ""
    verdict: str = ""
    verdict_why: str = ""
