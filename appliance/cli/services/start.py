"""``sms start``."""

from __future__ import annotations

import argparse
from pathlib import Path

from appliance.cli.common import (
    Verbs,
    add_host,
    add_json,
    cost_lines,
    loss_lines,
    open_target,
    print_result,
    seconds,
    verb,
)

EXAMPLES = """\
  sms start                     on this admin host
  sms start --host host-a       on another one, over SSH
  sms start --dry-run           check the host and the image, print the commands, change nothing
  sms start --image old.sif     use this image instead of the current one"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "start",
        "start the services container and wait until it serves",
        "Verify the image, take the lease, prepare the overlay, start, and wait until every service answers.\n"
        "Rolls back automatically when a step fails. While an engine has the services: only those that it does not\n"
        "run, such as NAT and time.",
        EXAMPLES,
    )
    add_host(parser)
    parser.add_argument("--image", type=Path, metavar="FILE", help="use this image instead of the current one")
    parser.add_argument(
        "--wait", type=seconds, default=60, metavar="SECONDS", help="how long services may take to answer (60)"
    )
    parser.add_argument("--keep", action="store_true", help="leave it running even if a service does not answer")
    parser.add_argument(
        "--without-remote",
        action="store_true",
        help="start although every lease was lost and a host or repository that may know it does not answer",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="start although the changed site file ends jobs or reservations, or begins a new cluster",
    )
    parser.add_argument("--boot", action="store_true", help="start only if it ran here at shutdown")
    parser.add_argument("-n", "--dry-run", action="store_true", help="run all checks and change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start, or show the commands."""
    from appliance.cli.screen import err
    from appliance.operations.engines.gateway import rehearse_gateway, serving_engine, start_gateway
    from appliance.operations.lease import query_lease
    from appliance.operations.services.start import StartOptions, rehearse_start, start

    cluster, host = open_target(arguments)
    options = StartOptions(
        arguments.image,
        arguments.wait,
        keep=arguments.keep,
        boot=arguments.boot,
        without_remote=arguments.without_remote,
        force=arguments.force,
    )
    # Only what stays is started while one has the lease.
    if arguments.dry_run:
        engine = serving_engine(cluster, host, adopt=False)
        commands = (
            rehearse_gateway(cluster, host, engine, options) if engine else rehearse_start(cluster, host, options)
        )
        print_result(arguments, commands, commands)
        return 0
    engine = serving_engine(cluster, host, boot=arguments.boot)
    if engine:
        cluster, started = start_gateway(cluster, host, engine, options)
    else:
        started = start(cluster, host, options)
    if started is None:
        taker = query_lease(host, cluster).taker
        ours = taker in ("", host.name)
        why = f"it did not run on {host.name} at shutdown" if ours else f"{taker} has taken over"
        err.print(f"{why}; nothing is started", markup=False)
        return 0
    answer = f"{len(started.services)} of {len(cluster.services)}"
    how = "runs already" if started.already else f"serves after {sum(started.parts.values()):.1f} s"
    lines = [f"{cluster.site.cluster} {how} on {host.name}, {answer} services answer"]
    if engine:
        lines.append(f"{engine} has the other services: `sms deploy status`")
    if started.failover:
        lines += ["it serves what an interrupted failover has restored", *loss_lines(started.failover)]
    cost = (started.unusable, started.failed)
    print_result(arguments, started, [*lines, *cost_lines(*cost)])
    return 0 if len(started.services) == len(cluster.services) and not any(cost) else 4
