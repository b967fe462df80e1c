"""``sms failover``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.cli.common import add_json, filled, open_target, seconds, verb

if TYPE_CHECKING:
    from appliance.operations.migration.failover import FailedOver

EXAMPLES = """\
  sms failover host-b --dry-run         what it would do
  sms failover host-b                   fence the dead host as the site file says, start on host-b
  sms failover host-b --i-have-fenced   the dead host is off: you have looked
  sms failover host-b --snapshot 12     from this snapshot, not the newest verified one"""


def add(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "failover",
        "start the appliance on another admin host, the one that ran it being dead",
        "Make sure that the host that holds the lease is off, then start on HOST: from the overlay, where both\n"
        "hosts share its folder, else from the newest verified snapshot on HOST. What lay there is kept as a\n"
        "snapshot. Interrupted, it goes on when it is run again. A host that is alive is moved from by\n"
        "`sms migrate`, which loses nothing.",
        EXAMPLES,
    )
    parser.add_argument("host", metavar="HOST", type=filled, help="the admin host to start on")
    parser.add_argument(
        "--i-have-fenced", action="store_true", dest="fenced", help="the dead host is off: you have made sure of it"
    )
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument("--snapshot", default="", metavar="N", help="start from this snapshot: a number, or latest")
    origin.add_argument("--shared", action="store_true", help="the overlay on HOST is the dead host's: start from it")
    parser.add_argument("--image", type=Path, metavar="FILE", help="another image than the current one")
    parser.add_argument("--wait", type=seconds, default=60, metavar="SECONDS", help="how long services may take (60)")
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything and change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Take over."""
    from appliance.cli.screen import out, print_json, progress
    from appliance.operations.migration.failover import Wanted, failover, plan_failover

    cluster, host = open_target(arguments)
    shown = progress(arguments.quiet)
    wanted = Wanted(arguments.fenced, arguments.shared, arguments.snapshot, arguments.image, arguments.wait)
    if arguments.dry_run:
        plan = plan_failover(cluster, host, wanted, shown)
        print_json(asdict(plan)) if arguments.json else out.print("\n".join(plan.steps), markup=False)
        return 0
    done = failover(cluster, host, wanted, shown)
    if arguments.json:
        print_json(asdict(done))
    else:
        _show(done, cluster.site.cluster, len(cluster.services))
    return 0 if len(done.services) == len(cluster.services) else 4


def _show(done: FailedOver, cluster: str, services: int) -> None:
    from appliance.cli.screen import out
    from appliance.operations.services.status import uptime_text, when

    answer = f"{len(done.services)} of {services} services answer"
    lines = [f"{cluster} serves on {done.host} after {done.seconds:.1f} s, generation {done.generation}, {answer}"]
    if done.lost_s is not None:
        lines.append(
            f"lost: {uptime_text(int(done.lost_s))}. It goes on as it was on {done.taken_on} at {when(done.taken)} "
            f"(snapshot {done.snapshot}): jobs submitted, accounting and messages since then are gone"
        )
    elif done.shared:
        lines.append("lost: nothing that had reached the shared overlay")
    if done.kept:
        lines.append(f"the overlay that was on {done.host} is kept as {done.kept}")
    if done.jobs is not None:
        known = ", ".join(f"{count} {state.lower()}" for state, count in done.jobs.items()) or "none"
        lines.append(f"jobs that the controller knows: {known}")
    out.print("\n".join(lines), markup=False)
