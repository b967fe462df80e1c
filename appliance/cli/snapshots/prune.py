"""``sms overlay prune``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from appliance.cli.common import (
    Verbs,
    add_host,
    add_json,
    add_vm,
    filled,
    open_site,
    open_target,
    positive,
    print_result,
    verb,
)
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from appliance.operations.snapshots.prune import Pruned

EXAMPLES = """\
  sms overlay prune -n          show what the site's retention would remove, and why the others are kept
  sms overlay prune             remove these snapshots
  sms overlay prune 12 13       remove these two, and no others
  sms overlay prune --vm        those of the provisioning VM's state
  sms overlay prune --at borg   remove archives in the Borg repository, on a machine whose key may remove
  sms overlay prune --at borg --uuid 5d6e71c0    of this one of several clusters of one name"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "prune",
        "remove snapshots by the site's retention",
        "Remove the snapshots that `retention:` of the site file does not keep, or the given ones. The newest\n"
        "verified one is always kept; what a restore replaced is kept for 30 days, unless it is given by number.",
        EXAMPLES,
    )
    parser.add_argument("numbers", nargs="*", type=positive, metavar="NUMBER", help="remove these and no others")
    add_host(parser)
    parser.add_argument(
        "--at",
        choices=("borg",),
        help="prune the Borg repository instead; this machine need not be an admin host",
    )
    parser.add_argument(
        "--uuid",
        type=filled,
        metavar="UUID",
        help="with --at: the cluster's UUID or at least 4 digits of it, if the repository has several of this name",
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="only show what would be removed, and why")
    add_vm(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from appliance.operations.snapshots.identity import is_uuid
    from appliance.operations.snapshots.prune import prune

    if arguments.uuid and not arguments.at:
        raise ConfigError("--uuid needs --at borg", hint="a host prunes the snapshots of its own cluster only")
    if arguments.uuid and not is_uuid(arguments.uuid):
        raise ConfigError(f"invalid UUID {arguments.uuid!r}", hint="give at least 4 digits of a UUID")
    if arguments.at:
        return run_at_repository(arguments)
    cluster, host = open_target(arguments)
    done = prune(cluster, host, arguments.numbers, dry_run=arguments.dry_run)
    print_result(arguments, done, lines(done, arguments.dry_run), markup=True)
    return 0


def run_at_repository(arguments: argparse.Namespace) -> int:
    """Prune the Borg repository."""
    from appliance.operations.snapshots.repository import prune_repository, pruning_host

    if arguments.numbers:
        raise ConfigError("--at borg takes no numbers: `retention:` decides", hint="sms overlay prune --at borg -n")
    cluster = open_site(arguments)
    host = pruning_host(cluster, arguments.host)
    done = prune_repository(cluster, host, dry_run=arguments.dry_run, cluster_uuid=arguments.uuid or "")
    word = "would remove" if arguments.dry_run else "removed"
    texts = [f"{word} {name}" for name in done.removed]
    kept = "would be kept" if arguments.dry_run else "kept"
    print_result(
        arguments, done, [*texts, f"{len(done.kept)} {kept} at {done.repository}, {len(done.removed)} removed"]
    )
    return 0


def lines(done: Pruned, dry_run: bool) -> Iterator[str]:
    """Format the decision on each snapshot with its reason, in rich markup; then the totals."""
    from rich.markup import escape

    from appliance.text import printable
    from appliance.units import format_size, format_time

    facts = {one["number"]: one for one in done.snapshots}
    for one in done.decisions:
        word = "keep" if one.keep else "would remove" if dry_run else "removed"
        shown = f"[green]{word:<12}[/]" if one.keep else f"[yellow]{word:<12}[/]"
        taken = format_time(facts[one.number]["taken"])[:16] if one.number in facts else "-"
        yield f"{one.number:>6}  {taken:<16}  {shown}  {escape(printable(', '.join(one.why)))}"
    named = {one.number for one in done.decisions}
    for number, why in sorted(done.broken.items()):
        if number not in named:
            text = f"{why}: `sms overlay prune {number}` removes it"
            yield f"{number:>6}  {'-':<16}  [red]{'damaged':<12}[/]  {escape(printable(text))}"
    removed = [one for one in done.decisions if not one.keep]
    kept = len(done.decisions) - len(removed)
    if dry_run:
        yield f"{kept} would be kept on {escape(done.host)}, {len(removed)} removed"
    else:
        yield (
            f"{kept} kept on {escape(done.host)}, {len(removed)} removed; {format_size(done.freed_bytes)} freed, "
            f"{format_size(done.stored_bytes)} left"
        )
