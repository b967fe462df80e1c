"""`sms`, but at every step of a migration it reports its position to a test and waits for its reply.

argv: descriptor of reports, descriptor of replies, seconds that services may take on the target, then words of `sms`.
A report is a line: `<` before a step, `>` as soon as an end has received its message, and the step's name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from appliance.cli import main
from appliance.operations.image import deliver
from appliance.operations.migration import migrate, start
from appliance.tools import agent, move

TELL, WORD = int(sys.argv[1]), int(sys.argv[2])
SILENT = ("ping", "parcels")


def tell(mark: str, name: str) -> None:
    """Report the position; continue when the test replies."""
    os.write(TELL, f"{mark}{name}\n".encode())
    os.read(WORD, 1)


def step(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The call, reported before and after."""

    def reported(*args: Any, **options: Any) -> Any:
        tell("<", name)
        found = call(*args, **options)
        tell(">", name)
        return found

    return reported


class Endpoint(move.Endpoint):
    """Reports each message of the driver."""

    def send(self, do: str, data: bytes = b"", **facts: Any) -> None:
        if do in SILENT:
            return super().send(do, data, **facts)
        tell("<", do)
        super().send(do, data, **facts)
        return tell(">", do)


start.WAIT_S = float(sys.argv[3])
agent.Endpoint = Endpoint  # type: ignore[attr-defined]
migrate.inspect_hosts = step(migrate.inspect_hosts, "inspect_hosts")  # type: ignore[attr-defined]
for name in ("copy_file", "trust"):
    setattr(deliver, name, step(getattr(deliver, name), name))
raise SystemExit(main(sys.argv[4:]))
