"""``sms files remove``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, verb
from appliance.cli.nodes.common import add_yes, confirm
from appliance.cli.nodes.files_common import add_later, add_wait, audience, finish, open_vm

EXAMPLES = """\
  sms files remove -n /etc/motd   print for which clients it is
  sms files remove /etc/motd      remove it from all clients
  sms files rollback /etc/motd    restore it"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    text = (
        "Remove a file from all its clients, which restore the file that it had replaced, if any. Files that were\n"
        "changed on a client stay there, and so do accounts. The VM keeps the versions. Asks for confirmation if the\n"
        "site file defines it. Refused for what the services container runs with, such as a prolog of its slurm.conf."
    )
    parser = verb(actions, "remove", "remove a master file from all its clients", text, EXAMPLES)
    parser.add_argument("path", metavar="PATH", help="its path on the clients")
    parser.add_argument("-n", "--dry-run", action="store_true", help="only print for which clients it is")
    add_yes(parser)
    add_later(parser)
    add_wait(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Remove it."""
    from appliance.cli.screen import out
    from appliance.errors import Refused
    from appliance.operations.nodes.files import find_master, is_pushed, refuse_used, remove_master
    from appliance.operations.services.pushes import Pushes

    cluster, api = open_vm(arguments)
    path = arguments.path
    there = find_master(api, path)
    if there is None:
        raise Refused(f"there is no master file {path}", hint="sms files list")
    refuse_used(Pushes(cluster, api, "files remove"), path)
    pushed = is_pushed(cluster, path, there)
    back = "the site file defines it: the next `sms files push` restores it"
    if arguments.dry_run:
        out.print(f"{path}: would be removed from {audience(there)}{f'; {back}' if pushed else ''}", markup=False)
        return 0
    if pushed:
        confirm(f"{path}: {back}. Remove it from {audience(there)}?", yes=arguments.yes)
    remove_master(api, path)
    words = f"`sms files rollback {path}` restores it"
    out.print(f"{path}: removed; {words}{', and so does the next `sms files push`' if pushed else ''}", markup=False)
    return finish(arguments, cluster, api)
