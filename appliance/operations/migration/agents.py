"""The agents of a migration: what they are asked to do, and how long a reply may take."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace

from appliance.errors import Busy
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.image.deliver import Image
from appliance.operations.migration.state import Inspected, Migration, MigrationResult
from appliance.operations.snapshots.list import store
from appliance.operations.under_way import explain_busy, mark_path
from appliance.plan.machine import inside_argv, inside_second, instance_name, start_argv, stop_argv, stop_timeout
from appliance.plan.migration.here import GATE
from appliance.plan.migration.move import reset_ports, stop_groups, stream_ports
from appliance.plan.services.jobs import ASK_NODES
from appliance.plan.services.network import INTERFACES, isolated_bridges, macvlan_requests
from appliance.progress import Progress, Silent
from appliance.shared.migration import MigrationRequest, SourceRequest, TargetRequest
from appliance.shared.overlay import frozen_mark
from appliance.tools.move import Endpoint

LONG_S = 3600.0
"""Timeout in seconds of requests that read a whole overlay, or end an instance."""
QUICK_S = 20.0
"""Timeout in seconds of requests that take only a moment."""


class NotesOnly(Silent):
    """Forwards only the lines that stay: the steps are shown by this process, not by the agents."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def report(self, text: str) -> None:
        self.progress.report(text)

    def warn(self, text: str) -> None:
        self.progress.warn(text)


def open_agents(cluster: Cluster, inspected: Inspected, image: Image, stack: ExitStack) -> Migration:
    """Start the agents on both hosts, which end with ``stack``; return the migration that has not begun yet.

    Each has the lock of its host, and has found it as planned. All runs begin with the source: one of several gets on.

    Raises:
        Busy: another run is at work on a host. Nothing was changed.
        Refused: another run has migrated, started or stopped the services container since it was planned.
    """
    source, target, notes_only = inspected.source, inspected.target, NotesOnly(cluster.env.progress)
    requests = target_request(cluster, inspected), source_request(cluster, inspected, image)
    on_source = stack.enter_context(cluster.env.agents.open_endpoint(source, "leave", requests[1], notes_only))
    _wait_until_ready(cluster, on_source)
    on_target = stack.enter_context(cluster.env.agents.open_endpoint(target, "arrive", requests[0], notes_only))
    _wait_until_ready(cluster, on_target)
    generation, shared = inspected.lease.generation + 1, inspected.plan.shared
    result = MigrationResult(source.name, target.name, image.path, generation, shared=shared)
    return Migration(cluster, inspected, image, on_source, on_target, result)


def _wait_until_ready(cluster: Cluster, endpoint: Endpoint) -> None:
    try:
        endpoint.receive("ready", patience_s=QUICK_S)
    except Busy as error:
        raise explain_busy(cluster, endpoint.host, error) from error


def source_request(cluster: Cluster, inspected: Inspected, image: Image) -> SourceRequest:
    """Return the request to the agent on the source."""
    here, hosts = inspected.here, (inspected.source, inspected.target)
    services = here.services if here else cluster.services
    loggers = [service for service in services if service.live and service.tails]
    common = _common_request(cluster, inspected, *hosts)
    if here:
        common = replace(common, bridges=here.bridges, addresses=here.addresses, macs=here.macs)
    return SourceRequest(
        **asdict(common),
        pid=inspected.pid,
        mac=common.macs[0],
        stop=(*([here.unknown] if here and here.unknown else []), *(tuple(group) for group in stop_groups(services))),
        stop_wait_s=stop_timeout(services),
        live=tuple(service.name for service in services if service.live),
        loggers=tuple(service.name for service in loggers),
        tails=tuple(path for service in services for path in service.tails),
        compress=not all(isinstance(host, Local) for host in hosts),
        frozen_mark=frozen_mark(str(cluster.places.overlay)),
        start_argv=start_argv(cluster.site, inspected.on_source, image.path),
        stream_ports=stream_ports(loggers),
        reset_ports=reset_ports(loggers),
        mirror=str(cluster.places.mirror) if inspected.plan.mirrored else "",
        second=here.second if here else None,
    )


def target_request(cluster: Cluster, inspected: Inspected) -> TargetRequest:
    """Return the request to the agent on the target."""
    common, here = _common_request(cluster, inspected, inspected.target, inspected.source), inspected.here
    inside = inside_argv(cluster.site, cluster.services)
    if here:
        inside, second = inside_second(here.second, cluster.services), here.second
        common = replace(common, overlay=second.overlay, mark=second.mark, lock=second.lock, instance=second.instance)
    return TargetRequest(
        **asdict(common),
        store=store(cluster),
        holds=tuple(isolated_bridges(cluster.site)),
        ask_nodes=tuple(ASK_NODES) if cluster.find_role("controller") else (),
        inside=inside,
        mirror=str(cluster.places.mirror) if inspected.plan.mirror else "",
        base=str(cluster.places.overlay) if here else "",
        gate=GATE if here else "",
        macvlan=macvlan_requests(cluster.site, inspected.target.name),
    )


def _common_request(cluster: Cluster, inspected: Inspected, host: Host, peer: Host) -> MigrationRequest:
    site, where = cluster.site, cluster.places
    networks = dict(zip(INTERFACES, (site.networks.provisioning, site.networks.public), strict=True))
    return MigrationRequest(
        cluster=site.cluster,
        host=host.name,
        peer=peer.name,
        verb=inspected.here.verb if inspected.here else "migrate",
        overlay=str(where.overlay),
        lease=str(where.lease),
        history=str(where.history),
        mark=mark_path(cluster),
        lock=str(where.lock),
        instance=instance_name(site),
        generation=inspected.lease.generation,
        bridges={name: network.uplink(host.name) for name, network in networks.items()},
        addresses={name: str(network.address.ip) for name, network in networks.items()},
        macs=tuple(network.mac for network in networks.values()),
        shared=inspected.plan.shared,
        stop_argv=stop_argv(site, stop_timeout(cluster.services)),
    )
