"""Signatures: how a service is recognized by its traffic, and what the catalogue says about it."""

from __future__ import annotations

from dataclasses import dataclass

TCP, UDP, SCTP, ICMP, ICMPV6 = 6, 17, 132, 1, 58
PROTOCOLS = {"tcp": TCP, "udp": UDP, "sctp": SCTP, "icmp": ICMP, "icmpv6": ICMPV6}
ANY_PORT = 0
ANYWHERE = 255
"""Offset of first bytes that may be anywhere in the first line."""


@dataclass(frozen=True)
class FirstBytes:
    """Range of the first bytes that a client sends: each is between ``low`` and ``high``, inclusive.

    With ``port`` ANY_PORT it is tried on every connection to a port that no other signature has. With ``offset``
    ANYWHERE they are somewhere in the first line, and ``low`` equals ``high``. ``beside``: another port that is the
    service's where they were seen.
    """

    protocol: int
    port: int
    offset: int
    low: bytes
    high: bytes
    beside: tuple[int, int] | None = None


@dataclass(frozen=True)
class Signature:
    """A service of the catalogue and its traffic.

    Attributes:
        name: the catalogue's name, used by ``sms build``.
        ports: (protocol, port) where the management node, or a node's daemon, listens.
        first: patterns of first bytes; they take precedence over ``ports``.
        routed: whether this is the traffic through the management node to outside addresses.
        critical: the catalogue's verdict, used if too little was seen.
        boot: nodes need it only while they boot.
        poll: only changes pass, which can wait, also where nodes open it.
        sms_opens: the management node opens connections of it to nodes, too. Of others it is a client if only it opens.
        every_s: typical seconds between two contacts of one node; `unseen` uses it.
        budget_s: tolerated outage in seconds: until nodes notice.
        budget_why: what happens then, with the source.
        carried: whether it can run in the services container.
        silent: it has no traffic of its own (munge, cron), so that its absence means nothing.
        advice: what to do if nodes need it and it cannot run in the container.
        verdict: the site's own verdict, which overrides the rules; empty without one.
        verdict_why: the site's reason.
    """

    name: str
    summary: str = ""
    ports: tuple[tuple[int, int], ...] = ()
    first: tuple[FirstBytes, ...] = ()
    routed: bool = False
    critical: bool = False
    boot: bool = False
    poll: bool = False
    sms_opens: bool = False
    every_s: float = 0.0
    budget_s: float = 0.0
    budget_why: str = ""
    carried: bool = False
    silent: bool = False
    advice: str = ""
    verdict: str = ""
    verdict_why: str = ""
