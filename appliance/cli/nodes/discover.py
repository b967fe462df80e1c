"""``sms node discover``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, duration, open_site, verb
from appliance.cli.nodes.common import show_table

if TYPE_CHECKING:
    from appliance.operations.nodes.discover import Report
    from appliance.plan.nodes.discover import Decision

EXAMPLES = """\
  sms node discover 10.0.9.0/24                   all controllers of a network
  sms node discover 10.0.9.[1-50] -n              read them, change nothing
  sms node discover x1000c0s[0-63]b0              by name, as on HPE Cray EX: nodes get their xnames
  sms node discover 10.0.9.7 --update             replace what differs in the inventory
  sms node discover 10.0.9.0/24 --name-pattern nid%06d --first 10.0.1.1"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "discover",
        "find controllers by Redfish, and add their systems to the inventory",
        "Scan every address for a Redfish service, read its systems, and add new ones to the inventory. What an admin\n"
        "has set is kept; differences are printed. Credentials come from `provisioning.bmc` of the site file, or from\n"
        "$SMS_BMC_USER and $SMS_BMC_PASSWORD. Exit status 4 on problems: conflicts, broken controllers, or nodes that\n"
        "the inventory rejects; `problems` in the JSON lists them.",
        EXAMPLES,
    )
    parser.add_argument(
        "ranges", nargs="+", metavar="RANGE", help="10.0.9.0/24, 10.0.9.1-10.0.9.50, 10.0.9.[1-50], or names"
    )
    parser.add_argument("--port", type=_port, default=443, metavar="PORT", help="their TCP port (default: 443)")
    parser.add_argument("--name-pattern", default="", metavar="PATTERN", help="names of new nodes: node%%03d")
    parser.add_argument(
        "--first", default="", metavar="ADDRESS", help="address of the first new node without one in slurm.nodes"
    )
    parser.add_argument("--group", action="append", default=[], metavar="GROUP", help="a group of new nodes")
    parser.add_argument("--update", action="store_true", help="also replace values that differ")
    parser.add_argument("-n", "--dry-run", action="store_true", help="read, change nothing")
    parser.add_argument(
        "--timeout", type=duration, default=60.0, metavar="TIME", help="how long one controller may take (default: 1m)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Discover."""
    from appliance.cli.screen import print_json
    from appliance.operations.nodes.discover import Options, discover

    cluster = open_site(arguments)
    options = Options(
        port=arguments.port,
        pattern=arguments.name_pattern,
        first=arguments.first,
        groups=tuple(arguments.group),
        update=arguments.update,
        dry_run=arguments.dry_run,
        timeout_s=arguments.timeout,
    )
    report = discover(cluster, arguments.ranges, options)
    if arguments.json:
        print_json(report)
    else:
        _show(report)
    return 4 if report.problems else 0


STYLES = {"new": "green", "changed": "cyan", "same": "dim", "differs": "yellow", "conflict": "red"}


def _show(report: Report) -> None:
    from rich.markup import escape
    from rich.table import Table

    from appliance.cli.screen import out

    if report.decisions:
        columns = ("controller", "node", "is", "address", "MAC", "power", "system")
        table = Table(*columns, box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for one in report.decisions:
            what = f"[{STYLES[one.what]}]{one.what}[/]"
            words = [escape(word) for word in _words(one, report)]
            table.add_row(words[0], words[1], what, *words[2:])
        show_table(table)
    for one in report.decisions:
        for difference in one.differences:
            where = one.found.bmc.removeprefix("https://").partition("/")[0]
            out.print(f"{one.name or where}: {difference}", markup=False)
    for target, bmc in report.bmcs.items():
        for note in bmc.notes:
            out.print(f"note: {target}: {note}", markup=False, style="dim")
    for broken in report.broken:
        out.print(f"{broken.target}: {broken.why}: {broken.message}", markup=False, style="red")
    for hint in dict.fromkeys(broken.hint for broken in report.broken if broken.hint):
        out.print(f"  hint: {hint}", markup=False)
    for name, why in report.failed.items():
        out.print(f"{name}: rejected by the inventory: {why}", markup=False, style="red")
    out.print(_sum(report), markup=False)


def _words(one: Decision, report: Report) -> list[str]:
    facts = one.found.facts
    macs = one.found.macs
    more = f" +{len(macs) - 1}" if len(macs) > 1 else ""
    memory = f", {facts['memory_gib']:g} GiB" if facts.get("memory_gib") else ""
    system = f"{facts.get('manufacturer', '')} {facts.get('model', '')}".strip() + memory
    return [
        one.found.bmc.removeprefix("https://").partition("/")[0],
        one.name or "-",
        str(one.change.get("address") or report.addresses.get(one.name) or "-"),
        f"{macs[0]}{more}" if macs else "-",
        report.power.get(one.found.bmc) or "-",
        system.removeprefix(", ") or "-",
    ]


def _sum(report: Report) -> str:
    counts = report.counts()
    words = ", ".join(f"{counts[what]} {what}" for what in STYLES if counts.get(what)) or "no systems"
    would = "; nothing was written" if report.dry_run else ""
    return (
        f"{report.scanned} addresses: {len(report.bmcs)} controllers, {len(report.broken)} broken, "
        f"{len(report.silent)} without an answer; {words}{would}"
    )
