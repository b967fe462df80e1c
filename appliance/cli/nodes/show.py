"""``sms node show``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from appliance.cli.common import Verbs, add_json, open_site, print_result, verb
from appliance.text import one_line

EXAMPLES = """\
  sms node show node007            by name
  sms node show x1000c0s0b0n0      by xname"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(actions, "show", "show a node of the inventory", "Show the inventory's entry of one node.", EXAMPLES)
    parser.add_argument("node", metavar="NODE", help="its name or xname")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show it."""
    from appliance.operations.nodes.node import show_node

    cluster = open_site(arguments)
    node = show_node(cluster, arguments.node)
    print_result(arguments, node, _lines(node))
    return 0


def _lines(node: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    width = max((len(key) for key in node), default=0)
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, f"{indent}  ")
        elif value not in (None, "", [], {}):
            yield f"{indent}{key:<{width}}  {_word(value)}"


def _word(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_word, value))
    if isinstance(value, Mapping):
        return " ".join(str(one) for one in value.values() if one)
    return one_line(str(value))
