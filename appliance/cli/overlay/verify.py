"""``sms overlay verify``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_host, add_json, open_target, verb

EXAMPLES = """\
  sms overlay verify            the newest verified one again, every byte of it
  sms overlay verify 41 42      these
  sms overlay verify --all      all there are"""


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
    add_host(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify them."""
    from appliance.cli.overlay.view import verified_lines
    from appliance.cli.screen import err, out, print_json, progress
    from appliance.flow.snapshots import verify

    cluster, host = open_target(arguments)
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
