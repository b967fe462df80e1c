"""``sms vm restore``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, filled, print_result, verb
from appliance.cli.vm.common import add_vm_host

if TYPE_CHECKING:
    from appliance.host.base import Host
    from appliance.operations.context import Cluster

EXAMPLES = """\
  sms vm restore latest                 after `sms vm stop`; then `sms vm start`
  sms vm restore before-upgrade -n      check the snapshot and the free space, change nothing
  sms vm restore latest --from borg     the state as it was pushed last; also where all disks are lost
  sms vm restore 42 --from host-b       of a standby host's copies (`sms overlay list --vm --host host-b`)"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "restore",
        "replace the VM's disks by a snapshot",
        "The VM must be off. Its current disks are kept as a snapshot themselves. With --from, the state disk is\n"
        "restored from the scheduled snapshots of the VM's state: in the Borg repository or on an admin host.",
        EXAMPLES,
    )
    add_vm_host(parser)
    parser.add_argument("name", type=filled, metavar="NAME", help="the snapshot, or `latest`")
    parser.add_argument(
        "--from", dest="source", type=filled, metavar="SOURCE", help="borg, or an admin host, which may be this one"
    )
    parser.add_argument(
        "--force", action="store_true", help="with --from: admin hosts that do not answer are lost, and do not run it"
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="check everything, change nothing")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Restore it."""
    from appliance.cli.vm.common import open_vm
    from appliance.cli.vm.snapshot import line
    from appliance.errors import ConfigError, Refused
    from appliance.operations.vm.restore import check_restore, restore_vm

    if arguments.force and not arguments.source:
        raise ConfigError("--force needs --from", hint="sms vm restore latest --from borg --force --host HOST")
    try:
        cluster, host = open_vm(arguments)
    except Refused as error:
        if arguments.host or not arguments.source:
            raise
        hint = f"name the admin host that gets the disks: sms vm restore {arguments.name} --from ... --host HOST"
        raise Refused(error.message, hint=hint) from error
    if arguments.source:
        return restore_from(arguments, cluster.of_vm(), host)
    if arguments.dry_run:
        snapshot = check_restore(cluster, host, arguments.name)
        print_result(arguments, snapshot, [f"would restore {line(snapshot)}"])
        return 0
    restored = restore_vm(cluster, host, arguments.name)
    text = f"restored {restored.name} on {restored.host}; the old disks: {restored.kept}"
    print_result(arguments, restored, [text])
    return 0


def restore_from(arguments: argparse.Namespace, cluster: Cluster, host: Host) -> int:
    """Restore a snapshot of the VM's state."""
    from appliance.operations.snapshots.vm_restore import StateSource, check_state, choose, restore_state
    from appliance.units import format_time

    wanted = StateSource(arguments.source, arguments.name, arguments.force)
    if arguments.dry_run:
        chosen = choose(cluster, host, wanted)
        check_state(cluster, host, wanted, chosen)
        one = chosen.snapshot
        text = f"would restore snapshot {one['number']} of {wanted.source}, of {format_time(one['taken'])}"
        print_result(arguments, one, [text])
        return 0
    done = restore_state(cluster, host, wanted)
    kept = f"; the old disks: {done.kept}" if done.kept else ""
    print_result(arguments, done, [f"restored the state from {done.name} on {done.host}{kept}"])
    return 0
