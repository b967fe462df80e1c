"""``sms status``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_host, add_json, open_serving, verb
from appliance.cli.snapshot_facts import snapshot_facts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from appliance.host.base import Host
    from appliance.operations.context import Cluster
    from appliance.operations.engines.deploy_status import DeployStatus
    from appliance.operations.overlay.mirrored import MirrorState
    from appliance.operations.services.status import Status
    from appliance.operations.vm.deferred import Deferred

EXAMPLES = """\
  sms status              a table; exit status 4 if a service does not answer, or nodes cannot reach it
  sms status              on a machine that is not an admin host: of the host that has the lease
  sms status --json       the same for scripts
  sms status --watch      refresh every two seconds until Ctrl-C"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "status",
        "probe every service in its own protocol, and whether nodes reach them",
        "Probe every service in its own protocol, the container's networks, Slurm's nodes and the guard; show the\n"
        "image and its signer, the lease, the snapshots and the overlay's use.",
        EXAMPLES,
    )
    add_host(parser, serving=True)
    parser.add_argument("-w", "--watch", action="store_true", help="refresh every two seconds")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the status."""
    from appliance.cli.steps import waiting

    with waiting("query the services container"):
        cluster, host = open_serving(arguments)
        found = collect(cluster, host)
    from appliance.cli.screen import out, print_json

    if arguments.watch:
        return watch(found, lambda: collect(cluster, host))
    if arguments.json:
        print_json(found)
    else:
        out.print(found.view())
    return 0 if found.healthy else 4


@dataclass(frozen=True)
class Shown:
    """The status of a host, and of the services on an engine if one has them.

    ``gateway``: of what stays in the services container of the host meanwhile, if it runs there or should.
    """

    container: Status
    engine: DeployStatus | None = None
    gateway: Status | None = None

    @property
    def healthy(self) -> bool:
        """Whether all that is to run is healthy, and no service runs twice."""
        if self.engine is None:
            return self.container.healthy
        twice = {one.name for one in self.container.services if one.ok} & set(self.engine.record.services)
        rest = self.gateway is None or self.gateway.healthy
        return self.engine.healthy and rest and (not self.container.running or (self.container.healthy and not twice))

    def as_dict(self) -> dict[str, object]:
        """Return the value printed by --json."""
        gateway = {"gateway": self.gateway.as_dict()} if self.gateway else {}
        return self.container.as_dict() | ({"engine": asdict(self.engine)} if self.engine else {}) | gateway

    def view(self) -> RenderableType:
        """Return both for the terminal."""
        from rich.console import Group
        from rich.markup import escape

        from appliance.cli.engine_facts import status_lines

        shown = [self.container] if self.container.running or self.engine is None else []
        shown += [self.gateway] if self.gateway else []
        parts: list[RenderableType] = [escape(line) for line in status_lines(self.engine)] if self.engine else []
        for one in shown:
            parts += [*([""] if parts else []), view(one)]
        return Group(*parts)


def collect(cluster: Cluster, host: Host) -> Shown:
    """Collect the status of a host, and of an engine if one has the services."""
    from appliance.operations.deployed import read_deployed
    from appliance.operations.services.status import gateway_status, status

    with cluster.env.pool(2) as pool:
        deployed, gateway = pool.submit(read_deployed, cluster, host), pool.submit(gateway_status, cluster, host)
        container, engine = status(cluster, host), None
        record = deployed.result()
    if record and record.has_services:
        # What it needs takes as long to import as all else.
        from appliance.operations.engines.deploy_status import engine_status

        engine = engine_status(cluster, host, record)
    return Shown(container, engine, gateway.result())


def watch(found: Shown, query: Callable[[], Shown]) -> int:
    """Refresh the view until Ctrl-C; return the exit status of the last one."""
    from rich.live import Live

    from appliance.cli.screen import out

    try:
        while not out.is_terminal:
            out.print(found.view())
            time.sleep(2)
            found = query()
        with Live(found.view(), console=out, screen=out.is_terminal, auto_refresh=False) as live:
            while True:
                time.sleep(2)
                found = query()
                live.update(found.view(), refresh=True)
    except KeyboardInterrupt:
        return 0 if found.healthy else 4


def mirror_text(mirror: MirrorState) -> str:
    """Return a mirror in one line: its members and the time of the last scrub."""
    from rich.markup import escape

    from appliance.units import format_time

    colours = {"whole": "green", "sick": "red", "lost": "red"}
    members = ", ".join(
        f"{escape(member['file'])} [{colours[member['state']]}]{member['state']}[/]" for member in mirror.members
    )
    scrubbed = f"scrubbed {format_time(mirror.scrubbed)}" if mirror.scrubbed else "never scrubbed"
    return f"{members}; {scrubbed}"


def reach_facts(found: Status) -> Iterator[tuple[str, str]]:
    """Yield rows about the container's networks and the nodes, in rich markup."""
    from rich.markup import escape

    for network in found.networks:
        ways = f"by {', '.join(network.uplinks)}" if network.uplinks else "no uplink"
        name = f"macvlan on {network.bridge}" if network.attach == "macvlan" else f"{network.bridge} {ways}"
        text = escape(f"{name}; {network.answering} neighbours, {len(network.silent)} silent")
        yield f"{network.name} network", text + ("; [red]FAILED[/]" if network.problems else "")
    if found.nodes:
        view = found.nodes
        acknowledged = sum(node.acknowledged for node in view.silent)
        silent = f", {len(view.silent)} do not respond" if view.silent else ""
        expected = f" ({acknowledged} of them out of service)" if acknowledged else ""
        answers = [f"{probe.network} [{'green]ok' if probe.ok else 'red]FAILED'}[/]" for probe in found.probes]
        parts = ["not known" if view.problem else f"{view.count}{silent}{expected}", *answers]
        yield "nodes", "; ".join(parts)


def deferred_text(vm: Deferred) -> str:
    """Return whether the provisioning VM is up, and what is deferred while it is off."""
    return "is up" if vm.up else f"is off; these wait for it: {', '.join(vm.waits)}"


def view(found: Status) -> RenderableType:
    """Return the status as tables for the terminal."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    from appliance.units import format_time, format_uptime

    lease = found.lease
    held = f"held by {lease.holder} since {format_time(lease.since)}" if lease.holder else "free"
    if found.lease_problem:
        held = "not known"
    state = "[green]healthy[/]" if found.healthy else "[red]unhealthy[/]" if found.running else "[red]not running[/]"
    facts = [("services container", f"{escape(found.cluster)} on {escape(found.host)}: {state}")]
    if found.running:
        facts.append(("up for", format_uptime(found.uptime_s)))
        facts.append(
            (
                "image",
                escape(
                    f"sha256:{found.image.get('sha256', 'unknown')[:16]} key {found.image.get('key', 'unknown')[:12]}"
                ),
            )
        )
        facts.append(("signed by", escape(found.image.get("signer", "unknown"))))
        if found.overlay:
            used, size = found.overlay["used"], found.overlay["size"]
            facts.append(("overlay", f"{used >> 20} of {size >> 20} MiB used ({used * 100 // size}%)"))
    if found.mirror:
        facts.append(("mirror", mirror_text(found.mirror)))
    facts.append(("lease", held if found.lease_problem else f"{escape(held)}, generation {lease.generation}"))
    facts += [(name, escape(text)) for name, text in snapshot_facts(found.snapshots)]
    if found.vm_snapshots and (found.vm_snapshots.count or found.vm_snapshots.schedule):
        facts += [(name, escape(text)) for name, text in snapshot_facts(found.vm_snapshots, "VM ")]
    facts += reach_facts(found)
    if vm := found.provisioning:
        facts.append(("provisioning", escape(f"{vm.hostname} ({vm.address}) {deferred_text(vm)}")))
    head = Table.grid(padding=(0, 2))
    for name, text in facts:
        head.add_row(name, text)
    parts: list[RenderableType] = [head]
    if found.services:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for title in ("service", "state", "answer", "ms"):
            table.add_column(title, justify="right" if title == "ms" else "left", overflow="fold")
        for answer in found.services:
            mark = "[green]ok[/]" if answer.ok else "[red]FAILED[/]"
            table.add_row(answer.name, mark, escape(answer.detail), f"{answer.ms:.0f}")
        parts += ["", table]
    parts += [f"[yellow]warning:[/] {escape(warning)}" for warning in found.warnings]
    return Group(*parts)
