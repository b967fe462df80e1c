"""Decode the sampled packets: leases, poll intervals and Slurm messages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from analysis.observed import Role, Sample
from analysis.protocols import DHCP_PORTS, NTP_PORT, READ_AT_MOST, SAMPLED, SLURM_PORTS
from analysis.protocols.dhcp import (
    ACK,
    OFFER,
    Dhcp,
    client,
    is_cut,
    is_firmware,
    is_relayed,
    is_renewal,
    is_renewed,
    is_reply,
    read_dhcp,
    terms,
)
from analysis.protocols.ntp import CLIENT, Ntp, read_ntp
from analysis.protocols.slurm import SlurmMessage, read_slurm
from analysis.signatures import TCP, UDP

DHCP_KEPT = SAMPLED[0][2]


@dataclass(frozen=True)
class DecodedSamples:
    """Messages that were decoded.

    Attributes:
        system_leases: finite leases that a server granted to nodes' systems, not to their firmware.
        renewals: number of requests to renew a lease; of their answers, if more of these were captured.
        relayed: whether a relay forwarded DHCP: then counts do not show which clients have an address already.
        requests_read: whether all DHCP requests of clients were sampled, and show whether the client has an address.
        cut_at: the maximum captured bytes of a packet if packets were cut, else 0.
    """

    dhcp: tuple[Dhcp, ...] = ()
    ntp: tuple[Ntp, ...] = ()
    slurm: tuple[SlurmMessage, ...] = ()
    system_leases: tuple[Dhcp, ...] = ()
    renewals: int = 0
    relayed: bool = False
    requests_read: bool = False
    cut_at: int = 0

    @property
    def leases(self) -> tuple[Dhcp, ...]:
        """Finite leases: those granted by a server, else those offered."""
        leases = [one for one in self.dhcp if 0 < one.lease_s < math.inf]
        return tuple([one for one in leases if one.kind == ACK] or leases)

    @property
    def endless(self) -> bool:
        """Whether there is an infinite lease."""
        return any(one.lease_s == math.inf for one in self.dhcp)

    @property
    def polls(self) -> tuple[float, ...]:
        """NTP poll intervals of clients in seconds."""
        return tuple(one.poll_s for one in self.ntp if one.mode == CLIENT)

    @property
    def slurm_types(self) -> Counter[str]:
        """Number of Slurm messages by type."""
        return Counter(one.name for one in self.slurm)

    @property
    def slurm_releases(self) -> tuple[str, ...]:
        """Slurm releases of the messages, sorted."""
        return tuple(sorted({one.release for one in self.slurm}))


def own_samples(samples: Sequence[Sample], roles: bytes) -> list[Sample]:
    """Return the samples of the cluster's own services, on which their budgets depend.

    Nodes that poll a public time server, and the management node that polls its own, show nothing about its clients.
    """
    return [one for one in samples if _is_own(one, Role(roles[one.source]), Role(roles[one.destination]))]


def _is_own(sample: Sample, source: Role, destination: Role) -> bool:
    if sample.port in DHCP_PORTS:
        return True  # broadcasts, and those of relays
    if sample.port == NTP_PORT:
        return source == Role.NODE and destination in (Role.SMS, Role.GROUP)
    return {source, destination} == {Role.NODE, Role.SMS}


def read_samples(samples: Sequence[Sample], cut_at: int = 0) -> DecodedSamples:
    """Decode the sampled packets; of many, only some are decoded in full.

    Args:
        cut_at: the maximum captured bytes of a packet, 0 if packets are complete.
    """
    dhcp = [one.payload for one in samples if one.protocol == UDP and one.port in DHCP_PORTS]
    requests = [payload for payload in dhcp if not is_reply(payload)]
    granted = [one for one in _read_leases(_of_systems(dhcp)) if one.kind == ACK and 0 < one.lease_s < math.inf]
    clock = [one.payload for one in samples if (one.protocol, one.port) == (UDP, NTP_PORT)]
    clients = [payload for payload in clock if payload and payload[0] & 7 == CLIENT]
    jobs = [one.payload for one in samples if one.protocol == TCP and one.port in SLURM_PORTS]
    return DecodedSamples(
        tuple(_read_leases(dhcp)),
        tuple(one for one in map(read_ntp, spread(clients)) if one),
        tuple(one for one in map(read_slurm, jobs) if one),
        system_leases=tuple(granted),
        renewals=max(sum(map(is_renewal, requests)), sum(map(is_renewed, dhcp))),
        relayed=any(map(is_relayed, dhcp)),
        requests_read=bool(requests)
        and len(dhcp) < DHCP_KEPT
        and all(is_cut(one) or terms(one)[0] for one in requests),
        cut_at=cut_at,
    )


def _read_leases(dhcp: Iterable[bytes]) -> list[Dhcp]:
    """Decode one answer per lease; of many leases the shortest (the numbers are big-endian)."""
    answers = {terms(payload): payload for payload in dhcp if is_reply(payload)}
    worth = sorted((key for key in answers if key[0] in (ACK, OFFER)), key=lambda key: (key[0] != ACK, key[1], key[2]))
    return [one for one in map(read_dhcp, (answers[key] for key in worth[:READ_AT_MOST])) if one]


def _of_systems(dhcp: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the answers to clients whose last request was not one of firmware, in the order of the capture."""
    firmware: dict[bytes, bool] = {}
    for payload in dhcp:
        if not is_reply(payload):
            firmware[client(payload)] = is_firmware(payload)
        elif firmware.get(client(payload)) is False:
            yield payload


def spread(payloads: Sequence[bytes]) -> list[bytes]:
    """Return at most READ_AT_MOST of them, evenly spaced."""
    if len(payloads) <= READ_AT_MOST:
        return list(payloads)
    return [payloads[at * len(payloads) // READ_AT_MOST] for at in range(READ_AT_MOST)]
