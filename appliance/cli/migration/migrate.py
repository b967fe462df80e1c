"""``sms migrate``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from appliance.cli.common import add_json, filled, verb

if TYPE_CHECKING:
    from appliance.operations.migration.migrate import Plan
    from appliance.operations.migration.moving import Moved

EXAMPLES = """\
  sms migrate host-b              from wherever it runs to host-b
  sms migrate host-b --dry-run    every check, the plan, and how long each service will be away
  sms migrate host-b --force      although a service will be away for longer than it may be"""


def add(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "migrate",
        "move the running appliance to another admin host",
        "Copy the overlay while it is written, stop what keeps state, start it unseen on the other host, and switch\n"
        "the addresses. Jobs run on, connections through NAT go on. What fails leaves it where it was.",
        EXAMPLES,
    )
    parser.add_argument("to", metavar="HOST", type=filled, help="the admin host that it goes to")
    parser.add_argument("--force", action="store_true", help="although services will be away for too long")
    parser.add_argument("-n", "--dry-run", action="store_true", help="check both hosts and show the plan")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Move it, or show how it would be."""
    from appliance.cli.screen import print_json, progress
    from appliance.operations.context import need_root, open_cluster
    from appliance.operations.migration.migrate import migrate, refuse_over, rehearse_migrate
    from appliance.operations.site.find import find_site

    shown = progress(arguments.quiet)
    need_root()
    cluster = open_cluster(find_site(arguments.site), arguments.state, shown)
    if arguments.dry_run:
        plan = rehearse_migrate(cluster, arguments.to, shown)
        if arguments.json:
            print_json({**asdict(plan), "over": [one.name for one in plan.over]})
        else:
            _show_plan(plan)
        refuse_over(plan, force=arguments.force)
        return 0
    moved = migrate(cluster, arguments.to, shown, force=arguments.force)
    if arguments.json:
        print_json(asdict(moved))
    else:
        _show_moved(cluster.site.cluster, moved)
    return 0


def _show_plan(plan: Plan) -> None:
    from appliance.cli.screen import out

    how = "both see one overlay" if plan.shared else f"{plan.used_bytes >> 20} MiB to bring over at most"
    out.print(f"{plan.source} to {plan.target}: {how}; {plan.free_bytes >> 20} MiB free there", markup=False)
    out.print(f"image {plan.image}", markup=False)
    basis = f"the median of {plan.measured} moves before" if plan.measured else "no move has been measured: defaults"
    parts = ", ".join(f"{name} {seconds:g} s" for name, seconds in plan.parts.items())
    out.print(f"predicted: {parts} ({basis})", markup=False)
    width = max(len(one.name) for one in plan.away)
    for one in plan.away:
        over = "  OVER" if one.over else ""
        out.print(f"  {one.name:{width}}  away {one.predicted_s:6.2f} s, may be {one.budget_s:g} s{over}", markup=False)


def _show_moved(cluster: str, moved: Moved) -> None:
    from appliance.cli.screen import out

    away: dict[float, list[str]] = {}
    for name, seconds in moved.outage.items():
        away.setdefault(seconds, []).append(name)
    for seconds, names in sorted(away.items()):
        out.print(f"away for {seconds:.2f} s: {', '.join(names)}", markup=False)
    out.print(
        f"{moved.overlay_bytes >> 20} MiB in use; {moved.copied_bytes >> 20} MiB sent before, "
        f"{moved.last_bytes >> 10} KiB while services were away"
    )
    lost = f"{moved.lost_datagrams} syslog datagram{'s' * (moved.lost_datagrams != 1)} lost in the switch"
    out.print(
        f"{moved.connections} connections through NAT carried over, {moved.jobs} jobs known, {lost}", markup=False
    )
    for note in moved.notes:
        out.print(f"note: {note}", markup=False)
    out.print(
        f"{cluster} serves on {moved.target}, generation {moved.generation}, after {moved.seconds:.1f} s", markup=False
    )
