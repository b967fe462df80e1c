"""What `sms-run --jobsync` needs to keep the order of starts and stops on one node, from the catalogue alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from appliance.catalog import Service
from appliance.plan.render import Templates
from appliance.plan.services.supervisor import services_json

PROGRAMS = (
    *(
        "sms-run",
        "sms-probe",
        "smsfiles.py",
        "smslease.py",
        "smsrt.py",
        "smsserve.py",
        "smsstart.py",
        "smssync.py",
        "smstask.py",
    ),
)
"""Files of definitions/runtime that a task outside of the image needs, in one folder anywhere."""


def task_json(services: Sequence[Service], templates: Templates) -> dict[str, object]:
    """Return the file of services of an engine: that of the services container, and of each service `jobsync`.

    Its fields: ``holds``, the services that it uses while it runs (`needs`; those of `after` are only waited for before
    its start); ``signal`` and ``stop_s`` of its own stop; ``release_s``, the limit of the wait for its users before
    that; ``ports``, TCP ports that it listens on when it is ready; ``lease``, the folder of which it is the one writer;
    ``outlived``, whether its processes run on when it stops.

    Args:
        services: those of one workload in starting order, with all that they need, wherever that runs.
    """
    names = {service.name for service in services}
    limits = stop_limits(services)
    document = services_json(services, templates)
    tasks = document["services"]
    assert isinstance(tasks, dict)
    for service in services:
        tasks[service.name]["jobsync"] = {
            "holds": [need for need in service.needs if need in names],
            "signal": service.stop_signal,
            "stop_s": service.stop_wait_s,
            "release_s": limits[service.name] - service.stop_wait_s,
            "lease": service.engines.lease,
            "outlived": service.engines.outlived,
            "ports": [int(port.partition("/")[2]) for port in service.ports if port.startswith("tcp/")],
        }
    return document


def stop_limits(services: Sequence[Service]) -> Mapping[str, int]:
    """Return by service the seconds after which a task that is to stop has ended: its users first, then itself.

    An engine that kills it sooner (kill_timeout, terminationGracePeriodSeconds) breaks that order.

    Args:
        services: in starting order.
    """
    limits: dict[str, int] = {}
    for service in reversed(services):
        users = [limits[user.name] for user in services if service.name in user.needs]
        limits[service.name] = service.stop_wait_s + max(users, default=0)
    return limits
