"""``sms files rollback``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, absolute, positive, verb
from appliance.cli.nodes.files_common import add_later, add_wait, finish, open_vm

EXAMPLES = """\
  sms files rollback /etc/slurm/slurm.conf               to the previous version
  sms files rollback /etc/slurm/slurm.conf --version 3   to this one (sms files show lists them)"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    text = "Make an older version of a master file the current one, and notify its clients."
    parser = verb(actions, "rollback", "return to an older version of a master file", text, EXAMPLES)
    parser.add_argument("path", type=absolute, metavar="PATH", help="its path on the clients")
    parser.add_argument("--version", type=positive, metavar="N", help="this version (default: the previous one)")
    add_later(parser)
    add_wait(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Roll it back."""
    from appliance.cli.screen import out
    from appliance.operations.nodes.files import roll_back

    cluster, api = open_vm(arguments)
    done = roll_back(api, arguments.path, arguments.version)
    out.print(f"{arguments.path}: version {done['version']} is current now", markup=False)
    return finish(arguments, cluster, api)
