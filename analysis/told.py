"""What the packets that were kept say of timeouts: read once, asked by many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.observed import Sample
from analysis.protocols import DHCP_PORTS, NTP_PORT, READ_AT_MOST, SLURM_PORTS
from analysis.protocols.dhcp import ACK, Dhcp, is_reply, read_dhcp
from analysis.protocols.ntp import CLIENT, Ntp, read_ntp
from analysis.protocols.slurm import SlurmMessage, read_slurm
from analysis.signatures import TCP, UDP


@dataclass(frozen=True)
class Told:
    """Messages that were understood."""

    dhcp: tuple[Dhcp, ...] = ()
    ntp: tuple[Ntp, ...] = ()
    slurm: tuple[SlurmMessage, ...] = ()

    @property
    def leases(self) -> tuple[Dhcp, ...]:
        """Leases that a server gave, those that end."""
        return tuple(one for one in self.dhcp if one.kind == ACK and 0 < one.lease_s < math.inf)

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


def read_samples(samples: Sequence[Sample]) -> Told:
    """What the kept packets say. Of many, some are read, spread evenly."""
    dhcp = [one.payload for one in samples if one.protocol == UDP and one.port in DHCP_PORTS]
    replies = [payload for payload in dhcp if is_reply(payload)]
    # A client that has an address puts it into ciaddr (RFC 2131, table 5): only those tell something.
    renewing = [payload for payload in dhcp if not is_reply(payload) and any(payload[12:16])]
    clock = [one.payload for one in samples if (one.protocol, one.port) == (UDP, NTP_PORT)]
    asked = [payload for payload in clock if payload and payload[0] & 7 == CLIENT]
    jobs = [one.payload for one in samples if one.protocol == TCP and one.port in SLURM_PORTS]
    return Told(
        tuple(one for one in map(read_dhcp, (*spread(replies), *spread(renewing))) if one),
        tuple(one for one in map(read_ntp, spread(asked)) if one),
        tuple(one for one in map(read_slurm, jobs) if one),
    )


def spread(payloads: Sequence[bytes]) -> list[bytes]:
    """At most READ_AT_MOST of them, evenly."""
    if len(payloads) <= READ_AT_MOST:
        return list(payloads)
    return [payloads[at * len(payloads) // READ_AT_MOST] for at in range(READ_AT_MOST)]
