"""The schedule files, compared with golden files, and verified by systemd's own programs."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from appliance.config.model import EVEN_MINUTES, Site
from appliance.errors import ConfigError
from appliance.operations.site.find import open_site
from appliance.plan.snapshots.schedule import (
    calendar,
    check_every,
    cron_command,
    cron_fields,
    drill_job,
    drill_time,
    has_drill,
    installed,
    job,
    plan_schedule,
    read_every,
    systemd_command,
)
from tests.places import GOLDEN

COMMON = ("/usr/bin/sms", "/etc/sms/sms.yaml", "/var/lib/sms")
ARGV = job(*COMMON)
FOLDERS = ("/var/lib/sms/overlays", "/var/lib/sms/snapshots")
DRILL = drill_job("/usr/bin/sms", "/etc/sms/sms.yaml", "/var/lib/sms", "admin-1")
ODD = job("/opt/sms 2/bin/sms", "/etc/sms/100%.yaml", "/var/lib/$sms")


@pytest.fixture
def site() -> Site:
    return open_site(GOLDEN / "sites" / "debian-12.yaml").site


def test_rendered_files(site: Site, golden: Callable[[Path, dict[str, str]], None]) -> None:
    texts: dict[str, str] = {}
    for kind, every, argv, folder in (
        ("cron", 15, ARGV, "usual"),
        ("systemd", 15, ARGV, "usual"),
        ("cron", 360, ODD, "odd"),
        ("systemd", 360, ODD, "odd"),
    ):
        planned = plan_schedule(site.cluster, kind, every, argv=argv, folders=FOLDERS)  # type: ignore[arg-type]
        texts |= {f"{folder}{path}": text for path, text in planned.files.items()}
        assert installed(planned.files, site.cluster) == (kind, every)
        assert {read_every(text) for text in planned.files.values()} - {None} == {every}
        assert not any(map(has_drill, planned.files.values()))
    for kind in ("cron", "systemd"):
        planned = plan_schedule(site.cluster, kind, 15, argv=ARGV, folders=FOLDERS, drill=DRILL)  # type: ignore[arg-type]
        texts |= {f"drill{path}": text for path, text in planned.files.items()}
        assert installed(planned.files, site.cluster) == (kind, 15)
        assert sum(map(has_drill, planned.files.values())) == 1
        assert len(planned.units) == 2 * (kind == "systemd")
    for kind, every in (("cron", 15), ("systemd", 15), ("cron", 360), ("systemd", 1440)):
        argv, drill = job(*COMMON, "--vm"), drill_job(*COMMON, "admin-1", "--vm")
        label = f"{site.cluster}.vm"
        planned = plan_schedule(label, kind, every, argv=argv, folders=FOLDERS, drill=drill)  # type: ignore[arg-type]
        texts |= {f"vm-{every}{path}": text for path, text in planned.files.items()}
        assert installed(planned.files, label) == (kind, every)
        assert installed(planned.files, site.cluster) is None, "it is not the overlay's"
    golden(GOLDEN / "schedule", texts)


def test_drills_of_hosts_are_at_different_times_of_the_night() -> None:
    times = [drill_time(f"admin-{number}") for number in range(20)]
    assert len(set(times)) > 15
    assert all(weekday < 7 and 1 <= hour < 5 and minute < 60 for weekday, hour, minute in times)


@pytest.mark.parametrize(
    ("every", "cron", "systemd"),
    [
        (1, "* * * * *", "*-*-* *:0/1:00"),
        (15, "*/15 * * * *", "*-*-* *:0/15:00"),
        (30, "*/30 * * * *", "*-*-* *:0/30:00"),
        (60, "0 * * * *", "*-*-* *:00:00"),
        (120, "0 */2 * * *", "*-*-* 0/2:00:00"),
        (720, "0 */12 * * *", "*-*-* 0/12:00:00"),
        (1440, "0 0 * * *", "*-*-* 00:00:00"),
    ],
)
def test_minutes(every: int, cron: str, systemd: str) -> None:
    assert (cron_fields(every), calendar(every)) == (cron, systemd)
    check_every(every)


def due(fields: str, at: datetime) -> bool:
    """Whether a crontab(5) entry runs then: numbers, * and steps only."""

    def fits(field: str, value: int) -> bool:
        return value % int(field[2:]) == 0 if field.startswith("*/") else field == "*" or int(field) == value

    minute, hour, *rest = fields.split()
    return fits(minute, at.minute) and fits(hour, at.hour) and rest == ["*"] * 3


@pytest.mark.parametrize("every", EVEN_MINUTES)
def test_cron_runs_it_at_even_intervals(every: int) -> None:
    day = [datetime(2026, 11, 21) + timedelta(minutes=minute) for minute in range(2881)]
    times = [at for at in day if due(cron_fields(every), at)]
    assert {later - earlier for earlier, later in pairwise(times)} == {timedelta(minutes=every)}


@pytest.mark.parametrize("every", EVEN_MINUTES)
def test_systemd_runs_it_at_the_same_times(every: int, need: Callable[[str], str]) -> None:
    argv = [need("systemd-analyze"), "calendar", "--iterations=3", "--base-time=2026-11-21 09:59:00", calendar(every)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={"TZ": "UTC", "LC_ALL": "C"})
    lines = [line.partition(": ")[2].strip() for line in done.stdout.splitlines() if "elapse" in line or "Iter" in line]
    times = [datetime.strptime(line, "%a %Y-%m-%d %H:%M:%S %Z") for line in lines]
    assert len(times) == 3
    assert all(due(cron_fields(every), at) for at in times)
    assert {later - earlier for earlier, later in pairwise(times)} == {timedelta(minutes=every)}


@pytest.mark.parametrize(
    ("every", "near"),
    [(7, "take 6 or 10"), (45, "take 30 or 60"), (90, "take 60 or 120"), (0, "take 1"), (2000, "take 1440")],
)
def test_uneven_intervals_are_refused_with_the_nearest(every: int, near: str) -> None:
    with pytest.raises(ConfigError, match=f"evenly every {every} minutes") as caught:
        check_every(every)
    assert caught.value.hint.startswith(f"{near}: sms overlay schedule install --every ")


def test_commands_survive_their_files() -> None:
    assert shlex.split(cron_command(ODD).replace(r"\%", "%")) == list(ODD)
    assert systemd_command(("/bin/a b", 'say "x"', "100%", "$HOME", "c\\d")) == (
        '"/bin/a b" "say \\"x\\"" 100%% $$HOME "c\\\\d"'
    )


def test_systemd_verifies_the_units(site: Site, tmp_path: Path, need: Callable[[str], str]) -> None:
    """systemd-analyze requires that the program exists, so an existing one is used."""
    argv = ("/bin/true", *ODD[1:])
    drill = drill_job("/bin/true", "/etc/sms/100%.yaml", "/var/lib/$sms", "admin-1")
    planned = plan_schedule(site.cluster, "systemd", 15, argv=argv, folders=("/tmp", "/var/lib/a b"), drill=drill)
    for path, text in planned.files.items():
        (tmp_path / Path(path).name).write_text(text)
    units = [str(tmp_path / Path(path).name) for path in planned.files]
    verify = [need("systemd-analyze"), "verify", "--man=no", "--recursive-errors=no", *units]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    ours = [line for line in done.stderr.splitlines() if "snapshot" in line or "drill" in line]
    assert ours == []
    assert done.returncode == 0, done.stderr


def test_nothing_is_installed_without_its_files() -> None:
    assert installed({}, "lab") is None
    assert installed({"/etc/cron.d/sms-lab": "# something else\n"}, "lab") is None
    assert installed({"/etc/cron.d/sms-other": "# Every 5 minutes: x\n"}, "lab") is None
