"""Requests to the agent of the old node of an adoption, and the state that it stores there (``sms adopt``).

The stored state survives a reboot: ``resume`` recovers a killed run from it, and undo restores the node by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OldInterface:
    """An interface of the old node, from which addresses move to the services container.

    Attributes:
        name: there, such as eno1, bond0 or br0.
        inside: the interface of the container that gets them: eth0 (provisioning) or eth1 (public).
        mac: moves to the container.
        spare_mac: the interface has this one meanwhile.
        moves: addresses with prefix; the first one is the main one.
        keeps: addresses with prefix that stay.
        witnesses: addresses of other machines in that network, such as the gateway and the admin host: if one answers
            ARP, this network is up.
    """

    name: str
    inside: str
    mac: str
    spare_mac: str
    moves: tuple[str, ...]
    keeps: tuple[str, ...]
    witnesses: tuple[str, ...]


@dataclass(frozen=True)
class AdoptRequest:
    """The request to the old node that gives its services away (``adopt_leave``).

    Attributes:
        host: the old node.
        peer: the admin host that gets its services.
        mark: file of the stored state, /var/lib/sms-adopt/CLUSTER.json.
        away: file that exists while the units below must not start, /var/lib/sms-adopt/CLUSTER.away.
        lock: /run/sms/adopt-CLUSTER.lock.
        controller, accounting: systemd units, such as slurmctld.service and slurmdbd.service.
        stop_wait_s: seconds that units may take to stop.
        state: StateSaveLocation there.
        state_inside: its path in the container, which the tar of changes has.
        stream_ports, reset_ports: TCP ports of receivers of logs, as in ``migration.SourceRequest``.
    """

    cluster: str
    host: str
    peer: str
    mark: str
    away: str
    lock: str
    interfaces: tuple[OldInterface, ...]
    controller: tuple[str, ...]
    accounting: tuple[str, ...]
    stop_wait_s: float
    state: str
    state_inside: str
    stream_ports: tuple[int, ...] = ()
    reset_ports: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReturnRequest:
    """The request to the old node that gets its services back (``adopt_return``); the rest is in the stored state.

    Attributes:
        host: the old node.
        peer: the admin host that has its services.
        mark, lock: as in ``AdoptRequest``.
    """

    cluster: str
    host: str
    peer: str
    mark: str
    lock: str


@dataclass(frozen=True)
class SavedInterface:
    """An interface of the old node before the switch.

    Attributes:
        name: of the interface.
        addresses: all IPv4 and IPv6 addresses in their order, each as words of ``ip address add``.
        routes: routes over it, each as words of ``ip route add``.
        witnesses: those of ``OldInterface`` that answered before the switch.
    """

    name: str
    addresses: tuple[str, ...]
    routes: tuple[str, ...]
    witnesses: tuple[str, ...]


@dataclass(frozen=True)
class AdoptMark:
    """The state of an adoption on the old node.

    Attributes:
        state: read, stopping, released, given; up while the services return.
        pid: of the agent that stored it.
        request: the ``AdoptRequest``.
        interfaces: before the switch.
        times: when each state was entered, in seconds since 1970.
        running: units that ran before.
    """

    state: str
    pid: int
    request: dict[str, Any]
    interfaces: tuple[SavedInterface, ...] = ()
    times: dict[str, float] = field(default_factory=dict)
    running: tuple[str, ...] = ()
