"""Scheduled snapshots: Debian's cron and systemd take them; failures are in syslog, in a mailbox and in the status."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from appliance.operations.image.build import Built
from tests.real.booted import bootable, booted
from tests.real.conftest import Playground
from tests.stores import BORG, write_passphrase
from tests.waiting import wait_until

pytestmark = pytest.mark.real

RUN = ("-q", "overlay", "snapshot", "--scheduled")


@pytest.fixture
def carrier(running: Playground) -> Iterator[Playground]:
    """The services container runs on host-a, which has no snapshots and no schedule; afterwards neither."""
    clear(running)
    yield running
    clear(running)


def clear(playground: Playground) -> None:
    for name in ("host-a", "host-b"):
        host = playground.host(name)
        playground.sms("-q", "overlay", "schedule", "remove", on=name)
        host.run(
            "sh",
            "-c",
            'pkill -x --ns $$ --nslist pid cron; rm -rf /var/lib/sms/snapshots/lab; rm -f "$1"',
            "clear",
            "/var/run/crond.pid",
            ok=None,
        )


def wait(what: str, ask: Callable[[], Any]) -> Any:
    return wait_until(ask, what, 240, every_s=0.5)


def snapshots(playground: Playground, on: str = "host-a") -> list[dict[str, Any]]:
    reported: dict[str, Any] = json.loads(playground.sms("overlay", "list", "--json", on=on, ok=(0, 4)).stdout)
    return list(reported["snapshots"])


def doctor(playground: Playground) -> dict[str, Any]:
    reported = json.loads(playground.sms("doctor", "--json", ok=(0, 4)).stdout)
    return next(check for check in reported["checks"] if check["what"] == "snapshots")


@pytest.mark.full
def test_a_repository_that_hangs_stops_no_snapshot(carrier: Playground, need: Callable[[str], str]) -> None:
    """The far borg answers nothing more, while its connection stays: local snapshots go on, and are pushed later."""
    need("borg")

    site = carrier.variant("borg.yaml", lambda document: document.update(snapshots={"borg": BORG}))
    far = carrier.host("host-b")
    write_passphrase(carrier.lab)
    run = ("-q", "--site", site, "overlay", "snapshot", "--scheduled")
    carrier.sms(*run)
    first = subprocess.Popen([*carrier.lab.host("host-a").prefix, "sms", *run])
    try:
        wait("a far borg that is stopped", lambda: far.works("pkill", "-STOP", "-f", "borg serve"))
        assert first.poll() is None
        taken = len(snapshots(carrier))
        for number in (1, 2):
            carrier.sms(*run)
            assert len(snapshots(carrier)) == taken + number
        found = json.loads(carrier.sms("--site", site, "status", "--json").stdout)
        assert found["snapshots"]["last_run"]["push_waits_since"], "pushes are said to wait"
        assert found["healthy"], "for a while they may"
        assert "pushes wait" in carrier.sms("--site", site, "status").text
        assert first.poll() is None
    finally:
        far.run("pkill", "-CONT", "-f", "borg serve", ok=None)
        assert first.wait(120) == 0
    carrier.sms(*run)
    would = carrier.sms("-q", "--site", site, "overlay", "push", "--all-missing", "-n", "--json")
    assert json.loads(would.stdout) == []
    far.run("rm", "-rf", "/var/lib/sms/repo")


@contextmanager
def syslog(playground: Playground) -> Iterator[socket.socket]:
    """What host-a's logger sends. Its /dev/log would be the machine's, so that logger is given another socket."""
    host, path = playground.host("host-a"), playground.lab.etc / "syslog"
    program = host.run("sh", "-c", "command -v logger").text
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(path))
        heard.settimeout(60)
        host.run("mv", program, f"{program}.real")
        try:
            script = f'#!/bin/sh\nexec {program}.real --socket /etc/sms/{path.name} "$@"\n'
            host.write(program, script.encode(), mode=0o755)
            yield heard
        finally:
            host.run("mv", f"{program}.real", program)
            path.unlink()


def test_cron_takes_them_every_minute(carrier: Playground, need: Callable[[str], str]) -> None:
    need("cron")
    host = carrier.host("host-a")
    assert carrier.status()["snapshots"]["schedule"] == "" and carrier.status()["healthy"]
    assert doctor(carrier)["state"] == "warning"
    reported = carrier.sms("overlay", "schedule", "install", "--host", "host-a", "--every", "1", on="admin")
    assert b"note: cron does not run on host-a" in reported.stderr, "cron in the services container does not count"
    assert b"sms overlay schedule install --host host-b" in reported.stderr
    assert (doctor(carrier)["state"], doctor(carrier)["mend"]) == ("missing", "cron")
    host.run("cron")
    assert doctor(carrier)["state"] == "ok"
    shown = json.loads(carrier.sms("overlay", "schedule", "show", "--json").stdout)
    assert (shown["kind"], shown["every"], shown["runs"]) == ("cron", 1, True)

    first = wait("a snapshot", lambda: snapshots(carrier))
    assert (first[0]["reason"], first[0]["running"], first[0]["health"]["ok"]) == ("scheduled", True, True)
    run = wait("its record", lambda: carrier.status()["snapshots"]["last_run"])
    assert (run["ok"], run["number"]) == (True, first[0]["number"])
    status = carrier.status()
    assert status["healthy"] and not status["warnings"]
    assert status["snapshots"]["newest"]["number"] == first[0]["number"]
    assert (status["snapshots"]["limit_minutes"], status["snapshots"]["every_minutes"]) == (7, 1)

    # cron dies: only the status reports it.
    host.run("sh", "-c", "pkill -x --ns $$ --nslist pid cron")
    wait("the end of the run", lambda: not host.works("pgrep", "-f", "overlay snapshot --scheduled"))
    file = "/etc/cron.d/sms-lab"
    host.run("touch", "-d", "10 minutes ago", file)
    record = "/var/lib/sms/snapshots/lab/run.json"
    told_run = json.loads(host.read(record) or b"")
    host.write(record, json.dumps({**told_run, "started": told_run["started"] - 240}).encode(), mode=0o600)
    lease = json.loads(host.read("/var/lib/sms/overlays/lab.lease") or b"")
    since = lease["since"]
    host.write("/var/lib/sms/overlays/lab.lease", json.dumps({**lease, "since": since - 600}).encode(), mode=0o600)
    status = carrier.status()
    assert not status["healthy"]
    assert any("no scheduled snapshot has run for" in warning for warning in status["warnings"])
    assert "does cron or systemd run there?" in carrier.sms("status", ok=(4,)).text


def test_a_failure_reaches_syslog_a_mailbox_and_status(carrier: Playground) -> None:
    host, outside = carrier.host("host-a"), carrier.host("outside")
    mails = "/var/mail/all"

    def mail_with(words: str) -> Callable[[], bool]:
        return lambda: outside.works("grep", "-q", words, mails)

    carrier.sms("-q", "overlay", "schedule", "install")
    with syslog(carrier) as heard:
        program = host.run("sh", "-c", "command -v e2fsck").text
        host.run("mv", program, f"{program}.away")
        try:
            for _ in range(2):
                failed = carrier.sms(*RUN, ok=(1,))
                assert failed.stdout == failed.stderr == b"", "cron would mail or log it once more"
                line = heard.recv(4096).decode()
                assert "sms" in line and "overlay snapshots of lab: host-a cannot run" in line
                assert line.startswith("<75>"), "cron.err"
        finally:
            host.run("mv", f"{program}.away", program)
        wait("the mail", mail_with("Subject: .sms. lab: overlay snapshots on host-a failed"))
        assert outside.works("grep", "-q", "^To: root@example.test", mails)
        status = carrier.status()
        assert not status["healthy"]
        assert any("the last scheduled snapshot failed: host-a cannot" in warning for warning in status["warnings"])
        carrier.sms(*RUN)
        assert "recovered, with snapshot 1" in heard.recv(4096).decode()
    wait("the mail", mail_with("Subject: .sms. lab: overlay snapshots on host-a have recovered"))
    assert outside.run("grep", "-c", "^Subject: .sms. lab", mails).text == "2", "one a day, not one a run"
    assert carrier.status()["healthy"]


def test_runs_do_not_overlap_and_only_the_carrier_takes_any(carrier: Playground) -> None:
    host = carrier.lab.host("host-a")
    argv = [*host.prefix, "sms", *RUN]
    both = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate(timeout=120) for process in both] == [(b"", b"")] * 2
    assert [process.returncode for process in both] == [0, 0]
    taken = len(snapshots(carrier))
    run = carrier.status()["snapshots"]["last_run"]
    assert run["ok"] and ((taken == 1 and "another run" in run["met"]) or taken == 2)
    waiting = carrier.sms(*RUN, on="host-b")
    assert waiting.stdout == waiting.stderr == b""
    assert not carrier.host("host-b").works("test", "-e", "/var/lib/sms/snapshots/lab")
    carrier.sms("-q", "stop")
    carrier.sms(*RUN)
    assert len(snapshots(carrier)) == taken, "nothing has changed since it was stopped"
    status = carrier.status()
    assert not status["running"] and status["snapshots"]["count"] == taken


def test_systemd_takes_them(stopped: Playground, built: Built, need: Callable[[str], str]) -> None:
    service, timer = "sms-lab.snapshot.service", "sms-lab.snapshot.timer"
    with bootable(stopped, built, need) as outer:
        outer.run("rm", "-rf", "/var/lib/sms/snapshots/lab")
        with booted(outer) as system:
            system.run("sms", "-q", "start", timeout=120)
            system.run("sms", "-q", "overlay", "schedule", "install", "--every", "5")
            again = json.loads(system.run("sms", "overlay", "schedule", "install", "--every", "5", "--json").stdout)
            assert (again["kind"], again["every"], again["runs"], again["changed"]) == ("systemd", 5, True, False)
            assert "*:00/5:00" in system.run("systemctl", "show", "-P", "TimersCalendar", timer).text
            for _ in range(2):  # a run that lasts is not in the way of the next
                system.run("systemctl", "start", service)

            def reported() -> Any:
                return json.loads(system.run("sms", "status", "--json", ok=(0, 4)).stdout)["snapshots"]

            wait("the end of the runs", lambda: not system.works("pgrep", "-f", "overlay snapshot --scheduled"))
            found = reported()
            assert (found["schedule"], found["last_run"]["ok"]) == ("systemd", True), found
            assert found["count"] == 2 or "another run" in found["last_run"]["met"], found
            assert system.run("sms", "overlay", "schedule", "remove").status == 0
            assert not system.works("systemctl", "is-active", "--quiet", timer)
            assert system.run("systemctl", "is-enabled", timer, ok=None).status
            system.run("sms", "-q", "stop", timeout=120)
        outer.run("rm", "-rf", "/var/lib/sms/snapshots/lab")
