"""``sms overlay snapshot``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_host, add_json, add_vm, duration, open_target, print_result, verb

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.host.base import Host
    from appliance.operations.context import Cluster
    from appliance.plan.snapshots.runs import Run

LONGEST_FREEZE_S = 60

EXAMPLES = """\
  sms overlay snapshot                           of the overlay on this host, without a stop
  sms overlay snapshot --host host-a             on another one, over SSH
  sms overlay snapshot --reason upgrade          with a reason, which `sms overlay list` shows
  sms overlay snapshot --method full --no-dump   a complete copy, without database dumps
  sms overlay snapshot --vm                      of the provisioning VM's state, while it runs or is off
  sms overlay snapshot -n                        show what would be done"""


def freeze_limit(text: str) -> float:
    """Parse the limit of the freeze, in seconds.

    Raises:
        argparse.ArgumentTypeError: it is not a duration, or longer than a minute.
    """
    seconds = duration(text)
    if seconds > LONGEST_FREEZE_S:
        raise argparse.ArgumentTypeError(f"{text!r} is longer than {LONGEST_FREEZE_S} s: Slurm gives up after 10")
    return seconds


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "snapshot",
        "take a snapshot without a stop",
        "Dump databases, read the overlay, freeze it briefly to read what has changed meanwhile, check the file\n"
        "system and the state files, then commit the snapshot. Exit status 4: taken, but a dump failed.",
        EXAMPLES,
    )
    add_host(parser)
    parser.add_argument(
        "--method",
        choices=("auto", "reflink", "delta", "full"),
        help="storage method (default: snapshots.method of the site file)",
    )
    parser.add_argument(
        "--freeze-limit", type=freeze_limit, default=5.0, metavar="SECONDS", help="how long writers may wait (5)"
    )
    parser.add_argument("--no-dump", action="store_true", help="do not dump databases first")
    why = parser.add_mutually_exclusive_group()
    why.add_argument("--reason", default="", metavar="TEXT", help="a short reason, for the list")
    why.add_argument(
        "--scheduled",
        action="store_true",
        help="as cron does: also prune and push, record the run, and report failures; does nothing on a host without "
        "the lease",
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything and change nothing")
    add_vm(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run_vm(arguments: argparse.Namespace, cluster: Cluster, host: Host) -> int:
    """Take a snapshot of the VM's state."""
    from appliance.cli.snapshots.view import taken_line
    from appliance.errors import ConfigError
    from appliance.operations.snapshots.scheduled import run_scheduled_vm
    from appliance.operations.snapshots.vm_state import rehearse_vm_state, take_vm_state

    if arguments.method or arguments.no_dump:
        raise ConfigError("--method and --no-dump are those of the overlay", hint="sms overlay snapshot --vm")
    if arguments.dry_run:
        steps = rehearse_vm_state(cluster, host)
        print_result(arguments, steps, steps)
        return 0
    if arguments.scheduled:
        return report_scheduled(arguments, run_scheduled_vm(cluster, host))
    taken = take_vm_state(cluster, host, reason=" ".join(arguments.reason.split()))
    assert taken
    print_result(arguments, taken, [taken_line(f"the VM of {cluster.site.cluster}", taken)])
    return 0


def report_scheduled(arguments: argparse.Namespace, run: Run | None) -> int:
    """Print a scheduled run. Failures are reported by syslog and mail: cron's --quiet run prints only warnings."""
    from appliance.cli.screen import err, print_json

    if arguments.json:
        print_json(run)
    elif run and not run.ok and not arguments.quiet:
        err.print(f"sms: {run.error}", markup=False)
    return 0 if run is None or run.ok else 1


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from appliance.cli.screen import err
    from appliance.cli.snapshots.view import taken_line
    from appliance.operations.services.names import NameWatch
    from appliance.operations.snapshots.scheduled import run_scheduled
    from appliance.operations.snapshots.snapshot import SCHEDULED, SnapshotOptions, rehearse_snapshot, snapshot

    cluster, host = open_target(arguments)
    if cluster.vm:
        return run_vm(arguments, cluster, host)
    reason = SCHEDULED if arguments.scheduled else " ".join(arguments.reason.split())
    options = SnapshotOptions(arguments.method or "", arguments.freeze_limit, not arguments.no_dump, reason)
    if arguments.dry_run:
        steps = rehearse_snapshot(cluster, host, options)
        print_result(arguments, steps, steps)
        return 0
    if arguments.scheduled:

        def follow_names(report: Callable[[str], None]) -> None:
            NameWatch(cluster, host, report).check()

        return report_scheduled(arguments, run_scheduled(cluster, host, options, follow_names=follow_names))
    taken = snapshot(cluster, host, options)
    result = {**taken.snapshot, "not_dumped": list(taken.not_dumped)}
    print_result(arguments, result, [taken_line(cluster.label, taken.snapshot)])
    for why in taken.not_dumped:
        err.print(f"warning: {why}", markup=False)
    if taken.not_dumped:
        err.print("  hint: `sms status` shows whether it is healthy; `sms logs` shows its messages", markup=False)
    return 4 if taken.not_dumped else 0
