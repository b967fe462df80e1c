"""``sms vm start``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, add_json, duration, filled, open_target, print_result, verb

EXAMPLES = """\
  sms vm start                    on this admin host
  sms vm start --host host-a      on another one, over SSH
  sms vm start -n --host host-a   check everything, start nothing
  sms vm start --keep             leave it running even if a service is not healthy"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "start",
        "start the VM and wait until all its services are healthy",
        "Verify the image's signature and every byte of it, issue certificates for this start, pass them in memory,\n"
        "start QEMU (with KVM where it works), and check all services in the VM. A failed start is rolled back.",
        EXAMPLES,
    )
    parser.add_argument(
        "--host", type=filled, metavar="NAME", help="the admin host to start it on (default: this machine)"
    )
    parser.add_argument(
        "--wait",
        type=duration,
        default=0.0,
        metavar="SPAN",
        help="how long its services may take to become healthy (180s; without KVM 600s)",
    )
    parser.add_argument("--keep", action="store_true", help="leave it running even if it is not healthy")
    parser.add_argument(
        "--force", action="store_true", help="start even if unreachable or lost hosts may have newer disks"
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything, start nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start it."""
    from appliance.operations.vm.start import StartOptions, rehearse_start_vm, start_vm

    cluster, host = open_target(arguments)
    options = StartOptions(arguments.wait, arguments.keep, arguments.force)
    if arguments.dry_run:
        steps = rehearse_start_vm(cluster, host, options)
        print_result(arguments, steps, steps)
        return 0
    started = start_vm(cluster, host, options)
    wrong = {name: state for name, state in started.services.items() if state != "ok"}
    words = "runs already" if started.already else f"is healthy after {started.parts.get('serves', 0):.0f} s"
    accel = started.accel + (f" ({started.why_no_kvm})" if started.why_no_kvm else "")
    lines = [f"the VM {'runs' if wrong else words} on {started.host}, {accel}"]
    print_result(arguments, started, [*lines, *(f"  {name}: {state}" for name, state in wrong.items())])
    return 4 if wrong else 0
