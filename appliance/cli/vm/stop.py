"""``sms vm stop``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, add_json, duration, print_result, verb
from appliance.cli.vm.common import add_vm_host

EXAMPLES = """\
  sms vm stop                    on whichever host it runs; the cluster keeps running
  sms vm stop --timeout 5m       wait longer before it is killed"""


def add(actions: Verbs) -> None:
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
        "--timeout", type=duration, default=180.0, metavar="SPAN", help="how long its shutdown may take (3m)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Stop it."""
    from appliance.cli.vm.common import open_vm
    from appliance.operations.vm.stop import stop_vm

    cluster, host = open_vm(arguments)
    stopped = stop_vm(cluster, host, timeout_s=arguments.timeout)
    text = f"the VM on {stopped.host} is off, by {stopped.how}, after {stopped.seconds:.1f} s"
    if stopped.how == "not running":
        text = f"the VM is not running on {stopped.host}"
    print_result(arguments, stopped, [text])
    return 0
