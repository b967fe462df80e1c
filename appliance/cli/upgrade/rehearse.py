"""``sms rehearse``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from appliance.cli.common import Verbs, add_json, filled, open_site, print_result, seconds, selector, verb
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from appliance.operations.upgrade.rehearse_checks import Check

EXAMPLES = """\
  sms rehearse                        the current image, on a copy of the newest verified snapshot
  sms rehearse 3f2a                   an image of the store, by the start of its key
  sms rehearse /tmp/new.sif -n        print the steps
  sms rehearse --host host-a --snapshot 42 --nodes 4
  sms rehearse --without-vm           with the provisioning VM off: does the cluster keep running?
  sms rehearse --keep                 keep it running for inspection; the output says how
  sms rehearse --down                 remove kept rehearsals"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "rehearse",
        "test an image on a copy of production's state",
        "Start an image on a copy of the newest verified snapshot, on this machine, in isolated networks with a few\n"
        "compute nodes; probe every service, run a job, and remove everything. Production is only read.\n"
        "Exit status 4 if a check fails.",
        EXAMPLES,
    )
    parser.add_argument("image", nargs="?", type=filled, metavar="IMAGE", help="a file, or the start of a key")
    parser.add_argument(
        "--host",
        type=filled,
        metavar="NAME",
        help="host of the snapshot (default: where the container runs)",
    )
    parser.add_argument(
        "--snapshot", default="latest", type=selector, metavar="NUMBER", help="the snapshot (default: %(default)s)"
    )
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="compute nodes (default: %(default)s)")
    parser.add_argument("--user", default="root", metavar="NAME", help="user of the job (default: %(default)s)")
    parser.add_argument("--wait", type=seconds, default=60, metavar="SECONDS", help="timeout of the services (60)")
    parser.add_argument(
        "--without-vm", action="store_true", help="with the provisioning VM off; report who tries to reach it"
    )
    parser.add_argument("--keep", action="store_true", help="keep it running")
    parser.add_argument("--down", action="store_true", help="remove kept rehearsals")
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything and create nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Rehearse."""
    from dataclasses import asdict

    from appliance.cli.screen import print_json
    from appliance.operations.upgrade.rehearse import RehearsalOptions, plan_rehearsal, rehearse, tear_down

    cluster = open_site(arguments)
    if arguments.down:
        if arguments.image or arguments.keep:
            raise ConfigError("--down takes no image", hint="sms rehearse --down")
        removed = tear_down(cluster)
        print_result(arguments, removed, [f"removed: {', '.join(removed) or 'nothing'}"])
        return 0
    options = RehearsalOptions(
        arguments.image or "",
        arguments.nodes,
        arguments.host or "",
        arguments.snapshot,
        arguments.user,
        arguments.keep,
        arguments.wait,
        arguments.without_vm,
    )
    if arguments.dry_run:
        steps = plan_rehearsal(cluster, options)
        print_result(arguments, steps, steps)
        return 0
    done = rehearse(cluster, options)
    if arguments.json:
        print_json({**asdict(done), "ok": not done.failed})
    else:
        _print(done)
    return 4 if done.failed else 0


def checks_table(checks: Iterable[Check]) -> Table:
    """Return the checks as a table."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "check", "evidence", "s", box=None, header_style="bold", pad_edge=False)
    for check in checks:
        mark = "[green]✓[/]" if check.ok else "[red]✗[/]"
        table.add_row(mark, escape(check.what), escape(check.seen), f"{check.seconds:.1f}")
    return table


def _print(done: Any) -> None:
    """Print the checks as a table, then the verdict."""
    from appliance.cli.screen import out

    out.print(checks_table(done.checks), "", sep="\n")
    what = f"image {done.key[:12]} on snapshot {done.snapshot} of {done.host}"
    failed = ", ".join(check.what for check in done.failed)
    out.print(f"{what}: failed: {failed}" if failed else f"{what}: all checks passed", markup=False)
    if done.kept:
        out.print(
            f"It keeps running:\n"
            f"  sms lab exec --name {done.name} rehearsal-host -- apptainer instance list   the container\n"
            f"  sms lab exec --name {done.name} {(done.nodes or ['rehearsal-outside'])[0]}   a shell there\n"
            f"  sms rehearse --down                                        remove it",
            markup=False,
        )
