"""The snapshot schedule: a cron entry, or a timer with its service where systemd runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from appliance.config.model import EVEN_MINUTES, Site
from appliance.errors import ConfigError

Kind = Literal["cron", "systemd"]

HOUR, DAY = 60, 1440
EVERY = re.compile(r"^# Every (\d+) minutes", re.MULTILINE)
"""The line with the interval in the files of both kinds."""
MIN_TIMEOUT_S = 1800
"""Lower limit of the unit's start timeout, in seconds."""

CRON = """\
# Written by `sms overlay schedule install`.
# Every {every} minutes: a snapshot of the overlay of cluster {cluster}, pruned by the site's retention.
# By {sms}
SHELL=/bin/sh
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# A failed run reports itself. Earlier errors, such as an unreadable site file, go to syslog.
MAILTO=""
{fields} root {command} 2>&1 >/dev/null | logger -t sms -p cron.err
"""

SERVICE = """\
# Written by `sms overlay schedule install`.
[Unit]
Description=Snapshot of the overlay of sms cluster {cluster}
Documentation=man:sms(1)
RequiresMountsFor={folders}

[Service]
Type=oneshot
ExecStart={command}
# The watchdog of a freeze must outlive the process that it watches.
KillMode=process
TimeoutStartSec={timeout}
"""

TIMER = """\
# Written by `sms overlay schedule install`.
# Every {every} minutes: a snapshot of the overlay of cluster {cluster}, pruned by the site's retention.
# By {sms}
[Unit]
Description=Snapshots of the overlay of sms cluster {cluster}

[Timer]
OnCalendar={calendar}
AccuracySec=1s
RandomizedDelaySec=0
# Catch up on a run that was missed while the host was down.
Persistent=true

[Install]
WantedBy=timers.target
"""


@dataclass(frozen=True)
class Schedule:
    """A planned schedule: its files by path, and the unit that systemd starts; ``every`` is in minutes."""

    kind: Kind
    every: int
    files: Mapping[str, str]
    unit: str = ""


def cron_path(cluster: str) -> str:
    """Return the path of the cron entry. cron ignores names with a dot; a cluster's name has none."""
    return f"/etc/cron.d/sms-{cluster}"


def timer_name(cluster: str) -> str:
    """Return the name of the timer. A cluster's name has no dot, so no other cluster's unit has this name."""
    return f"sms-{cluster}.snapshot.timer"


def timer_path(cluster: str) -> str:
    """Return the path of the timer."""
    return f"/etc/systemd/system/{timer_name(cluster)}"


def service_path(cluster: str) -> str:
    """Return the path of the timer's service."""
    return timer_path(cluster).removesuffix("timer") + "service"


def check_every(every: int) -> None:
    """Check that cron and systemd can run a job every ``every`` minutes.

    Raises:
        ConfigError: they cannot; the hint has the nearest intervals.
    """
    if every in EVEN_MINUTES:
        return
    lower = max((step for step in EVEN_MINUTES if step < every), default=1)
    higher = min((step for step in EVEN_MINUTES if step > every), default=DAY)
    near = " or ".join(map(str, sorted({lower, higher})))
    raise ConfigError(
        f"nothing can be run evenly every {every} minutes: they must divide an hour, or be hours that divide a day",
        hint=f"take {near}: sms overlay schedule install --every {lower}",
    )


def cron_fields(every: int) -> str:
    """Return the time fields of crontab(5)."""
    if every < HOUR:
        return f"*/{every} * * * *" if every > 1 else "* * * * *"
    if every == DAY:
        return "0 0 * * *"
    return f"0 */{every // HOUR} * * *" if every > HOUR else "0 * * * *"


def calendar(every: int) -> str:
    """Return the calendar expression of systemd.time(7)."""
    if every < HOUR:
        return f"*-*-* *:0/{every}:00"
    if every == DAY:
        return "*-*-* 00:00:00"
    return f"*-*-* 0/{every // HOUR}:00:00" if every > HOUR else "*-*-* *:00:00"


def job(sms: str, site_file: str, state: str) -> tuple[str, ...]:
    """Return the command of the job."""
    return (sms, "-q", "--site", site_file, "--state", state, "overlay", "snapshot", "--scheduled")


def cron_command(argv: tuple[str, ...]) -> str:
    """Quote a command for crontab(5), where a percent sign ends the line."""
    return shlex.join(argv).replace("%", r"\%")


def systemd_command(argv: tuple[str, ...]) -> str:
    """Quote a command for systemd.service(5), where percent and dollar signs are expanded."""
    return " ".join(systemd_word(word).replace("$", "$$") for word in argv)


def systemd_word(word: str) -> str:
    """Quote a word for a unit file."""
    plain = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{plain}"' if re.search(r"[\s'\";\\]", word) else plain


def plan_schedule(site: Site, kind: Kind, every: int, *, argv: tuple[str, ...], folders: tuple[str, ...]) -> Schedule:
    """Plan the schedule of a site on one of its hosts.

    Args:
        every: minutes between two runs.
        argv: the ``job``.
        folders: folders that must be mounted before it runs.

    Raises:
        ConfigError: cron and systemd cannot run it at even intervals.
    """
    check_every(every)
    values = {"cluster": site.cluster, "every": every, "sms": argv[0]}
    if kind == "cron":
        command = cron_command(argv)
        text = CRON.format(**values, fields=cron_fields(every), command=command)
        return Schedule(kind, every, {cron_path(site.cluster): text})
    command = systemd_command(argv)
    mounts = " ".join(dict.fromkeys(map(systemd_word, folders)))
    timeout = max(MIN_TIMEOUT_S, 2 * every * 60)
    service = SERVICE.format(**values, command=command, folders=mounts, timeout=timeout)
    timer = TIMER.format(**values, calendar=calendar(every))
    files = {service_path(site.cluster): service, timer_path(site.cluster): timer}
    return Schedule(kind, every, files, timer_name(site.cluster))


def read_every(text: str) -> int | None:
    """Parse the minutes of a schedule's file; None where it has none."""
    found = EVERY.search(text)
    return int(found[1]) if found else None


def installed(texts: Mapping[str, str], cluster: str) -> tuple[Kind, int] | None:
    """Return kind and minutes of the schedule in these files, given by path; None where there is none."""
    kinds: tuple[tuple[Kind, str], ...] = (("systemd", timer_path(cluster)), ("cron", cron_path(cluster)))
    for kind, path in kinds:
        every = read_every(texts.get(path, ""))
        if every:
            return kind, every
    return None
