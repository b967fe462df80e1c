"""``sms version``."""

from __future__ import annotations

import argparse

from appliance import __version__
from appliance.cli.common import Verbs, add_json, print_result, verb

EXAMPLES = """\
  sms version          the same as sms --version
  sms version --json   with the version of Python"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(verbs, "version", "print the version", "Print the version of sms.", EXAMPLES)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the version."""
    import platform

    print_result(arguments, {"sms": __version__, "python": platform.python_version()}, [f"sms {__version__}"])
    return 0
