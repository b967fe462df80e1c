"""``sms node list``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from appliance.cli.common import add_json, open_site, verb
from appliance.cli.nodes.common import add_nodes, show_table

if TYPE_CHECKING:
    from appliance.provision.payloads import Node, UnknownMachine

EXAMPLES = """\
  sms node list                    all nodes
  sms node list @compute           nodes of a group
  sms node list node[001-010]      these nodes
  sms node list --unknown          unknown machines that tried to boot
  sms node list --json             everything, for scripts"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
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

    cluster, shown = open_site(arguments)
    if arguments.unknown:
        return _show_unknown(list_unknown(cluster, arguments.nodes), json=arguments.json)
    nodes = list_nodes(cluster, arguments.nodes, shown)
    if arguments.json:
        print_json(nodes)
    elif not nodes:
        out.print("the inventory has no nodes; `sms node discover` or `sms node add` adds some", markup=False)
    else:
        _show(nodes)
    return 0


def _show_unknown(machines: Sequence[UnknownMachine], *, json: bool) -> int:
    from appliance.cli.screen import out, print_json
    from appliance.units import format_time

    if json:
        print_json(machines)
    for one in machines if not json else ():
        words = f"{one.get('mac')}  {one.get('address') or '-':<15}  {one.get('count')} times"
        out.print(f"{words}, last {format_time(float(one.get('last') or 0))}", markup=False)
    if not machines and not json:
        out.print("no unknown machine has tried to boot", markup=False)
    return 0


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
