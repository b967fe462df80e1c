"""``sms vm``: the provisioning VM; the cluster works without it for days."""

from __future__ import annotations

from appliance.cli.common import Verbs, add_actions, verb

ACTIONS = (
    "vm.build",
    "vm.start",
    "vm.stop",
    "vm.status",
    "vm.console",
    "vm.exec",
    "vm.snapshot",
    "vm.restore",
    "vm.migrate",
)
"""In the order of the help; modules of ``appliance.cli``."""

EXAMPLES = """\
  sms vm build                     build its image: packages, a playbook, a sealed disk
  sms vm start --host host-a       start it and wait until all its services are healthy
  sms vm status                    exit status 4 if a service is not healthy
  sms vm snapshot                  both its disks at one point in time; it keeps running
  sms vm migrate host-b            move it with its disks to another admin host
  sms vm stop                      the cluster keeps running"""


def add(verbs: Verbs) -> None:
    """Add the verb and its actions."""
    parser = verb(
        verbs,
        "vm",
        "the virtual machine that provisions nodes",
        "Nodes boot from it, and pull files from it. It runs in QEMU on an admin host; its persistent state is on\n"
        "one disk. While it is off, only nodes that boot need it.",
        EXAMPLES,
    )
    add_actions(parser, ACTIONS)
