"""``sms overlay``: all that the appliance has written, its snapshots, its mirror."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_actions, verb

ACTIONS = (
    "overlay.create",
    "snapshots.snapshot",
    "snapshots.list",
    "snapshots.show",
    "snapshots.diff",
    "snapshots.verify",
    "snapshots.restore",
    "snapshots.prune",
    "snapshots.push",
    "snapshots.pull",
    "snapshots.schedule",
    "overlay.grow",
    "overlay.mirror",
)
"""In the order of the help; modules of ``appliance.cli``."""

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
    add_actions(parser, ACTIONS)
