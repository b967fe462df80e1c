"""``sms overlay verify``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from appliance.cli.common import add_host, add_json, open_target, verb

if TYPE_CHECKING:
    from appliance.host.base import Host
    from appliance.operations.context import Cluster

EXAMPLES = """\
  sms overlay verify            the newest verified one again, every byte of it
  sms overlay verify 41 42      these
  sms overlay verify --all      all there are
  sms overlay verify --all -n   only say which would be read"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "verify",
        "read snapshots again, every byte, and check them",
        "Hold every byte of snapshots against its digest, and check their file systems and state files again.\n"
        "Exit status 4 when one is damaged; that is written down, and it is `latest` no more.",
        EXAMPLES,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("snapshots", nargs="*", metavar="NUMBER", default=["latest"], help="numbers, or latest (default)")
    what.add_argument("--all", action="store_true", help="all there are")
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would be read; nothing is noted")
    add_host(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify them."""
    from appliance.cli.screen import err, out, print_json, progress
    from appliance.cli.snapshots.view import verified_lines
    from appliance.operations.snapshots.list import verify

    cluster, host = open_target(arguments)
    if arguments.dry_run:
        return rehearse(cluster, host, arguments)
    shown = progress(arguments.quiet)
    found = verify(cluster, host, arguments.snapshots, shown, everything=arguments.all)
    if arguments.json:
        print_json([{"number": one.number, "ok": one.ok, "damage": list(one.damage)} for one in found])
    else:
        for line in verified_lines(found, cluster.site.cluster):
            out.print(line)
    bad = [one.number for one in found if not one.ok]
    if bad:
        numbers = " ".join(str(number) for number in bad)
        err.print(
            f"  hint: `sms overlay snapshot` stores anew what the overlay still has; "
            f"`sms overlay prune {numbers}` gives up what is no good",
            markup=False,
        )
    return 4 if bad else 0


def rehearse(cluster: Cluster, host: Host, arguments: argparse.Namespace) -> int:
    """Say what would be read."""
    from appliance.cli.screen import out, print_json
    from appliance.operations.snapshots.list import rehearse_verify
    from appliance.units import format_size

    found = rehearse_verify(cluster, host, arguments.snapshots, everything=arguments.all)
    if arguments.json:
        print_json(found)
        return 0
    for one in found:
        out.print(
            f"read snapshot {one['number']} of {cluster.site.cluster}, {format_size(one['used_bytes'])}", markup=False
        )
    out.print("what is found would be written down beside each", markup=False)
    return 0
