"""``sms node power``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, add_json, duration, open_site, print_result, verb
from appliance.cli.nodes.common import add_nodes, add_yes, confirm, confirm_controllers, print_outcomes

EXAMPLES = """\
  sms node power status @all               query every controller
  sms node power on node[001-450]          switch them on, and wait until they are on
  sms node power off node007               cut the power; --soft shuts the system down first
  sms node power reset @compute --yes      restart a group without confirmation"""

WORDS = {"on": "switch on", "off": "switch off", "reset": "restart", "status": "query"}


class _Operations(tuple[str, ...]):
    """Choices for completion. Invalid words are accepted here and reported by `run`, which also sees the nodes."""

    def __contains__(self, word: object) -> bool:
        return True


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "power",
        "switch nodes on and off, or query their state",
        "Switch many nodes in parallel through their controllers by Redfish, and wait until each reports its new\n"
        "state. While the VM is off, the cached inventory is used and its age is printed.",
        EXAMPLES,
    )
    parser.add_argument("operation", choices=_Operations(WORDS), metavar="on|off|reset|status", help="what to do")
    add_nodes(parser)
    parser.add_argument("--soft", action="store_true", help="off: shut the system down, and wait for it")
    parser.add_argument(
        "--timeout", type=duration, default=120.0, metavar="TIME", help="how long one node may take (default: 2m)"
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="only print which nodes match")
    add_yes(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def _suggest(arguments: argparse.Namespace) -> str:
    """Return a corrected command, for a node given before the operation or a misspelt operation."""
    from difflib import get_close_matches

    words = [arguments.operation, *arguments.nodes]
    if words[-1] in WORDS:
        return f"sms node power {words[-1]} {' '.join(words[:-1])}"
    near = get_close_matches(words[0], WORDS, 1)
    return f"did you mean {near[0]}?" if near else "sms node power --help"


def run(arguments: argparse.Namespace) -> int:
    """Do it."""
    from appliance.config.hostlist import fold
    from appliance.errors import ConfigError
    from appliance.operations.nodes.node import list_nodes
    from appliance.operations.nodes.power import power

    if arguments.operation not in WORDS:
        raise ConfigError(f"{arguments.operation[:60]!r} is not one of {', '.join(WORDS)}", hint=_suggest(arguments))
    if arguments.soft and arguments.operation != "off":
        raise ConfigError("--soft is only valid with off", hint="sms node power off --soft NODES")
    cluster = open_site(arguments)
    nodes = list_nodes(cluster, arguments.nodes)
    names = fold(node["name"] for node in nodes)
    if arguments.dry_run:
        text = f"would {WORDS[arguments.operation]} {len(nodes)}: {names}"
        print_result(arguments, [node["name"] for node in nodes], [text])
        return 0
    if len(nodes) > 1 and arguments.operation in ("off", "reset"):
        words = WORDS[arguments.operation].capitalize()
        confirm(f"{words} {len(nodes)} nodes: {names}?", yes=arguments.yes)
    confirm_controllers(cluster, nodes)
    done = power(cluster, nodes, "soft-off" if arguments.soft else arguments.operation, arguments.timeout)
    return print_outcomes(arguments, done)
