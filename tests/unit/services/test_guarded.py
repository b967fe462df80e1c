"""Starting and stopping the guard: needs sms, a site file with the same lease, and more than one admin host."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from appliance.config.model import Overlay
from appliance.errors import Busy, SmsError
from appliance.host.base import CommandError, Result
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.env import LOCKED
from appliance.operations.hosts import guarded
from appliance.operations.hosts.guarded import STOP_TIMEOUT_S, ensure_guard, guard_version, is_outdated, start_guard
from appliance.operations.hosts.installed import SITE_FILE, lies_there
from appliance.operations.services import guard
from appliance.plan.machine import Places
from appliance.progress import Silent
from appliance.shared.locks import hold_lock
from appliance.tools.apptainer import Instance
from appliance.tools.files import HELD, is_locked
from appliance.tools.programs import PATH_OF
from appliance.tools.scripts import script_argv
from tests.sites import open_debian
from tests.support.env import fake_env
from tests.support.fake import Fake
from tests.support.instances import LIST, lists

STARTS, STOPS = script_argv("start-daemon")[:3], script_argv("stop-daemon")[:3]


def cluster(*, overlays: str = "", hosts: int = 2) -> Cluster:
    opened = open_debian()
    admins = tuple(opened.site.admin_hosts[0].model_copy(update={"name": f"host-{n}"}) for n in range(hosts))
    changes: dict[str, Any] = {"admin_hosts": admins}
    if overlays:
        changes["overlay"] = Overlay(directory=Path(overlays))
    return Cluster(opened.site.model_copy(update=changes), opened.services, opened.base, env=fake_env())


@pytest.mark.parametrize(
    ("text", "overlays", "same"),
    [
        ("", "", False),
        ("[", "", False),
        ("- a list", "", False),
        ("[" * 5000, "", False),
        ("cluster: sample\nx: 2026-13-45", "", True),
        ("cluster: sample\nx: &a [*a]", "", False),
        (f"cluster: sample\nx: {'y' * (1 << 20)}", "", False),
        ("cluster: other", "", False),
        ("cluster: sample", "", True),
        ("cluster: sample\noverlay: {size_mb: 64}", "", True),
        ("cluster: sample", "/srv/shared", False),
        ("cluster: sample\noverlay: {directory: /srv/shared}", "", False),
        ("cluster: sample\noverlay: {directory: /srv/shared}", "/srv/shared", True),
        ("cluster: sample\noverlay: {directory: shared}", "/etc/sms/shared", True),
        ("cluster: sample\noverlay: {directory: [x]}", "/srv/shared", False),
    ],
)
def test_site_file_must_use_the_same_lease(text: str, overlays: str, same: bool) -> None:
    host = Fake({})
    host.files[SITE_FILE] = text.encode()
    assert lies_there(cluster(overlays=overlays), host) is same


class Recorder(Silent):
    """Records the reported lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def report(self, text: str) -> None:
        self.lines.append(text)


def remote(*, sms: str = "/usr/bin/sms", guarded: bool = False, site: bytes = b"cluster: sample") -> Fake:
    host = Fake(
        {
            ("test", "-e"): (0, ""),
            ("flock",): (HELD if guarded else 0, ""),
            ("sh", "-c", PATH_OF, "find", "sms"): (0, sms),
            ("test", "-d", "/run/systemd/system"): (1, ""),
            STARTS: (0, ""),
        },
        name="host-1",
    )
    host.files[SITE_FILE] = site
    return host


def started(host: Fake) -> list[tuple[str, ...]]:
    return [argv for argv in host.asked if argv[:3] == STARTS]


def test_guard_is_started_with_the_site_file_of_its_host() -> None:
    host, recorder = remote(), Recorder()
    assert start_guard(cluster().showing(recorder), host) and recorder.lines == []
    (argv,) = started(host)
    assert argv[6:] == ("/usr/bin/sms", "--quiet", "--site", SITE_FILE, "--state", "/var/lib/sms", "guard")


LOCK = "/run/sms/sample.guard.lock"


@pytest.mark.parametrize(
    ("files", "kept"),
    [
        ({LOCK: b"7", f"{LOCK}.version": f"7 {guard_version(cluster())}".encode()}, True),
        ({LOCK: b"7\n", f"{LOCK}.version": b"6 1"}, True),  # its code does not run yet
        ({LOCK: b"7"}, False),  # of version 519381b
        (
            {LOCK: b"7", f"{LOCK}.version": f"6 {guard_version(cluster())}".encode()},
            False,
        ),  # the same, after a newer one
        ({LOCK: b"7", f"{LOCK}.version": b"7 x"}, False),
    ],
)
def test_a_running_guard_of_another_version_is_replaced(files: dict[str, bytes], *, kept: bool) -> None:
    host, recorder = remote(guarded=True), Recorder()
    host.answers[STOPS] = (0, "")
    host.files |= files
    assert start_guard(cluster().showing(recorder), host) and recorder.lines == []
    assert is_outdated(cluster(), host) is not kept
    stopped = [argv[4:] for argv in host.asked if argv[:3] == STOPS]
    assert (stopped, len(started(host))) == (([], 0) if kept else ([(LOCK, str(STOP_TIMEOUT_S))], 1))


def test_an_older_guard_is_kept_where_none_can_be_started() -> None:
    host, recorder = remote(guarded=True, site=b""), Recorder()
    host.files[LOCK] = b"7"
    assert start_guard(cluster().showing(recorder), host)
    assert not [argv for argv in host.asked if argv[:3] == STOPS]
    assert len(recorder.lines) == 1 and "cannot be replaced" in recorder.lines[0]


@pytest.mark.parametrize(
    ("guarded", "version", "runs", "did"),
    [
        (True, guard_version(cluster()), True, []),
        (True, "1", True, [STOPS, STARTS]),
        (False, "", True, [STARTS]),  # a verb was killed before it had started one
        (False, "", False, []),  # nor does the services container
    ],
)
def test_a_scheduled_run_replaces_a_guard_of_another_version_and_starts_a_missing_one(
    guarded: bool, version: str, runs: bool, did: list[tuple[str, ...]]
) -> None:
    host = remote(guarded=guarded)
    host.answers |= {STOPS: (0, ""), LIST: lists([Instance("sms-sample", 7, "/i.sif")] * runs)}
    host.files |= {LOCK: b"7", f"{LOCK}.version": f"7 {version}".encode()}
    ensure_guard(cluster(), host)
    assert [argv[:3] for argv in host.asked if argv[:3] in (STOPS, STARTS)] == did
    host.files[SITE_FILE] = b""
    with pytest.raises(SmsError) if did else nullcontext():
        ensure_guard(cluster(), host)
    ensure_guard(cluster(hosts=1), host)


def test_no_guard_is_started_while_another_run_is_at_work() -> None:
    """It may be a stop, which has ended the guard before the services container."""
    host = Held({**remote().answers, LIST: lists([Instance("sms-sample", 7, "/i.sif")])}, name="host-1")
    host.files[SITE_FILE] = b"cluster: sample"
    with pytest.raises(Busy):
        ensure_guard(cluster(), host)
    assert not started(host)


class Held(Fake):
    """A host whose locks another run holds."""

    @contextmanager
    def hold(self, *argv: str, timeout: float = 30) -> Iterator[str]:
        raise CommandError(Result(self.name, argv, LOCKED, b"", b""))
        yield


@pytest.mark.parametrize("starts", [True, False])
def test_a_guard_that_systemd_starts_is_waited_for(*, starts: bool) -> None:
    """Before, `sms status` right after a start ended with status 4: no guard runs."""
    host, recorder, asked = remote(), Recorder(), count()
    host.answers |= {
        ("test", "-d", "/run/systemd/system"): (0, ""),
        ("systemctl",): (0, ""),
        ("flock",): lambda *_: (HELD if next(asked) >= 3 and starts else 0, ""),
    }
    assert start_guard(cluster().showing(recorder), host) is starts and next(asked) >= 2
    assert bool(recorder.lines) is not starts
    if not starts:
        assert "journalctl -u sms-sample-guard.service" in recorder.lines[0]


@pytest.mark.parametrize("host", [remote(sms=""), remote(site=b""), remote(site=b"cluster: other")])
def test_missing_guard_is_reported(host: Fake) -> None:
    recorder = Recorder()
    assert not start_guard(cluster().showing(recorder), host) and not started(host)
    assert len(recorder.lines) == 1 and "no guard on host-1" in recorder.lines[0]


def test_single_host_needs_no_guard() -> None:
    recorder = Recorder()
    assert not start_guard(cluster(hosts=1).showing(recorder), Fake({("test",): (1, "")})) and recorder.lines == []


def test_a_guard_of_a_site_that_had_more_hosts_is_stopped() -> None:
    """Else it would obey the lease of a host that is not there any more."""
    host, recorder = remote(guarded=True), Recorder()
    host.answers[STOPS] = (0, "")
    assert not start_guard(cluster(hosts=1).showing(recorder), host) and recorder.lines == []
    assert [argv[4:] for argv in host.asked if argv[:3] == STOPS] == [(LOCK, str(STOP_TIMEOUT_S))]


def test_guard_is_stopped_through_its_lock(tmp_path: Path) -> None:
    here, lock = Local("here"), str(tmp_path / "lock")
    stop = script_argv("stop-daemon", lock, str(STOP_TIMEOUT_S))
    assert not is_locked(here, lock)
    here.run(*stop)  # no guard runs
    holder = 'exec 9>"$1"; flock 9; echo $$ >"$1"; echo held; exec sleep 100'
    with here.hold("sh", "-c", holder, "holder", lock):
        assert is_locked(here, lock)
        here.run(*stop)
        assert not is_locked(here, lock)


SLOW = 'import os, sys, time; time.sleep(float(sys.argv[1])); os.write(1, b"began")'
"""A guard takes a second until its own code runs."""


def start_slowly(lock: Path, log: Path, *command: str) -> None:
    Local("here").run(*script_argv("start-daemon", str(lock), str(log), *command))


def test_a_stop_right_after_a_start_ends_a_guard_that_has_not_begun_yet(tmp_path: Path) -> None:
    here, lock, log = Local("here"), tmp_path / "run" / "lock", tmp_path / "log"
    start_slowly(lock, log, sys.executable, "-c", SLOW, "2")
    assert is_locked(here, str(lock))
    here.run(*script_argv("stop-daemon", str(lock), str(STOP_TIMEOUT_S)))
    assert not is_locked(here, str(lock))
    time.sleep(2.5)
    assert log.read_text() == ""


@dataclass(frozen=True)
class WithLock(Cluster):
    """A cluster whose guard has this lock."""

    lock: PurePosixPath | None = None

    @property
    def places(self) -> Places:
        found = super().places
        assert self.lock
        found.guard_lock = self.lock
        return found


def test_a_guard_has_the_lock_that_it_was_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = cluster()
    made = WithLock(usual.site, usual.services, usual.base, lock=PurePosixPath(tmp_path / "lock"))
    with hold_lock(str(tmp_path / "lock")):
        inherited = next(
            int(path.name) for path in Path("/proc/self/fd").iterdir() if path.readlink() == tmp_path / "lock"
        )
        with pytest.raises(Busy), guard.only_guard(made):
            pass
        monkeypatch.setenv(guard.LOCK_FD, str(inherited))
        with guard.only_guard(made):
            assert (tmp_path / "lock").read_text() == str(os.getpid())
            assert not guarded.is_outdated(made, Local("here"))
        assert guard.LOCK_FD not in os.environ, "programs that it starts do not have it"


def test_a_command_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    with hold_lock(str(tmp_path / "lock"), shared=True):
        pass
    with pytest.raises(CommandError, match="it did not start"):
        start_slowly(tmp_path / "lock", tmp_path / "log", "/nowhere/sms", "guard")
