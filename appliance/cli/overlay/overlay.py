"""``sms overlay``: the overlay, its snapshots, its mirror."""

from __future__ import annotations

from appliance.cli.common import Verbs, add_actions, verb

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
    "snapshots.key",
    "snapshots.schedule",
    "upgrade.drill",
    "snapshots.identity",
    "overlay.grow",
    "overlay.mirror",
)
"""Modules of ``appliance.cli``, in the order of the help."""

EXAMPLES = """\
  sms overlay snapshot                    take one now, without a stop
  sms overlay list                        list all, newest last
  sms overlay verify latest               read all of it again and verify it
  sms overlay restore 42                  replace the overlay by it (after `sms stop`)
  sms overlay schedule install            take them by cron or systemd from now on"""


def add(verbs: Verbs) -> None:
    """Add the verb and its actions."""
    parser = verb(
        verbs,
        "overlay",
        "the overlay, its snapshots and its mirror",
        "The services container writes to one ext3 file, its overlay. Snapshots of it are taken while it is in use,\n"
        "checked before they are committed, and restored, compared, pushed to other hosts, or pruned.",
        EXAMPLES,
    )
    add_actions(parser, ACTIONS)
