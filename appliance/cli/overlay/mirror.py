"""``sms overlay mirror``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from appliance.cli.common import Verbs, absolute, add_host, add_json, open_target, positive, print_result, verb

if TYPE_CHECKING:
    from appliance.operations.overlay.mirror import MirrorChange
    from appliance.operations.overlay.mirrored import MirrorState

EXAMPLES = """\
  sms overlay mirror create --on /disk1/sms --on /disk2/sms
  sms overlay mirror status            exit status 4 when the mirror is not redundant
  sms overlay mirror scrub             read everything, repair each member from the other; best once a week
  sms overlay mirror rebuild           rebuild a lost or faulty member
  sms overlay mirror remove            back to one plain file"""

CREATE = """\
  sms overlay mirror create --on /disk1/sms --on /disk2/sms
  sms overlay mirror create --on /tmp/a --on /tmp/b --same-fs     on one disk, for a trial"""

REBUILD = """\
  sms overlay mirror rebuild                          in the folder of the old member
  sms overlay mirror rebuild --on /disk3/sms          on another disk
  sms overlay mirror rebuild --member 2 --on /disk3/sms"""


def add(actions: Verbs) -> None:
    """Add the action and its subcommands."""
    parser = verb(
        actions,
        "mirror",
        "keep the overlay on two disks",
        "Keep the overlay on two file systems: it survives the loss of either, and corrupt blocks are found and\n"
        "repaired from the other. `sms start` opens the mirror, degraded if a member is missing; `sms stop` closes it.",
        EXAMPLES,
    )
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    _add_create(parts)
    _add(parts, "status", run_status, "show the mirror's state", "Show both members and their errors; changes nothing.")
    scrub = _add(
        parts,
        "scrub",
        run_scrub,
        "read everything, repair corrupt blocks",
        "Read both members and repair corrupt blocks from the other one. The services container may run.",
    )
    _add_dry_run(scrub)
    _add_rebuild(parts)
    remove = _add(
        parts,
        "remove",
        run_remove,
        "move the overlay back to one plain file",
        "Move the overlay back to one plain file, and remove both members. The services container must be stopped.",
    )
    remove.add_argument("--abandon", action="store_true", help="no member is intact: remove the mirror and the overlay")
    _add_dry_run(remove)
    adopt = _add(
        parts,
        "adopt",
        run_adopt,
        "recover a mirror from one of its members",
        "Recover the mirror from one member, after the overlay's folder was lost together with the other disk.",
        "  sms overlay mirror adopt /disk2/sms",
    )
    adopt.add_argument("folder", type=absolute, metavar="DIR", help="the folder of a member")
    _add_dry_run(adopt)


def _add(parts: Any, name: str, run: Any, help: str, description: str, examples: str = "") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verb(parts, name, help, description, examples or f"  sms overlay mirror {name}")
    add_host(parser)
    add_json(parser)
    parser.set_defaults(run=run)
    return parser


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything and change nothing")


def _add_create(parts: Any) -> None:
    create = _add(
        parts,
        "create",
        run_create,
        "move the overlay onto a mirror",
        "Create one sparse file in each of two folders and a mirror of both; copy the overlay there, read the copy,\n"
        "compare, and replace the overlay by a link. The services container must be stopped.",
        CREATE,
    )
    create.add_argument(
        "--on",
        action="append",
        type=absolute,
        metavar="DIR",
        help="the folder of a member; give it twice (default: admin_hosts[].mirror of the site file)",
    )
    create.add_argument("--size", metavar="SIZE", help="size of each member (twice the overlay plus 1G); sparse")
    create.add_argument("--same-fs", action="store_true", help="allow both folders on one file system")
    _add_dry_run(create)


def _add_rebuild(parts: Any) -> None:
    rebuild = _add(
        parts,
        "rebuild",
        run_rebuild,
        "rebuild a lost or faulty member",
        "Repair a member with errors from the other; recreate one that is lost or is to move to another folder.\n"
        "The services container may run.",
        REBUILD,
    )
    rebuild.add_argument("--on", type=absolute, metavar="DIR", help="the folder of the new member")
    rebuild.add_argument(
        "--member", type=positive, metavar="NUMBER", help="the member to replace (the lost or faulty one)"
    )
    rebuild.add_argument("--same-fs", action="store_true", help="allow both folders on one file system")
    _add_dry_run(rebuild)


def run_create(arguments: argparse.Namespace) -> int:
    """Run ``create``."""
    from appliance.operations.overlay.grow import parse_size
    from appliance.operations.overlay.mirror import MirrorOptions, create

    size = parse_size(arguments.size).size if arguments.size else 0
    cluster, host = open_target(arguments)
    wanted = [str(folder) for admin in cluster.site.admin_hosts if admin.name == host.name for folder in admin.mirror]
    options = MirrorOptions(arguments.on or wanted, size, arguments.same_fs)
    done = create(cluster, host, options, dry_run=arguments.dry_run)
    return _print_change(arguments, done, f"the overlay on {host.name} is mirrored", "is mirrored there already")


def run_status(arguments: argparse.Namespace) -> int:
    """Run ``status``."""
    from appliance.cli.screen import out, print_json
    from appliance.operations.overlay.mirrored import query_mirror

    cluster, host = open_target(arguments)
    state = query_mirror(cluster, host)
    if arguments.json:
        print_json({**asdict(state), "healthy": state.healthy} if state else None)
    elif state is None:
        out.print(f"the overlay on {host.name} is not mirrored", markup=False)
    else:
        _show(state)
    return 0 if state is None or state.healthy else 4


def _show(state: MirrorState) -> None:
    from rich.markup import escape
    from rich.table import Table

    from appliance.cli.screen import out
    from appliance.units import format_time

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("member", "file", "state", "detail"):
        table.add_column(title, overflow="fold")
    for member in state.members:
        colour = "green" if member["state"] == "whole" else "red"
        cells = (escape(member["file"]), f"[{colour}]{member['state']}[/]", escape(member["detail"]))
        table.add_row(str(member["number"]), *cells)
    out.print(table)
    how = f"open, {state.free >> 20} of {state.size >> 20} MiB free" if state.open else "closed"
    repaired = f", {state.mended} errors repaired" if state.mended else ""
    scrubbed = f"last scrub {format_time(state.scrubbed)}{repaired}" if state.scrubbed else "never scrubbed"
    out.print(f"{state.kind}, {how}; {scrubbed}", markup=False)
    for problem in state.problems:
        out.print(f"[yellow]warning:[/] {escape(problem)}")


def run_scrub(arguments: argparse.Namespace) -> int:
    """Run ``scrub``."""
    from appliance.operations.overlay.mirror import scrub

    cluster, host = open_target(arguments)
    done = scrub(cluster, host, dry_run=arguments.dry_run)
    return _print_change(arguments, done, f"{done.mended} errors were repaired on {host.name}", "has no errors")


def run_rebuild(arguments: argparse.Namespace) -> int:
    """Run ``rebuild``."""
    from appliance.operations.overlay.mirror import RebuildOptions, rebuild

    cluster, host = open_target(arguments)
    options = RebuildOptions(arguments.on, arguments.member, arguments.same_fs)
    done = rebuild(cluster, host, options, dry_run=arguments.dry_run)
    return _print_change(arguments, done, f"the mirror on {host.name} is redundant again", "is redundant")


def run_remove(arguments: argparse.Namespace) -> int:
    """Run ``remove``."""
    from appliance.operations.overlay.mirror import abandon, remove

    cluster, host = open_target(arguments)
    remove_mirror = abandon if arguments.abandon else remove
    done = remove_mirror(cluster, host, dry_run=arguments.dry_run)
    result = "is abandoned, there is no overlay" if arguments.abandon else "is one plain file again"
    return _print_change(arguments, done, f"the overlay on {host.name} {result}", "is not mirrored")


def run_adopt(arguments: argparse.Namespace) -> int:
    """Run ``adopt``."""
    from appliance.operations.overlay.mirror import adopt

    cluster, host = open_target(arguments)
    done = adopt(cluster, host, arguments.folder, dry_run=arguments.dry_run)
    return _print_change(arguments, done, f"the overlay on {host.name} is on its mirror again", "is on its mirror")


def _print_change(arguments: argparse.Namespace, done: MirrorChange, changed: str, same: str) -> int:
    """Print the result, as JSON if requested."""
    if not done.changed:
        changed = f"the overlay on {done.host} {same}, nothing to do"
    elif arguments.dry_run:
        changed = "\n".join(done.steps)
    print_result(arguments, done, [changed])
    return 0
