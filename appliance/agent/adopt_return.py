"""Old node of an adoption when it gets its services back: the undo.

The coordinator has written the container's state beside the old one before anything moves. The state decides what
happens when the connection is lost:

    given  the services run in the container: nothing is done
    up     this node has the addresses: it starts the services, and completes the undo, unless the container has taken
           them again, which it does when nobody answers for them: the network of this node may have failed
"""

import os
import time
from typing import Any, Callable, Dict, List, Optional

from appliance.agent import adopt_guard, adopt_network, adopt_units
from appliance.agent.adopt_place import new_state, place_state
from appliance.agent.adopt_state import OldNode
from appliance.agent.channel import Channel
from appliance.agent.machine import Handler, StateMachine, follow_to_the_end, reason
from appliance.agent.migration_source import RECLAIM_S
from appliance.agent.migration_target import ARMED_S, PORTS_LIMIT_S
from appliance.agent.protocol import Problem, read_request
from appliance.agent.take import host_locked
from appliance.shared.adopt import ReturnRequest
from appliance.shared.wire import Message

SETTLED_S = 10.0
"""Seconds after which the container's side has decided: ``migration_source.RECLAIM_S``, and the time to ask."""
AGAIN_S = 1.0
"""Seconds between two looks that have to agree, each of ``arp.QUERY_S``: the container acts right after one."""


def run_return(request: Dict[str, Any]) -> Dict[str, Any]:
    """Follow the coordinator's messages until the services run here, or in the container as before.

    Raises:
        Problem: the undo failed.
    """
    follow_to_the_end()
    given = read_request(ReturnRequest, request)
    with host_locked(given.lock):
        node = OldNode.stored(given.mark)
        if node is None or node.mark.state != "given" or node.request.cluster != given.cluster:
            found = node.mark.state if node else "none"
            raise Problem("no adoption of %s is to be undone (state: %s)" % (given.host, found), "", 3)
        adopt_guard.renew(given.mark, given.lock)
        one = AdoptReturn(node, Channel())
        one.begin()
        return one.run()


class AdoptReturn(StateMachine):
    """The old node's state machine of an undo."""

    SIDE = "adopt_return"
    ENDED = ("done",)

    def __init__(self, node: OldNode, channel: Optional[Channel]) -> None:
        StateMachine.__init__(self, channel)
        self.node = node
        self.request = node.request
        self.state = node.mark.state
        self.network = self.system.instance(os.getpid())
        self.armed_at = 0.0
        self.warning = ""
        self.served = False

    def patience_s(self) -> float:
        """Return how many seconds without a message mean that the coordinator is gone."""
        return RECLAIM_S if self.state == "up" else StateMachine.patience_s(self)

    def handlers(self) -> Dict[str, Handler]:
        """Return the function of each message."""
        return {
            "arm": self.arm,
            "up": self.take_over,
            "serve": self.serve,
            "commit": self.commit,
            "forget": self.forget,
            "abort": self.abort,
        }

    def record_event(self, event: str, **facts: Any) -> None:
        """Append an event to the log."""
        self.node.record_event(event, **facts)

    def begin(self) -> None:
        """Report to be ready, and where the state of the container is to be written."""
        assert self.channel
        self.channel.send("ready", state=self.request.state, state_new=new_state(self.request.state))

    def arm(self, message: Message) -> None:
        """Load the connections known so far; ``take_over`` is allowed for ``ARMED_S`` from now on.

        Raises:
            Problem: the container's state is not here.
        """
        assert self.channel
        lines = self._read_lines(message)
        if not os.path.isdir(new_state(self.request.state)):
            raise Problem("the state of the container is not in %s" % new_state(self.request.state))
        self._forget_connections()
        self.warning = self._load_connections(lines)
        self.armed_at = self.system.boot_time()
        self.channel.send("armed")

    def take_over(self, message: Message) -> None:
        """Take over the connections and the addresses."""
        assert self.channel
        lines = self._read_lines(message)
        began = time.monotonic()
        self._enter("up", "taking the addresses")
        try:
            # Nothing slow, such as disk access, may come between reading the clock and taking the addresses.
            if self.system.boot_time() > self.armed_at + ARMED_S:
                raise Problem("the request to take over came too late", "is the network slow? run it again")
            warning = self._load_connections(lines) or self.warning
            self.node.take_addresses()
            if self.system.boot_time() > self.armed_at + PORTS_LIMIT_S:
                raise Problem("the addresses were taken too late", "is %s overloaded?" % self.request.host)
        except BaseException:
            # The container takes them again, unless one of them answers.
            self.attempt("", self.node.give_addresses)
            self._enter("given", "the addresses were not taken")
            raise
        took = time.monotonic() - began
        self.channel.send("up", up_s=took, trouble=warning)

    def _read_lines(self, message: Message) -> List[str]:
        assert self.channel
        return self.channel.read_body(message).decode(errors="replace").splitlines()

    def _load_connections(self, lines: List[str]) -> str:
        try:
            return self.system.load_connections(self.network, lines)
        except OSError as error:
            return "the translated connections cannot be loaded, they end: %s" % reason(error)

    def _forget_connections(self) -> None:
        """Remove translated connections from before the adoption: they would hide those of the container."""
        for one in self.request.interfaces:
            for address in one.moves:
                argv = self.network.network("conntrack", "-D", "--reply-dst", address.partition("/")[0])
                self.attempt("", lambda argv=argv: self.system.run(*argv, ok=range(256)))  # type: ignore[misc]

    def serve(self, message: Message) -> None:
        """Put the state in place, and start the services."""
        assert self.channel
        if self.state != "up":
            raise Problem("received serve in state %s" % self.state, status=2)
        began = time.monotonic()
        kept = self._serve()
        self.channel.send("serves", took_s=time.monotonic() - began, kept=kept)

    def _serve(self) -> str:
        kept = place_state(self.request.state)
        self.node.start_units()
        self.served = True
        self.record_event("serves", kept=kept)
        return kept

    def commit(self, message: Message) -> None:
        """Complete the undo: nothing of the adoption is left here but the old state and the log."""
        assert self.channel
        if not self.served:
            raise Problem("received commit before serve", status=2)
        self._commit()
        self.channel.send("committed")

    def _commit(self) -> None:
        self.node.allow_units()
        self.node.clear()
        self.state = "done"
        self.record_event("undone")

    def forget(self, message: Message) -> None:
        """End the adoption: the services stay where they are, and their units here are disabled."""
        assert self.channel
        if self.state != "given":
            raise Problem("received forget in state %s" % self.state, status=2)
        adopt_units.disable(self.node.units)
        self._commit()
        self.channel.send("forgotten")

    def abort(self, message: Message) -> None:
        """End on the coordinator's request.

        Raises:
            Problem: the addresses are here.
        """
        assert self.channel
        if self.state == "up":
            raise Problem("the services run on %s by now" % self.request.host, "sms adopt --undo")
        self.record_event("not undone", why=str(message.get("why", "")))
        self.channel.send("aborted")
        self.state = "done"

    def abandon(self, why: str) -> None:
        """End from any state: with the addresses, complete the undo, once it is seen that the container has them not.

        While the network of this node is down, that is waited for, but not longer than ``OldNode.is_late`` allows.
        """
        if self.state == "up":
            self.record_event("alone", why=why)
            self._settle(lambda: not self.node.is_late("up"))

    def recover(self, may_ask: Callable[[], bool], *, sure: bool) -> None:
        """Continue from state up of a killed run, or of before a reboot.

        If this node has not taken the addresses, the container takes them again, by ``SETTLED_S`` after that state at
        the latest where its network works. While it is unknown who serves, nobody does here.

        Args:
            may_ask: whether to ask again while it is unknown.
            sure: the container has given everything back, and has not served since.
        """
        while not sure and not self.node.has_addresses() and 0 <= self.node.since("up") < SETTLED_S:
            time.sleep(0.1)
        if sure:
            self.node.take_addresses()
            self._serve()
            self._commit()
        else:
            self._settle(may_ask)

    def _settle(self, may_ask: Callable[[], bool]) -> None:
        """Serve, or leave it to the container, by who answers for the addresses.

        Args:
            may_ask: whether to ask again while it is unknown.
        """
        isolated, before = not self.node.has_addresses(), ""
        recovers = self.channel is None  # a boot may have brought the addresses back, after the container has served
        while True:
            # One network that works is enough where this node answers in it: the container asks in all of them.
            found = self.node.ask_who_serves(anywhere=not isolated)
            if found == adopt_network.TARGET:
                self._isolate()
                self._enter("given", "the services run on %s" % self.request.peer)
                return
            if found == adopt_network.NOBODY and (isolated or recovers) and self.node.is_late("up"):
                found = adopt_network.UNKNOWN
            if found == before == adopt_network.NOBODY and not isolated:
                self._serve()
                self._commit()
                return
            if found == before == adopt_network.NOBODY:
                self.node.take_addresses()
                isolated = False  # looked at again: the container may have taken them at the same moment
            elif found == adopt_network.UNKNOWN and not isolated:
                self._isolate()
                isolated = True
            if found == adopt_network.UNKNOWN and not may_ask():
                self.record_event("undecided")
                return
            before = found
            time.sleep(AGAIN_S)

    def _isolate(self) -> None:
        """Have no address that moves, and run nothing that keeps state; do all of it, whatever fails."""
        self.served = False
        self.attempt("", self.node.give_addresses)
        self.attempt("", lambda: self.node.stop_units(self.node.units))

    def _enter(self, state: str, what: str) -> None:
        self.node.enter(state, what)
        self.state = state
