"""``sms files rollback``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, absolute, positive, verb
from appliance.cli.nodes.files_common import add_later, add_wait, finish, open_vm

EXAMPLES = """\
  sms files rollback /etc/motd               to the previous version
  sms files rollback /etc/motd --version 3   to this one (sms files show lists them)"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    text = (
        "Make an older version of a master file the current one, and notify its clients. Files that slurmctld has,\n"
        "too, are refused: change the site file back, and `sms apply` judges what that costs jobs. Accounts are\n"
        "judged as `sms files push` judges them."
    )
    parser = verb(actions, "rollback", "return to an older version of a master file", text, EXAMPLES)
    parser.add_argument("path", type=absolute, metavar="PATH", help="its path on the clients")
    parser.add_argument("--version", type=positive, metavar="N", help="this version (default: the previous one)")
    parser.add_argument("--force", action="store_true", help="remove any users and groups")
    add_later(parser)
    add_wait(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Roll it back."""
    from appliance.cli.screen import out
    from appliance.operations.nodes.files import roll_back
    from appliance.operations.services.pushes import Pushes

    cluster, api = open_vm(arguments)
    judge = Pushes(cluster, api, "files rollback", arguments.force)
    done = roll_back(api, judge, arguments.path, arguments.version)
    out.print(f"{arguments.path}: version {done['version']} is current now", markup=False)
    return finish(arguments, cluster, api)
