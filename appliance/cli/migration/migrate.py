"""``sms migrate``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, filled, open_site, print_result, this_host, verb

if TYPE_CHECKING:
    from appliance.operations.migration.state import MigrationResult
    from appliance.plan.migration.plan import Plan
    from appliance.plan.migration.state import MovePlan, MoveResult

EXAMPLES = """\
  sms migrate host-b              to host-b, from the host that runs it
  sms migrate host-b --dry-run    run all checks, show the plan and the predicted outage of each service
  sms migrate host-b --force      even if predicted outages exceed the tolerated ones
  sms migrate --to nomad -n       all checks of a move to Nomad; changes nothing
  sms migrate --to nomad          the services with their state to Nomad; running jobs run on
  sms migrate --to container      back to the services container of this host
  sms migrate --to container --force   although Nomad's servers are lost: its state is on this host"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "migrate",
        "move the running services container to another admin host, or its services to an engine",
        "Copy the overlay while it is in use, stop stateful services, start isolated on the other host, and switch\n"
        "the addresses. Jobs keep running, connections through NAT are kept. Rolls back automatically on failure.\n\n"
        "With --to: stop the services, copy their state to an engine or back, compare the copies, start them there.\n"
        "An interrupted move is resumed by the same command.",
        EXAMPLES,
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("host", metavar="HOST", nargs="?", type=filled, help="the target admin host")
    target.add_argument("--to", choices=("kubernetes", "nomad", "container"), help="who gets the services")
    parser.add_argument(
        "--force",
        action="store_true",
        help="ignore outage budgets, differing versions, services that would stop, an engine that does not answer",
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="check both hosts and show the plan")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Migrate, or show the plan."""
    from appliance.operations.context import need_root
    from appliance.operations.migration.migrate import migrate, refuse_over_budget, rehearse_migrate

    need_root()
    if arguments.to:
        return _move(arguments)
    cluster = open_site(arguments)
    if arguments.dry_run:
        plan = rehearse_migrate(cluster, arguments.host)
        print_result(arguments, {**asdict(plan), "over": [one.name for one in plan.over]}, _plan_lines(plan))
        refuse_over_budget(plan, force=arguments.force)
        return 0
    result = migrate(cluster, arguments.host, force=arguments.force)
    print_result(arguments, result, _result_lines(cluster.site.cluster, result))
    return 0


def _move(arguments: argparse.Namespace) -> int:
    """Move the services with their state, or show the plan."""
    from appliance.operations.engines.move import move, refuse_left, rehearse_move

    cluster = open_site(arguments)
    host = this_host(cluster)
    if arguments.dry_run:
        plan = rehearse_move(cluster, host, arguments.to, force=arguments.force)
        print_result(arguments, plan, _move_plan_lines(plan))
        refuse_left(plan, force=arguments.force)
        return 0
    result = move(cluster, host, arguments.to, force=arguments.force)
    print_result(arguments, result, _move_lines(cluster.site.cluster, result))
    return 0


def _move_plan_lines(plan: MovePlan) -> Iterator[str]:
    if plan.resumes:
        yield f"{plan.target} has the state: its services are only started"
        return
    free = f"; {plan.free_bytes >> 20} MiB free there" if plan.free_bytes >= 0 else ""
    yield f"{plan.source} to {plan.target}: {plan.files} files, {plan.bytes >> 20} MiB to copy{free}"
    yield f"state: {', '.join(plan.paths)}"
    has = [f"{name} {version}" for name, version in (("Slurm", plan.slurm), ("MariaDB", plan.mariadb)) if version]
    if has:
        yield f"image there: {', '.join(has)}"
    basis = f"median of {plan.measured} previous moves" if plan.measured else "default: nothing measured yet"
    yield f"predicted: outage of {plan.predicted_s:g} s ({basis}); running jobs run on"
    if plan.stays:
        yield f"in the services container on this host stay: {', '.join(plan.stays)}"
    for name, why in plan.left.items():
        yield f"  {name} would stop: {why}"


def _move_lines(cluster: str, result: MoveResult) -> Iterator[str]:
    if result.same:
        yield f"{result.target} has the services of {cluster} already (generation {result.generation})"
        return
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.parts.items())
    if not result.resumed:
        yield f"{result.files} files, {result.bytes >> 20} MiB copied and compared"
        yield f"outage {result.outage_s:.1f} s: {parts}"
    yield from (f"note: {note}" for note in result.notes)
    end = f"generation {result.generation}, after {result.seconds:.1f} s"
    yield f"{result.target} has the services of {cluster}, {end}{' (resumed)' * result.resumed}"


def _plan_lines(plan: Plan) -> Iterator[str]:
    how = "both share one overlay" if plan.shared else f"at most {plan.used_bytes >> 20} MiB to copy"
    yield f"{plan.source} to {plan.target}: {how}; {plan.free_bytes >> 20} MiB free there"
    if plan.mirror:
        yield f"the overlay there is on a mirror: {' and '.join(plan.mirror)}"
    yield f"image {plan.image}"
    basis = f"median of {plan.measured} previous migrations" if plan.measured else "defaults: nothing measured yet"
    parts = ", ".join(f"{name} {seconds:g} s" for name, seconds in plan.parts.items())
    yield f"predicted: {parts} ({basis})"
    width = max(len(one.name) for one in plan.away)
    for one in plan.away:
        over = "  OVER" if one.over else ""
        yield f"  {one.name:{width}}  outage {one.predicted_s:6.2f} s, tolerated {one.budget_s:g} s{over}"


def _result_lines(cluster: str, result: MigrationResult) -> Iterator[str]:
    outages: dict[float, list[str]] = {}
    for name, seconds in result.outage.items():
        outages.setdefault(seconds, []).append(name)
    for seconds, names in sorted(outages.items()):
        yield f"outage {seconds:.2f} s: {', '.join(names)}"
    yield (
        f"{result.overlay_bytes >> 20} MiB in use; {result.copied_bytes >> 20} MiB sent before, "
        f"{result.last_bytes >> 10} KiB during the outage"
    )
    lost = f"{result.lost_datagrams} syslog datagram{'s' * (result.lost_datagrams != 1)} lost during the switch"
    yield f"{result.connections} connections through NAT transferred, {result.jobs} jobs known, {lost}"
    yield from (f"note: {note}" for note in result.notes)
    yield f"{cluster} serves on {result.target}, generation {result.generation}, after {result.seconds:.1f} s"
