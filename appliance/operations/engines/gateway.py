"""What runs on in the services container while an engine has the other services: NAT, time and so on.

It is a cluster of its own (``Cluster.of_gateway``), with a lease that decides which admin host runs it. It never has a
service that the engine has, by the record of the deployment and by what the site file gives to the engine now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

from appliance.engines.deploy import Bundle
from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.engines.bundles import render_bundle, units_of
from appliance.operations.engines.deployed import find_deployed
from appliance.operations.hosts.guarded import is_guarded, start_guard, stop_guard
from appliance.operations.lease import Leases, query_lease
from appliance.operations.preflight import find_instance
from appliance.operations.services.boot import install_unit
from appliance.operations.services.start import BOOT_PATIENCE_S, Started, StartOptions, rehearse_start, start
from appliance.operations.services.stop import stop_gateway
from appliance.plan.migration.lease import engine_error, find_holder, find_newer, find_newest, find_released
from appliance.plan.services.controllers import KUBERNETES
from appliance.plan.services.gateway import find_staying


def serving_engine(cluster: Cluster, host: Host, *, boot: bool = False, adopt: bool = True) -> str:
    """Return the engine that has the lease; empty if none has. What ``host`` had not heard of is written there before.

    Args:
        boot: wait for the other admin hosts, which may have switched on just now, too.
        adopt: False: write nothing.
    """
    if not (mine := query_lease(host, cluster)).engine:
        return ""
    leases = Leases(host, cluster, tolerant=True)
    views = leases.query(patience_s=BOOT_PATIENCE_S if boot else 0)
    newer = find_newer(host.name, views) or find_released(host.name, views)
    if newer and adopt:
        leases.adopt(newer)
        return query_lease(host, cluster).engine
    return (newer or mine).engine


def find_gateway(cluster: Cluster, host: Host, engine: str) -> Cluster:
    """Return what stays while ``engine`` has the lease of the admin hosts.

    Raises:
        Refused: the engine does not have it any more, what it has is not recorded, or nothing stays.
    """
    views = Leases(host, cluster, tolerant=True).query()
    lease = find_holder(views)  # not that of this host's file, which may be older than one that was released
    if lease is None or lease.engine != engine:
        newest = find_newest(views)
        raise Refused(
            f"{lease.holder if lease else 'no host'} has the lease by now, not {engine}",
            hint="see `sms status`" + (f"; {newest} has the newest state" if newest else ""),
        )
    record = find_deployed(cluster, host)
    if record is None or record.engine != engine or not record.services:
        raise engine_error(lease)
    moved = {*record.services, *units_of(render_bundle(cluster, engine))}
    services = find_staying(cluster.services, moved)
    if not services:
        raise engine_error(lease)
    return cluster.of_gateway(services)


def start_gateway(cluster: Cluster, host: Host, engine: str, options: StartOptions) -> tuple[Cluster, Started | None]:
    """Start what stays on ``host``, with its guard and its unit; return it, and None as ``start``.

    Raises:
        Refused: another admin host has them; or as ``find_gateway`` and ``start``.
    """
    part = cluster.of_gateway()
    if options.boot and query_lease(host, part).holder != host.name:
        return part, None
    part = find_gateway(cluster, host, engine)
    holder = find_holder(Leases(host, part, tolerant=True).query(), without=options.fenced)
    if holder and holder.holder != host.name:
        raise Refused(
            f"{', '.join(one.name for one in part.services)} stay on {holder.holder}, which has their lease",
            hint=f"`sms stop --host {holder.holder}` stops them there; if it has failed: `sms failover {host.name}`",
        )
    with _guarded(cluster, host) if options.unit else nullcontext():
        # A lease of it that is lost does no harm: no state is newer than another one.
        started = start(part, host, replace(options, unit=False, without_remote=True))
        if started and query_lease(host, cluster).engine != engine:  # all services began to start here meanwhile
            stop_gateway(cluster, host)
            raise SmsError(f"{engine} has lost the lease meanwhile: nothing stays any more", hint="see `sms status`")
    if started and options.unit:
        install_unit(cluster, host)
    return part, started


@contextmanager
def _guarded(cluster: Cluster, host: Host) -> Iterator[None]:
    """Start the guard first: what a kill within the context leaves running has one. It ends again if nothing runs."""
    before = is_guarded(cluster, host)
    start_guard(cluster, host)
    try:
        yield
    finally:
        with suppress(SmsError):
            if not before and not any(find_instance(one, host) for one in (cluster, cluster.of_gateway())):
                stop_guard(cluster, host)


def rehearse_gateway(cluster: Cluster, host: Host, engine: str, options: StartOptions) -> list[str]:
    """Return the commands that ``start_gateway`` would run, after all checks of it.

    Raises:
        As ``start_gateway``.
    """
    part = find_gateway(cluster, host, engine)
    return rehearse_start(part, host, replace(options, without_remote=True))


def keep_gateway(cluster: Cluster, host: Host, bundle: Bundle) -> str:
    """Start what stays where it ran last, else on ``host``; again if the site file changes it. Return why it does not.

    What stays no more is stopped. The engine has the lease, and its deployment is recorded.

    Raises:
        SmsError: it could not be stopped, and the engine is to get its address.
    """
    try:
        lease = query_lease(host, cluster.of_gateway())
        known = {one.name for one in cluster.site.admin_hosts}
        there = cluster.host(lease.holder) if lease.holder in known else host
        if not find_staying(cluster.services, units_of(bundle)):
            if stop_gateway(cluster, there):
                cluster.env.progress.report(
                    f"note: nothing stays in the services container: it was stopped on {there.name}"
                )
            return ""
        cluster.env.progress.report(f"note: what only the services container runs stays on {there.name}")
        options = StartOptions(keep=True)  # there is nothing to go back to: a part of it is better than none
        part, started = start_gateway(cluster, there, bundle.engine, options)
        if started and started.stale:
            stop_gateway(cluster, there)
            part, started = start_gateway(cluster, there, bundle.engine, options)
    except SmsError as error:
        if bundle.engine == KUBERNETES and cluster.site.engines.kubernetes.network == "attached":
            raise SmsError(
                f"what stayed in the services container may have the address that slurmctld's pod is to get: "
                f"{error.message}",
                hint="`sms stop --host HOST` stops it; then run this again",
            ) from error
        return error.message
    missing = started.missing(part.services) if started else []
    return f"{', '.join(missing)} does not answer" if missing else ""


def missing_gateway(cluster: Cluster, host: Host, bundle: Bundle) -> list[str]:
    """Return a warning if no admin host has the lease of what stays, by the file of this one."""
    names = [one.name for one in find_staying(cluster.services, units_of(bundle))]
    if not names or query_lease(host, cluster.of_gateway()).holder:
        return []
    return [f"{', '.join(names)} do not run: `sms start` starts them in the services container of an admin host"]


@dataclass(frozen=True)
class Stays:
    """What runs on in the services container of an admin host; both are empty if nothing does."""

    host: str = ""
    services: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """It as text for the user."""
        if not self.services:
            return []
        stop = f"`sms stop --host {self.host}` stops them"
        return [f"in the services container on {self.host} stay: {', '.join(self.services)}; {stop}"]


def find_stays(cluster: Cluster, host: Host, bundle: Bundle) -> Stays:
    """Return what stays while an engine has ``bundle``, and on which host, by the lease file of ``host``."""
    holder = query_lease(host, cluster.of_gateway()).holder
    names = tuple(one.name for one in find_staying(cluster.services, units_of(bundle)))
    return Stays(holder, names) if holder and names else Stays()


def find_silent(cluster: Cluster, host: Host) -> str:
    """Return the other admin host that has the lease of what stays and does not answer; empty if there is none."""
    part = cluster.of_gateway()
    leases = Leases(host, part, tolerant=True)
    holder = find_holder(leases.query())
    return str(holder.holder) if holder and holder.holder in leases.unreachable else ""
