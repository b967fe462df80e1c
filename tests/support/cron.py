"""This machine with a /etc/cron.d that is a folder of a test: for commands on it, and for its agents."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.host.base import Host, Result
from appliance.host.local import Local
from appliance.tools.agent import Agents

CRON = "/etc/cron.d"


class HostWithCron(Local):
    """This machine."""

    def __init__(self, name: str, cron: Path) -> None:
        super().__init__(name)
        self.cron = cron

    def run(self, *argv: str, **options: Any) -> Result:
        return super().run(*(word.replace(CRON, str(self.cron)) for word in argv), **options)


@dataclass(frozen=True)
class AgentsWithCron(Agents):
    """Agents of this machine."""

    cron: str = CRON

    def call(self, host: Host, command: str, request: dict[str, Any], *more: Any, **options: Any) -> dict[str, Any]:
        there = json.loads(json.dumps(request).replace(CRON, self.cron))
        reply: dict[str, Any] = super().call(host, command, there, *more, **options)
        here: dict[str, Any] = json.loads(json.dumps(reply).replace(self.cron, CRON))
        return here
