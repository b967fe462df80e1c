"""``sms overlay mirror``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from appliance.cli.common import add_host, add_json, filled, open_target, verb

if TYPE_CHECKING:
    from appliance.operations.overlay.mirror import Done
    from appliance.operations.overlay.mirrored import MirrorState

EXAMPLES = """\
  sms overlay mirror create --on /disk1/sms --on /disk2/sms
  sms overlay mirror status            exit status 4 when losing a disk would lose something
  sms overlay mirror scrub             read all of it, mend one member from the other; best once a week
  sms overlay mirror rebuild           make a lost or sick member whole
  sms overlay mirror remove            back to one plain file"""

CREATE = """\
  sms overlay mirror create --on /disk1/sms --on /disk2/sms
  sms overlay mirror create --on /tmp/a --on /tmp/b --same-fs     on one disk, to try it out"""

REBUILD = """\
  sms overlay mirror rebuild                          where the old member was
  sms overlay mirror rebuild --on /disk3/sms          on another disk
  sms overlay mirror rebuild --member 2 --on /disk3/sms"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action and its own verbs."""
    parser = verb(
        actions,
        "mirror",
        "keep the overlay on two disks at once",
        "Keep the overlay on two file systems at once: losing either loses nothing, and what is not as it was written\n"
        "is found and mended from the other. `sms start` opens the mirror, with one member if need be; `sms stop`\n"
        "closes it.",
        EXAMPLES,
    )
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    _add_create(parts)
    _add(parts, "status", run_status, "how the mirror stands", "Show both members and their errors; changes nothing.")
    scrub = _add(
        parts,
        "scrub",
        run_scrub,
        "read all of it, mend what is not as it was written",
        "Read both members; what is not as it was written is mended from the other. The appliance may run.",
    )
    _add_dry_run(scrub)
    _add_rebuild(parts)
    remove = _add(
        parts,
        "remove",
        run_remove,
        "back to one plain file",
        "Bring the overlay back into one plain file, and remove both members. The appliance is stopped.",
    )
    remove.add_argument("--abandon", action="store_true", help="no member is whole: give it up, without an overlay")
    _add_dry_run(remove)
    adopt = _add(
        parts,
        "adopt",
        run_adopt,
        "take up a mirror by one of its members",
        "Where the folder of the overlay was lost together with one disk: take up the mirror by the other.",
        "  sms overlay mirror adopt /disk2/sms",
    )
    adopt.add_argument("folder", metavar="DIR", help="the folder that a member lies in")
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
        "bring the overlay onto a mirror",
        "Make one sparse file in each of two folders, a mirror of both, and bring the overlay there: copied, read\n"
        "again, compared; then its path becomes a link. The appliance is stopped.",
        CREATE,
    )
    create.add_argument(
        "--on", action="append", required=True, type=filled, metavar="DIR", help="a folder for a member; given twice"
    )
    create.add_argument("--size", metavar="SIZE", help="of each member (twice the overlay and 1G); it is sparse")
    create.add_argument("--same-fs", action="store_true", help="although both folders are on one file system")
    _add_dry_run(create)


def _add_rebuild(parts: Any) -> None:
    rebuild = _add(
        parts,
        "rebuild",
        run_rebuild,
        "make a lost or sick member whole",
        "A member with errors is mended from the other; one that is lost is made anew, as is one that is to lie\n"
        "elsewhere. The appliance may run.",
        REBUILD,
    )
    rebuild.add_argument("--on", type=filled, metavar="DIR", help="where the new member is to lie")
    rebuild.add_argument("--member", type=int, metavar="NUMBER", help="the member to replace (the lost or sick one)")
    rebuild.add_argument("--same-fs", action="store_true", help="although both folders are on one file system")
    _add_dry_run(rebuild)


def run_create(arguments: argparse.Namespace) -> int:
    """Create it."""
    from appliance.cli.screen import progress
    from appliance.operations.overlay.grow import read_wanted
    from appliance.operations.overlay.mirror import create

    size = read_wanted(arguments.size).size if arguments.size else 0
    cluster, host = open_target(arguments)
    folders = [folder.rstrip("/") or "/" for folder in arguments.on]
    shown = progress(arguments.quiet)
    same_fs, dry_run = arguments.same_fs, arguments.dry_run
    done = create(cluster, host, shown, folders, size=size, same_fs=same_fs, dry_run=dry_run)
    return _told(arguments, done, f"the overlay on {host.name} is mirrored", "is mirrored so already")


def run_status(arguments: argparse.Namespace) -> int:
    """Show how it stands."""
    from appliance.cli.screen import out, print_json
    from appliance.operations.overlay.mirror import status

    cluster, host = open_target(arguments)
    state = status(cluster, host)
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
    from appliance.operations.services.status import when

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("member", "file", "state", "what"):
        table.add_column(title, overflow="fold")
    for member in state.members:
        colour = "green" if member["state"] == "whole" else "red"
        cells = (escape(member["file"]), f"[{colour}]{member['state']}[/]", escape(member["detail"]))
        table.add_row(str(member["number"]), *cells)
    out.print(table)
    how = f"open, {state.free >> 20} of {state.size >> 20} MiB free" if state.open else "closed"
    mended = f", {state.mended} errors mended" if state.mended else ""
    scrubbed = f"last scrub {when(state.scrubbed)}{mended}" if state.scrubbed else "never scrubbed"
    out.print(f"{state.kind}, {how}; {scrubbed}", markup=False)
    for problem in state.problems:
        out.print(f"[yellow]warning:[/] {escape(problem)}")


def run_scrub(arguments: argparse.Namespace) -> int:
    """Scrub it."""
    from appliance.cli.screen import progress
    from appliance.operations.overlay.mirror import scrub

    cluster, host = open_target(arguments)
    done = scrub(cluster, host, progress(arguments.quiet), dry_run=arguments.dry_run)
    return _told(arguments, done, f"{done.mended} errors were mended on {host.name}", "has nothing to mend")


def run_rebuild(arguments: argparse.Namespace) -> int:
    """Rebuild a member."""
    from appliance.cli.screen import progress
    from appliance.operations.overlay.mirror import rebuild

    cluster, host = open_target(arguments)
    done = rebuild(
        cluster,
        host,
        progress(arguments.quiet),
        folder=arguments.on.rstrip("/") if arguments.on else None,
        number=arguments.member,
        same_fs=arguments.same_fs,
        dry_run=arguments.dry_run,
    )
    return _told(arguments, done, f"the mirror on {host.name} is whole again", "is whole")


def run_remove(arguments: argparse.Namespace) -> int:
    """Remove it."""
    from appliance.cli.screen import progress
    from appliance.operations.overlay.mirror import abandon, remove

    cluster, host = open_target(arguments)
    act = abandon if arguments.abandon else remove
    done = act(cluster, host, progress(arguments.quiet), dry_run=arguments.dry_run)
    said = "is given up, there is no overlay" if arguments.abandon else "is one plain file again"
    return _told(arguments, done, f"the overlay on {host.name} {said}", "is not mirrored")


def run_adopt(arguments: argparse.Namespace) -> int:
    """Adopt one."""
    from appliance.cli.screen import progress
    from appliance.operations.overlay.mirror import adopt

    cluster, host = open_target(arguments)
    folder = arguments.folder.rstrip("/")
    done = adopt(cluster, host, progress(arguments.quiet), folder, dry_run=arguments.dry_run)
    return _told(arguments, done, f"the overlay on {host.name} lies on its mirror again", "lies on its mirror")


def _told(arguments: argparse.Namespace, done: Done, changed: str, same: str) -> int:
    """The outcome, as the user wants it."""
    from appliance.cli.screen import out, print_json

    if arguments.json:
        print_json(asdict(done))
    elif not done.changed:
        out.print(f"the overlay on {done.host} {same}, nothing is done", markup=False)
    elif getattr(arguments, "dry_run", False):
        out.print("\n".join(done.steps), markup=False)
    else:
        out.print(changed, markup=False)
    return 0
