"""``sms vm restore``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, add_json, filled, print_result, verb
from appliance.cli.vm.common import add_vm_host

EXAMPLES = """\
  sms vm restore latest                 after `sms vm stop`; then `sms vm start`
  sms vm restore before-upgrade -n      check the snapshot and the free space, change nothing"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "restore",
        "replace the VM's disks by a snapshot",
        "The VM must be off. Its current disks are kept as a snapshot themselves.",
        EXAMPLES,
    )
    add_vm_host(parser)
    parser.add_argument("name", type=filled, metavar="NAME", help="the snapshot, or `latest`")
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything, change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Restore it."""
    from appliance.cli.vm.common import open_vm
    from appliance.cli.vm.snapshot import line
    from appliance.operations.vm.restore import check_restore, restore_vm

    cluster, host, shown = open_vm(arguments)
    if arguments.dry_run:
        snapshot = check_restore(cluster, host, arguments.name)
        print_result(arguments, snapshot, [f"would restore {line(snapshot)}"])
        return 0
    restored = restore_vm(cluster, host, shown, arguments.name)
    text = f"restored {restored.name} on {restored.host}; the old disks: {restored.kept}"
    print_result(arguments, restored, [text])
    return 0
