"""``sms overlay``: all that the appliance has written, its snapshots, its mirror."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from appliance.cli.common import verb

ACTIONS: tuple[str, ...] = (
    "create",
    "snapshot",
    "list",
    "show",
    "diff",
    "verify",
    "restore",
    "prune",
    "push",
    "pull",
    "schedule",
    "grow",
    "mirror",
)
"""In the order of the help; each is a module of ``appliance.cli.overlay``."""

EXAMPLES = """\
  sms overlay snapshot                    take one now; the appliance runs on
  sms overlay list                        all there are, the newest last
  sms overlay verify latest               read all of it again, and check it
  sms overlay restore 42                  put it in the overlay's place (the appliance is stopped)
  sms overlay schedule install            cron takes them from now on"""


def add(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb and its actions."""
    parser = verb(
        verbs,
        "overlay",
        "snapshots of all that the appliance has written",
        "All that the appliance writes lies in one ext3 file, its overlay. Its snapshots are taken while it runs,\n"
        "checked before they count, and restored, compared, pushed elsewhere, or thinned out.",
        EXAMPLES,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name in ACTIONS:
        importlib.import_module(f"appliance.cli.overlay.{name}").add(actions)
