"""``sms node``: discover, list, change, switch and boot the nodes of the inventory."""

from __future__ import annotations

from appliance.cli.common import Verbs, add_actions, verb

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
  sms node list @compute                  list the nodes of a group
  sms node power status node[001-450]     query their controllers
  sms node boot node007 --wait 5m         restart it from the network, and wait until it is up
  sms node edit node007 --group +gpu      add a group"""


def add(verbs: Verbs) -> None:
    """Add the verb and its actions."""
    parser = verb(
        verbs,
        "node",
        "find nodes, list and change them, switch them on and off",
        "The inventory of the provisioning VM: nodes, their addresses, and the controllers that switch them. Requests\n"
        "to controllers also work while the VM is off.",
        EXAMPLES,
    )
    add_actions(parser, ACTIONS)
