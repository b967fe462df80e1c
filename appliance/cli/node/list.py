"""``sms node list``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from appliance.cli.common import add_json, verb
from appliance.cli.node.common import add_nodes, open_site

if TYPE_CHECKING:
    from appliance.flow.inventory import Node

EXAMPLES = """\
  sms node list                    all of them
  sms node list @compute           those of a group
  sms node list node[001-010]      these
  sms node list --json             everything, for scripts"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "list",
        "the nodes that there are",
        "List nodes of the inventory; of the last answer that was kept, with its age, while the VM is off.",
        EXAMPLES,
    )
    add_nodes(parser, needed=False)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List them."""
    from appliance.cli.screen import out, print_json
    from appliance.flow.node import list_nodes

    cluster, shown = open_site(arguments)
    nodes = list_nodes(cluster, arguments.nodes, shown)
    if arguments.json:
        print_json(nodes)
    elif not nodes:
        out.print("the inventory has no nodes; `sms node discover` or `sms node add` makes some", markup=False)
    else:
        _show(nodes)
    return 0


def _show(nodes: Sequence[Node]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from appliance.cli.screen import out

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
    out.print(table)
