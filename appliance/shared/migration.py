"""Requests to the agents of a migration. The agent stores its request, so that ``resume`` recovers a killed run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from appliance.shared.adopt import OldInterface


@dataclass(frozen=True)
class Second:
    """The second instance of a switch on one host, which is source and target at the same time.

    Attributes:
        instance: its name until it has replaced the first one; no instance of this host had it before.
        overlay: path of the copy that it uses.
        mark, lock: those of the agent of the target.
    """

    instance: str
    overlay: str
    mark: str
    lock: str


@dataclass(frozen=True)
class MacvlanRequest:
    """A macvlan interface of the container.

    Attributes:
        name: inside.
        parent: interface of the host.
        address: with prefix.
        routes: over it, as ``ip route add`` takes them.
    """

    name: str
    parent: str
    mac: str
    address: str
    routes: tuple[str, ...]


@dataclass(frozen=True)
class MigrationRequest:
    """What both agents of a migration are given.

    Attributes:
        host: the admin host of this agent.
        peer: the admin host of the other one.
        overlay, lease, history, mark, lock: paths on the host; ``mark`` is the file of the stored state.
        instance: name of the Apptainer instance.
        generation: of the lease before the migration.
        bridges, addresses: by interface inside the container; for a macvlan interface the parent instead of the bridge.
        macs: MAC addresses of the interfaces inside.
        shared: both hosts use one overlay.
        stop_argv: command that stops the instance.
    """

    cluster: str
    host: str
    peer: str
    verb: str
    overlay: str
    lease: str
    history: str
    mark: str
    lock: str
    instance: str
    generation: int
    bridges: dict[str, str]
    addresses: dict[str, str]
    macs: tuple[str, ...]
    shared: bool
    stop_argv: tuple[str, ...]


@dataclass(frozen=True)
class SourceRequest(MigrationRequest):
    """The request to the source.

    Attributes:
        pid: of the first process of the instance.
        mac: to which syslog messages are counted while no host has it.
        stop: services that keep state, in groups that stop together, in this order.
        stop_wait_s: seconds that a group may take to stop.
        live: services without state, which serve until the switch.
        loggers: of these, the ones that write ``tails``.
        tails: log files, as paths inside, whose last lines are copied after the switch.
        compress: compress chunks.
        frozen_mark: file that exists while the overlay is frozen.
        start_argv: command that starts the instance.
        stream_ports: TCP ports of the loggers, whose sessions are closed before the switch.
        reset_ports: of these, the ones whose sessions are reset instead.
        mirror: as for ``TargetRequest``.
        second: the target is this host.
        gives: interfaces of the old node of an adoption, as in ``TargetRequest``.
    """

    pid: int
    mac: str
    stop: tuple[tuple[str, ...], ...]
    stop_wait_s: float
    live: tuple[str, ...]
    loggers: tuple[str, ...]
    tails: tuple[str, ...]
    compress: bool
    frozen_mark: str
    start_argv: tuple[str, ...]
    stream_ports: tuple[int, ...] = ()
    reset_ports: tuple[int, ...] = ()
    mirror: str = ""
    second: Optional[Second] = None
    gives: tuple[OldInterface, ...] = ()


@dataclass(frozen=True)
class TargetRequest(MigrationRequest):
    """The request to the target.

    Attributes:
        store: folder of the snapshots, whose chunks are reused.
        holds: bridges of an isolated instance, which are removed at the end.
        ask_nodes: command inside that makes the controller query its nodes; empty without a controller.
        inside: first words of a command that runs inside; empty in a state that an earlier version stored.
        mirror: folder where the mirror of the overlay is mounted, to which ``overlay`` is a link; empty without one.
        base: the overlay of the source, if that is this host; else empty.
        gate: nftables table that isolates services with state, which is removed at the end; empty without one.
        macvlan: interfaces that replace those of the isolated instance, detached.
        prepared: a complete copy beside the overlay, which others than the source's agent have made; empty without one.
        gives: interfaces of the old node of an adoption.
    """

    store: str
    holds: tuple[str, ...]
    ask_nodes: tuple[str, ...]
    inside: tuple[str, ...] = ()
    mirror: str = ""
    base: str = ""
    gate: str = ""
    macvlan: tuple[MacvlanRequest, ...] = ()
    prepared: str = ""
    gives: tuple[OldInterface, ...] = ()


@dataclass(frozen=True)
class MoveMark:
    """The state of a migration on one host, from which ``resume`` recovers a killed run.

    ``side``: leave (source), arrive (target), or adopt_yield (source of the undo of an adoption). ``ports``: the host's
    end of each interface. ``inode``: of the copy of the overlay, on the target.
    """

    side: str
    state: str
    pid: int
    request: dict[str, Any]
    ports: dict[str, str] = field(default_factory=dict)
    inode: int = 0

    @property
    def moves_ports(self) -> bool:
        """Whether ports of the instance are moved by its agents only; before, as if there were no migration."""
        return self.side not in ("leave", "adopt_yield") or self.state not in ("read", "stopping")
