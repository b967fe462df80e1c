"""``sms overlay push``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_host, add_json, add_vm, filled, open_target, print_result, verb

if TYPE_CHECKING:
    from appliance.operations.snapshots.push import Pushed

EXAMPLES = """\
  sms overlay push                        the newest verified one, to all targets of the site file
  sms overlay push --all-missing -n       show what would be sent where
  sms overlay push 42 --to borg           one of them, to the Borg repository
  sms overlay push latest --to host-b     into the snapshot store of another admin host
  sms overlay push --vm                   the newest of the provisioning VM's state
  sms overlay push --all-missing --prune  then prune there by the site's retention, as scheduled runs do"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "push",
        "send snapshots to a Borg repository and to other hosts",
        "Send verified snapshots to the Borg repository and the standby hosts of the site file. Only missing data is\n"
        "sent; a snapshot is committed there once it is complete. An interrupted push is resumed by the next run.",
        EXAMPLES,
    )
    parser.add_argument(
        "snapshot", nargs="?", type=filled, metavar="NUMBER", help="its number, or latest: the newest verified one"
    )
    parser.add_argument(
        "--all-missing", action="store_true", help="every verified one that is not there and would be kept there"
    )
    parser.add_argument(
        "--to", action="append", default=[], type=filled, metavar="TARGET", help="borg, or an admin host; repeatable"
    )
    parser.add_argument(
        "--prune", action="store_true", help="then remove there what `retention:` of the site file does not keep"
    )
    add_host(parser)
    parser.add_argument("-n", "--dry-run", action="store_true", help="only show what would be pushed and removed")
    add_vm(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from appliance.errors import ConfigError
    from appliance.operations.snapshots.push import PushOptions, exit_status, push

    if arguments.snapshot and arguments.all_missing:
        raise ConfigError("a snapshot and --all-missing exclude each other", hint="give one of them")
    cluster, host = open_target(arguments)
    options = PushOptions(arguments.snapshot or "latest", arguments.all_missing, arguments.prune, arguments.dry_run)
    done = push(cluster, host, options, arguments.to)
    print_result(arguments, done, lines(done, pruned=arguments.prune), markup=True)
    return exit_status(done)


def lines(done: list[Pushed], *, pruned: bool = False) -> Iterator[str]:
    """Format the result of each, in rich markup. ``pruned``: what retention does not keep was, or would be, removed."""
    from rich.markup import escape

    from appliance.operations.snapshots.push import FAILED, PRESENT, PUSHED, REMOVED, WOULD_REMOVE
    from appliance.units import format_size

    for one in done:
        what = f"snapshot {one.snapshot}" if one.snapshot else "nothing"
        if one.state == FAILED:
            yield f"[red]failed[/]: {what} to {escape(one.target)}: {escape(one.error)}"
            if one.hint:
                yield f"  hint: {escape(one.hint)}"
        elif one.state == PRESENT:
            yield f"{what} is at {escape(one.target)} already{escape(as_number(one.snapshot, one.name, 'there'))}"
        elif one.state == PUSHED:
            yield (
                f"{what} is at {escape(one.target)} now{escape(as_number(one.snapshot, one.name, 'there'))}, "
                f"{format_size(one.bytes)} new there, {one.seconds:.1f} s"
            )
        elif one.state in (REMOVED, WOULD_REMOVE):
            verb = "would be removed" if one.state == WOULD_REMOVE else "is removed"
            name = "" if one.name.isdecimal() else f" ({escape(one.name)})"
            yield f"snapshot {one.snapshot} at {escape(one.target)} {verb}: no rule keeps it{name}"
        else:
            yield f"{what} would be sent to {escape(one.target)}: {format_size(one.bytes)} at most"
    if not done:
        yield "no snapshots are missing there"
    if pruned and not any(one.state in (FAILED, REMOVED, WOULD_REMOVE) for one in done):
        yield "no snapshots are to be removed there: a rule keeps each"


def as_number(number: int, name: str, where: str) -> str:
    """Format the archive name of a snapshot at the target, or its number there if it differs."""
    if not name.isdecimal():
        return f": {name}" if name else ""
    return "" if int(name) == number else f" as number {name} {where} ({number} is taken)"
