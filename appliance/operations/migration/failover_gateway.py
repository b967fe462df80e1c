"""Part of ``sms failover``: an engine has the services, and the admin host with those that stay has failed."""

from __future__ import annotations

from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.engines.gateway import find_gateway, find_silent, start_gateway
from appliance.operations.history import note
from appliance.operations.lease import Leases, query_lease
from appliance.operations.migration.failover import (
    VERB,
    FailoverOptions,
    FailoverResult,
    find_admin,
    refuse_alive,
)
from appliance.operations.migration.fence import check_fence, describe_fence, fence
from appliance.operations.services.start import StartOptions
from appliance.operations.services.unfinished import last_sign
from appliance.plan.migration.lease import GENERATION_BUMP


def find_dead_gateway(cluster: Cluster, host: Host, options: FailoverOptions) -> str:
    """Return the admin host that has what stays and does not answer; empty if a failover is one of all services.

    That the user has fenced says nothing about the engine then, also where that does not answer: with the state of a
    snapshot beside it there would be two controllers. If its state is lost as well, a snapshot is named, or the next
    failover, which finds what stays alive, restores one.
    """
    if options.snapshot or options.shared or not query_lease(host, cluster).engine:
        return ""
    return find_silent(cluster, host)


def plan_gateway(cluster: Cluster, host: Host, old: str, options: FailoverOptions) -> list[str]:
    """Return the steps as text, after the checks.

    Raises:
        Refused: the failed host is not known to be off, or nothing stays.
    """
    admin, part = find_admin(cluster, old), find_gateway(cluster, host, query_lease(host, cluster).engine)
    if options.fenced:
        leases = Leases(host, part, tolerant=True)
        leases.query()
        refuse_alive(leases, [old])
    else:
        check_fence(admin)
    how = "assumed to be off (--i-have-fenced)" if options.fenced else describe_fence(admin)
    return [f"{old}: {how}", f"start {', '.join(one.name for one in part.services)} on {host.name}"]


def failover_gateway(
    cluster: Cluster, host: Host, old: str, options: FailoverOptions
) -> tuple[Cluster, FailoverResult]:
    """Fence the failed host, and start what stays on ``host``; return that, too. Run it again after an interruption.

    Raises:
        Refused: as ``plan_gateway``; nothing was changed.
        SmsError: a later step failed.
    """
    began, engine = cluster.env.clock.monotonic(), query_lease(host, cluster).engine
    plan_gateway(cluster, host, old, options)
    alive = last_sign(cluster.of_gateway(), host, (old,))
    if not options.fenced:
        with cluster.env.progress.step(f"fence {old}"):
            fence(find_admin(cluster, old), cluster.env.hosts.this)
    start = StartOptions(options.image, options.wait_s, keep=True, fenced=(old,), generation_bump=GENERATION_BUMP)
    part, started = start_gateway(cluster, host, engine, start)
    assert started  # None is for a start at boot
    note(cluster, host, VERB, "done for what stays", old=[old], generation=started.generation)
    result = FailoverResult(host.name, [old], started.generation, False, alive=alive, services=started.services)
    result.seconds = round(cluster.env.clock.monotonic() - began, 1)
    return part, result
