"""``sms completion``."""

from __future__ import annotations

import argparse
import sys

from appliance.cli.common import Verbs, verb

EXAMPLES = """\
  sms completion bash >/etc/bash_completion.d/sms
  sms completion zsh  >/usr/share/zsh/site-functions/_sms"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(verbs, "completion", "print completion for a shell", "Print completion for a shell.", EXAMPLES)
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the completion script."""
    import shtab

    from appliance.cli import make_parser

    sys.stdout.write(shtab.complete(make_parser(), shell=arguments.shell))
    return 0
