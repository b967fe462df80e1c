"""``sms stop``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from appliance.cli.common import Verbs, add_host, add_json, open_target, print_result, verb

EXAMPLES = """\
  sms stop                 on this admin host
  sms stop --host host-a   on another one, over SSH
  sms stop --dry-run       show what would be stopped, in order; change nothing"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "stop",
        "stop the services container",
        "Stop every daemon cleanly, in the reverse order of the start, then release the lease.",
        EXAMPLES,
    )
    add_host(parser)
    parser.add_argument(
        "--keep-lease", action="store_true", help="the host shuts down and shall start it again at boot"
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="show what would be stopped, change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def _ignore_interrupt(signum: int, frame: object) -> None:
    sys.stderr.write("sms: the services are being stopped; this cannot be interrupted\n")


def run(arguments: argparse.Namespace) -> int:
    """Stop."""
    from appliance.operations.services.stop import plan_stop, stop

    cluster, host = open_target(arguments)
    if arguments.dry_run:
        plan = plan_stop(cluster, host, keep_lease=arguments.keep_lease)
        lines = [f"would stop {name}" for name in plan.services]
        lines += [f"would release the lease of {host.name}"] * plan.lease_released
        lines += [f"jobs: {plan.jobs}; those that run go on, none starts meanwhile"] if plan.jobs else []
        lines += _dropped(plan.by_hand)
        print_result(arguments, plan, lines or [f"{cluster.site.cluster} does not run on {host.name}"])
        return 0
    # An interrupted stop would leave some daemons stopped and others running.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _ignore_interrupt)
    stopped = stop(cluster, host, keep_lease=arguments.keep_lease)
    what = f"stopped after {stopped.seconds:.1f} s" if stopped.ran else "was not running"
    lease = ", the lease is free" if stopped.lease_released else ""
    if stopped.holder not in (None, host.name):
        lease = f"; {stopped.holder} has the lease: sms stop --host {stopped.holder}"
    if stopped.engine:
        lease = f"; {stopped.engine} has the other services: `sms deploy stop` stops them"
    jobs = [f"jobs: {stopped.jobs}; those that run go on, none starts until `sms start`"] if stopped.jobs else []
    print_result(
        arguments, stopped, [f"{cluster.site.cluster} {what} on {host.name}{lease}", *jobs, *_dropped(stopped.by_hand)]
    )
    return 0


def _dropped(by_hand: Sequence[str]) -> list[str]:
    return [f"{one} after the next start: write it into the site file, or repeat it" for one in by_hand]
