"""``sms guard``."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from appliance.cli.common import add_json, verb
from appliance.errors import Refused

EXAMPLES = """\
  sms guard                     look every few seconds, until it is ended
  sms guard --once              look once, as from cron
  sms guard --once --json       what was done, for a script: null when nothing was"""


def add(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "guard",
        "stop the appliance here once another host has taken over",
        "Hold this admin host's lease against those of the others. Once another host has taken over, take the\n"
        "appliance here off its networks and stop it. `sms start` starts a guard, `sms stop` ends it.",
        EXAMPLES,
    )
    parser.add_argument("--once", action="store_true", help="look once and end")
    add_json(parser)
    parser.set_defaults(run=run, host=None)


def run(arguments: argparse.Namespace) -> int:
    """Guard."""
    from appliance.cli.common import open_target
    from appliance.cli.screen import print_json
    from appliance.operations.services.guard import GaveWay, guard, guard_once

    try:
        cluster, host = open_target(arguments)
    except Refused as error:
        # A guard is of the host that it runs on.
        raise Refused(error.message, hint="run it on an admin host; `sms start` has one started there") from None

    def tell(gave: GaveWay | None) -> None:
        if arguments.json:
            print_json(asdict(gave) if gave else None)

    if arguments.once:
        tell(guard_once(cluster, host, _say))
        return 0
    with suppress(KeyboardInterrupt):  # `sms stop` ends it so
        guard(cluster, host, _say, on_gave_way=tell)
    return 0


def _say(words: str) -> None:
    """A line with its time: what a guard says is most often read in a log, later."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {words}\n")
    sys.stderr.flush()
