"""``sms node boot``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, add_json, duration, open_site, print_result, verb
from appliance.cli.nodes.common import add_nodes, add_yes, confirm, confirm_controllers, print_outcomes

EXAMPLES = """\
  sms node boot node007 --wait 5m           from the network, and wait until its slurmd answers
  sms node boot @compute --yes              a group, without confirmation
  sms node boot node007 --target disk       from its disk, this once
  sms node boot node007 --no-cycle          from the network at its next start"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "boot",
        "restart nodes from the network",
        "Set the next boot of nodes, and only that one, to the network, and restart them. --wait waits until they are\n"
        "up: slurmd answers, or they have reported their files to the VM.",
        EXAMPLES,
    )
    add_nodes(parser)
    parser.add_argument(
        "--target", choices=("pxe", "http", "disk", "uefi", "none"), default="pxe", help="boot source (default: pxe)"
    )
    parser.add_argument("--path", default="", metavar="PATH", help="the device path of --target uefi")
    parser.add_argument("--mode", choices=("UEFI", "Legacy"), default="", help="boot mode of the firmware")
    parser.add_argument("--no-cycle", action="store_true", help="do not restart them")
    parser.add_argument("--wait", type=duration, default=0.0, metavar="TIME", help="wait until they are up")
    parser.add_argument(
        "--timeout", type=duration, default=120.0, metavar="TIME", help="how long a controller may take (default: 2m)"
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="only print which nodes match")
    add_yes(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do it."""
    from appliance.config.hostlist import fold
    from appliance.operations.nodes.node import list_nodes
    from appliance.operations.nodes.power import Boot, boot

    cluster = open_site(arguments)
    nodes = list_nodes(cluster, arguments.nodes)
    names = fold(node["name"] for node in nodes)
    if arguments.dry_run:
        text = f"would boot {len(nodes)} from {arguments.target}: {names}"
        print_result(arguments, [node["name"] for node in nodes], [text])
        return 0
    if len(nodes) > 1 and not arguments.no_cycle:
        confirm(f"Restart {len(nodes)} nodes: {names}?", yes=arguments.yes)
    how = Boot(
        target=arguments.target,
        path=arguments.path,
        mode=arguments.mode,
        cycle=not arguments.no_cycle,
        wait_s=arguments.wait,
        timeout_s=arguments.timeout,
    )
    confirm_controllers(cluster, nodes)
    done = boot(cluster, nodes, how)
    return print_outcomes(arguments, done)
