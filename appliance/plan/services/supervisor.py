"""Configuration of supervisord and sms-run, which start and restart services inside the container."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.catalog import Service
from appliance.plan.render import Templates
from appliance.plan.services.confinement import NUMBERS

HEADER = """\
; Written by sms. Every program waits itself for what it needs (sms-run), so that a service that
; is restarted waits as well.
[supervisord]
nodaemon=true
user=root
logfile=/var/log/sms/supervisord.log
logfile_maxbytes=10MB
logfile_backups=2
pidfile=/run/sms/supervisord.pid
childlogdir=/var/log/sms
identifier=sms

[unix_http_server]
file=/run/sms/supervisor.sock
chmod=0700

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl=unix:///run/sms/supervisor.sock
"""

PROGRAM = """
[program:{name}]
command=/opt/sms/bin/sms-run {name}
priority={priority}
autorestart=true
; sms-run waits longer after each failure; the supervisor itself never gives up.
startsecs=0
stopsignal={stop_signal}
stopwaitsecs={stop_wait}
killasgroup=true
redirect_stderr=true
stdout_logfile=/var/log/sms/{name}.log
stdout_logfile_maxbytes={log_bytes}
stdout_logfile_backups=3
"""
LOG_FILES = 4
LARGEST_LOG = 10 << 20


def supervisor_conf(services: Sequence[Service], overlay_mb: int) -> str:
    """Return supervisord.conf for services in starting order; they are stopped in reverse order.

    Their logs take a sixteenth of the overlay at most: a client that makes them long must not fill it.
    """
    log_bytes = min(LARGEST_LOG, (overlay_mb << 20) // 16 // (LOG_FILES * max(1, len(services))))
    programs = [
        PROGRAM.format(
            name=service.name,
            priority=number * 10,
            stop_signal=service.stop_signal,
            stop_wait=service.stop_wait_s,
            log_bytes=log_bytes,
        )
        for number, service in enumerate(services, 1)
    ]
    return HEADER + "".join(programs)


def services_json(services: Sequence[Service], templates: Templates) -> dict[str, object]:
    """Return what sms-run, sms-probe and sms-filesync read: services by name in starting order."""
    names = {service.name for service in services}
    return {
        "services": {
            service.name: {
                "run": [templates.text(word) for word in service.run],
                "user": service.user,
                "groups": list(service.groups),
                # What runs on a node itself, such as slurmd, is not confined.
                "capabilities": sorted(NUMBERS[name] for name in service.capabilities) if service.container else None,
                "setup": _setup(service, templates),
                "unclean": templates.text(service.unclean),
                "running": service.running,
                "saves": service.saves,
                "needs": [need for need in (*service.needs, *service.after) if need in names],
                # Of them, those without which it starts if they do not answer for a while.
                "after": [name for name in service.after if name in names],
                "sync": list(service.sync),
                "probe": _probe(service, templates),
            }
            for service in services
        }
    }


def _setup(service: Service, templates: Templates) -> str:
    """Return the preparation; of earlier images it has to contain what an unclean stop needs."""
    end = f'if [ -n "${{SMS_UNCLEAN:-}}" ]; then\n{service.unclean}\nfi\n' if service.unclean else ""
    return templates.text(service.setup + end)


def _probe(service: Service, templates: Templates) -> dict[str, object]:
    assert service.probe
    given = service.probe.model_dump(exclude_none=True, exclude={"outside"})
    kind = next(name for name in ("exec", "ntp", "smtp", "syslog", "routed", "http", "fresh") if name in given)
    if kind == "exec":
        given["exec"] = [[templates.text(word) for word in argv] for argv in given["exec"]]
    else:
        given[kind] = templates.text(given[kind])
    return {"kind": kind, **given}
