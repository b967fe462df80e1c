"""Container's side of the undo of an adoption: the services return to the old node, as to the target of a migration.

What it needs of the state is copied by the coordinator: all of it while slurmctld runs, the changes once it has
stopped. The overlay stays as it is: a later adoption, or an administrator, may want it.
"""

from typing import Any, Dict

from appliance.agent import adopt_other
from appliance.agent.adopt_changes import ChangedFiles, SendsChanges
from appliance.agent.channel import Channel
from appliance.agent.machine import Handler, follow_to_the_end
from appliance.agent.migration_source import READ_S, MigrationSource
from appliance.agent.protocol import Problem, field, read_request
from appliance.agent.take import host_locked
from appliance.shared.migration import SourceRequest
from appliance.shared.wire import Message


def run_yield(request: Dict[str, Any]) -> Dict[str, Any]:
    """Follow the coordinator's messages until the services run on the old node, or here again.

    The request is a ``SourceRequest`` whose peer is the old node.

    Raises:
        Problem: it failed; the services container runs here as before.
    """
    follow_to_the_end()
    given = read_request(SourceRequest, request)
    with host_locked(given.lock):
        source = AdoptYield(given, Channel())
        source.begin()
        return source.run()


class AdoptYield(SendsChanges, MigrationSource):
    """The container's state machine of the undo of an adoption."""

    SIDE = "adopt_yield"

    def handlers(self) -> Dict[str, Handler]:
        """Return the function of each message."""
        return {
            "note": self.note_files,
            "round": self.send_round,
            "halt": self.halt,
            "connections": self.send_connections,
            "release": self.release,
            "given": self.give,
            "finish": self.finish,
            "abort": self.abort,
        }

    def begin(self) -> None:
        """Check that the instance of the plan still runs and serves here, and report to be ready.

        Raises:
            Problem: it does not. Nothing has been done.
        """
        self.ports = self.instance.ports(sorted(self.request.bridges))
        MigrationSource.begin(self)

    def note_files(self, message: Message) -> None:
        """Remember the files of a folder inside, ``folder``, which belongs to what runs there."""
        folder = field(message, "folder", str)
        self.files = ChangedFiles(folder, folder, self.instance.root)
        SendsChanges.note_files(self, message)

    def halt(self, message: Message) -> None:
        """Stop services, whose state is copied then. Others go on; a rollback starts those of ``request.stop``."""
        assert self.channel
        names = field(message, "names", list)
        known = {name for group in self.request.stop for name in group}
        if self.state not in ("read", "stopping") or not known.issuperset(names):
            raise Problem("received halt of %s in state %s" % (names, self.state), status=2)
        began = self.system.monotonic()
        if self.state == "read":
            self._enter("stopping", "stopping services that keep state", ports=self.ports)
        self.instance.stop_services(names, self.request.stop_wait_s)
        self.channel.send("halted", took_s=self.system.monotonic() - began)

    def release(self, message: Message) -> None:
        """Detach the ports from the bridges; send the connections that ``send_connections`` has not sent."""
        if self.state != "stopping":
            raise Problem("received release in state %s" % self.state, status=2)
        MigrationSource.release(self, message)

    def give(self, message: Message) -> None:
        """The old node serves: no admin host has the lease any more."""
        assert self.channel
        if self.state != "released":
            raise Problem("received given in state %s" % self.state, status=2)
        self._enter("given", "%s serves" % self.request.peer, ports=self.ports)
        self._give_lease()
        self.sessions.wait_until_read(READ_S)  # `finish` ends the log server
        self.channel.send("given", lost=self.counter.count() if self.counter else 0)

    def abort(self, message: Message) -> None:
        """Roll back on the coordinator's request; ``sure``: the old node has confirmed that it has rolled back."""
        if self.state == "given":
            raise Problem("the services run on %s" % self.request.peer)
        MigrationSource.abort(self, message)

    def target_answers(self, *, alone: bool) -> bool:
        """Return whether the old node serves. It knows no lease: while this network is down, that cannot be seen.

        Raises:
            Problem: it cannot be seen, and somebody waits.
        """
        unknown = 0
        while True:
            seen = adopt_other.look(self.system, self.request.gives, self.request.bridges)
            if seen == adopt_other.SERVES or MigrationSource.target_answers(self, alone=alone):
                return True
            if seen == adopt_other.AWAY:
                return False
            unknown += 1
            if unknown == adopt_other.TIMES and not alone:
                raise Problem(adopt_other.NETWORK_DOWN % self.request.host, adopt_other.NETWORK_HINT)
            self.system.sleep(adopt_other.AGAIN_S)

    def _give_lease(self) -> None:
        self.host_state.free_lease(self.request.generation + 1)

    def _retire_overlay(self) -> None:
        pass  # it stays
