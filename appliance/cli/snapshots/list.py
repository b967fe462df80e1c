"""``sms overlay list``."""

from __future__ import annotations

import argparse
import time
from typing import Any

from appliance.cli.common import add_host, add_json, open_target, verb

EXAMPLES = """\
  sms overlay list                  on this admin host, newest last
  sms overlay list --host host-b    on another one
  sms overlay list --json           every manifest, for scripts"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "list",
        "list the snapshots",
        "List the snapshots on a host, newest last; exit status 4 when one of them is damaged.",
        EXAMPLES,
    )
    add_host(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from dataclasses import asdict

    from appliance.cli.screen import out, print_json
    from appliance.cli.snapshots.view import list_lines
    from appliance.operations.snapshots.list import list_snapshots

    cluster, host = open_target(arguments)
    listing = list_snapshots(cluster, host)
    if arguments.json:
        print_json(asdict(listing))
    elif not listing.snapshots and not listing.broken:
        out.print(
            f"no snapshots of {cluster.site.cluster} on {host.name}; `sms overlay snapshot` takes one", markup=False
        )
    else:
        for line in list_lines(listing, time.time()):
            out.print(line)
    return 4 if listing.damaged else 0
