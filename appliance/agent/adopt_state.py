"""What an adoption stores on the old node, and how its services are restored there."""

import os
import time
from dataclasses import asdict, replace
from typing import Any, Optional, Tuple

from appliance.agent import adopt_guard, adopt_network, adopt_units
from appliance.agent.protocol import Problem, read_request
from appliance.shared.adopt import AdoptMark, AdoptRequest
from appliance.shared.files import remove_state, replace_file
from appliance.shared.history import AppendLine, make_event
from appliance.shared.records import RecordError, from_json, to_json

UNDECIDED_S = 600.0
"""Seconds after the switch during which this node may take its addresses automatically. Later, the container may have
served while this network was down, and what is here would be an older state."""


def read_mark(path: str) -> Optional[AdoptMark]:
    """Return the stored state of an adoption; None where there is none.

    Raises:
        OSError: it cannot be read.
        Problem: it is invalid. Addresses may be removed: it must not count as none.
    """
    try:
        with open(path, "rb") as stream:
            return from_json(AdoptMark, stream.read())
    except FileNotFoundError:
        return None
    except RecordError as error:
        raise Problem(
            "the state of an adoption is invalid: %s" % error,
            "what it has to restore is in %s" % path,
        ) from None


class OldNode:
    """The old node of an adoption."""

    def __init__(self, request: AdoptRequest, mark: Optional[AdoptMark] = None) -> None:
        """Read nothing.

        Args:
            mark: the stored state, without which ``begin`` has to be called.
        """
        self.request = request
        self.mark = mark or AdoptMark("read", os.getpid(), asdict(request))
        self.log = os.path.splitext(request.mark)[0] + ".log"

    @classmethod
    def stored(cls, path: str) -> Optional["OldNode"]:
        """Return the node as its stored state has it; None without one.

        Raises:
            OSError, Problem: as ``read_mark``.
        """
        mark = read_mark(path)
        return cls(read_request(AdoptRequest, mark.request), mark) if mark else None

    @property
    def units(self) -> Tuple[str, ...]:
        """All units that stop, in the order in which they start."""
        return (*self.request.accounting, *self.request.controller)

    def begin(self) -> None:
        """Check that the node is as planned, and read what is to be restored; change nothing.

        Raises:
            Problem: it is not, or an adoption is under way or done.
        """
        if os.path.exists(self.request.mark):
            raise Problem("an adoption of %s is under way or done" % self.request.host, "sms adopt --help", 3)
        for one in self.request.interfaces:
            adopt_network.check_interface(one)
        running = adopt_units.check_units(self.units)
        saved = tuple(adopt_network.save_interface(one) for one in self.request.interfaces)
        if not any(one.witnesses for one in saved):
            asked = ", ".join(address for one in self.request.interfaces for address in one.witnesses)
            raise Problem(
                "no other machine answers ARP in the networks of %s (%s)"
                % (self.request.host, asked or "none was asked"),
                "without one it could not be seen whether the network is down or the services are nowhere",
                3,
            )
        self.mark = replace(self.mark, interfaces=saved, running=running)

    def enter(self, state: str, what: str) -> None:
        """Store a state that is about to be entered: ``resume`` recovers a killed run from there."""
        times = {**self.mark.times, state: time.time()}
        self.mark = replace(self.mark, state=state, pid=os.getpid(), times=times)
        replace_file(self.request.mark, to_json(self.mark))
        self.record_event(state, what=what)

    def clear(self) -> None:
        """Remove the stored state: nothing is left to restore."""
        remove_state(self.request.mark)

    def record_event(self, event: str, **facts: Any) -> None:
        """Append an event to the log beside the stored state."""
        line = make_event(self.request.host, "adopt", event, dict(facts, peer=self.request.peer))
        try:
            AppendLine(self.log, line).perform()
        except OSError:
            pass  # a full disk must not prevent services from starting again

    # Units

    def prevent_units(self) -> None:
        """Prepare that units do not start while the file ``away`` exists, and the guard."""
        adopt_guard.install(self.request.mark, self.request.lock)
        adopt_units.prevent(self.units, self.request.away)

    def start_guard(self) -> None:
        """Start the guard: from now on, this node has not what has moved.

        Raises:
            Problem: it cannot be started.
        """
        if adopt_guard.is_installed():
            adopt_units.systemctl("start", "--no-block", adopt_guard.UNIT)

    def allow_units(self) -> None:
        """Undo ``prevent_units``."""
        adopt_guard.remove(self.request.mark)
        adopt_units.allow(self.units)

    def stop_units(self, units: Tuple[str, ...]) -> None:
        """Prevent all units from starting, and stop some."""
        replace_file(self.request.away, b"sms adopt\n", 0o644)
        adopt_units.stop(units, self.request.stop_wait_s)

    def start_units(self) -> None:
        """Let the units start again, and start those that ran before the adoption."""
        remove_state(self.request.away)
        adopt_units.start([unit for unit in self.units if unit in self.mark.running], self.request.stop_wait_s)

    # Network

    def give_addresses(self) -> None:
        """Remove the addresses that move, and replace MAC addresses.

        Raises:
            Problem, OSError: not all could be.
        """
        self._each(adopt_network.release)

    def keep_away(self, *, early: bool, late: bool) -> None:
        """Remove what has moved where something has added it.

        Args:
            early: the network of the node is not configured yet: only what moves is looked at.
            late: it should be by now: what stays is added where it is missing.

        Raises:
            Problem, OSError: not all could be done.
        """
        interfaces = self.request.interfaces
        moved = [one for one in interfaces if adopt_network.has_any_moved(one)]
        if early:
            saved = {one.name: one for one in self.mark.interfaces}
            for one in moved:
                adopt_network.remove_moved(one, saved[one.name])
        elif moved or (late and any(adopt_network.lacks_kept(one) for one in interfaces)):
            self.record_event("removed again", interfaces=[one.name for one in moved])
            self.give_addresses()

    def take_addresses(self) -> None:
        """Take back MAC addresses, addresses and routes; do nothing where they are here.

        Raises:
            Problem, OSError: not all could be restored.
        """
        self._each(adopt_network.restore)

    def has_addresses(self) -> bool:
        """Return whether this node has all addresses and MAC addresses of before the adoption."""
        return all(adopt_network.has_moved(one) for one in self.request.interfaces)

    def _each(self, work: Any) -> None:
        adopt_network.each_interface(work, self.request.interfaces, self.mark.interfaces)

    def ask_who_serves(self, *, anywhere: bool = False) -> str:
        """Return who answers for the addresses: as ``adopt_network.ask_who_serves``."""
        return adopt_network.ask_who_serves(self.request.interfaces, self.mark.interfaces, anywhere=anywhere)

    def since(self, state: str) -> float:
        """Return the seconds since a state was entered, by the clock of this node, which may have been set."""
        return time.time() - self.mark.times.get(state, 0.0)

    def is_late(self, state: str) -> bool:
        """Whether the container may have served since, while this network was down. A wrong clock counts as late."""
        return not 0 <= self.since(state) <= UNDECIDED_S
