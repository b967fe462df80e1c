"""``sms host``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, open_site, print_result, verb

if TYPE_CHECKING:
    from appliance.errors import SmsError
    from appliance.tools.ansible import Play

PREPARE = """\
  sms host prepare host-a              over SSH; on host-a itself, locally
  sms host prepare host-a --dry-run    show what would change"""

UNPREPARE = """\
  sms host unprepare host-b --dry-run  show what would be removed
  sms host unprepare host-b            bridges, VLANs, firewall rules, modules
  on host-b itself, with the keys of the other admin hosts, too"""

LIST = """\
  sms host list            every admin host of the site
  sms host list --json     the same as JSON"""


def add(verbs: Verbs) -> None:
    """Add the verb and its subcommands."""
    parser = verb(
        verbs,
        "host",
        "prepare and list admin hosts",
        "Prepare and list the machines that can run the services container, or take the preparation back.",
        "  sms host prepare host-a\n  sms host list",
    )
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    prepare = verb(
        parts,
        "prepare",
        "prepare a host to run the services container",
        "Set up packages, Apptainer, folders, kernel settings and bridges with Ansible. Existing bridges are not\n"
        "changed; a missing one is created with the port that is set in the site file. Idempotent: a second run\n"
        "changes nothing.",
        PREPARE,
    )
    back = verb(
        parts,
        "unprepare",
        "take back what prepare did to a host",
        "Remove the bridges, VLANs, firewall rules and files that `sms host prepare` made, and on the host itself\n"
        "the keys of the other admin hosts. Packages, Apptainer and the state folder stay, and bridges of others do.\n"
        "Refused while a bridge has other ports or addresses. Idempotent.",
        UNPREPARE,
    )
    for part, run in ((prepare, run_prepare), (back, run_unprepare)):
        part.add_argument("name", metavar="NAME", help="an admin host of the site")
        part.add_argument("-n", "--dry-run", action="store_true", help="show what would change; change nothing")
        add_json(part)
        part.set_defaults(run=run)
    listing = verb(parts, "list", "list the admin hosts of the site", "List the admin hosts of the site.", LIST)
    add_json(listing)
    listing.set_defaults(run=run_list)


def run_prepare(arguments: argparse.Namespace) -> int:
    """Prepare a host."""
    from appliance.operations.hosts.host import failure, prepare

    play = prepare(open_site(arguments), arguments.name, dry_run=arguments.dry_run)
    return _show(arguments, play, "is prepared", failure(play, arguments.name))


def run_unprepare(arguments: argparse.Namespace) -> int:
    """Take back the preparation of a host."""
    from appliance.operations.hosts.host import failure, unprepare

    play = unprepare(open_site(arguments), arguments.name, dry_run=arguments.dry_run)
    error = failure(play, arguments.name, "the preparation of {} is not taken back")
    return _show(arguments, play, "has nothing that `sms host prepare` made", error)


def _show(arguments: argparse.Namespace, play: Play, done: str, error: SmsError | None) -> int:
    lines = [f"{'would change' if arguments.dry_run else 'changed'}: {task}" for task in play.changed]
    lines += play.diffs if arguments.dry_run else []
    if not play.failed and not play.changed:
        lines.append(f"{arguments.name} {done}: nothing to change")
    print_result(arguments, play, lines)
    if error:
        raise error
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    """List the admin hosts."""
    from rich.markup import escape
    from rich.table import Table

    from appliance.cli.screen import out, print_json
    from appliance.operations.hosts.host import list_hosts

    lines = list_hosts(open_site(arguments))
    # At most one host may run the container, but for the isolated one of a migration.
    many = [line.name for line in lines if line.running]
    status = 4 if len(many) > 1 and not any(line.move and line.move.under_way for line in lines) else 0
    if arguments.json:
        print_json(lines)
        return status
    table = Table("host", "address", "reachable", "container", "lease", box=None, pad_edge=False, header_style="bold")
    for line in lines:
        reachable = "[green]yes[/]" if line.reachable else "[red]no[/]"
        runs = "running" if line.running else "-" if line.reachable else "?"
        holds = "holder" if line.holds_lease else "-" if line.reachable else "?"
        table.add_row(line.name, line.address, reachable, runs, holds)
    out.print(table)
    for line in lines:
        if text := line.problem or (f"{line.name}: {line.move.text}; {line.move.hint}" if line.move else ""):
            out.print(f"[yellow]{escape(text)}[/]")
    if status:
        out.print(f"[red]the services container runs on {' and '.join(many)}: stop all but one immediately[/]")
    return status
