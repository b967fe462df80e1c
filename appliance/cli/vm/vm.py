"""``sms vm``: the provisioning VM, which may be off for days."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_actions, verb

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
  sms vm build                     its image: packages, a playbook, a sealed disk
  sms vm start --host host-a       and wait until everything in it serves
  sms vm status                    exit status 4 when something in it does not serve
  sms vm snapshot                  both its disks at one moment; it runs on
  sms vm migrate host-b            with its disks, to another admin host
  sms vm stop                      the cluster runs on without it"""


def add(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb and its actions."""
    parser = verb(
        verbs,
        "vm",
        "the virtual machine that provisions nodes",
        "Nodes boot from it, and pull files from it. It runs in QEMU on an admin host; what it must not lose lies on\n"
        "one disk. Switched off, it is missed by nobody but nodes that boot.",
        EXAMPLES,
    )
    add_actions(parser, ACTIONS)
