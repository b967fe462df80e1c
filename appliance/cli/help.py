"""``sms help``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, verb

EXAMPLES = """\
  sms help                    all verbs
  sms help migrate            the same as sms migrate --help
  sms help overlay restore    of an action"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(verbs, "help", "show the help of a verb", "Show the help of a verb or of its action.", EXAMPLES)
    parser.add_argument("words", nargs="*", metavar="VERB", help="a verb, and an action of it (default: all verbs)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the help; an unknown verb ends with status 2."""
    from appliance.cli import make_parser

    make_parser().parse_args([*arguments.words, "--help"])
    return 0
