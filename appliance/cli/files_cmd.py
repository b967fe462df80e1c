"""``sms files``: master copies of files, and who has them."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from appliance.cli.common import verb

ACTIONS: tuple[str, ...] = ("list", "show", "add", "remove", "push", "report", "rollback")
"""In the order of the help; each is a module of ``appliance.cli.files``."""

EXAMPLES = """\
  sms files push                                  bring what the site file names to the VM, and wake all clients
  sms files push --dry-run                        only say what differs
  sms files add /etc/motd motd --services         one more file, for all nodes and the container
  sms files report                                who has what, and who has not
  sms files rollback /etc/slurm/slurm.conf        the version before, everywhere"""


def add(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb and its actions."""
    parser = verb(
        verbs,
        "files",
        "master copies of files that nodes and the container pull",
        "The provisioning VM has the master copies of passwd, group, shadow, slurm.conf and the site's own files.\n"
        "Nodes and the services container pull them every few minutes and when they are woken, only what changed.",
        EXAMPLES,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name in ACTIONS:
        importlib.import_module(f"appliance.cli.files.{name}").add(actions)
