"""What a migration stores on a host: the lease, the history, the state to recover from."""

import os
from dataclasses import asdict
from typing import Any, Dict, Optional, Tuple

from appliance.agent.protocol import Problem
from appliance.agent.system import System
from appliance.shared.history import AppendLine, make_event
from appliance.shared.lease import WRITTEN, Lease, SwapLease, parse_lease, peek
from appliance.shared.migration import MigrationRequest, MoveMark
from appliance.shared.records import RecordError, from_json, to_json

CHANGED = "another run has migrated, started or stopped the services container meanwhile"
CHANGED_HINT = "`sms host list` shows where it runs; if it shall still be migrated, run this again"


def read_mark(system: System, path: str) -> Optional[MoveMark]:
    """Return the stored state of a migration; None where there is none.

    Raises:
        OSError: it cannot be read.
        Problem: it is invalid. The ports of an instance may be detached: it must not count as none.
    """
    data = system.read(path)
    try:
        return None if data is None else from_json(MoveMark, data)
    except RecordError as error:
        raise Problem(
            "the state of an interrupted migration is invalid: %s" % error,
            "`sms status` shows which host serves; then remove %s" % path,
        ) from None


class HostState:
    """What a migration stores on a host: the lease, the history, the state to recover from."""

    def __init__(self, request: MigrationRequest, side: str, system: System) -> None:
        self.request = request
        self.side = side
        self.system = system

    def record_event(self, event: str, **facts: Any) -> None:
        """Append an event to the history."""
        line = make_event(self.request.host, self.request.verb, event, dict(facts, peer=self.request.peer))
        try:
            self.system.perform(AppendLine(self.request.history, line))
        except OSError:
            pass  # a full disk must not prevent services from starting again

    def save_state(self, state: str, *, ports: Optional[Dict[str, str]] = None, inode: int = 0) -> None:
        """Store the state that is about to be entered: ``resume`` recovers a killed run from there."""
        mark = MoveMark(self.side, state, os.getpid(), asdict(self.request), ports or {}, inode)
        self.system.replace(self.request.mark, to_json(mark))

    def clear_state(self) -> None:
        """Remove the stored state: there is nothing to recover."""
        try:
            self.system.remove(self.request.mark)
        except OSError as error:  # of a read-only disk, which must not hide the outcome; ``resume`` does it once more
            self.system.note("note: %s cannot be removed: %s" % (self.request.mark, (error.strerror or error)))

    def generation(self) -> int:
        """Return the generation of the lease stored here; 0 where there is none."""
        return self._lease()[0]

    def _lease(self) -> Tuple[int, str]:
        try:
            return peek(self.system.read(self.request.lease))
        except OSError:
            return 0, ""

    def was_served_by(self, peer: str) -> bool:
        """Return whether a host has taken the lease since the migration was planned, and has released it here."""
        try:
            lease = parse_lease(self.system.read(self.request.lease) or b"")
        except (OSError, ValueError, TypeError):
            return False
        return lease.holder is None and lease.last == peer and lease.generation > self.request.generation

    def check_plan(self, *, holds: bool) -> None:
        """Check, under the lock of the host, that nothing has changed here since the migration was planned.

        Args:
            holds: this host must hold the lease.

        Raises:
            Problem: another run has migrated, started or stopped the services container meanwhile.
        """
        generation, holder = self._lease()
        ours = holder == self.request.host or not holds
        if ours and generation <= self.request.generation and read_mark(self.system, self.request.mark) is None:
            return
        raise Problem(CHANGED, CHANGED_HINT, 3)

    def write_lease(self, holder: str, generation: int, *, only_from: Optional[int] = None) -> bool:
        """Write the lease unless that would lower its generation; return whether it was written.

        Args:
            only_from: the generation that the stored lease must have.
        """
        owner = holder if self.request.shared else self.request.host
        return self._write(Lease(self.request.cluster, generation, holder, self.system.time(), file=owner), only_from)

    def free_lease(self, generation: int) -> bool:
        """Write a lease that no host holds, and that this host released, as ``write_lease``."""
        host = self.request.host
        return self._write(
            Lease(self.request.cluster, generation, None, self.system.time(), file=host, last=host), None
        )

    def _write(self, lease: Lease, only_from: Optional[int]) -> bool:
        swap = SwapLease(self.request.lease, lease.text().decode(), generation=only_from, wait_s=float("inf"))
        return bool(self.system.perform(swap) == WRITTEN)

    def holder(self) -> str:
        """Return the holder of the lease stored here; empty where there is none."""
        return self._lease()[1]
