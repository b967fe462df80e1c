"""``sms node``: the machines of the inventory, found, listed, changed, switched on and off."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_actions, verb

ACTIONS = (
    "nodes.discover",
    "nodes.list",
    "nodes.show",
    "nodes.add",
    "nodes.edit",
    "nodes.remove",
    "nodes.power",
    "nodes.boot",
    "nodes.import_",
    "nodes.export",
)
"""In the order of the help; modules of ``appliance.cli``."""

EXAMPLES = """\
  sms node discover 10.0.9.0/24           find controllers, read them, fill the inventory
  sms node list @compute                  the nodes of a group
  sms node power status node[001-450]     ask all of their controllers
  sms node boot node007 --wait 5m         from the network, now, and wait until it is up
  sms node edit node007 --group +gpu      one more group"""


def add(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb and its actions."""
    parser = verb(
        verbs,
        "node",
        "find nodes, list and change them, switch them on and off",
        "The inventory of the provisioning VM: which nodes there are, by which addresses they boot, and the\n"
        "controllers that switch them. What is asked of controllers works while the VM is off, too.",
        EXAMPLES,
    )
    add_actions(parser, ACTIONS)
