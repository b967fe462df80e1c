"""``sms restart``: single services of the running container, one after the other."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from appliance.catalog import Service
from appliance.errors import ConfigError, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import note
from appliance.operations.preflight import lock_host
from appliance.operations.services.inside import find_here, need_running, refuse_elsewhere, refuse_superseded
from appliance.plan.machine import inside_argv, probe_argv
from appliance.plan.services.probes import ProbeAnswer
from appliance.text import one_line
from appliance.tools.scripts import script_argv

RELOAD_S = 60
"""How long a reload may take, in seconds."""


@dataclass(frozen=True)
class Restarted:
    """A service that was restarted; ``seconds`` until it answered again.

    ``detail``: its answer, or why there is none.
    """

    service: str
    ok: bool
    seconds: float
    detail: str


@dataclass(frozen=True)
class Restart:
    """A service to restart, and what its users notice meanwhile, as the catalogue has it."""

    service: str
    tolerated_s: float
    why: str


def plan_restart(cluster: Cluster, host: Host, names: Sequence[str]) -> list[Restart]:
    """Return what a restart of these services means, in the order of the restart; changes nothing.

    Raises:
        ConfigError: the site has no such service.
        Refused: the services container does not run there, another host has taken over, or an engine has a service.
    """
    here, chosen = _choose(cluster, host, names)
    need_running(here, host)
    refuse_superseded(here, host)
    return [Restart(one.name, one.outage.budget_s, one.outage.why) for one in chosen]


def restart(cluster: Cluster, host: Host, names: Sequence[str], *, wait_s: float) -> Iterator[Restarted]:
    """Restart services in the order of their start, and wait for each; the others keep running.

    Args:
        wait_s: how long each may take to answer.

    Raises:
        ConfigError: the site has no such service.
        Refused: as for ``plan_restart``, or another sms is at work there.
        SmsError: the supervisor did not restart one; those after it were not restarted.
    """
    here, chosen = _choose(cluster, host, names)
    with lock_host(here, host):
        need_running(here, host)
        refuse_superseded(here, host)
        for service in chosen:
            with cluster.env.progress.step(f"restart {service.name}") as step:
                done = restart_service(here, host, service, wait_s)
                step.detail(done.detail)
            note(cluster, host, "restart", "restarted", service=service.name, ok=done.ok, seconds=done.seconds)
            yield done


def _choose(cluster: Cluster, host: Host, names: Sequence[str]) -> tuple[Cluster, list[Service]]:
    """Return what the services container of the host has, and of it these services."""
    known = [service.name for service in cluster.services]
    if missing := [name for name in names if name not in known]:
        raise ConfigError(f"the site has no service {missing[0][:70]!r}", hint=f"it has {', '.join(known)}")
    here = find_here(cluster, host)
    for name in names:
        refuse_elsewhere(cluster, here, host, name)
    return here, [service for service in here.services if service.name in names]


def restart_service(cluster: Cluster, host: Host, service: Service, wait_s: float) -> Restarted:
    """Restart a service and wait until it answers. The caller has the host's lock.

    Raises:
        SmsError: the supervisor did not restart it.
    """
    began, limit = cluster.env.clock.monotonic(), service.stop_wait_s + 30
    argv = inside_argv(cluster.site, cluster.services, *script_argv("restart-service", service.name))
    result = host.run(*argv, ok=None, timeout=limit)
    pids = result.text.split()
    if len(pids) != 2 or pids[0] == pids[1] or not pids[1].isdecimal() or int(pids[1]) == 0:
        output = one_line((result.stdout + result.stderr).decode(errors="replace"), 200)
        raise SmsError(
            f"the supervisor did not restart {service.name}: {output}", hint="`sms logs supervisor` shows what it did"
        )
    ok, detail = wait_for_answer(cluster, host, service, wait_s)
    return Restarted(service.name, ok, round(cluster.env.clock.monotonic() - began, 3), detail)


def wait_for_answer(cluster: Cluster, host: Host, service: Service, wait_s: float) -> tuple[bool, str]:
    """Wait until a service answers, ``wait_s`` seconds at most; return whether it does, and its answer or why not.

    Raises:
        SmsError: the probe failed.
    """
    words = ("--wait", f"{wait_s:g}", service.name)
    probe = probe_argv(cluster.site, cluster.services, *words, confined=True)
    answer: ProbeAnswer = host.run(*probe, ok=(0, 4), timeout=wait_s + 30).parse(ProbeAnswer, last=True)
    return answer.ok, one_line(answer.detail, 200)


def reload_service(cluster: Cluster, host: Host, service: Service, wait_s: float) -> str:
    """Let a service read its files again, and wait until it answers; return its answer. One without a reload does not.

    Raises:
        SmsError: it does not answer.
    """
    for argv in service.reload:
        result = host.run(*inside_argv(cluster.site, cluster.services, *argv), ok=None, timeout=RELOAD_S)
        if result.status:
            output = one_line((result.stderr or result.shown).decode(errors="replace"), 300)
            raise SmsError(f"{service.name}: {shlex.join(argv)}: {output}", hint=f"sms logs {service.name}")
    if not service.reload:
        return ""
    ok, detail = wait_for_answer(cluster, host, service, wait_s)
    if not ok:
        raise no_answer(service, detail)
    return detail


def tell_nodes(cluster: Cluster, host: Host) -> None:
    """Let nodes fetch the files of a controller that was started with other ones: by themselves they keep the old ones.

    Where that fails, it is only reported: the services run.
    """
    if not (controller := cluster.find_role("controller")):
        return
    try:
        reload_service(cluster, host, controller, RELOAD_S)
    except SmsError as error:
        cluster.env.progress.warn(
            f"nodes may have the old files of {controller.name}: {error.message}; "
            f"`sms exec -- {shlex.join(controller.reload[0])}` repeats it"
        )


def no_answer(service: Service, detail: str) -> SmsError:
    """Return the error of a service that does not answer."""
    return SmsError(f"{service.name} does not answer: {detail}", hint=f"sms logs {service.name}")
