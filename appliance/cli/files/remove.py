"""``sms files remove``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import verb
from appliance.cli.files.common import add_later, add_wait, finish, open_vm

EXAMPLES = """\
  sms files remove /etc/motd      take it from all that have it
  sms files rollback /etc/motd    and bring it back"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    text = (
        "Take a file from all its clients: what was there before it came is put back, else it is removed. One that\n"
        "somebody has changed there stays, and so do accounts. Its versions stay in the VM."
    )
    parser = verb(actions, "remove", "take a master file from all its clients", text, EXAMPLES)
    parser.add_argument("path", metavar="PATH", help="as it is on the clients")
    add_later(parser)
    add_wait(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Remove it."""
    from appliance.cli.screen import out
    from appliance.flow.files import remove_master

    cluster, api, shown = open_vm(arguments)
    remove_master(api, arguments.path)
    out.print(f"{arguments.path}: removed; `sms files rollback {arguments.path}` brings it back", markup=False)
    return finish(arguments, cluster, api, shown)
