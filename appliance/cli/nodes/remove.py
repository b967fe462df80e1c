"""``sms node remove``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, add_json, open_site, print_result, verb
from appliance.cli.nodes.common import add_nodes, add_yes, confirm

EXAMPLES = """\
  sms node remove -n node[449-450]     print which nodes match
  sms node remove node007              remove it from the inventory
  sms node remove @old --yes           all nodes of a group, without confirmation"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "remove",
        "remove nodes from the inventory",
        "Remove nodes from the inventory: they cannot boot any more. Running nodes keep running.",
        EXAMPLES,
    )
    add_nodes(parser)
    add_yes(parser)
    parser.add_argument("-n", "--dry-run", action="store_true", help="only print which nodes match")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Remove them."""
    from appliance.config.hostlist import fold
    from appliance.operations.nodes.node import remove_nodes

    cluster = open_site(arguments)
    chosen = remove_nodes(cluster, arguments.nodes, dry_run=True)
    names = fold(node["name"] for node in chosen)
    if not arguments.dry_run:
        confirm(f"Remove {names} from the inventory?", yes=arguments.yes)
        remove_nodes(cluster, [node["name"] for node in chosen])
    word = "would remove" if arguments.dry_run else "removed"
    print_result(arguments, chosen, [f"{word} {len(chosen)}: {names}"])
    return 0
