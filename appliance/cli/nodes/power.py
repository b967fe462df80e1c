"""``sms node power``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_json, duration, verb
from appliance.cli.nodes.common import add_nodes, add_yes, confirm, open_site, show_outcomes

EXAMPLES = """\
  sms node power status @all               ask every controller
  sms node power on node[001-450]          switch them on, and wait until they are
  sms node power off node007               at once, as by the switch; --soft asks its system to end first
  sms node power reset @compute --yes      restart a group without a question"""

WORDS = {"on": "switch on", "off": "switch off", "reset": "restart", "status": "ask"}


class _Wishes(tuple[str, ...]):
    """For completion. What is none of them is told by `run`, which sees the nodes as well."""

    def __contains__(self, word: object) -> bool:
        return True


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "power",
        "switch nodes on and off, or ask",
        "Ask the controllers of many nodes at once by Redfish, and wait until each says that it is so. They are those\n"
        "of the inventory; while the VM is off, those of the last answer, whose age is told.",
        EXAMPLES,
    )
    parser.add_argument("wish", choices=_Wishes(WORDS), metavar="on|off|reset|status", help="what is to be")
    add_nodes(parser)
    parser.add_argument("--soft", action="store_true", help="off: ask the system to end, and wait for it")
    parser.add_argument(
        "--timeout", type=duration, default=120.0, metavar="TIME", help="how long one node may take (default: 2m)"
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say which nodes are meant")
    add_yes(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def _meant(arguments: argparse.Namespace) -> str:
    """What was to be said, where the node stands before the wish, or the wish is misspelt."""
    from difflib import get_close_matches

    words = [arguments.wish, *arguments.nodes]
    if words[-1] in WORDS:
        return f"sms node power {words[-1]} {' '.join(words[:-1])}"
    near = get_close_matches(words[0], WORDS, 1)
    return f"did you mean {near[0]}?" if near else "sms node power --help"


def run(arguments: argparse.Namespace) -> int:
    """Do it."""
    from appliance.cli.screen import out, print_json
    from appliance.config.hostlist import fold
    from appliance.errors import ConfigError
    from appliance.operations.nodes.power import as_dicts, choose, power

    if arguments.wish not in WORDS:
        raise ConfigError(f"{arguments.wish[:60]!r} is not one of {', '.join(WORDS)}", hint=_meant(arguments))
    if arguments.soft and arguments.wish != "off":
        raise ConfigError("--soft goes with off alone", hint="sms node power off --soft NODES")
    cluster, shown = open_site(arguments)
    nodes = choose(cluster, arguments.nodes, shown)
    names = fold(node["name"] for node in nodes)
    if arguments.dry_run:
        if arguments.json:
            print_json([node["name"] for node in nodes])
        else:
            out.print(f"would {WORDS[arguments.wish]} {len(nodes)}: {names}", markup=False)
        return 0
    if len(nodes) > 1 and arguments.wish in ("off", "reset"):
        words = WORDS[arguments.wish].capitalize()
        confirm(f"{words} {len(nodes)} nodes: {names}?", yes=arguments.yes)
    done = power(cluster, nodes, "soft-off" if arguments.soft else arguments.wish, arguments.timeout, shown)
    if arguments.json:
        print_json(as_dicts(done))
        return 1 if any(one.error for one in done) else 0
    return show_outcomes(done)
