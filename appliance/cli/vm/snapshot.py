"""``sms vm snapshot``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, filled, print_result, verb
from appliance.cli.vm.common import add_vm_host
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from appliance.host.base import Host
    from appliance.operations.context import Cluster
    from appliance.operations.vm.snapshots import VmSnapshot

EXAMPLES = """\
  sms vm snapshot                   both disks at one point in time, named by date; the VM keeps running
  sms vm snapshot before-upgrade    with a name
  sms vm snapshot --list            list all
  sms vm snapshot --verify latest   check one again: both disks, and the file system of the state
  sms vm snapshot --prune 5 -n      print what would be removed; without -n, remove all but the newest five"""


def keep_count(text: str) -> int:
    """Parse the number of snapshots to keep.

    Raises:
        argparse.ArgumentTypeError: not a number from 1 to 9999.
    """
    if not text.isdecimal() or not 1 <= int(text) <= 9999:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 9999")
    return int(text)


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "snapshot",
        "take a snapshot of the VM's disks; it keeps running",
        "Freeze its file systems for some milliseconds, start a copy of both disks at that moment, and verify the\n"
        "copy. Only a verified copy is kept.",
        EXAMPLES,
    )
    add_vm_host(parser)
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="name of the snapshot (default: the time)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="list all snapshots")
    what.add_argument("--verify", type=filled, metavar="NAME", help="check a snapshot again")
    what.add_argument("--prune", type=keep_count, metavar="KEEP", help="remove all but the newest KEEP")
    parser.add_argument("--reason", default="", metavar="TEXT", help="why it is taken, for the list")
    parser.add_argument("-n", "--dry-run", action="store_true", help="with --prune: remove nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Take a snapshot; or list, verify or prune them."""
    from appliance.cli.vm.common import open_vm
    from appliance.operations.vm.snapshot import snapshot_vm
    from appliance.operations.vm.snapshots import list_snapshots, prune_snapshots, verify_snapshot

    if arguments.dry_run and arguments.prune is None:
        raise ConfigError("--dry-run needs --prune", hint="a snapshot changes nothing in the VM: leave -n out")
    cluster, host = open_vm(arguments)
    if arguments.list:
        found = list_snapshots(cluster, host)
    elif arguments.verify:
        found = [verify_snapshot(cluster, host, arguments.verify)]
    elif arguments.prune is not None:
        found = prune_snapshots(cluster, host, keep=arguments.prune, dry_run=arguments.dry_run)
    else:
        taken = snapshot_vm(cluster, host, arguments.name, reason=" ".join(arguments.reason.split()))
        print_result(arguments, taken, [line(taken)])
        return 0
    lines = [line(one) for one in found]
    if arguments.prune is not None:
        word = "would remove" if arguments.dry_run else "removed"
        lines = [f"{word} {one}" for one in lines] or [f"nothing to remove on {host.name}"]
    print_result(arguments, found, _list_lines(cluster, host, lines) if arguments.list else lines)
    return 0


def _list_lines(cluster: Cluster, host: Host, lines: Sequence[str]) -> Iterator[str]:
    """Yield the list with its title, and the counts of other hosts, which are queried for it."""
    from appliance.operations.vm.snapshots import count_elsewhere

    if lines:
        yield f"{'name':32} {'taken on ' + host.name:19}  {'size':>10}"
        yield from lines
    others = elsewhere(count_elsewhere(cluster, host))
    if others or not lines:
        yield f"{len(lines) or 'none'} on {host.name}{others and '; '}{others}"


def elsewhere(counts: Mapping[str, int]) -> str:
    """Return the counts of other hosts with the commands that list them; empty if they have none."""
    return "; ".join(f"{count} on {name}: sms vm snapshot --list --host {name}" for name, count in counts.items())


def line(one: VmSnapshot) -> str:
    """Return a line that describes a snapshot."""
    from appliance.units import format_time

    when = format_time(one.taken)
    how = f"frozen {one.frozen_ms:.0f} ms" if one.running else "off"
    words = [f"{one.name:32} {when}  {one.size_bytes >> 20:6} MiB  {how}", *(() if one.verified else ("not verified",))]
    return "  ".join([*words, *((one.reason,) if one.reason else ())])
