"""``sms node add``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import Verbs, add_json, filled, open_site, print_result, verb

EXAMPLES = """\
  sms node add node007 --mac 02:00:0a:4d:00:97 --address 10.0.1.7 --group cpu
  sms node add node008 --mac 02:00:0a:4d:00:98 --bmc https://10.0.9.8"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "add",
        "add a node to the inventory",
        "Add a node to the inventory. The options are checked before the VM is contacted.",
        EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", type=filled, help="name of the node")
    add_node_options(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def add_node_options(parser: Any) -> None:
    """Add the options that describe a node."""
    parser.add_argument(
        "--mac", action="append", default=[], metavar="MAC", help="a MAC address; the first boots; may be repeated"
    )
    parser.add_argument("--address", metavar="ADDRESS", help="its address in the provisioning network")
    parser.add_argument("--xname", metavar="XNAME", help="its location: x1000c0s0b0n0")
    parser.add_argument("--bmc", metavar="URL", help="its controller: https://10.0.9.7[/redfish/v1/Systems/1]")
    parser.add_argument("--profile", metavar="PROFILE", help="the image that it boots, whatever its groups")
    parser.add_argument("--group", action="append", default=[], metavar="GROUP", help="a group; may be repeated")


def read_node_spec(arguments: argparse.Namespace) -> Any:
    """Return the options that describe the node."""
    from appliance.operations.nodes.node import NodeSpec

    return NodeSpec(
        # An empty text, or a sign alone, is kept so that it is reported as invalid.
        macs=tuple(part for word in arguments.mac for part in word.split(",") if part or not word),
        address=arguments.address,
        xname=arguments.xname,
        bmc=arguments.bmc,
        profile=arguments.profile,
        groups=tuple(part for word in arguments.group for part in word.split(",") if part),
    )


def run(arguments: argparse.Namespace) -> int:
    """Add it."""
    from appliance.operations.nodes.node import add_node

    cluster = open_site(arguments)
    made = add_node(cluster, arguments.name, read_node_spec(arguments))
    words = ", ".join(filter(None, (made.change.get("address"), *map(str, made.change["macs"]))))
    print_result(arguments, {"name": made.name, **made.change}, [f"added {made.name}: {words}"])
    return 0
