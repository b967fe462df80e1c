"""``sms overlay push``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from appliance.cli.common import add_host, add_json, filled, open_target, verb

if TYPE_CHECKING:
    from appliance.flow.push import Pushed

EXAMPLES = """\
  sms overlay push                        the newest verified one, to all that the site file names
  sms overlay push --all-missing -n       say what would go where
  sms overlay push 42 --to borg           one of them, to the Borg repository
  sms overlay push latest --to host-b     into the snapshot store of another admin host"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "push",
        "send snapshots to a Borg repository and to other hosts",
        "Send verified snapshots to the Borg repository and the standby hosts that the site file names. Only what is\n"
        "not there travels; nothing counts there before all of it is. Cut off, the next run goes on.",
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
    add_host(parser)
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would be pushed")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Push."""
    from dataclasses import asdict

    from appliance.cli.screen import out, print_json, progress
    from appliance.errors import ConfigError
    from appliance.flow.push import FAILED, Wanted, push

    if arguments.snapshot and arguments.all_missing:
        raise ConfigError("a snapshot and --all-missing", hint="give one of them")
    cluster, host = open_target(arguments)
    wanted = Wanted(arguments.snapshot or "latest", all_missing=arguments.all_missing, dry_run=arguments.dry_run)
    done = push(cluster, host, wanted, arguments.to, progress(arguments.quiet))
    if arguments.json:
        print_json([asdict(one) for one in done])
    else:
        for line in lines(done):
            out.print(line)
    return 1 if any(one.state == FAILED for one in done) else 0


def lines(done: list[Pushed]) -> Iterator[str]:
    """What became of each, with rich's markup."""
    from rich.markup import escape

    from appliance.cli.overlay.view import size
    from appliance.flow.push import FAILED, PRESENT, PUSHED

    for one in done:
        what = f"snapshot {one.snapshot}" if one.snapshot else "nothing"
        if one.state == FAILED:
            yield f"[red]failed[/]: {what} to {escape(one.target)}: {escape(one.error)}"
            if one.hint:
                yield f"  hint: {escape(one.hint)}"
        elif one.state == PRESENT:
            yield f"{what} is at {escape(one.target)} already: {escape(one.name)}"
        elif one.state == PUSHED:
            yield (
                f"{what} is at {escape(one.target)} now: {escape(one.name)}, {size(one.bytes)} new there, "
                f"{one.seconds:.1f} s"
            )
        else:
            yield f"{what} would go to {escape(one.target)}: {size(one.bytes)} at most"
        for note in one.notes:
            yield f"  note: {escape(note)}"
    if not done:
        yield "nothing is missing there"
