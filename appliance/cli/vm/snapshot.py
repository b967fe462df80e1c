"""``sms vm snapshot``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.cli.common import add_json, filled, verb
from appliance.cli.vm.common import add_vm_host

if TYPE_CHECKING:
    from appliance.operations.vm.snapshots import VmSnapshot

EXAMPLES = """\
  sms vm snapshot                   both disks at one moment, named by the time; the VM runs on
  sms vm snapshot before-upgrade    under a name of your own
  sms vm snapshot --list            all there are
  sms vm snapshot --verify latest   read it again: both disks, and the file system of the state
  sms vm snapshot --prune 5 -n      say which would go; without -n, remove all but the newest five"""


def keep_count(text: str) -> int:
    """How many snapshots stay.

    Raises:
        argparse.ArgumentTypeError: not a number from 1 on.
    """
    if not text.isdecimal() or not 1 <= int(text) <= 9999:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 9999")
    return int(text)


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "snapshot",
        "take a snapshot of the VM's disks; it runs on",
        "Hold its file systems still for some milliseconds, begin a copy of both disks at that moment, and check the\n"
        "copy. Only then does it count.",
        EXAMPLES,
    )
    add_vm_host(parser)
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="what to call it (default: the time)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="show all there are")
    what.add_argument("--verify", type=filled, metavar="NAME", help="read one again, and check it")
    what.add_argument("--prune", type=keep_count, metavar="KEEP", help="remove all but the newest KEEP")
    parser.add_argument("--reason", default="", metavar="TEXT", help="a word on why, for the list")
    parser.add_argument("-n", "--dry-run", action="store_true", help="with --prune: remove nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Take one, or show, check, remove those there are."""
    from dataclasses import asdict

    from appliance.cli.screen import out, print_json, progress
    from appliance.cli.vm.common import open_vm
    from appliance.operations.vm.snapshot import snapshot_vm
    from appliance.operations.vm.snapshots import count_elsewhere, list_snapshots, prune_snapshots, verify_snapshot

    cluster, host = open_vm(arguments)
    shown = progress(arguments.quiet)
    if arguments.list:
        found = list_snapshots(cluster, host)
    elif arguments.verify:
        found = [verify_snapshot(cluster, host, arguments.verify, shown)]
    elif arguments.prune is not None:
        found = prune_snapshots(cluster, host, shown, keep=arguments.prune, dry_run=arguments.dry_run)
    else:
        taken = snapshot_vm(cluster, host, shown, arguments.name, reason=" ".join(arguments.reason.split()))
        print_json(asdict(taken)) if arguments.json else out.print(line(taken), markup=False)
        return 0
    if arguments.json:
        print_json([asdict(one) for one in found])
        return 0
    word = ""
    if arguments.list and found:
        out.print(f"{'name':32} {'taken on ' + host.name:19}  {'size':>10}", markup=False)
    elif arguments.prune is not None:
        word = "would remove " if arguments.dry_run else "removed "
        if not found:
            out.print(f"nothing to remove on {host.name}", markup=False)
    for one in found:
        out.print(f"{word}{line(one)}", markup=False)
    if arguments.list:
        others = elsewhere(count_elsewhere(cluster, host))
        if others or not found:
            out.print(f"{len(found) or 'none'} on {host.name}{others and '; '}{others}", markup=False)
    return 0


def elsewhere(counts: Mapping[str, int]) -> str:
    """What other hosts have, and how it is seen; empty where they have none."""
    return "; ".join(f"{count} on {name}: sms vm snapshot --list --host {name}" for name, count in counts.items())


def line(one: VmSnapshot) -> str:
    """A snapshot in one line."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.taken))
    how = f"held {one.frozen_ms:.0f} ms" if one.running else "off"
    words = [f"{one.name:32} {when}  {one.size_bytes >> 20:6} MiB  {how}", *(() if one.verified else ("not verified",))]
    return "  ".join([*words, *((one.reason,) if one.reason else ())])
