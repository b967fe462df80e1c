"""``sms vm status``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, open_site, print_result, verb
from appliance.cli.snapshot_facts import snapshot_facts
from appliance.cli.vm.common import add_vm_host
from appliance.text import one_line

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
    from appliance.operations.snapshots.status import vm_snapshot_status
    from appliance.operations.vm.status import status_vm

    cluster = open_site(arguments)
    name = arguments.host or cluster.site.admin_hosts[0].name
    found = status_vm(cluster, cluster.host(name), only=arguments.host is not None)
    of_state = None
    if found.host and found.host not in found.silent:
        of_state = vm_snapshot_status(cluster.of_vm(), cluster.host(found.host))
    result = {**asdict(found), "state_snapshots": of_state and of_state.as_dict()}
    lines = [*_lines(found)]
    if of_state:
        lines += [f"{name:10} {text}" for name, text in snapshot_facts(of_state, "state ")]
        lines += [f"WARNING    {warning}" for warning in of_state.judgement.warnings]
    print_result(arguments, result, lines)
    return 0 if found.healthy and (of_state is None or of_state.judgement.healthy) else 4


def _lines(found: VmStatus) -> Iterator[str]:
    from appliance.cli.vm.snapshot import elsewhere
    from appliance.operations.site.ca import ISSUER_SOON_DAYS
    from appliance.units import format_age, format_time

    facts = [("vm", f"{found.cluster}, {found.address}: {_state(found)}")]
    if found.running:
        accel = found.accel + (f" ({found.why_no_kvm})" if found.why_no_kvm else "")
        facts.append(("up for", f"{format_age(time.time() - found.since)}, {accel}"))
        facts.append(("memory", f"{found.memory_mb} MiB and {found.cpus} CPU; QEMU uses {found.used_memory_mb} MiB"))
        facts.append(("agent", "answers" if found.guest_agent else "does not answer"))
    if found.state_mb:
        facts.append(("state", f"{found.state_used_mb} of {found.state_mb} MiB used"))
    if found.disk_bytes:
        facts.append(("disks", ", ".join(f"{name} {size >> 20} MiB" for name, size in found.disk_bytes.items())))
    if found.digest:
        facts.append(("image", f"sha256:{found.digest[:16]}"))
    if found.running and found.issuer_days < ISSUER_SOON_DAYS:
        left = f"nodes get no certificates after {max(0, found.issuer_days)} days"
        facts.append(("WARNING", f"{left}: `sms vm start` renews its certificates while it runs"))
    refused = found.api.get("refused")
    if isinstance(refused, list) and refused:
        names = ", ".join(one_line(str(name)) for name in refused[:5]) + (" and others" if len(refused) > 5 else "")
        facts.append(("WARNING", f"requests with certificates of {names} were refused: `sms node show NODE`"))
    if found.snapshots:
        newest = format_time(found.newest_snapshot)
        facts.append(("snapshots", f"{found.snapshots}, the newest of {newest}"))
    if found.snapshots_elsewhere:
        here = "" if found.snapshots else f"none on {found.host}; "
        facts.append(("snapshots", f"{here}{elsewhere(found.snapshots_elsewhere)}"))
    if found.silent:
        facts.append(("silent", f"{', '.join(found.silent)}: unreachable"))
    yield from (f"{name:10} {words}" for name, words in facts)
    yield from (f"  {name:12} {state}" for name, state in found.services.items())


def _state(found: VmStatus) -> str:
    if found.busy:
        where = f"on {found.host}, " if found.running else ""
        return f"{where}{'healthy' if found.healthy else 'not ready'}; a start, stop or migration is in progress"
    if found.running:
        return f"on {found.host}, {'healthy' if found.healthy else 'UNHEALTHY'}"
    return f"off; its disks are on {found.host}" if found.host else "was never started"
