"""What the agents of migrations and adoptions have in common: each is a state machine that the coordinator drives.

When the connection is lost, it alone decides how to continue, by the state that it is in.
"""

import signal
from contextlib import ExitStack
from typing import Any, Callable, Dict, Optional, Tuple

from appliance.agent import protocol
from appliance.agent.channel import PATIENCE_S, Channel, Disconnected
from appliance.agent.protocol import Problem
from appliance.agent.system import SYSTEM, System
from appliance.shared.wire import Message

Handler = Callable[[Message], None]


def follow_to_the_end() -> None:
    """Ignore signals: a run is cancelled by closing the channel, and a signal would interrupt its rollback.

    Messages to people go to standard error, since standard output is the channel.
    """
    protocol.OUTPUT[0] = 2
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)


def reason(error: BaseException) -> str:
    """Return the text of an error."""
    return getattr(error, "message", "") or str(error) or type(error).__name__


class StateMachine:
    """One side of a migration or adoption."""

    SIDE = ""
    """First word of the names of its steps."""
    QUIET: Tuple[str, ...] = ()
    """Messages that are not reported as steps."""
    ENDED: Tuple[str, ...] = ()
    """States in which it is done."""

    def __init__(self, channel: Optional[Channel], system: System = SYSTEM) -> None:
        self.channel = channel
        self.system = system
        self.state = ""
        self.stack = ExitStack()

    def handlers(self) -> Dict[str, Handler]:
        """Return the function of each message."""
        raise NotImplementedError

    def abandon(self, why: str) -> None:
        """End from any state, so that exactly one host serves."""
        raise NotImplementedError

    def record_event(self, event: str, **facts: Any) -> None:
        """Append an event to the history."""
        raise NotImplementedError

    def patience_s(self) -> float:
        """Return how many seconds without a message mean that the coordinator is gone."""
        return PATIENCE_S

    def run(self) -> Dict[str, Any]:
        """Handle messages until the end."""
        assert self.channel
        try:
            with self.stack:
                while self.state not in self.ENDED:
                    self._do(self.channel.receive(self.patience_s()))
        except Disconnected:
            self.abandon("the connection to the coordinator was lost")
        except BaseException as error:
            self.system.step("abandon")
            self.abandon(reason(error))
            raise
        return {"state": self.state}

    def _do(self, message: Message) -> None:
        name = str(message.get("do"))
        handler = self.handlers().get(name)
        if handler is None:
            raise Problem("received an unknown message: %s" % name[:40], "is `sms` the same version on both hosts?")
        if name not in self.QUIET:
            self.system.step("%s.%s" % (self.SIDE, name))
        handler(message)

    def attempt(self, what: str, work: Callable[[], object]) -> None:
        """Do a part of a rollback whose failure, such as of one bridge, must not prevent the others."""
        try:
            work()
        except Exception as error:
            self.record_event("trouble", why=what + reason(error))
