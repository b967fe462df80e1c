"""``sms overlay grow``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from appliance.cli.common import Verbs, add_host, add_json, open_target, print_result, verb

EXAMPLES = """\
  sms overlay grow 4G           4 GiB in all
  sms overlay grow +1G          1 GiB more
  sms overlay grow 4G --dry-run   check whether there is room, change nothing"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "grow",
        "enlarge the overlay, in use or stopped",
        "Enlarge the overlay's file and its file system. The services container may run: its writers do not wait.\n"
        "An overlay cannot shrink. An interrupted run is finished by the next. Where the kernel does not let root\n"
        "grow a file system in use, the command refuses, and the services container has to be stopped first.",
        EXAMPLES,
    )
    parser.add_argument("size", metavar="SIZE", help="how large, or how much more: 4096M, 4G, +1G")
    add_host(parser)
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything and change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from appliance.operations.overlay.grow import grow, parse_size

    spec = parse_size(arguments.size)
    cluster, host = open_target(arguments)
    done = grow(cluster, host, spec, dry_run=arguments.dry_run)
    lines: Sequence[str] = [f"{done.path} on {done.host} has grown from {done.before >> 20} to {done.size >> 20} MiB"]
    if not done.changed:
        lines = [f"{done.path} on {done.host} has {done.size >> 20} MiB already"]
    elif arguments.dry_run:
        lines = done.steps
    print_result(arguments, done, lines)
    return 0
