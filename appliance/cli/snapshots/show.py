"""``sms overlay show``."""

from __future__ import annotations

import argparse
import time

from appliance.cli.common import Verbs, add_host, add_json, add_vm, open_target, print_result, verb

EXAMPLES = """\
  sms overlay show latest         the newest verified one
  sms overlay show 42 --json      its manifest, for scripts"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(actions, "show", "show a snapshot's manifest", "Show a snapshot's manifest.", EXAMPLES)
    parser.add_argument("snapshot", metavar="NUMBER", help="its number, or latest: the newest verified one")
    add_host(parser)
    add_vm(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from appliance.cli.snapshots.view import show_lines
    from appliance.operations.snapshots.list import find_snapshot, list_snapshots

    cluster, host = open_target(arguments)
    found = find_snapshot(list_snapshots(cluster, host), arguments.snapshot)
    print_result(arguments, found, show_lines(found, time.time()))
    return 0
