"""``sms overlay show``."""

from __future__ import annotations

import argparse
import time
from typing import Any

from appliance.cli.common import add_host, add_json, open_target, verb

EXAMPLES = """\
  sms overlay show latest         the newest verified one
  sms overlay show 42 --json      its manifest, for scripts"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(actions, "show", "show a snapshot's manifest", "Show a snapshot's manifest.", EXAMPLES)
    parser.add_argument("snapshot", metavar="NUMBER", help="its number, or latest: the newest verified one")
    add_host(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from appliance.cli.screen import out, print_json
    from appliance.cli.snapshots.view import show_lines
    from appliance.operations.snapshots.list import find_snapshot, list_snapshots

    cluster, host = open_target(arguments)
    found = find_snapshot(list_snapshots(cluster, host), arguments.snapshot)
    if arguments.json:
        print_json(found)
    else:
        out.print("\n".join(show_lines(found, time.time())), markup=False)
    return 0
