"""``sms logs``, ``exec`` and ``shell``: commands in the running services container, and logs from its overlay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from appliance.errors import ConfigError, Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.deployed import read_deployed
from appliance.operations.lease import Leases, query_lease
from appliance.operations.overlay.frozen import end_lost_freeze
from appliance.operations.overlay.mirrored import is_linked
from appliance.operations.overlay.overlay import keep_stopped
from appliance.operations.preflight import find_instance, running_gateway
from appliance.plan.machine import inside_argv
from appliance.plan.migration.lease import engine_error, find_newer
from appliance.plan.services.gateway import find_staying
from appliance.progress import Silent
from appliance.tools import ext3

LOGS = "/var/log/sms"
LOG_BYTES = 256 << 20
"""The largest log of a stopped container that is read."""
MESSAGES = "messages"
OTHER_LOGS = {MESSAGES: "/var/log/messages", "supervisor": f"{LOGS}/supervisord.log"}
"""Logs that are not of one service: the messages of all nodes, and that of the supervisor."""


def find_here(cluster: Cluster, host: Host) -> Cluster:
    """Return what the services container of a host has, also if it is stopped: all, or what stays beside an engine.

    Raises:
        SmsError: the record of the deployment, or a lease, cannot be read.
    """
    if find_instance(cluster, host):
        return cluster
    if part := running_gateway(cluster, host):
        return part
    record = read_deployed(cluster, host) if query_lease(host, cluster).engine else None
    stays = find_staying(cluster.services, record.services) if record else ()
    return cluster.of_gateway(stays) if stays else cluster


def refuse_elsewhere(cluster: Cluster, here: Cluster, host: Host, name: str) -> None:
    """Check that a service is not one that an engine has.

    Args:
        here: of ``find_here``.

    Raises:
        Refused: it is.
    """
    has, all_services = ({service.name for service in one.services} for one in (here, cluster))
    if name in all_services - has:
        raise Refused(
            f"{name} is not in the services container of {host.name}: "
            f"{query_lease(host, cluster).engine or 'an engine'} has it",
            hint="`sms deploy status` shows where; its log: `nomad alloc logs`, or `kubectl logs`",
        )


def need_running(cluster: Cluster, host: Host) -> None:
    """Refuse unless an instance runs on the host, and can write.

    Raises:
        Refused: no instance runs there.
    """
    end_lost_freeze(cluster, host)
    if not find_instance(cluster, host):
        lease = query_lease(host, cluster)
        if lease.engine:
            raise engine_error(lease)
        holder = lease.holder
        elsewhere = holder not in (None, host.name)
        raise Refused(
            f"the services container does not run on {host.name}" + f", but on {holder}" * elsewhere,
            hint=f"--host {holder}" if elsewhere else f"sms start --host {host.name}",
        )


def refuse_superseded(cluster: Cluster, host: Host) -> None:
    """Check that no other host has taken over, by the lease files of all that answer.

    Raises:
        Refused: one has; what runs on ``host`` is stopped by its guard, or has to be.
    """
    newer = find_newer(host.name, Leases(host, cluster, tolerant=True).query())
    if newer:
        raise Refused(
            f"the services container runs on {host.name}, but {newer.holder} holds the lease",
            hint=f"two hosts must never run it: sms stop --host {host.name}",
        )


def run_inside(cluster: Cluster, host: Host, argv: tuple[str, ...]) -> int:
    """Run a command in the services container on the user's terminal; return its exit status."""
    here = find_here(cluster, host)
    need_running(here, host)
    return host.interact(*inside_argv(here.site, here.services, *argv))


def log_path(cluster: Cluster, name: str) -> str:
    """Return the path of a log in the container.

    Raises:
        ConfigError: there is no such log.
    """
    names = [service.name for service in cluster.services]
    if name in OTHER_LOGS:
        return OTHER_LOGS[name]
    if name not in names:
        raise ConfigError(f"no log {name}", hint=f"available logs: {', '.join([*names, *OTHER_LOGS])}")
    return f"{LOGS}/{name}.log"


def show_log(
    cluster: Cluster, host: Host, name: str, *, lines: int, follow: bool, write: Callable[[bytes], None]
) -> None:
    """Pass the end of a log to ``write`` as it is read, also when the services container does not run.

    Raises:
        ConfigError: there is no such log.
        Refused: nothing to read it from, or an engine has the service.
        CommandError: it cannot be read.
    """
    path, here = log_path(cluster, name), find_here(cluster, host)
    logging = cluster.find_role("logging")
    refuse_elsewhere(cluster, here, host, logging.name if logging and name == MESSAGES else name)
    cluster = here
    if find_instance(cluster, host):
        tail = ("tail", "-n", str(lines), *(("-F",) if follow else ()), path)
        # While it follows a log, what tail reports is shown at once, such as that the log was rotated.
        report = (lambda line: write(f"{line}\n".encode())) if follow else None
        with host.stream(*inside_argv(cluster.site, cluster.services, *tail), on_line=report) as stream:
            while data := stream.read():
                write(data)
            stream.result()
        return
    if follow:
        raise Refused(
            f"the services container does not run on {host.name}", hint="omit --follow to show the log in its overlay"
        )
    overlay = str(cluster.places.overlay)
    with keep_stopped(cluster.showing(Silent()), host) if is_linked(cluster, host) else nullcontext():
        if not host.works("test", "-f", overlay):
            raise Refused(
                f"there is no overlay {overlay} on {host.name}",
                hint="the services container has never run on this host",
            )
        data = ext3.read_inside(host, overlay, f"/upper{path}", limit=LOG_BYTES)
    write(b"".join(data.splitlines(keepends=True)[-lines:]))
