"""``sms vm status``."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, open_site, verb
from appliance.cli.vm.common import add_vm_host

if TYPE_CHECKING:
    from appliance.operations.vm.status import VmStatus

EXAMPLES = """\
  sms vm status           on whichever host it runs; exit status 4 if it is off or a service is not healthy
  sms vm status --json    the same for scripts"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "status",
        "where the VM runs, and whether its services are healthy",
        "Query the admin hosts for where it runs, and the VM itself, through its guest agent, for its health.",
        EXAMPLES,
    )
    add_vm_host(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show it."""
    from appliance.cli.screen import print_json
    from appliance.operations.vm.status import status_vm

    cluster, _ = open_site(arguments)
    name = arguments.host or cluster.site.admin_hosts[0].name
    found = status_vm(cluster, cluster.host(name), only=arguments.host is not None)
    if arguments.json:
        print_json(found)
    else:
        show(found)
    return 0 if found.healthy else 4


def show(found: VmStatus) -> None:
    """Print it for people."""
    from appliance.cli.screen import out
    from appliance.cli.vm.snapshot import elsewhere
    from appliance.operations.site.ca import ISSUER_SOON_DAYS
    from appliance.units import format_age

    lines = [("vm", f"{found.cluster}, {found.address}: {_state(found)}")]
    if found.running:
        accel = found.accel + (f" ({found.why_no_kvm})" if found.why_no_kvm else "")
        lines.append(("up for", f"{format_age(time.time() - found.since)}, {accel}"))
        lines.append(("memory", f"{found.memory_mb} MiB and {found.cpus} CPU; QEMU uses {found.used_memory_mb} MiB"))
        lines.append(("agent", "answers" if found.guest_agent else "does not answer"))
    if found.state_mb:
        lines.append(("state", f"{found.state_used_mb} of {found.state_mb} MiB used"))
    if found.disk_bytes:
        lines.append(("disks", ", ".join(f"{name} {size >> 20} MiB" for name, size in found.disk_bytes.items())))
    if found.digest:
        lines.append(("image", f"sha256:{found.digest[:16]}"))
    if found.running and found.issuer_days < ISSUER_SOON_DAYS:
        left = f"nodes get no certificates after {max(0, found.issuer_days)} days"
        lines.append(("WARNING", f"{left}: `sms vm start` gives it a new issuer while it runs"))
    if found.snapshots:
        newest = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.newest_snapshot))
        lines.append(("snapshots", f"{found.snapshots}, the newest of {newest}"))
    if found.snapshots_elsewhere:
        here = "" if found.snapshots else f"none on {found.host}; "
        lines.append(("snapshots", f"{here}{elsewhere(found.snapshots_elsewhere)}"))
    if found.silent:
        lines.append(("silent", f"{', '.join(found.silent)}: unreachable"))
    for name, words in lines:
        out.print(f"{name:10} {words}", markup=False)
    for name, state in found.services.items():
        out.print(f"  {name:12} {state}", markup=False)


def _state(found: VmStatus) -> str:
    if found.busy:
        where = f"on {found.host}, " if found.running else ""
        return f"{where}{'healthy' if found.healthy else 'not ready'}; a start, stop or migration is in progress"
    if found.running:
        return f"on {found.host}, {'healthy' if found.healthy else 'UNHEALTHY'}"
    return f"off; its disks are on {found.host}" if found.host else "was never started"
