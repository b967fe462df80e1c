"""Old node of an adoption: its services are copied while they run, then handed over with their addresses.

The state decides what happens when the connection to the coordinator is lost:

    read      the services run here: nothing is done
    stopping  services that keep state are stopped: they are started again
    released  the addresses are removed: no host serves. The target takes them within ``ARMED_S`` of its last message
              or never. After ``RECLAIM_S`` this node asks by ARP who answers for them: if it is the target, the
              adoption is completed. If nobody does, but other machines of the networks answer, they are taken back.
              If nobody answers at all, the own network is down, and the target may serve: this node goes on asking
    given     the target serves: the stored state stays, because undo needs it

Nothing of the services is deleted here.
"""

import os
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from appliance.agent import adopt_network, adopt_units
from appliance.agent.adopt_changes import ChangedFiles, SendsChanges
from appliance.agent.adopt_state import OldNode
from appliance.agent.channel import PATIENCE_S, Channel
from appliance.agent.connections import translated_to, without_timeout
from appliance.agent.machine import Handler, StateMachine, follow_to_the_end, reason
from appliance.agent.migration_source import NOTICE_S, READ_S, RECLAIM_S
from appliance.agent.protocol import Problem, note, read_request
from appliance.agent.take import host_locked
from appliance.shared.adopt import AdoptRequest
from appliance.shared.wire import Message

ASK_AGAIN_S = 1.0


def run_leave(request: Dict[str, Any]) -> Dict[str, Any]:
    """Follow the coordinator's messages until the services run on the target, or here again.

    Raises:
        Problem: the adoption failed; the services run here as before.
    """
    follow_to_the_end()
    given = read_request(AdoptRequest, request)
    with host_locked(given.lock):
        leave = AdoptLeave(OldNode(given), Channel())
        leave.begin()
        return leave.run()


class AdoptLeave(SendsChanges, StateMachine):
    """The old node's state machine of an adoption."""

    SIDE = "adopt_leave"
    ENDED = ("gone",)

    def __init__(self, node: OldNode, channel: Optional[Channel]) -> None:
        StateMachine.__init__(self, channel)
        self.node = node
        self.request = node.request
        self.state = node.mark.state
        self.files = ChangedFiles(self.request.state, self.request.state_inside)
        # The network of this process: that of the node, or a namespace that stands for it.
        self.network = self.system.instance(os.getpid())
        self.sessions = self.system.open_sessions(self.network.pid, self.request.stream_ports, self.request.reset_ports)
        self.sent_connections: Set[str] = set()
        self.connections: List[str] = []
        """As they were when the addresses were removed."""
        self.released_at = 0.0
        self.troubles: List[str] = []
        """What could not be restored."""
        self.reported = False
        """Whether the coordinator may know that the addresses are removed: only then the target takes them."""

    def patience_s(self) -> float:
        """Return how many seconds without a message mean that the coordinator is gone."""
        return RECLAIM_S if self.state == "released" else PATIENCE_S

    def handlers(self) -> Dict[str, Handler]:
        """Return the function of each message."""
        return {
            "note": self.note_files,
            "round": self.send_round,
            "prepare_stop": self.prepare_stop,
            "stop_accounting": self.stop_accounting,
            "stop": self.stop,
            "connections": self.send_connections,
            "release": self.release,
            "given": self.give,
            "finish": self.finish,
            "abort": self.abort,
        }

    def record_event(self, event: str, **facts: Any) -> None:
        """Append an event to the log."""
        self.node.record_event(event, **facts)

    def begin(self) -> None:
        """Check that the node is as the plan has it, and report to be ready.

        Raises:
            Problem: it is not, or an adoption is under way or done. Nothing has been done.
        """
        assert self.channel
        self.node.begin()
        self.node.enter("read", "the services run here")
        self.channel.send("ready")

    # The switch

    def prepare_stop(self, message: Message) -> None:
        """Prepare that stopped units stay stopped: systemd takes seconds to read its units again."""
        assert self.channel
        self.node.prevent_units()
        self.channel.send("prepared")

    def stop_accounting(self, message: Message) -> None:
        """Stop the accounting; slurmctld keeps its records until it reaches one again."""
        assert self.channel
        began = time.monotonic()
        missing = [unit for unit in self.node.units if not os.path.exists(adopt_units.drop_in(unit))]
        if missing:
            raise Problem("%s would start again: nothing prevents it yet" % ", ".join(missing))
        self._enter("stopping", "stopping services that keep state")
        self.node.stop_units(self.request.accounting)
        self.channel.send("stopped", took_s=time.monotonic() - began)

    def stop(self, message: Message) -> None:
        """Stop the controller, and send its last changes. Services without state go on."""
        began = time.monotonic()
        if self.state != "stopping":
            raise Problem("received stop in state %s" % self.state)
        self.node.stop_units(self.request.controller)
        self.send_delta("final", stop_s=time.monotonic() - began)

    def send_connections(self, message: Message) -> None:
        """Send the current connections before the switch: to transfer thousands takes longer than the rest of it."""
        assert self.channel
        self._close_sessions()
        lines, trouble = self._read_connections()
        self.sent_connections = {without_timeout(line) for line in lines}
        self.channel.send("connections", "\n".join(lines).encode(), trouble=trouble)

    def release(self, message: Message) -> None:
        """Remove the addresses; send the connections that ``send_connections`` has not sent."""
        assert self.channel
        if self.state != "stopping":
            raise Problem("received release in state %s" % self.state)
        self._close_sessions()
        self._enter("released", "removing the addresses")
        # Before: a masquerading kernel forgets connections together with their address.
        self.connections, trouble = self._read_connections()
        began = self.released_at = time.monotonic()
        self.node.give_addresses()
        down = time.monotonic()
        new = [line for line in self.connections if without_timeout(line) not in self.sent_connections]
        self.reported = True
        text = "\n".join(new).encode()
        self.channel.send("released", text, down_s=down - began, connections=len(self.connections), trouble=trouble)

    def _read_connections(self) -> Tuple[List[str], str]:
        """Return the connections that are translated to a moved address, and why there are none."""
        moved = {address.partition("/")[0] for one in self.request.interfaces for address in one.moves}
        try:
            found = self.system.read_connections(self.network)
        except (OSError, Problem) as error:
            return [], "the translated connections cannot be read, they will end: %s" % reason(error)
        return [line for line in found if translated_to(line) in moved], ""

    def _close_sessions(self) -> None:
        """Close the TCP sessions of log senders; they send what follows on new ones, which only the target accepts."""
        try:
            self.sessions.close()
        except Exception as error:
            text = "the TCP sessions of log senders cannot be closed, lines may be lost: %s" % reason(error)
            self.record_event("trouble", why=text)
            note("note: " + text)
            return
        self.sessions.wait_until_noticed(NOTICE_S)

    def give(self, message: Message) -> None:
        """The target serves."""
        assert self.channel
        self._given("%s serves" % self.request.peer)
        self.channel.send("given")

    def _given(self, what: str) -> None:
        self._enter("given", what)
        self.attempt("the guard of addresses does not run: ", self.node.start_guard)
        self.attempt("", lambda: self.sessions.wait_until_read(READ_S))
        self.attempt("log senders cannot connect: ", self.sessions.reopen)  # to the addresses that stay

    def finish(self, message: Message) -> None:
        """End; what is stored stays, for ``adopt_return``."""
        assert self.channel
        if self.state != "given":
            raise Problem("received finish in state %s" % self.state)
        self.channel.send("finished")
        self.state = "gone"

    # Rollback

    def abort(self, message: Message) -> None:
        """Roll back on the coordinator's request; ``sure``: the target has confirmed that it has rolled back."""
        assert self.channel
        why, sure = str(message.get("why", "")), bool(message.get("sure"))
        if self.state == "given" and not sure:
            raise Problem("the services run on %s" % self.request.peer, "sms adopt --undo")
        if self.state == "released" and not sure and self._decide(why, lambda: False) != adopt_network.NOBODY:
            raise Problem("the services may run on %s" % self.request.peer, "sms status")
        self.restore_service(why)
        self.channel.send("back", trouble="; ".join(self.troubles))

    def abandon(self, why: str) -> None:
        """End from any state, so that exactly one host serves."""
        if self.state == "released" and self.reported and self._decide(why, self._may_ask) != adopt_network.NOBODY:
            return
        if self.state in ("read", "stopping", "released"):
            self.restore_service(why)

    def _may_ask(self) -> bool:
        """Whether it is to be asked again who serves."""
        time.sleep(ASK_AGAIN_S)
        return not self.node.is_late("released")

    def _decide(self, why: str, may_ask: Callable[[], bool]) -> str:
        """Find out who serves; enter state given if it is the target.

        Args:
            may_ask: whether to ask again while it is unknown.

        Returns:
            As ``adopt_network.ask_who_serves``; ``UNKNOWN`` also if nobody serves, and too late to take back.
        """
        if self.state == "given":
            return adopt_network.TARGET
        while time.monotonic() < self.released_at + RECLAIM_S:
            time.sleep(0.05)
        while True:
            found = self.node.ask_who_serves()
            if found == adopt_network.TARGET:
                self._given("%s answers for the addresses" % self.request.peer)
                return found
            if found == adopt_network.NOBODY and not self.node.is_late("released"):
                return found
            if not may_ask():
                self.record_event("undecided", why=why, seen=found)
                return adopt_network.UNKNOWN

    def restore_service(self, why: str) -> None:
        """Make the services run here as before. What is stored stays if a part of it failed: it can be repeated."""
        if self.state in ("released", "given"):
            if self.connections:
                self.attempt("", lambda: self.system.load_connections(self.network, self.connections))
            self.attempt("", self.node.take_addresses)
        self.attempt("log senders cannot connect: ", self.sessions.reopen)
        if self.state != "read":
            self.attempt("", self.node.start_units)
        self.attempt("", self.node.allow_units)
        self.state = "gone"
        self.record_event("back", why=why)
        if not self.troubles:
            self.node.clear()

    def attempt(self, what: str, work: Callable[[], object]) -> None:
        """Do a part whose failure must not prevent the others."""
        try:
            work()
        except Exception as error:
            self.troubles.append(what + reason(error))
            self.record_event("trouble", why=self.troubles[-1])

    def recover(self, may_ask: Callable[[], bool], *, sure: bool) -> None:
        """Continue from the stored state of a killed run. After a reboot, the addresses may be here again.

        Args:
            may_ask: whether to ask again while it is unknown who serves.
            sure: the target has rolled back.
        """
        why = "the adoption was killed"
        self.released_at, self.reported = time.monotonic() - RECLAIM_S, True
        if self.state in ("released", "given") and not sure:
            self.attempt("", self.node.give_addresses)
            if self._decide(why, may_ask) != adopt_network.NOBODY:
                return
        self.restore_service("the target has rolled back" if sure else why)

    def _enter(self, state: str, what: str) -> None:
        self.node.enter(state, what)
        self.state = state
