"""``sms overlay list``."""

from __future__ import annotations

import argparse
import time

from appliance.cli.common import Verbs, add_host, add_json, add_vm, open_target, print_result, verb

EXAMPLES = """\
  sms overlay list                  on this admin host, newest last
  sms overlay list --host host-b    on another one
  sms overlay list --vm             those of the provisioning VM's state
  sms overlay list --json           every manifest, for scripts"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "list",
        "list the snapshots",
        "List the snapshots on a host, newest last; exit status 4 when one of them is damaged.",
        EXAMPLES,
    )
    add_host(parser)
    add_vm(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from appliance.cli.snapshots.view import list_lines
    from appliance.operations.snapshots.list import list_snapshots

    cluster, host = open_target(arguments)
    listing = list_snapshots(cluster, host)
    if listing.snapshots or listing.broken or listing.foreign:
        print_result(arguments, listing, list_lines(listing, time.time()), markup=True)
    else:
        text = f"no snapshots of {cluster.label} on {host.name}; `sms overlay snapshot{' --vm' * cluster.vm}` takes one"
        print_result(arguments, listing, [text])
    return 4 if listing.damaged else 0
