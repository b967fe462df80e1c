"""``sms exec``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, add_host, open_serving, verb

EXAMPLES = """\
  sms exec sinfo                     run a command; sms exits with its exit status
  sms exec -- squeue --long          options of the command follow --
  sms exec --host host-a -- chronyc sources"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "exec",
        "run a command in the services container",
        "Run a command in the running services container. The exit status is that of the command; as in a shell,\n"
        "127 if there is no such command, 126 if it cannot be run, and 128+N if signal N ended it.",
        EXAMPLES,
    )
    add_host(parser, serving=True)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command and its arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from appliance.errors import ConfigError
    from appliance.operations.services.inside import run_inside

    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ConfigError("no command", hint="sms exec -- squeue")
    cluster, host = open_serving(arguments)
    # Apptainer itself exits with 255 if there is no such program.
    return run_inside(cluster, host, ("env", "--", *command))
