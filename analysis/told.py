"""What the packets that were kept say of timeouts: read once, asked by many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.observed import Sample
from analysis.protocols import DHCP_PORTS, NTP_PORT, READ_AT_MOST, SAMPLED, SLURM_PORTS
from analysis.protocols.dhcp import ACK, OFFER, REQUEST, Dhcp, has_address, is_relayed, is_reply, read_dhcp, terms
from analysis.protocols.ntp import CLIENT, Ntp, read_ntp
from analysis.protocols.slurm import SlurmMessage, read_slurm
from analysis.signatures import TCP, UDP

DHCP_KEPT = SAMPLED[0][2]


@dataclass(frozen=True)
class Told:
    """Messages that were understood.

    Attributes:
        relayed: whether a relay passed DHCP on: then counts do not tell who has an address already.
        requests_read: whether all that clients said by DHCP was kept and could be read.
        cut_at: bytes of a packet that were captured at most, where packets were cut; 0 where they were not.
    """

    dhcp: tuple[Dhcp, ...] = ()
    ntp: tuple[Ntp, ...] = ()
    slurm: tuple[SlurmMessage, ...] = ()
    relayed: bool = False
    requests_read: bool = False
    cut_at: int = 0

    @property
    def leases(self) -> tuple[Dhcp, ...]:
        """Leases that a server gave, else those that it offered: those that end."""
        leases = [one for one in self.dhcp if 0 < one.lease_s < math.inf]
        return tuple([one for one in leases if one.kind == ACK] or leases)

    @property
    def endless(self) -> bool:
        """Whether a lease never ends."""
        return any(one.lease_s == math.inf for one in self.dhcp)

    @property
    def renewals(self) -> int:
        """Clients that asked to keep the address they have."""
        return sum(one.renewing for one in self.dhcp)

    @property
    def polls(self) -> tuple[float, ...]:
        """Seconds between two questions for the time, as clients say."""
        return tuple(one.poll_s for one in self.ntp if one.mode == CLIENT)

    @property
    def slurm_types(self) -> Counter[str]:
        """Slurm's messages by what they are."""
        return Counter(one.name for one in self.slurm)

    @property
    def slurm_releases(self) -> tuple[str, ...]:
        """Slurm's releases that were spoken."""
        return tuple(sorted({one.release for one in self.slurm}))


def read_samples(samples: Sequence[Sample], cut_at: int = 0) -> Told:
    """What the kept packets say. Of many, some are read in full.

    Args:
        cut_at: bytes of a packet that were captured at most, 0 where packets are whole.
    """
    dhcp = [one.payload for one in samples if one.protocol == UDP and one.port in DHCP_PORTS]
    asked = [payload for payload in dhcp if not is_reply(payload)]
    # One answer of all that name the same lease; of many leases those that end first (the numbers are big-endian).
    answers = {terms(payload): payload for payload in dhcp if is_reply(payload)}
    worth = sorted((key for key in answers if key[0] in (ACK, OFFER)), key=lambda key: (key[0] != ACK, key[1], key[2]))
    # Who renews asks the server itself (RFC 2131, section 4.4.5): only who has no address needs a relay.
    renewing = [one for one in asked if has_address(one) and not is_relayed(one) and terms(one)[0] == REQUEST]
    clock = [one.payload for one in samples if (one.protocol, one.port) == (UDP, NTP_PORT)]
    clients = [payload for payload in clock if payload and payload[0] & 7 == CLIENT]
    jobs = [one.payload for one in samples if one.protocol == TCP and one.port in SLURM_PORTS]
    chosen = [*(answers[key] for key in worth[:READ_AT_MOST]), *spread(renewing)]
    return Told(
        tuple(one for one in map(read_dhcp, chosen) if one),
        tuple(one for one in map(read_ntp, spread(clients)) if one),
        tuple(one for one in map(read_slurm, jobs) if one),
        relayed=any(map(is_relayed, dhcp)),
        requests_read=bool(asked) and len(dhcp) < DHCP_KEPT and all(terms(one)[0] for one in asked),
        cut_at=cut_at,
    )


def spread(payloads: Sequence[bytes]) -> list[bytes]:
    """At most READ_AT_MOST of them, evenly."""
    if len(payloads) <= READ_AT_MOST:
        return list(payloads)
    return [payloads[at * len(payloads) // READ_AT_MOST] for at in range(READ_AT_MOST)]
