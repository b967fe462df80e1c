"""``sms overlay pull``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_host, add_json, filled, open_target, verb

EXAMPLES = """\
  sms overlay pull --from borg --list     what the repository has
  sms overlay pull --from borg            the newest one there comes into this host's store
  sms overlay pull --from host-b 42       one of another admin host's
  sms overlay restore latest              then put it in the overlay's place"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "pull",
        "bring a snapshot back from a Borg repository or another host",
        "Bring a snapshot into the store of this host, from where it was pushed to. Every byte is held against its\n"
        "digest, and the file system checked, before it counts. `sms overlay restore` puts it in the overlay's place.",
        EXAMPLES,
    )
    parser.add_argument(
        "snapshot",
        nargs="?",
        default="latest",
        type=filled,
        metavar="NAME",
        help="its number there, an archive's name, or latest (the default)",
    )
    parser.add_argument(
        "--from", dest="source", required=True, type=filled, metavar="SOURCE", help="borg, or an admin host"
    )
    parser.add_argument("--list", action="store_true", help="only say what is there")
    add_host(parser)
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say which one would come")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Pull."""
    from dataclasses import asdict

    from appliance.cli.screen import out, print_json, progress
    from appliance.cli.snapshots.push import as_number
    from appliance.operations.snapshots.pull import pull
    from appliance.units import format_size

    cluster, host = open_target(arguments)
    if arguments.list:
        return show_list(cluster, host, arguments)
    done = pull(
        cluster, host, arguments.source, arguments.snapshot, progress(arguments.quiet), dry_run=arguments.dry_run
    )
    if arguments.json:
        print_json(asdict(done))
        return 0
    what = f"snapshot {done.snapshot} of {done.source}"
    if done.present:
        out.print(f"{what} is on {host.name} already{as_number(done.snapshot, str(done.number), 'here')}", markup=False)
    elif arguments.dry_run:
        out.print(f"{what} would come to {host.name}", markup=False)
    else:
        number = as_number(done.snapshot, str(done.number), "here")
        out.print(f"{what} is on {host.name} now{number}, {format_size(done.bytes)} came", markup=False)
    return 0


def show_list(cluster: Any, host: Any, arguments: argparse.Namespace) -> int:
    """What is there."""
    from appliance.cli.screen import out, print_json
    from appliance.operations.services.status import when
    from appliance.operations.snapshots.pull import list_elsewhere, name_of
    from appliance.text import printable
    from appliance.units import format_size

    there = list_elsewhere(cluster, host, arguments.source)
    if arguments.json:
        print_json(there)
        return 0
    for one in there:
        line = f"{one['number']:>6}  {when(one['taken'])[:16]}  {format_size(one['used_bytes']):>8}"
        out.print(f"{line}  {printable(one['host'])}  {name_of(one)}", markup=False)
    if not there:
        out.print(f"no snapshots at {arguments.source}", markup=False)
    return 0
