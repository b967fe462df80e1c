"""Target of an adoption: as that of a migration, but the old node knows no lease.

It takes its addresses back when nobody answers for them, as while the network of this host is down. So this side asks
who serves before it goes on without its coordinator.
"""

from typing import Any, Dict

from appliance.agent import adopt_other
from appliance.agent.channel import Channel
from appliance.agent.machine import follow_to_the_end
from appliance.agent.migration_source import RECLAIM_S
from appliance.agent.migration_target import MigrationTarget
from appliance.agent.protocol import read_request
from appliance.agent.take import host_locked
from appliance.shared.migration import MoveMark, TargetRequest


def run_arrive(request: Dict[str, Any]) -> Dict[str, Any]:
    """Follow the coordinator's messages until the services container serves here, or all is rolled back.

    Raises:
        Problem: the adoption failed, and was rolled back.
    """
    follow_to_the_end()
    given = read_request(TargetRequest, request)
    with host_locked(given.lock):
        target = AdoptArrive(given, Channel())
        target.begin()
        return target.run()


class AdoptArrive(MigrationTarget):
    """The target's state machine of an adoption."""

    had_addresses = False
    """Whether a killed run had taken the addresses; it may have isolated the instance since."""

    def patience_s(self) -> float:
        """Return how many seconds without a message mean that the coordinator is gone."""
        return RECLAIM_S if self.state == "up" else MigrationTarget.patience_s(self)

    def abandon(self, why: str) -> None:
        """End the adoption from any state: an instance that serves goes on, unless the old node serves again.

        While the network of this host is down, that cannot be seen: the instance is isolated until then.

        Raises:
            Problem: it cannot be seen, and somebody waits. The stored state stays.
        """
        if self.instance and (self.state == "up" or (self.state == "started" and self.had_addresses)):
            given, alone = self.request, self.channel is not None
            if adopt_other.serves_again(self.system, given, self._isolate, alone=alone):
                self.roll_back(why)
                return
            if self.state == "started":
                self.system.set_bridges({port: given.bridges[name] for name, port in self.ports.items()})
                self.state = "up"
                self.instance.announce(given.addresses)
        MigrationTarget.abandon(self, why)

    def _isolate(self) -> None:
        self.attempt("", self.detach_ports)

    def recover(self, saved: MoveMark) -> None:
        """Continue from the state that a killed run saved; as ``MigrationTarget.recover``.

        Raises:
            Problem: as ``abandon``.
        """
        self.had_addresses = saved.state == "up"
        MigrationTarget.recover(self, saved)
