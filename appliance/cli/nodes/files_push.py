"""``sms files push``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_json, verb
from appliance.cli.nodes.files_common import SIGNS, UNHEALTHY, add_wait, lines, open_vm

EXAMPLES = """\
  sms files push              bring what differs, wake all clients, show who has it
  sms files push --dry-run    only say what differs
  sms files push --wait 2m    wait longer for the last ones"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    text = (
        "Bring what the site file names to the provisioning VM, only what differs: accounts, shadow, the munge key,\n"
        "the slurm.conf of `slurm:`, `provisioning.files`. Then wake all clients and wait until each has reported:\n"
        "exit status 4 where one has not, or lacks a file. Clients that were not heard for long (nodes that are off)\n"
        "are shown, and not waited for."
    )
    parser = verb(actions, "push", "bring the site's files to the VM and wake all clients", text, EXAMPLES)
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what differs")
    parser.add_argument("--accounts", action="store_true", help="replace what `sms user sync` has brought, too")
    add_wait(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Push."""
    from appliance.cli.screen import out, print_json
    from appliance.operations.nodes.files import push

    cluster, api, shown = open_vm(arguments)
    done = push(cluster, shown, wait_s=arguments.wait, dry_run=arguments.dry_run, accounts=arguments.accounts, api=api)
    if arguments.json:
        print_json(done.as_dict())
        return UNHEALTHY if done.lacking else 0
    for one in done.differences:
        if one.what != "same":
            out.print(f"{SIGNS[one.what]} {one.path}{f': {one.why}' if one.why else ''}", markup=False)
        if text := done.texts.get(one.path):
            out.print("\n".join(f"    {line}" for line in text.split("\n")[2:]), markup=False)
    out.print(done.summary(dry_run=arguments.dry_run), markup=False)
    for line in lines(done.told):
        out.print(line, markup=False)
    return UNHEALTHY if done.lacking else 0
