"""``sms vm stop``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_json, duration, verb
from appliance.cli.vm.common import add_vm_host

EXAMPLES = """\
  sms vm stop                    wherever it runs; the cluster runs on without it
  sms vm stop --timeout 5m       give it longer before it is ended"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "stop",
        "stop the VM; its disks stay",
        "Ask its guest agent, press its power button, and end it when it does not end by itself.",
        EXAMPLES,
    )
    add_vm_host(parser)
    parser.add_argument(
        "--timeout", type=duration, default=60.0, metavar="SPAN", help="how long it gets to end by itself (60s)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Stop it."""
    from dataclasses import asdict

    from appliance.cli.screen import out, print_json, progress
    from appliance.cli.vm.common import open_vm
    from appliance.operations.vm.stop import stop_vm

    cluster, host = open_vm(arguments)
    stopped = stop_vm(cluster, host, progress(arguments.quiet), timeout_s=arguments.timeout)
    if arguments.json:
        print_json(asdict(stopped))
    elif stopped.how == "not running":
        out.print(f"the VM does not run on {stopped.host}", markup=False)
    else:
        out.print(f"the VM on {stopped.host} is off, by {stopped.how}, after {stopped.seconds:.1f} s", markup=False)
    return 0
