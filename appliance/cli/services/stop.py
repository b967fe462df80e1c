"""``sms stop``."""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import asdict
from typing import Any

from appliance.cli.common import add_host, add_json, open_target, verb

EXAMPLES = """\
  sms stop                 on this admin host
  sms stop --host host-a   on another one, over SSH"""


def add(verbs: argparse._SubParsersAction[Any]) -> None:
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
    add_json(parser)
    parser.set_defaults(run=run)


def _ignore_interrupt(signum: int, frame: object) -> None:
    sys.stderr.write("sms: the services are being stopped; this cannot be interrupted\n")


def run(arguments: argparse.Namespace) -> int:
    """Stop."""
    from appliance.cli.screen import out, print_json, progress
    from appliance.operations.services.stop import stop

    cluster, host = open_target(arguments)
    # An interrupted stop would leave some daemons stopped and others running.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _ignore_interrupt)
    stopped = stop(cluster, host, progress(arguments.quiet), keep_lease=arguments.keep_lease)
    if arguments.json:
        print_json(asdict(stopped))
        return 0
    what = f"stopped after {stopped.seconds:.1f} s" if stopped.ran else "was not running"
    lease = ", the lease is free" if stopped.lease_released else ""
    out.print(f"{cluster.site.cluster} {what} on {host.name}{lease}", markup=False)
    return 0
