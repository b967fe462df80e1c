"""``sms files``: master files and the clients that have them."""

from __future__ import annotations

from appliance.cli.common import Verbs, add_actions, verb

ACTIONS = (
    "nodes.files_list",
    "nodes.files_show",
    "nodes.files_add",
    "nodes.files_remove",
    "nodes.files_push",
    "nodes.files_report",
    "nodes.files_rollback",
)
"""In the order of the help; modules of ``appliance.cli``."""

EXAMPLES = """\
  sms files push                                  upload the files of the site file, notify all clients
  sms files push --dry-run                        only print what differs
  sms files add /etc/motd motd --services         add a file for all nodes and the container
  sms files report                                which clients are up to date
  sms files rollback /etc/motd                    return to the previous version everywhere"""


def add(verbs: Verbs) -> None:
    """Add the verb and its actions."""
    parser = verb(
        verbs,
        "files",
        "master copies of files that nodes and the container pull",
        "The provisioning VM has the master copies of passwd, group, shadow, slurm.conf and the site's own files.\n"
        "Nodes and the services container pull what changed, every few minutes and when they are notified.",
        EXAMPLES,
    )
    add_actions(parser, ACTIONS)
