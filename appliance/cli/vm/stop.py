"""``sms vm stop``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_json, duration, verb
from appliance.cli.vm.common import add_vm_host

EXAMPLES = """\
  sms vm stop                    on whichever host it runs; the cluster keeps running
  sms vm stop --timeout 5m       wait longer before it is killed"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "stop",
        "stop the VM; its disks stay",
        "Shut it down through its guest agent, then by its power button; kill it if it does not end in time.",
        EXAMPLES,
    )
    add_vm_host(parser)
    parser.add_argument(
        "--timeout", type=duration, default=60.0, metavar="SPAN", help="how long its shutdown may take (60s)"
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
        out.print(f"the VM is not running on {stopped.host}", markup=False)
    else:
        out.print(f"the VM on {stopped.host} is off, by {stopped.how}, after {stopped.seconds:.1f} s", markup=False)
    return 0
