"""The snapshot schedule: a cron entry, or a timer with its service where systemd runs."""

from __future__ import annotations

import re
import shlex
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from appliance.config.model import EVEN_MINUTES
from appliance.errors import ConfigError

Kind = Literal["cron", "systemd"]
Job = Literal["snapshot", "drill"]
Unit = Literal["timer", "service"]

HOUR, DAY = 60, 1440
EVERY = re.compile(r"^# Every (\d+) minutes", re.MULTILINE)
"""The line with the interval in the files of both kinds."""
DRILL = "# Every week: a restore drill"
"""The beginning of the line about it in the files of both kinds."""
DAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")
OVERLAPPING = ("/usr/bin/systemd-run", "--quiet", "--collect", "--property=KillMode=process")
"""Runs a command in a unit of its own, which is not kept, and ends at once."""

CRON = """\
# Written by `sms overlay schedule install`.
# Every {every} minutes: a snapshot of {what} of cluster {cluster}, pruned by the site's retention.
# By {sms}
SHELL=/bin/sh
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# A failed run reports itself. Earlier errors, such as an unreadable site file, go to syslog.
MAILTO=""
{fields} root {command} 2>&1 >/dev/null | logger -t sms -p cron.err
"""

CRON_DRILL = """\
# Every week: a restore drill with the newest snapshot elsewhere. After a kill the second command removes what is left.
{fields} root {{ {command}; {clean}; }} 2>&1 >/dev/null | logger -t sms -p cron.err
"""

DRILL_SERVICE = """\
# Written by `sms overlay schedule install`.
[Unit]
Description=Restore drill of {what} of sms cluster {cluster}
Documentation=man:sms(1)
RequiresMountsFor={folders}

[Service]
Type=oneshot
ExecStart={command}
# Also after a kill: the processes of the copy end with this unit, and this removes the rest.
ExecStopPost=-{clean}
Nice=10
IOSchedulingClass=idle
TimeoutStartSec=6h
"""

DRILL_TIMER = """\
# Written by `sms overlay schedule install`.
# Every week: a restore drill with the newest snapshot elsewhere of cluster {cluster}.
# By {sms}
[Unit]
Description=Restore drills of {what} of sms cluster {cluster}

[Timer]
OnCalendar={calendar}
RandomizedDelaySec=30min
Persistent=true

[Install]
WantedBy=timers.target
"""

SERVICE = """\
# Written by `sms overlay schedule install`.
[Unit]
Description=Snapshot of {what} of sms cluster {cluster}
Documentation=man:sms(1)
RequiresMountsFor={folders}

[Service]
Type=oneshot
# Each run has a unit of its own, as by cron: the next one must not wait for a push that takes long or hangs. There the
# watchdog of a freeze outlives the process that it watches.
ExecStart={command}
"""

TIMER = """\
# Written by `sms overlay schedule install`.
# Every {every} minutes: a snapshot of {what} of cluster {cluster}, pruned by the site's retention.
# By {sms}
[Unit]
Description=Snapshots of {what} of sms cluster {cluster}

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
    """A planned schedule: its files by path, and the units that systemd starts; ``every`` is in minutes."""

    kind: Kind
    every: int
    files: Mapping[str, str]
    units: tuple[str, ...] = ()


@dataclass(frozen=True)
class DrillJob:
    """The weekly restore drill of a host: the commands that run it and remove what a killed one has left."""

    host: str
    command: tuple[str, ...]
    clean: tuple[str, ...]


def cron_path(cluster: str) -> str:
    """Return the path of the cron entry. cron ignores names with a dot; a cluster's name has none, nor an underscore.

    Args:
        cluster: its name, or the label of its VM's snapshots, here and in the functions below.
    """
    return f"/etc/cron.d/sms-{cluster.replace('.', '_')}"


def unit_name(cluster: str, job: Job, kind: Unit = "timer") -> str:
    """Return the name of a job's unit. A cluster's name has no dot, so no other cluster's unit has this name."""
    return f"sms-{cluster}.{job}.{kind}"


def unit_path(cluster: str, job: Job, kind: Unit = "timer") -> str:
    """Return the path of a job's unit."""
    return f"/etc/systemd/system/{unit_name(cluster, job, kind)}"


def drill_time(host: str) -> tuple[int, int, int]:
    """Return weekday (0 is Sunday), hour and minute of a host's drills: at night, most hosts at different times."""
    number = zlib.crc32(host.encode())
    return number % 7, 1 + number // 7 % 4, number // 28 % 60


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


def offset_of(label: str, every: int) -> int:
    """Return the minute of the first run: those of the VM are between those of the overlay, which push there, too."""
    return min(every // 2, HOUR // 2) if "." in label else 0


def cron_fields(every: int, offset: int = 0) -> str:
    """Return the time fields of crontab(5)."""
    if every < HOUR:
        minutes = f"{offset}-59/{every}" if offset else f"*/{every}"
        return f"{minutes} * * * *" if every > 1 else "* * * * *"
    if every == DAY:
        return f"{offset} 0 * * *"
    return f"{offset} */{every // HOUR} * * *" if every > HOUR else f"{offset} * * * *"


def calendar(every: int, offset: int = 0) -> str:
    """Return the calendar expression of systemd.time(7)."""
    if every < HOUR:
        return f"*-*-* *:{offset}/{every}:00"
    if every == DAY:
        return f"*-*-* 00:{offset:02}:00"
    return f"*-*-* 0/{every // HOUR}:{offset:02}:00" if every > HOUR else f"*-*-* *:{offset:02}:00"


def job(sms: str, site_file: str, state: str, *options: str) -> tuple[str, ...]:
    """Return the command of the job; ``options``: ``--vm`` for the VM's state."""
    return (sms, "-q", "--site", site_file, "--state", state, "overlay", "snapshot", *options, "--scheduled")


def drill_job(sms: str, site_file: str, state: str, host: str, *options: str) -> DrillJob:
    """Return the restore drill of a host; ``options`` as for ``job``."""
    drill = (sms, "-q", "--site", site_file, "--state", state, "overlay", "drill", *options)
    return DrillJob(host, (*drill, "--scheduled"), (*drill, "--down"))


def cron_command(argv: tuple[str, ...]) -> str:
    """Quote a command for crontab(5), where a percent sign ends the line."""
    return shlex.join(argv).replace("%", r"\%")


def systemd_command(argv: tuple[str, ...]) -> str:
    """Quote a command for systemd.service(5), where percent and dollar signs are expanded."""
    return " ".join(systemd_word(word).replace("$", "$$") for word in argv)


def systemd_word(word: str) -> str:
    """Quote a word for a unit file."""
    return _quoted(word.replace("%", "%%"))


def _quoted(word: str) -> str:
    """Quote a word as systemd splits lines and properties."""
    plain = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{plain}"' if re.search(r"[\s'\";\\]", word) else plain


def plan_schedule(
    label: str,
    kind: Kind,
    every: int,
    *,
    argv: tuple[str, ...],
    folders: tuple[str, ...],
    drill: DrillJob | None = None,
) -> Schedule:
    """Plan the schedule of a cluster on one of its hosts.

    Args:
        label: name of the cluster; of the snapshots of its VM's state, if they are what is scheduled.
        every: minutes between two runs.
        argv: the ``job``.
        folders: folders that must be mounted before it runs.
        drill: None where there is nothing to restore from.

    Raises:
        ConfigError: cron and systemd cannot run it at even intervals.
    """
    check_every(every)
    cluster, _, vm = label.partition(".")
    what = "the VM's state" if vm else "the overlay"
    offset = offset_of(label, every)
    values = {"cluster": cluster, "what": what, "every": every, "sms": argv[0]}
    if kind == "cron":
        text = CRON.format(**values, fields=cron_fields(every, offset), command=cron_command(argv))
        return Schedule(kind, every, {cron_path(label): text + _cron_drill(drill, vm)})
    each = dict.fromkeys(folders)
    mounts = " ".join(map(systemd_word, each))
    # The manager expands variables of the command there, too.
    needs, words = (
        f"--property=RequiresMountsFor={' '.join(map(_quoted, each))}",
        (one.replace("$", "$$") for one in argv),
    )
    command = systemd_command((*OVERLAPPING, needs, "--", *words))
    service = SERVICE.format(**values, command=command, folders=mounts)
    files = {
        unit_path(label, "snapshot", "service"): service,
        unit_path(label, "snapshot"): TIMER.format(**values, calendar=calendar(every, offset)),
    }
    units = [unit_name(label, "snapshot")]
    if drill:
        commands = {"command": systemd_command(drill.command), "clean": systemd_command(drill.clean)}
        weekday, hour, minute = drill_time(drill.host + vm)
        at = f"{DAYS[weekday]} *-*-* {hour:02}:{minute:02}:00"
        files[unit_path(label, "drill", "service")] = DRILL_SERVICE.format(**values, **commands, folders=mounts)
        files[unit_path(label, "drill")] = DRILL_TIMER.format(**values, calendar=at)
        units.append(unit_name(label, "drill"))
    return Schedule(kind, every, files, tuple(units))


def _cron_drill(drill: DrillJob | None, vm: str) -> str:
    if not drill:
        return ""
    weekday, hour, minute = drill_time(drill.host + vm)
    commands = {"command": cron_command(drill.command), "clean": cron_command(drill.clean)}
    return CRON_DRILL.format(fields=f"{minute} {hour} * * {weekday}", **commands)


def has_drill(text: str) -> bool:
    """Whether a schedule's file runs restore drills."""
    return DRILL in text


def read_every(text: str) -> int | None:
    """Parse the minutes of a schedule's file; None where it has none."""
    found = EVERY.search(text)
    return int(found[1]) if found else None


def installed(texts: Mapping[str, str], cluster: str) -> tuple[Kind, int] | None:
    """Return kind and minutes of the schedule in these files, given by path; None where there is none."""
    kinds: tuple[tuple[Kind, str], ...] = (("systemd", unit_path(cluster, "snapshot")), ("cron", cron_path(cluster)))
    for kind, path in kinds:
        every = read_every(texts.get(path, ""))
        if every:
            return kind, every
    return None
