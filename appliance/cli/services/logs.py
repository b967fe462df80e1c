"""``sms logs``."""

from __future__ import annotations

import argparse
from contextlib import suppress

from appliance.cli.common import Verbs, add_host, add_json, open_serving, positive, print_result, verb

EXAMPLES = """\
  sms logs                  messages of all nodes
  sms logs slurmctld        the end of the log of a service, also when it does not run
  sms logs -f postfix       follow a log until Ctrl-C
  sms logs supervisor       starts and exits of services"""


DESCRIPTION = """Show the end of a log of the services container. On a terminal, control characters in it are escaped; a
file or a pipe gets them unchanged: where it ends on a terminal, as `ssh HOST sms logs` does, use `cat -v`."""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(verbs, "logs", "show a log", DESCRIPTION, EXAMPLES)
    parser.add_argument("name", nargs="?", default="messages", metavar="LOG", help="a service, messages or supervisor")
    parser.add_argument("-f", "--follow", action="store_true", help="keep showing new lines")
    parser.add_argument("-n", "--lines", type=positive, default=50, metavar="N", help="number of lines (50)")
    add_host(parser, serving=True)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show a log."""
    from appliance.cli.edge import data_writer
    from appliance.errors import ConfigError
    from appliance.operations.services.inside import show_log

    if arguments.json and arguments.follow:
        raise ConfigError("--json prints one document, and --follow has no end", hint="omit one of them")
    cluster, host = open_serving(arguments)
    if arguments.json:
        parts: list[bytes] = []
        show_log(cluster, host, arguments.name, lines=arguments.lines, follow=False, write=parts.append)
        lines = b"".join(parts).decode(errors="backslashreplace").splitlines()
        print_result(arguments, {"host": host.name, "log": arguments.name, "lines": lines}, [])
        return 0
    with suppress(KeyboardInterrupt):
        show_log(cluster, host, arguments.name, lines=arguments.lines, follow=arguments.follow, write=data_writer())
    return 0
