"""``sms guard``."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress

from appliance.cli.common import Verbs, add_json, verb
from appliance.errors import Refused

EXAMPLES = """\
  sms guard                     check every few seconds until stopped
  sms guard --once              check once, as from cron
  sms guard --once --json       what was done, for scripts: null if nothing"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "guard",
        "stop the services container here once another host has taken over",
        "Compare this admin host's lease with those of the others. Once another host has taken over, disconnect\n"
        "the services container here from its networks and stop it. `sms start` starts a guard, `sms stop` stops it.",
        EXAMPLES,
    )
    parser.add_argument("--once", action="store_true", help="check once and exit")
    add_json(parser)
    parser.set_defaults(run=run, host=None)


def run(arguments: argparse.Namespace) -> int:
    """Run the guard."""
    from appliance.cli.common import open_target
    from appliance.cli.screen import print_json
    from appliance.operations.services.guard import SteppedDown, guard, guard_once

    try:
        cluster, host = open_target(arguments)
    except Refused as error:
        # A guard always acts on the host that it runs on.
        raise Refused(error.message, hint="run it on an admin host; `sms start` starts one there") from None

    def show(stepped_down: SteppedDown | None) -> None:
        if arguments.json:
            print_json(stepped_down)

    if arguments.once:
        show(guard_once(cluster, host, _report))
        return 0
    with suppress(KeyboardInterrupt):  # `sms stop` stops it this way
        guard(cluster, host, _report, on_step_down=show)
    return 0


def _report(message: str) -> None:
    """Print a message with its time, for the log of the guard."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
    sys.stderr.flush()
