"""``sms start``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from appliance.cli.common import add_host, add_json, open_target, seconds, verb

EXAMPLES = """\
  sms start                     on this admin host
  sms start --host host-a       on another one, over SSH
  sms start --dry-run           check the host and the image, print the commands, change nothing
  sms start --image old.sif     another image than the current one"""


def add(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "start",
        "start the appliance and wait until it serves",
        "Verify the image, take the lease, ready the overlay, start, and wait until every service answers.\n"
        "A step that fails undoes those before it.",
        EXAMPLES,
    )
    add_host(parser)
    parser.add_argument("--image", type=Path, metavar="FILE", help="another image than the current one")
    parser.add_argument("--wait", type=seconds, default=60, metavar="SECONDS", help="how long services may take (60)")
    parser.add_argument("--keep", action="store_true", help="leave it running although a service does not come up")
    parser.add_argument("--boot", action="store_true", help="start only what ran here when the host went down")
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything and change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start."""
    from appliance.cli.screen import err, out, print_json, progress
    from appliance.operations.migration.lease import look_at_lease
    from appliance.operations.services.start import rehearse_start, start

    cluster, host = open_target(arguments)
    shown = progress(arguments.quiet)
    if arguments.dry_run:
        commands = rehearse_start(cluster, host, shown, image=arguments.image)
        print_json(commands) if arguments.json else out.print("\n".join(commands), markup=False)
        return 0
    started = start(
        cluster,
        host,
        shown,
        image=arguments.image,
        wait_s=arguments.wait,
        keep=arguments.keep,
        boot=arguments.boot,
    )
    if started is None:
        holder = look_at_lease(host, cluster).holder
        why = f"{holder} has taken over" if holder else f"nothing ran on {host.name} when it went down"
        err.print(f"{why}; nothing is started", markup=False)
        return 0
    if arguments.json:
        print_json(asdict(started))
    else:
        answer = f"{len(started.services)} of {len(cluster.services)}"
        how = "runs already" if started.already else f"serves after {sum(started.parts.values()):.1f} s"
        out.print(f"{cluster.site.cluster} {how} on {host.name}, {answer} services answer", markup=False)
    return 0 if len(started.services) == len(cluster.services) else 4
