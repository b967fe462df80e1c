"""Part of the guard: a container whose uplink lost its carrier is back on the network only after the leases were read.

While the cable is out, another host may have taken over; when it is plugged in again, both would have the address.
After a moment without a carrier, in which no host can take over, it is back at once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from appliance.errors import Busy, SmsError
from appliance.host.base import CommandError, Host
from appliance.operations.context import Cluster
from appliance.operations.lease import Leases
from appliance.operations.preflight import find_instance, lock_host, lock_ports
from appliance.operations.under_way import read_move
from appliance.plan.migration.lease import View, find_newer
from appliance.plan.services.network import INTERFACES
from appliance.shared.files import replace_file
from appliance.shared.lease import Lease
from appliance.shared.ports import split_macvlan
from appliance.tools import carrier, ports
from appliance.tools.apptainer import Instance

INSTANCE_INTERVAL_S = 5
"""Seconds between two queries for an instance while none is known."""
PATIENCE_S = 35
"""Seconds to wait for other hosts after the carrier is back: a switch port with spanning tree forwards after 30 s."""
FLAP_S = 2
"""Seconds without a carrier after which no failover that began with it can be on the network."""
CALM_S = 60
"""Seconds between two returns before the leases were read: reads may fail while a link goes up and down."""

Record = Callable[[str, str, dict[str, object]], None]
"""Record an event of the history: its name, a message and facts."""


class Known(Protocol):
    """The leases as known to the guard."""

    def learn(self, name: str, view: View) -> None:
        """Take over a lease that was read."""

    def is_current(self) -> bool:
        """Return whether all leases that can be read were read just now."""

    def newer(self) -> Lease | None:
        """Return the lease of the host that took over, as far as known."""

    def may_return(self) -> bool:
        """Return whether ports may be on their bridges again, once the leases of this cluster permit it."""


class UplinkWatch:
    """The container's ports, and those that were taken off their bridges."""

    def __init__(self, cluster: Cluster, host: Host, record: Record, known: Known) -> None:
        self.cluster = cluster
        self.host = host
        self.record = record
        self.known = known
        self.kept_off: dict[str, str] = self._load()
        """Bridge by port, as in ``_ports``; the parent of a port that is a macvlan interface."""
        self._ports: dict[str, str] = {}
        self._seen: dict[str, float] = {}
        """Monotonic time at which each bridge last had its uplink."""
        self._leases: Leases | None = None
        self._back_at: float | None = None
        self._flap_ends = self._returned_at = -CALM_S * 1.0
        """Until when ports may return before the leases were read, and when they last did."""
        self._looked_at = -INSTANCE_INTERVAL_S * 1.0

    def check(self) -> None:
        """Take ports off bridges that lost their uplink; put them back if it is there again and nobody took over."""
        for port in [port for port in self.kept_off if not carrier.exists(port)]:
            del self.kept_off[port]  # the instance has ended
            self._save()
        for port, bridge in self._find_ports().items():
            if carrier.has_uplink(bridge, port):
                self._seen[bridge] = self.cluster.env.clock.monotonic()
            elif bridge in self._seen and self._is_attached(port, bridge):
                self._take_off(port, bridge)
        ready = {port: bridge for port, bridge in self.kept_off.items() if carrier.has_uplink(bridge, port)}
        if not ready:
            self._back_at = None
        elif self.cluster.env.clock.monotonic() < self._flap_ends:
            self._returned_at = self.cluster.env.clock.monotonic()
            self._put_back(ready, ", before the leases are read: it was lost for a moment only")
            leases = Leases(self.host, self.cluster.reconnecting())
            threading.Thread(target=self._read_leases, args=(leases,), daemon=True).start()
        elif self._may_return():
            unread = ", ".join(self._leases.unreachable) if self._leases else ""
            self._put_back(ready, f"; the lease of {unread} could not be read" if unread else "")

    def _find_ports(self) -> dict[str, str]:
        """Return bridge or parent by the instance's port; empty without an instance."""
        if self._ports and all(carrier.exists(port) for port in self._ports):
            return self._ports
        self._ports, now = {}, self.cluster.env.clock.monotonic()
        if now - self._looked_at >= INSTANCE_INTERVAL_S:
            self._looked_at = now
            running = find_instance(self.cluster, self.host)
            found = self._ports_of(running) if running else {}
            networks = (self.cluster.site.networks.provisioning, self.cluster.site.networks.public)
            pairs = zip(networks, INTERFACES, strict=True)
            self._ports = {found[name]: network.uplink(self.host.name) for network, name in pairs if name in found}
        return self._ports

    def _ports_of(self, running: Instance) -> dict[str, str]:
        try:
            return ports.find_ports(self.host, running.pid)
        except CommandError:
            if Path(f"/proc/{running.pid}/ns/net").exists():
                raise
            return {}  # it has ended meanwhile

    def _take_off(self, port: str, bridge: str) -> None:
        seen = self._seen[bridge]
        try:
            with lock_ports(self.cluster, self.host):
                if not self._is_attached(port, bridge):
                    return
                if not self.kept_off:
                    calm = seen - self._returned_at >= CALM_S and self.known.is_current()
                    self._flap_ends = seen + FLAP_S if calm else seen
                self.kept_off[port] = bridge
                self._save()  # first: a guard that is started after this one was killed puts it back
                with suppress(CommandError):  # it has ended meanwhile
                    ports.detach(self.host, [port])
        except Busy:  # with the next check
            return
        # With connections of its own: those of before may wait for long until they send again.
        self._leases, self._back_at = Leases(self.host, self.cluster.reconnecting()), None
        message = f"{bridge} has lost its uplink: {port} is detached until the leases have been read again"
        self.record("uplink lost", message, {"bridge": bridge})

    def _is_attached(self, port: str, bridge: str) -> bool:
        """Return whether a port is attached to the bridge, or a macvlan interface to the parent of that name."""
        return ports.is_attached(self.host, port, bridge) if split_macvlan(port) else carrier.is_port(bridge, port)

    def _may_return(self) -> bool:
        """Read the leases of all hosts; return whether no other one has taken over, as far as they can be read."""
        if self._back_at is None:
            self._back_at = self.cluster.env.clock.monotonic()
        self._leases = self._leases or Leases(self.host, self.cluster.reconnecting())
        if find_newer(self.host.name, self._read_leases(self._leases)) or not self.known.may_return():
            return False  # the guard stops the instance
        return not self._leases.unreachable or self.cluster.env.clock.monotonic() - self._back_at > PATIENCE_S

    def _read_leases(self, leases: Leases) -> dict[str, View]:
        views = leases.query_readable()
        for name, view in views.items():
            if view.lease:
                self.known.learn(name, view)
        return views

    def _put_back(self, ready: dict[str, str], remark: str) -> None:
        with suppress(Busy), ExitStack() as stack:
            stack.enter_context(lock_ports(self.cluster, self.host))
            if self.known.newer():
                return  # the guard disconnects the instance under this lock
            if (move := read_move(self.cluster, self.host)) and move.moves_ports:
                if (move.side, move.state) != ("arrive", "up"):
                    return
                stack.enter_context(lock_host(self.cluster, self.host))  # not before its agent has ended
            with suppress(CommandError):
                ports.attach(self.host, ready)
            self.kept_off = {port: bridge for port, bridge in self.kept_off.items() if port not in ready}
            self._save()
            stack.close()
            unread = ", ".join(self._leases.unreachable) if self._leases else ""
            for port, bridge in ready.items():
                message = f"{bridge} has its uplink again: {port} is attached{remark}"
                self.record("uplink back", message, {"bridge": bridge, "unreachable": unread})
            self._leases = self._back_at = None

    def _load(self) -> dict[str, str]:
        try:
            found = json.loads(Path(self.cluster.places.uplink_mark).read_bytes())
            return {str(port): str(bridge) for port, bridge in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as error:
            raise SmsError(
                f"{self.cluster.places.uplink_mark} cannot be read: {error}",
                hint="`sms status` shows whether the container's ports are on their bridges; then remove the file",
            ) from error

    def _save(self) -> None:
        replace_file(str(self.cluster.places.uplink_mark), json.dumps(self.kept_off).encode())
