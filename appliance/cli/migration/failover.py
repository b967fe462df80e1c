"""``sms failover``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.cli.common import (
    Verbs,
    add_json,
    filled,
    loss_lines,
    open_target,
    outage_lines,
    print_result,
    seconds,
    selector,
    verb,
)

if TYPE_CHECKING:
    from appliance.operations.migration.failover import FailoverResult

EXAMPLES = """\
  sms failover host-b --dry-run         show what would be done
  sms failover host-b                   fence the failed host as configured, then start on host-b
  sms failover host-b --i-have-fenced   you have verified that the failed host is off
  sms failover host-b --snapshot 12     from this snapshot instead of the newest verified one"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "failover",
        "start the services container on another admin host after its host failed",
        "Power off the host that holds the lease, then start on HOST: from the overlay if both hosts share its\n"
        "folder, otherwise from the newest verified snapshot on HOST. The overlay that was on HOST is kept as a\n"
        "snapshot. An interrupted failover resumes when it is run again. To move from a host that is alive, use\n"
        "`sms migrate`, which loses nothing. While an engine has the services, and the admin host with those that it\n"
        "does not run, such as NAT and time, has failed: these are started on HOST. With --snapshot: all of them.",
        EXAMPLES,
    )
    parser.add_argument("host", metavar="HOST", type=filled, help="the admin host to start on")
    parser.add_argument(
        "--i-have-fenced", action="store_true", dest="fenced", help="you have verified that the failed host is off"
    )
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument("--snapshot", type=selector, metavar="N", help="start from this snapshot: a number or latest")
    origin.add_argument(
        "--shared", action="store_true", help="start from the overlay on HOST: it is shared with the failed host"
    )
    parser.add_argument("--image", type=Path, metavar="FILE", help="use this image instead of the current one")
    parser.add_argument(
        "--wait", type=seconds, default=60, metavar="SECONDS", help="how long services may take to answer (60)"
    )
    parser.add_argument(
        "--without-remote",
        action="store_true",
        help="start although every lease was lost and a host or repository that may know it does not answer",
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="run all checks and change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fail over, or show the plan."""
    from appliance.errors import Refused
    from appliance.operations.migration.failover import FailoverOptions, failover, plan_failover
    from appliance.operations.migration.failover_gateway import failover_gateway, find_dead_gateway, plan_gateway

    cluster, host = open_target(arguments)
    options = FailoverOptions(
        arguments.fenced,
        arguments.shared,
        arguments.snapshot or "",
        arguments.image,
        arguments.wait,
        arguments.without_remote,
    )
    gateway = find_dead_gateway(cluster, host, options)
    if gateway and arguments.dry_run:
        steps = plan_gateway(cluster, host, gateway, options)
        print_result(arguments, {"host": host.name, "old": [gateway], "steps": steps}, steps)
        return 0
    if arguments.dry_run:
        plan = plan_failover(cluster, host, options, shown=True)
        print_result(arguments, plan, plan.steps)
        if plan.refused and not arguments.json:
            raise Refused(plan.refused, hint=plan.hint)
        return 3 if plan.refused else 0
    if gateway:
        cluster, result = failover_gateway(cluster, host, gateway, options)
    else:
        result = failover(cluster, host, options)
    lines = [*_lines(result, cluster.site.cluster, len(cluster.services))]
    if gateway:
        lines.append(
            "an engine has the other services: `sms deploy status`; if their state is lost, too, run this again, with "
            "--i-have-fenced"
        )
    print_result(arguments, result, lines)
    return 0 if len(result.services) == len(cluster.services) else 4


def _lines(result: FailoverResult, cluster: str, services: int) -> Iterator[str]:
    from appliance.operations.services.unfinished import FailoverLoss

    answer = f"{len(result.services)} of {services} services answer"
    yield f"{cluster} serves on {result.host} after {result.seconds:.1f} s, generation {result.generation}, {answer}"
    if result.lost_s is not None:
        facts = (tuple(result.old), result.snapshot, result.taken, result.alive, result.lost_s, result.dead_s)
        yield from loss_lines(FailoverLoss(*facts, taken_on=result.taken_on))
    else:
        if result.shared:
            yield "lost: nothing that was written to the shared overlay"
        yield from outage_lines(result.old, result.dead_s, max(result.alive, result.taken))
    if result.kept:
        yield f"the overlay that was on {result.host} is kept as {result.kept}"
    if result.jobs is not None:
        known = ", ".join(f"{count} {state.lower()}" for state, count in result.jobs.items()) or "none"
        yield f"jobs known to the controller: {known}"
