"""``sms stop``: every daemon ends cleanly, then the lease is let go."""

from __future__ import annotations

import time
from dataclasses import dataclass

from appliance.errors import Refused, SmsError
from appliance.flow.context import Cluster
from appliance.flow.lease import look_at_lease, release_lease
from appliance.host.base import CommandError, Host
from appliance.plan.machine import STOP_TIMEOUT_S, instance_name, stop_argv
from appliance.progress import Progress
from appliance.tools import apptainer, ext3


@dataclass(frozen=True)
class Stopped:
    """What a stop found and did; ``seconds`` until every daemon had ended."""

    host: str
    ran: bool
    seconds: float
    lease_released: bool


def stop(cluster: Cluster, host: Host, progress: Progress, *, keep_lease: bool = False) -> Stopped:
    """Stop the appliance on ``host``.

    Args:
        keep_lease: the host goes down and is to start it again when it is back.

    Raises:
        Refused: another sms is at work there.
        SmsError: it would not end.
    """
    try:
        with host.lock(str(cluster.places.lock)):
            return _stop(cluster, host, progress, keep_lease)
    except CommandError as error:
        if error.result.status == 75:
            raise Refused(f"another sms is at work on {host.name}", hint="wait for it, then run this again") from error
        raise


def _stop(cluster: Cluster, host: Host, progress: Progress, keep_lease: bool) -> Stopped:
    began = time.monotonic()
    running = apptainer.find_instance(host, instance_name(cluster.site))
    if running:
        with progress.step("stop the services"):
            host.run(*stop_argv(cluster.site), timeout=STOP_TIMEOUT_S + 30)
        _wait_for_overlay(cluster, host)
    took = time.monotonic() - began
    held = look_at_lease(host, cluster).holder == host.name
    if held and not keep_lease:
        release_lease(host, cluster)
    return Stopped(host.name, running is not None, round(took, 3), held and not keep_lease)


def _wait_for_overlay(cluster: Cluster, host: Host, timeout_s: float = 20) -> None:
    """The overlay is free once its loop device is gone; only then may the lease be let go."""
    deadline = time.monotonic() + timeout_s
    while users := ext3.users_of(host, str(cluster.places.overlay)):
        if time.monotonic() > deadline:
            raise SmsError(
                f"the appliance ended, but {', '.join(users)} still holds its overlay",
                hint="the lease is kept; find who uses it (`losetup -l`, `fuser`), then run this again",
            )
        time.sleep(0.1)
