"""``sms overlay prune``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from appliance.cli.common import add_host, add_json, open_target, verb

if TYPE_CHECKING:
    from appliance.operations.snapshots.prune import Pruned

EXAMPLES = """\
  sms overlay prune -n          say what the site's rule would remove, and what keeps the others
  sms overlay prune             remove it
  sms overlay prune 12 13       remove these two, and no others"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "prune",
        "thin snapshots out by the site's rule",
        "Remove the snapshots that `retention:` of the site file does not keep, or those that are named. The newest\n"
        "verified one always stays; what a restore replaced stays for 30 days, unless it is named.",
        EXAMPLES,
    )
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="these, and no others")
    add_host(parser)
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would be removed, and why not more")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prune."""
    from appliance.cli.screen import out, print_json, progress
    from appliance.operations.snapshots.prune import prune

    cluster, host = open_target(arguments)
    done = prune(cluster, host, arguments.numbers, progress(arguments.quiet), dry_run=arguments.dry_run)
    if arguments.json:
        print_json(done.as_dict())
        return 0
    for line in lines(done, arguments.dry_run):
        out.print(line)
    return 0


def lines(done: Pruned, dry_run: bool) -> Iterator[str]:
    """Each snapshot with what becomes of it and why, with rich's markup; then the sum."""
    from rich.markup import escape

    from appliance.operations.services.status import when
    from appliance.text import printable
    from appliance.units import format_size

    facts = {one["number"]: one for one in done.snapshots}
    for one in done.decisions:
        word = "keep" if one.keep else "would remove" if dry_run else "removed"
        shown = f"[green]{word:<12}[/]" if one.keep else f"[yellow]{word:<12}[/]"
        taken = when(facts[one.number]["taken"])[:16] if one.number in facts else "-"
        yield f"{one.number:>6}  {taken:<16}  {shown}  {escape(printable(', '.join(one.why)))}"
    named = {one.number for one in done.decisions}
    for number, why in sorted(done.broken.items()):
        if number not in named:
            cure = f"{why}: `sms overlay prune {number}` removes it"
            yield f"{number:>6}  {'-':<16}  [red]{'damaged':<12}[/]  {escape(printable(cure))}"
    going = [one for one in done.decisions if not one.keep]
    staying = len(done.decisions) - len(going)
    if dry_run:
        yield f"{staying} would stay on {escape(done.host)}, {len(going)} would go"
    else:
        yield (
            f"{staying} stay on {escape(done.host)}, {len(going)} removed; {format_size(done.freed_bytes)} freed, "
            f"{format_size(done.stored_bytes)} left"
        )
