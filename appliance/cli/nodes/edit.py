"""``sms node edit``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import Verbs, add_json, open_site, print_result, verb
from appliance.cli.nodes.add import add_node_options, read_node_spec

EXAMPLES = """\
  sms node edit node007 --mac 02:00:0a:4d:00:99              a new board: replace all MAC addresses
  sms node edit node007 --mac +02:00:0a:4d:00:9a             add one
  sms node edit node007 --group +gpu --group=-compute        add a group, remove another
  sms node edit node007 --address 10.0.1.7 --profile gpu
  sms node edit node007 --profile=                           use the profile of its groups"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "edit",
        "change a node in the inventory",
        "Change the given settings, keep the others. MAC addresses and groups with + and - are added and removed;\n"
        "without a sign they replace all. An empty value clears a setting.",
        EXAMPLES,
    )
    parser.add_argument("node", metavar="NODE", help="its name or xname")
    add_node_options(parser)
    parser.add_argument("-n", "--dry-run", action="store_true", help="only print what would change")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Change it."""
    from appliance.operations.nodes.node import edit_node

    cluster = open_site(arguments)
    done = edit_node(cluster, arguments.node, read_node_spec(arguments), dry_run=arguments.dry_run)
    changes = done.change.items()
    lines = [f"{done.name}: {key}: {_word(done.before.get(key))} -> {_word(value)}" for key, value in changes]
    print_result(arguments, done, lines or [f"{done.name} is unchanged"])
    return 0


def _word(value: Any) -> str:
    return ", ".join(map(str, value)) or "-" if isinstance(value, list) else str(value or "-")
