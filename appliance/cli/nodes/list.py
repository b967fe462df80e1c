"""``sms node list``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, open_site, print_result, verb
from appliance.cli.nodes.common import add_nodes, show_table

if TYPE_CHECKING:
    from appliance.provision.payloads import Node, UnknownMachine

EXAMPLES = """\
  sms node list                    all nodes
  sms node list @compute           nodes of a group
  sms node list node[001-010]      these nodes
  sms node list --unknown          unknown machines that tried to boot
  sms node list --json             everything, for scripts"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "list",
        "list nodes of the inventory",
        "List nodes of the inventory. While the VM is off, the cached inventory is used and its age is printed.",
        EXAMPLES,
    )
    add_nodes(parser, needed=False)
    parser.add_argument("--unknown", action="store_true", help="unknown machines that tried to boot")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List them."""
    from appliance.cli.screen import out, print_json
    from appliance.operations.nodes.node import list_nodes, list_unknown

    cluster = open_site(arguments)
    if arguments.unknown:
        unknown = list_unknown(cluster, arguments.nodes)
        print_result(arguments, unknown, _unknown_lines(unknown))
        return 0
    nodes = list_nodes(cluster, arguments.nodes)
    if arguments.json:
        print_json(nodes)
    elif not nodes:
        out.print("the inventory has no nodes; `sms node discover` or `sms node add` adds some", markup=False)
    else:
        _show(nodes)
    return 0


def _unknown_lines(machines: Sequence[UnknownMachine]) -> Iterator[str]:
    from appliance.units import format_time

    for one in machines:
        words = f"{one.get('mac')}  {one.get('address') or '-':<15}  {one.get('count')} times"
        yield f"{words}, last {format_time(float(one.get('last') or 0))}"
    if not machines:
        yield "no unknown machine has tried to boot"


def _show(nodes: Sequence[Node]) -> None:
    from rich.markup import escape
    from rich.table import Table

    columns = ("name", "address", "MAC", "groups", "profile", "xname", "controller")
    table = Table(*columns, box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for node in nodes:
        macs = node.get("macs") or []
        more = f" +{len(macs) - 1}" if len(macs) > 1 else ""
        controller = str(node.get("bmc") or "").removeprefix("https://").partition("/")[0]
        words = (
            node["name"],
            node.get("address"),
            f"{macs[0]}{more}" if macs else "",
            ",".join(map(str, node.get("groups") or ())),
            node.get("profile"),
            node.get("xname"),
            controller,
        )
        table.add_row(*(escape(str(word or "-")) for word in words))
    show_table(table)
