"""``sms vm migrate``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, add_json, duration, filled, open_site, print_result, verb

EXAMPLES = """\
  sms vm migrate host-b         live if both hosts share its disks; else stopped, copied, and started there
  sms vm migrate host-b -n      check both hosts, and print how it would move"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "migrate",
        "move the VM with its disks to another admin host",
        "If both hosts share its disks, it moves live. Otherwise it is stopped, its disks are copied and compared by\n"
        "digest, and it is started on the target if it ran before. The cluster keeps running meanwhile.",
        EXAMPLES,
    )
    parser.add_argument("to", metavar="HOST", type=filled, help="the admin host to move to")
    parser.add_argument(
        "--timeout", type=duration, default=180.0, metavar="SPAN", help="how long its shutdown may take (3m)"
    )
    parser.add_argument("--stopped", action="store_true", help="stop it, even if it could move live")
    parser.add_argument("-n", "--dry-run", action="store_true", help="check both hosts, change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Move it."""
    from appliance.operations.vm.migrate import migrate_vm, plan_migrate_vm

    cluster = open_site(arguments)
    if arguments.dry_run:
        plan = plan_migrate_vm(cluster, arguments.to, stopped=arguments.stopped)
        how = "live" if plan.live else f"stopped, {plan.copy_bytes >> 20} MiB to copy"
        print_result(arguments, plan, [f"{plan.source} to {plan.target}: {how}; {plan.free_mb} MiB free there"])
        return 0
    moved = migrate_vm(cluster, arguments.to, stopped=arguments.stopped, timeout_s=arguments.timeout)
    how = f"live, paused for {moved.paused_ms:.0f} ms" if moved.live else f"{moved.copied_bytes >> 20} MiB copied"
    state = "runs" if moved.running else "is off, its disks are"
    print_result(arguments, moved, [f"the VM {state} on {moved.target}: {how}, after {moved.seconds:.1f} s"])
    return 0
