"""``sms stop``: stops every daemon cleanly, then releases the lease."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.env import Clock
from appliance.operations.history import note
from appliance.operations.hosts.guarded import stop_guard
from appliance.operations.image.deliver import find_refusal
from appliance.operations.lease import Leases, query_lease, release_lease
from appliance.operations.overlay.frozen import end_lost_freeze
from appliance.operations.overlay.mirrored import close_mirror
from appliance.operations.overlay.overlay import second_overlay
from appliance.operations.preflight import check_programs, find_instance, find_second, lock_host, running_gateway
from appliance.operations.services.effect import find_dropped
from appliance.operations.services.present import STOP_QUERY_S, describe_jobs
from appliance.plan.machine import stop_argv, stop_timeout
from appliance.plan.services.network import isolated_bridges
from appliance.shared.lease import Lease
from appliance.tools import ext3
from appliance.tools.ports import remove_bridges


@dataclass(frozen=True)
class Stopped:
    """What a stop found and did; ``seconds`` until every daemon had stopped; ``holder``: who has the lease now.

    ``jobs``: how many ran on and waited, as text; empty without a controller. ``by_hand``: changes by ``scontrol
    update`` that the next start drops.
    """

    host: str
    ran: bool
    seconds: float
    lease_released: bool
    holder: str | None = None
    jobs: str = ""
    by_hand: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        """The engine that has the lease; empty if none has."""
        return Lease("", holder=self.holder).engine


@dataclass(frozen=True)
class StopPlan:
    """What a stop would do: the services that run, in the order in which they would be stopped, and the lease.

    ``jobs``, ``by_hand``: as of ``Stopped``.
    """

    host: str
    services: tuple[str, ...]
    lease_released: bool
    jobs: str = ""
    by_hand: tuple[str, ...] = ()


def plan_stop(cluster: Cluster, host: Host, *, keep_lease: bool = False) -> StopPlan:
    """Return what ``stop`` would do, and warn as it does; change nothing.

    Raises:
        Refused: a program that a stop needs is missing.
    """
    check_programs(host)
    if not keep_lease:
        _warn(cluster, host)
    running = cluster if find_instance(cluster, host) else running_gateway(cluster, host)
    names = [service.name for service in reversed(running.services)] if running else []
    held = query_lease(host, cluster).holder == host.name
    costs = _describe(running, host, record=False) if running else ("", ())
    return StopPlan(host.name, tuple(names), held and not keep_lease, *costs)


def _describe(cluster: Cluster, host: Host, *, record: bool) -> tuple[str, tuple[str, ...]]:
    """Return what the outage costs: jobs as text, and what the next start drops."""
    jobs, present = describe_jobs(cluster, host, record=record)
    return jobs, find_dropped(cluster, host, present, STOP_QUERY_S) if present else ()


def stop(cluster: Cluster, host: Host, *, keep_lease: bool = False) -> Stopped:
    """Stop the services container on ``host``.

    Args:
        keep_lease: the host shuts down and shall start it again at boot.

    Raises:
        Refused: another sms is at work there.
        SmsError: it did not stop, or had to be killed; the lease is kept while its overlay is in use.
    """
    check_programs(host)
    if not keep_lease:
        _warn(cluster, host)
    with lock_host(cluster, host):
        began = cluster.env.clock.monotonic()
        end_lost_freeze(cluster, host)  # what waits for the end of one cannot be stopped
        leases = Leases(host, cluster)
        with cluster.env.pool(1) as pool:
            recorded = pool.submit(_describe, cluster, host, record=True) if find_instance(cluster, host) else None
            stop_guard(cluster, host)  # meanwhile
            costs = recorded.result() if recorded else ("", ())
        with cluster.env.progress.step("stop the services") as step, cluster.env.pool(1) as pool:
            query = pool.submit(leases.query) if not keep_lease else None  # while they stop
            ran = take_down(cluster, host)
            ran |= stop_gateway(cluster, host, keep_lease=keep_lease)
            took = cluster.env.clock.monotonic() - began
            step.detail("" if ran else "not running")
        holder = _query_holder(cluster, host, ran=ran)
        held = holder == host.name
        if held and not keep_lease:
            release_lease(host, cluster, leases=leases if query and not query.exception() else None)
        if ran:
            note(cluster, host, "stop", "stopped", seconds=round(took, 3), lease_released=held and not keep_lease)
    limit = stop_timeout(cluster.services)
    if took >= limit:
        raise SmsError(
            f"the services did not stop within {limit} s and were killed",
            hint="`sms logs supervisor` shows which; the next start checks the overlay",
        )
    released = held and not keep_lease
    return Stopped(host.name, ran, round(took, 3), released, None if released else holder, *costs)


def stop_gateway(cluster: Cluster, host: Host, *, keep_lease: bool = False) -> bool:
    """Stop what runs on in the services container while an engine has the other services; return whether it ran.

    Raises:
        Refused: another sms is at work there.
        SmsError: its overlay is still in use; its lease is kept.
    """
    part = cluster.of_gateway()
    if not host.works("test", "-e", str(part.places.lease)):
        return False  # it never ran
    with lock_host(part, host):
        ran = take_down(part, host)
        if not keep_lease:
            release_lease(host, part)
        if ran:
            note(cluster, host, "stop", "stopped what stays", lease_released=not keep_lease)
    return ran


def _query_holder(cluster: Cluster, host: Host, *, ran: bool) -> str | None:
    """Return the holder of the lease after the services have stopped.

    Raises:
        SmsError: the lease file cannot be read.
    """
    try:
        return query_lease(host, cluster).holder
    except Refused as error:
        if not ran:
            raise
        raise SmsError(f"the services have stopped; {error.message}", hint=error.hint) from error


def _warn(cluster: Cluster, host: Host) -> None:
    """Report before a stop that a start would be refused; a start takes the image of this machine, if it has one."""
    current = cluster.places.current
    if not find_instance(cluster, host):
        return
    if refusal := find_refusal(Local() if Path(current).is_file() else host, str(current)):
        cluster.env.progress.report(f"warning: {refusal}; a start after this stop is refused")


def take_down(cluster: Cluster, host: Host) -> bool:
    """Stop the instance if one runs, wait until the overlay is closed, and close its mirror; return whether one ran.

    Raises:
        SmsError: the overlay is still in use.
    """
    running = find_instance(cluster, host)
    limit = stop_timeout(cluster.services)
    if running:
        host.run(*stop_argv(cluster.site, limit), timeout=limit + 30)
    if second := find_second(cluster, host):  # it may serve
        host.run(*stop_argv(cluster.site, limit, name=second), timeout=limit + 30)
        _wait_for_overlay(host, second_overlay(cluster), cluster.env.clock)
    # A host that neither ran it nor holds the lease must not wait for a shared overlay.
    if running or query_lease(host, cluster).holder == host.name:
        _wait_for_overlay(host, str(cluster.places.overlay), cluster.env.clock)
    close_mirror(cluster, host)
    remove_bridges(host, isolated_bridges(cluster.site))  # of a start that failed or was killed
    return running is not None


def _wait_for_overlay(host: Host, overlay: str, clock: Clock, timeout_s: float = 20) -> None:
    """Wait until the loop device of the overlay is gone; only then may the lease be released."""
    deadline = clock.monotonic() + timeout_s
    while users := ext3.users_of(host, overlay):
        if clock.monotonic() > deadline:
            raise SmsError(
                f"the services container has stopped, but its overlay is still in use by {', '.join(users)}",
                hint="the lease is kept; find what uses it (`losetup -l`, `fuser`), then run this again",
            )
        clock.sleep(0.1)
