"""``sms overlay pull``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import (
    Verbs,
    add_host,
    add_json,
    add_snapshot_name,
    add_vm,
    filled,
    open_target,
    print_result,
    verb,
)

EXAMPLES = """\
  sms overlay pull --from borg --list     list the snapshots in the repository
  sms overlay pull --from borg            fetch the newest one into this host's store
  sms overlay pull --from host-b 42       fetch one from another admin host
  sms overlay pull --from borg --vm       the newest of the VM's state; `sms vm restore --from` does both
  sms overlay restore latest              then replace the overlay by it"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "pull",
        "fetch a snapshot from a Borg repository or another host",
        "Fetch a snapshot into the store of this host, from where it was pushed to. Every digest is verified, and\n"
        "the file system checked, before it is committed. `sms overlay restore` then replaces the overlay by it.",
        EXAMPLES,
    )
    add_snapshot_name(parser)
    parser.add_argument(
        "--from", dest="source", required=True, type=filled, metavar="SOURCE", help="borg, or an admin host"
    )
    parser.add_argument("--list", action="store_true", help="only list the snapshots there")
    add_host(parser)
    parser.add_argument("-n", "--dry-run", action="store_true", help="only show which one would be fetched")
    add_vm(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from appliance.cli.snapshots.push import as_number
    from appliance.operations.snapshots.pull import pull
    from appliance.units import format_size

    cluster, host = open_target(arguments)
    if arguments.list:
        return show_list(cluster, host, arguments)
    done = pull(cluster, host, arguments.source, arguments.snapshot, dry_run=arguments.dry_run)
    number = as_number(done.snapshot, str(done.number), "here")
    text = f"is on {host.name} now{number}, {format_size(done.bytes)} transferred"
    if done.present:
        text = f"is on {host.name} already{number}"
    elif arguments.dry_run:
        text = f"would be fetched to {host.name}"
    print_result(arguments, done, [f"snapshot {done.snapshot} of {done.source} {text}"])
    return 0


def show_list(cluster: Any, host: Any, arguments: argparse.Namespace) -> int:
    """List the snapshots at the source."""
    from appliance.operations.snapshots.list import foreign_note, list_snapshots
    from appliance.operations.snapshots.pull import archive_name, list_remote
    from appliance.text import printable
    from appliance.units import format_size, format_time

    remote = list_remote(cluster, host, arguments.source, list_snapshots(cluster, host).identity)
    there = remote.snapshots
    lines = []
    for one in there:
        line = f"{one['number']:>6}  {format_time(one['taken'])[:16]}  {format_size(one['used_bytes']):>8}"
        lines.append(f"{line}  {printable(one['host'])}  {archive_name(one)}")
    lines = lines or [f"no snapshots at {arguments.source}"]
    lines += [printable(note) for note in [foreign_note(remote.foreign, arguments.source)] if note]
    print_result(arguments, there, lines)
    return 0
