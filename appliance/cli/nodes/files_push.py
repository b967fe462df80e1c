"""``sms files push``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
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
        "`sms apply` changes it there and on nodes in one step."
    )
    parser = verb(actions, "push", "upload the site's files to the VM and notify all clients", text, EXAMPLES)
    parser.add_argument("-n", "--dry-run", action="store_true", help="only print what differs")
    parser.add_argument("--accounts", action="store_true", help="also replace files of `sms user sync`")
    add_wait(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Push."""
    from appliance.operations.nodes.files import push
    from appliance.operations.services.munge_key import find_other_key

    cluster, api = open_vm(arguments)
    done = push(
        cluster,
        wait_s=arguments.wait,
        dry_run=arguments.dry_run,
        accounts=arguments.accounts,
        api=api,
        find_holder=partial(find_other_key, cluster),
    )
    print_result(arguments, done, _lines(done, dry_run=arguments.dry_run))
    return UNHEALTHY if done.lacking else 0


def _lines(done: PushResult, *, dry_run: bool) -> Iterator[str]:
    for one in done.differences:
        if one.what != "same":
            yield f"{SIGNS[one.what]} {one.path}{f': {one.why}' if one.why else ''}"
        if text := done.texts.get(one.path):
            yield from (f"    {line}" for line in text.split("\n")[2:])
    yield done.summary(dry_run=dry_run)
    yield from lines(done.reports)
