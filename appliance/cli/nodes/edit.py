"""``sms node edit``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from appliance.cli.common import add_json, verb
from appliance.cli.nodes.add import add_wishes, read_wishes
from appliance.cli.nodes.common import open_site

EXAMPLES = """\
  sms node edit node007 --mac 02:00:0a:4d:00:99              a new board: this MAC address alone
  sms node edit node007 --mac +02:00:0a:4d:00:9a             one more
  sms node edit node007 --group +gpu --group=-compute        into one group, out of another
  sms node edit node007 --address 10.0.1.7 --profile gpu
  sms node edit node007 --profile=                           whatever its groups boot"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "edit",
        "change what the inventory says of a node",
        "Change what is named, and leave the rest. MAC addresses and groups with + and - are added and taken away,\n"
        "without they replace all there are; empty text takes a setting away.",
        EXAMPLES,
    )
    parser.add_argument("node", metavar="NODE", help="its name or xname")
    add_wishes(parser)
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would be changed")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Change it."""
    from appliance.cli.screen import out, print_json
    from appliance.operations.nodes.node import edit_node

    cluster, _ = open_site(arguments)
    done = edit_node(cluster, arguments.node, read_wishes(arguments), dry_run=arguments.dry_run)
    if arguments.json:
        print_json(asdict(done))
    elif not done.change:
        out.print(f"{done.name} is so already", markup=False)
    else:
        for key, value in done.change.items():
            out.print(f"{done.name}: {key}: {_word(done.before.get(key))} -> {_word(value)}", markup=False)
    return 0


def _word(value: Any) -> str:
    return ", ".join(map(str, value)) or "-" if isinstance(value, list) else str(value or "-")
