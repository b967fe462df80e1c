"""``sms rehearse``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_json, filled, seconds, verb
from appliance.errors import ConfigError

EXAMPLES = """\
  sms rehearse                        the current image, on a copy of the newest verified snapshot
  sms rehearse 3f2a                   an image of the store, by the beginning of its key
  sms rehearse /tmp/new.sif -n        say what would be done
  sms rehearse --host host-a --snapshot 42 --nodes 4
  sms rehearse --without-vm           the provisioning VM is off: does the cluster run on?
  sms rehearse --keep                 leave it up to look at; the words at the end say how
  sms rehearse --down                 remove what was kept"""


def add(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "rehearse",
        "try an image on a copy of production's state, beside it",
        "Start an image on a copy of the newest verified snapshot, on this machine, in networks that lead nowhere,\n"
        "with a few compute nodes; ask every service, run a job, and remove all of it. Production is only read.\n"
        "Exit status 4 when something does not work.",
        EXAMPLES,
    )
    parser.add_argument("image", nargs="?", type=filled, metavar="IMAGE", help="a file, or how a key begins")
    parser.add_argument("--host", default="", metavar="NAME", help="whose snapshot (default: where the appliance runs)")
    parser.add_argument("--snapshot", default="latest", metavar="NUMBER", help="which one (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="compute nodes (default: %(default)s)")
    parser.add_argument("--user", default="root", metavar="NAME", help="whose job it is (default: %(default)s)")
    parser.add_argument("--wait", type=seconds, default=60, metavar="SECONDS", help="how long services may take (60)")
    parser.add_argument(
        "--without-vm", action="store_true", help="with the provisioning VM off; who asks for it is shown"
    )
    parser.add_argument("--keep", action="store_true", help="leave it up")
    parser.add_argument("--down", action="store_true", help="remove what was left up")
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything and make nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Rehearse."""
    from dataclasses import asdict

    from appliance.cli.screen import out, print_json, progress
    from appliance.operations.context import open_cluster
    from appliance.operations.site.find import find_site
    from appliance.operations.upgrade.rehearse import Wanted, bring_down, plan_rehearsal, rehearse

    shown = progress(arguments.quiet)
    cluster = open_cluster(find_site(arguments.site), arguments.state, shown)
    if arguments.down:
        if arguments.image or arguments.keep:
            raise ConfigError("--down takes no image", hint="sms rehearse --down")
        removed = bring_down(cluster, shown)
        words = f"removed: {', '.join(removed) or 'nothing'}"
        print_json(removed) if arguments.json else out.print(words, markup=False)
        return 0
    wanted = Wanted(
        arguments.image or "",
        arguments.nodes,
        arguments.host,
        arguments.snapshot,
        arguments.user,
        arguments.keep,
        arguments.wait,
        arguments.without_vm,
    )
    if arguments.dry_run:
        steps = plan_rehearsal(cluster, wanted, shown)
        print_json(steps) if arguments.json else out.print("\n".join(steps), markup=False)
        return 0
    done = rehearse(cluster, wanted, shown)
    if arguments.json:
        print_json({**asdict(done), "ok": not done.failed})
    else:
        _print(done)
    return 4 if done.failed else 0


def _print(done: Any) -> None:
    """The checks as a table, then what it all means."""
    from rich.markup import escape
    from rich.table import Table

    from appliance.cli.screen import out

    table = Table("", "what", "how it was seen", "s", box=None, header_style="bold", pad_edge=False)
    for check in done.checks:
        mark = "[green]✓[/]" if check.ok else "[red]✗[/]"
        table.add_row(mark, escape(check.what), escape(check.seen), f"{check.seconds:.1f}")
    out.print(table, "", sep="\n")
    what = f"image {done.key[:12]} on snapshot {done.snapshot} of {done.host}"
    failed = ", ".join(check.what for check in done.failed)
    out.print(f"{what}: does not work: {failed}" if failed else f"{what}: all of it works", markup=False)
    if done.kept:
        out.print(
            f"It stays up:\n"
            f"  sms lab exec --name {done.name} rehearsal-host -- apptainer instance list   the container\n"
            f"  sms lab exec --name {done.name} {(done.nodes or ['rehearsal-outside'])[0]}   a shell there\n"
            f"  sms rehearse --down                                        remove it",
            markup=False,
        )
