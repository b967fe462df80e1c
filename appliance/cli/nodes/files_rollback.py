"""``sms files rollback``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import verb
from appliance.cli.nodes.files_common import add_later, add_wait, finish, open_vm

EXAMPLES = """\
  sms files rollback /etc/slurm/slurm.conf               the version before
  sms files rollback /etc/slurm/slurm.conf --version 3   this one (sms files show tells which there are)"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    text = "Make an older version of a master file the one that counts, and wake its clients."
    parser = verb(actions, "rollback", "an older version of a master file, everywhere", text, EXAMPLES)
    parser.add_argument("path", metavar="PATH", help="as it is on the clients")
    parser.add_argument("--version", type=int, metavar="N", help="this version (default: the one before)")
    add_later(parser)
    add_wait(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Roll it back."""
    from appliance.cli.screen import out
    from appliance.operations.nodes.files import roll_back

    cluster, api, shown = open_vm(arguments)
    done = roll_back(api, arguments.path, arguments.version)
    out.print(f"{arguments.path}: version {done['version']} counts now", markup=False)
    return finish(arguments, cluster, api, shown)
