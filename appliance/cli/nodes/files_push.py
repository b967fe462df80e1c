"""``sms files push``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, print_result, verb
from appliance.cli.nodes.files_common import SIGNS, UNHEALTHY, add_wait, lines, open_vm

if TYPE_CHECKING:
    from appliance.operations.nodes.files import PushResult

EXAMPLES = """\
  sms files push              upload what differs, notify all clients, print their state
  sms files push --dry-run    only print what differs
  sms files push --wait 2m    wait longer for the clients"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    text = (
        "Upload the files of the site file that differ to the provisioning VM: accounts, shadow, the munge key, the\n"
        "slurm.conf of `slurm:`, `provisioning.files`. Then notify all clients and wait for their reports. Exit\n"
        "status 4 if one has not reported or lacks a file. Offline clients (such as nodes that are off) are listed,\n"
        "but not waited for. A changed munge key is skipped while the services container runs with another one:\n"
        "`sms apply` changes it there and on nodes in one step. So is a changed slurm.conf, which can\n"
        "cost jobs: push the programs that it names, apply, then push again. Accounts without more than 10 % of the\n"
        "users or groups, or without a user with jobs, are refused."
    )
    parser = verb(actions, "push", "upload the site's files to the VM and notify all clients", text, EXAMPLES)
    parser.add_argument("-n", "--dry-run", action="store_true", help="only print what differs")
    parser.add_argument("--accounts", action="store_true", help="also replace files of `sms user sync`")
    parser.add_argument("--force", action="store_true", help="remove any users and groups")
    add_wait(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Push."""
    from appliance.errors import Refused
    from appliance.operations.nodes.files import push
    from appliance.operations.services.pushes import Pushes

    cluster, api = open_vm(arguments)
    judge = Pushes(cluster, api, "files push", arguments.force)
    dry_run = arguments.dry_run
    done = push(cluster, api, judge, wait_s=arguments.wait, dry_run=dry_run, accounts=arguments.accounts)
    print_result(arguments, done, _lines(done, dry_run=dry_run))
    if dry_run:
        return Refused.status if done.refused and not arguments.force else 0
    return UNHEALTHY if done.lacking else 0


def _lines(done: PushResult, *, dry_run: bool) -> Iterator[str]:
    for one in done.differences:
        if one.what != "same":
            yield f"{SIGNS[one.what]} {one.path}{f': {one.why}' if one.why else ''}"
        if text := done.texts.get(one.path):
            yield from (f"    {line}" for line in text.split("\n")[2:])
    yield done.summary(dry_run=dry_run)
    if dry_run and done.refused:
        yield from ("would be refused without --force:", *(f"  {line}" for line in done.refused))
    yield from lines(done.reports)
