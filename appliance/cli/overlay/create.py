"""``sms overlay create``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, add_host, add_json, open_target, print_result, verb

EXAMPLES = """\
  sms overlay create                  on this admin host
  sms overlay create --host host-b    on another one, over SSH
  sms overlay create -n               print the commands, change nothing"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "create",
        "create and seed the overlay, start nothing",
        "Create the overlay where there is none, and seed it from the site file, as a start does.\nNothing is started.",
        EXAMPLES,
    )
    add_host(parser)
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything and change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from appliance.operations.overlay.create import create, rehearse_create

    cluster, host = open_target(arguments)
    if arguments.dry_run:
        commands = rehearse_create(cluster, host)
        print_result(arguments, commands, commands or ["nothing would be done: it exists and is seeded"])
        return 0
    done = create(cluster, host)
    what = "is created and seeded" if done.created else "is seeded again" if done.seeded else "exists and is seeded"
    print_result(arguments, done, [f"{done.path} on {done.host} {what}"])
    return 0
