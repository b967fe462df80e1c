"""``sms overlay drill``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from appliance.cli.common import (
    Verbs,
    add_json,
    add_snapshot_name,
    add_vm,
    filled,
    open_site,
    print_result,
    seconds,
    verb,
)

if TYPE_CHECKING:
    from appliance.operations.upgrade.drill import DrillResult

EXAMPLES = """\
  sms overlay drill                   with the newest snapshot at the site file's targets
  sms overlay drill --from borg       with the newest in the Borg repository
  sms overlay drill --from host-b 42  with an older one of a standby host
  sms overlay drill --vm              with that of the VM's state: file system, inventory, master files
  sms overlay drill -n                show what would be done
  sms overlay drill --down            remove what a killed one has left; the next one does it, too"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "drill",
        "restore the newest snapshot elsewhere, as a test",
        "Check the Borg repository, fetch the newest snapshot from there or from a standby host, restore it beside\n"
        "production, start the services container on it in isolated networks, compare its jobs with those of the\n"
        "snapshot and of production, and remove everything. Exit status 4 if a check fails.",
        EXAMPLES,
    )
    add_snapshot_name(parser)
    parser.add_argument(
        "--from", dest="source", type=filled, metavar="SOURCE", help="borg, or an admin host (default: all)"
    )
    parser.add_argument("--wait", type=seconds, default=60, metavar="SECONDS", help="timeout of the services (60)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--scheduled", action="store_true", help="as the timer does: record the result, report failures by mail"
    )
    what.add_argument("--down", action="store_true", help="only remove what killed drills have left")
    what.add_argument("-n", "--dry-run", action="store_true", help="check everything and create nothing")
    add_vm(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from appliance.cli.screen import err, print_json
    from appliance.operations.upgrade import drill as work
    from appliance.operations.upgrade import vm_drill

    cluster = open_site(arguments)
    if arguments.down:
        removed = vm_drill.clean_up_vm(cluster) if cluster.vm else work.clean_up(cluster)
        print_result(arguments, removed, [f"removed: {', '.join(removed) or 'nothing'}"])
        return 0
    options = work.DrillOptions(arguments.source or "", arguments.snapshot, arguments.wait)
    if arguments.dry_run:
        steps = (vm_drill.plan_drill_vm if cluster.vm else work.plan_drill)(cluster, options)
        print_result(arguments, steps, steps)
        return 0
    do = vm_drill.drill_vm if cluster.vm else work.drill
    if arguments.scheduled:
        run = work.run_scheduled_drill(cluster, lambda: do(cluster, options))
        if arguments.json:
            print_json(run)
        elif not run.ok and not arguments.quiet:
            err.print(f"sms: {run.error}", markup=False)
        return 0 if run.ok else 1
    done = do(cluster, options)
    if arguments.json:
        print_json(done.as_dict())
    else:
        _print(done)
    return 0 if done.ok else 4


def _print(done: DrillResult) -> None:
    """Print the checks as a table, then the verdict."""
    from appliance.cli.screen import out
    from appliance.cli.upgrade.rehearse import checks_table
    from appliance.units import format_age

    out.print(checks_table(done.checks), "", sep="\n")
    what = "no snapshot elsewhere"
    if done.snapshot is not None:
        what = f"snapshot {done.snapshot} of {done.source}, {format_age(done.age_s or 0)} old"
    failed = ", ".join(check.what for check in done.failed)
    out.print(f"{what}: " + (f"failed: {failed}" if failed else "it can be restored"), markup=False)
    for note in done.notes:
        out.print(f"note: {note}", markup=False)
