"""What takes snapshots by itself: an entry for cron, or a timer with its service where systemd runs."""

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
"""How a file says so; both kinds have the line."""
LEAST_S = 1800
"""Seconds that a run may take at least before systemd ends it."""

CRON = """\
# Written by `sms overlay schedule install`.
# Every {every} minutes: a snapshot of the overlay of cluster {cluster}, kept by the site's rule.
# By {sms}
SHELL=/bin/sh
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# A run that fails says so itself. What it cannot say, for the site file cannot be read, goes to syslog.
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
# The watchdog of a freeze must outlive the one that it watches.
KillMode=process
TimeoutStartSec={timeout}
"""

TIMER = """\
# Written by `sms overlay schedule install`.
# Every {every} minutes: a snapshot of the overlay of cluster {cluster}, kept by the site's rule.
# By {sms}
[Unit]
Description=Snapshots of the overlay of sms cluster {cluster}

[Timer]
OnCalendar={calendar}
AccuracySec=1s
RandomizedDelaySec=0
# One that was missed while the host was down is made up for.
Persistent=true

[Install]
WantedBy=timers.target
"""


@dataclass(frozen=True)
class Schedule:
    """A schedule as it is to be: its files by path, and what systemd starts; ``every`` minutes."""

    kind: Kind
    every: int
    command: str
    files: Mapping[str, str]
    unit: str = ""


def cron_path(cluster: str) -> str:
    """Where cron's entry lies. cron takes no name with a dot in it; a cluster's has none."""
    return f"/etc/cron.d/sms-{cluster}"


def timer_name(cluster: str) -> str:
    """The timer. A cluster's name has no dot, so no other cluster's unit has this name."""
    return f"sms-{cluster}.snapshot.timer"


def timer_path(cluster: str) -> str:
    """Where the timer lies."""
    return f"/etc/systemd/system/{timer_name(cluster)}"


def service_path(cluster: str) -> str:
    """Where the service lies that the timer starts."""
    return timer_path(cluster).removesuffix("timer") + "service"


def check_every(every: int) -> None:
    """Whether cron and systemd can run something every so many minutes.

    Raises:
        ConfigError: with the nearest that they can.
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
    """Minute, hour and the rest, as crontab(5) has them."""
    if every < HOUR:
        return f"*/{every} * * * *" if every > 1 else "* * * * *"
    if every == DAY:
        return "0 0 * * *"
    return f"0 */{every // HOUR} * * *" if every > HOUR else "0 * * * *"


def calendar(every: int) -> str:
    """The same, as systemd.time(7) has it."""
    if every < HOUR:
        return f"*-*-* *:0/{every}:00"
    if every == DAY:
        return "*-*-* 00:00:00"
    return f"*-*-* 0/{every // HOUR}:00:00" if every > HOUR else "*-*-* *:00:00"


def job(sms: str, site_file: str, state: str) -> tuple[str, ...]:
    """What is run."""
    return (sms, "-q", "--site", site_file, "--state", state, "overlay", "snapshot", "--scheduled")


def cron_command(argv: tuple[str, ...]) -> str:
    """A command for crontab(5), where a percent sign ends the line."""
    return shlex.join(argv).replace("%", r"\%")


def systemd_command(argv: tuple[str, ...]) -> str:
    """A command for systemd.service(5), where percent and dollar signs stand for values."""
    return " ".join(systemd_word(word).replace("$", "$$") for word in argv)


def systemd_word(word: str) -> str:
    """A word of a unit file."""
    plain = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{plain}"' if re.search(r"[\s'\";\\]", word) else plain


def plan_schedule(site: Site, kind: Kind, every: int, *, argv: tuple[str, ...], folders: tuple[str, ...]) -> Schedule:
    """The schedule of a site on one of its hosts.

    Args:
        every: minutes between two runs.
        argv: the ``job``.
        folders: what must be mounted before it runs.

    Raises:
        ConfigError: it cannot be kept evenly.
    """
    check_every(every)
    values = {"cluster": site.cluster, "every": every, "sms": argv[0]}
    if kind == "cron":
        command = cron_command(argv)
        text = CRON.format(**values, fields=cron_fields(every), command=command)
        return Schedule(kind, every, command, {cron_path(site.cluster): text})
    command = systemd_command(argv)
    mounts = " ".join(dict.fromkeys(map(systemd_word, folders)))
    timeout = max(LEAST_S, 2 * every * 60)
    service = SERVICE.format(**values, command=command, folders=mounts, timeout=timeout)
    timer = TIMER.format(**values, calendar=calendar(every))
    files = {service_path(site.cluster): service, timer_path(site.cluster): timer}
    return Schedule(kind, every, command, files, timer_name(site.cluster))


def read_every(text: str) -> int | None:
    """The minutes of a schedule's file; None where it does not tell."""
    found = EVERY.search(text)
    return int(found[1]) if found else None


def installed(texts: Mapping[str, str], cluster: str) -> tuple[Kind, int] | None:
    """The kind and minutes of the schedule whose files are these, by path; None where there is none."""
    kinds: tuple[tuple[Kind, str], ...] = (("systemd", timer_path(cluster)), ("cron", cron_path(cluster)))
    for kind, path in kinds:
        every = read_every(texts.get(path, ""))
        if every:
            return kind, every
    return None
