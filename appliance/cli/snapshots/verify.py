"""``sms overlay verify``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_host, add_json, add_vm, open_target, print_result, verb

if TYPE_CHECKING:
    from appliance.host.base import Host
    from appliance.operations.context import Cluster

EXAMPLES = """\
  sms overlay verify            the newest verified one
  sms overlay verify 41 42      these two
  sms overlay verify --all      all of them
  sms overlay verify --all -n   only show which would be read"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "verify",
        "read every byte of snapshots again and verify them",
        "Verify the digests of snapshots, and check their file systems and state files again. Exit status 4 when\n"
        "one is damaged; this is recorded, and it is no longer `latest`.",
        EXAMPLES,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("snapshots", nargs="*", metavar="NUMBER", default=["latest"], help="numbers, or latest (default)")
    what.add_argument("--all", action="store_true", help="all snapshots")
    parser.add_argument("-n", "--dry-run", action="store_true", help="only show what would be read; record nothing")
    add_host(parser)
    add_vm(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from appliance.cli.screen import err
    from appliance.cli.snapshots.view import verified_lines
    from appliance.operations.snapshots.list import verify

    cluster, host = open_target(arguments)
    if arguments.dry_run:
        return rehearse(cluster, host, arguments)
    found = verify(cluster, host, arguments.snapshots, everything=arguments.all)
    result = [{"number": one.number, "ok": one.ok, "damage": list(one.damage)} for one in found]
    print_result(arguments, result, verified_lines(found, cluster.label), markup=True)
    bad = [one.number for one in found if not one.ok]
    if bad:
        numbers = " ".join(str(number) for number in bad)
        err.print(
            f"  hint: `sms overlay snapshot` stores again what the overlay still has; "
            f"`sms overlay prune {numbers}` removes what is damaged",
            markup=False,
        )
    return 4 if bad else 0


def rehearse(cluster: Cluster, host: Host, arguments: argparse.Namespace) -> int:
    """Print what would be read."""
    from appliance.operations.snapshots.list import rehearse_verify
    from appliance.units import format_size

    found = rehearse_verify(cluster, host, arguments.snapshots, everything=arguments.all)
    lines = [f"read snapshot {one['number']} of {cluster.label}, {format_size(one['used_bytes'])}" for one in found]
    print_result(arguments, found, [*lines, "the result would be recorded with each snapshot"])
    return 0
