"""``sms logs``."""

from __future__ import annotations

import argparse
from contextlib import suppress

from appliance.cli.common import Verbs, add_host, open_target, verb

EXAMPLES = """\
  sms logs                  messages of all nodes
  sms logs slurmctld        the end of the log of a service, also when it does not run
  sms logs -f postfix       follow a log until Ctrl-C
  sms logs supervisor       starts and exits of services"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(verbs, "logs", "show a log", "Show the end of a log of the services container.", EXAMPLES)
    parser.add_argument("name", nargs="?", default="messages", metavar="LOG", help="a service, messages or supervisor")
    parser.add_argument("-f", "--follow", action="store_true", help="keep showing new lines")
    parser.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="number of lines (50)")
    add_host(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show a log."""
    from appliance.cli.edge import data_writer
    from appliance.operations.services.inside import show_log

    cluster, host, _ = open_target(arguments)
    with suppress(KeyboardInterrupt):
        show_log(cluster, host, arguments.name, lines=arguments.lines, follow=arguments.follow, write=data_writer())
    return 0
