"""Scheduled runs that succeed or fail, and their status."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest

from appliance.agent.store import Store
from appliance.config.model import BorgRepository, Site
from appliance.errors import Busy, Refused, SmsError
from appliance.host.base import Host, Result
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.snapshots import push as push_flow
from appliance.operations.snapshots import scheduled
from appliance.operations.snapshots.report import record_path
from appliance.operations.snapshots.scheduled import run_scheduled
from appliance.operations.snapshots.snapshot import SnapshotOptions, Taken
from appliance.operations.snapshots.status import snapshot_status
from appliance.plan.snapshots.runs import DRILLS, Run, read_run
from appliance.plan.snapshots.schedule import drill_job, job, plan_schedule
from appliance.shared.lease import Lease
from appliance.shared.records import to_json
from appliance.tools.apptainer import Instance
from appliance.tools.borg import Repository, error_of
from tests import stores
from tests.places import DEBIAN_SITE
from tests.sites import open_debian
from tests.support.cron import AgentsWithCron, HostWithCron
from tests.support.env import FakeHosts, with_env
from tests.support.fake import Fake
from tests.support.instances import LIST, lists

CRON = "/etc/cron.d/sms-sample"
NAME = "admin-1"


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """A cluster on this machine, where ``cron.d`` in the folder of the test is the one of cron."""
    opened = open_debian(tmp_path / "state")
    return with_env(opened, agents=AgentsWithCron(str(tmp_path / "run"), cron=str(tmp_path / "cron.d")))


class Here(HostWithCron):
    """This machine; log lines and mails are collected, and the container's postfix accepts mail or not."""

    def __init__(self, mail_status: int = 0, cron: Path = Path("/etc/cron.d")) -> None:
        super().__init__(NAME, cron)
        self.instances: list[Instance] = []
        self.log: list[str] = []
        self.mails: list[str] = []
        self.mail_status = mail_status

    def run(self, *argv: str, **options: Any) -> Result:
        if argv[0] == "logger":
            self.log.append(f"{argv[4]} {argv[-1]}")
        elif argv[0] == "unshare":
            if not self.mail_status:
                self.mails.append((options.get("input") or b"").decode())
            return Result(self.name, argv, self.mail_status, b"", b"")
        elif argv[: len(LIST)] == LIST:
            return Result(self.name, argv, 0, lists(self.instances)(argv, None)[1].encode(), b"")
        elif "sendmail" in " ".join(argv):
            return Result(self.name, argv, 44, b"", b"")
        else:
            return super().run(*argv, **options)
        return Result(self.name, argv, 0, b"", b"")

    @contextlib.contextmanager
    def lock(self, path: str, *, wait_s: float = 0) -> Iterator[None]:
        """Other runs of this machine hold the locks in /run; none of this test does."""
        yield


@pytest.fixture
def take(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | Taken | None], list[str]]:
    """``take(error)``: snapshots raise it from now on; ``take(None)``: the store itself adds a small one.

    ``take(taken)``: nothing is added. Returns a list that gets a line for each snapshot.
    """
    hold_lease(cluster, NAME)
    store = Store(str(cluster.places.snapshots))

    def chosen(end: BaseException | Taken | None) -> list[str]:
        did: list[str] = []

        def snapshot(*_: object) -> Taken:
            did.append("snapshot")
            if isinstance(end, BaseException):
                raise end
            return end or Taken(stores.add_snapshot(store, [os.urandom(100)]).to_dict())

        monkeypatch.setattr(scheduled, "snapshot", snapshot)
        return did

    return chosen


def hold_lease(cluster: Cluster, holder: str | None, *, since: float | None = None) -> None:
    path = Path(cluster.places.lease)
    path.parent.mkdir(parents=True, exist_ok=True)
    since = time.time() - 86400 if since is None else since
    path.write_bytes(Lease(cluster.site.cluster, 3, holder, since).text())


def run(
    cluster: Cluster, host: Host, follow_names: Callable[[Callable[[str], None]], None] = lambda report: None
) -> Run | None:
    return run_scheduled(cluster, host, SnapshotOptions(reason="scheduled"), follow_names=follow_names)


def record(cluster: Cluster) -> Run | None:
    path = Path(record_path(cluster))
    return read_run(path.read_bytes()) if path.exists() else None


@pytest.mark.slow
def test_a_run_is_recorded_and_prunes(cluster: Cluster, take: Any) -> None:
    host = Here()
    take(None)
    count = 6  # in less than a second: three by `last`, and the oldest
    numbers = [done.number for _ in range(count) if (done := run(cluster, host))]
    assert numbers == [1, 2, 3, 4, 5, 6]
    found = record(cluster)
    assert found and (found.ok, found.number, found.notes) == (True, 6, ())
    assert stores.numbers(Store(str(cluster.places.snapshots))) == [1, 4, 5, 6]
    assert found.stored_bytes and found.stored_bytes > 0
    assert Path(record_path(cluster)).stat().st_mode & 0o777 == 0o600
    assert host.log == host.mails == []


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_names_of_nodes_are_followed_where_no_guard_does(cluster: Cluster, take: Any, hosts: int) -> None:
    take(None)
    site = cluster.site.model_copy(update={"admin_hosts": cluster.site.admin_hosts[:1] * hosts})

    def follow(report: Callable[[str], None]) -> None:
        report("2 nodes have other addresses")
        raise SmsError("scontrol failed")

    found = run(replace(cluster, site=site), Here(), follow)
    assert found and found.number == 1 and found.ok, "the snapshot is taken nevertheless"
    said = ("2 nodes have other addresses", "names of nodes: scontrol failed")
    assert [line for line in found.notes if "addresses" in line or "scontrol" in line] == [*said] * (hosts == 1)


@pytest.mark.slow
def test_a_failure_is_mailed_once_a_day_and_the_recovery_too(cluster: Cluster, take: Any) -> None:
    host = Here()
    take(SmsError("the file system is full", hint="sms overlay prune"))
    for _ in range(3):
        assert run(cluster, host)
    assert host.log == ["cron.err overlay snapshots of sample: the file system is full; hint: sms overlay prune"] * 3
    (mail,) = host.mails
    assert message_from_string(mail)["To"] == "operators@example.org"
    assert "overlay snapshots on admin-1 failed" in mail
    found = record(cluster)
    assert found and not found.ok and found.mailed
    a_day_ago = replace(found, mailed=found.mailed - 86401, failing_since=found.mailed - 86401)
    Path(record_path(cluster)).write_bytes(to_json(a_day_ago))
    run(cluster, host)
    assert len(host.mails) == 2 and "are still failing" in host.mails[1]
    take(None)
    run(cluster, host)
    run(cluster, host)
    assert len(host.mails) == 3 and "have recovered" in host.mails[2]
    assert host.log[4:] == ["cron.notice overlay snapshots of sample: recovered, with snapshot 1"]


def test_failed_mail_is_logged(cluster: Cluster, take: Any) -> None:
    host = Here(mail_status=255)
    take(SmsError("no"))
    run(cluster, host)
    assert host.log == [
        "cron.err overlay snapshots of sample: no; "
        "no mail could be sent: neither the services container nor the host accepts it"
    ]


def test_an_unexpected_exception_is_a_failure(cluster: Cluster, take: Any) -> None:
    host = Here()
    take(KeyError("number"))
    done = run(cluster, host)
    assert done and done.error == "KeyError: 'number'"
    assert len(host.mails) == 1


def test_a_host_without_the_lease_does_nothing(cluster: Cluster, take: Any) -> None:
    host = Here()
    take(SmsError("must not be asked"))
    for holder in ("admin-2", None):
        hold_lease(cluster, holder)
        assert run(cluster, host) is None
    assert record(cluster) is None and host.log == []
    assert not Path(cluster.places.snapshots).exists()


@pytest.mark.slow
@pytest.mark.parametrize("runs", [False, True])
def test_an_instance_whose_lease_was_lost_still_gets_snapshots(cluster: Cluster, take: Any, *, runs: bool) -> None:
    host = Here()
    take(None)
    Path(cluster.places.lease).unlink()
    host.instances = [Instance("sms-sample", 7, "/i.sif")] * runs
    done = run(cluster, host)
    assert (done and done.number) == (1 if runs else None)


def test_an_unreadable_lease_is_a_failure(cluster: Cluster, take: Any) -> None:
    host = Here()
    Path(cluster.places.lease).write_text("{")
    done = run(cluster, host)
    assert done and "lease file cannot be read" in done.error


def test_an_overlapping_run_is_only_recorded(cluster: Cluster, take: Any) -> None:
    host = Here()
    take(None)
    first = run(cluster, host)
    take(Busy("another run is at work on the snapshots"))
    assert run(cluster, host) is None
    found = record(cluster)
    assert first and found and (found.number, found.ok) == (1, True)
    assert found.met == "another run is at work on the snapshots" and found.met_at
    assert host.log == host.mails == []


def test_a_prune_blocked_by_a_reader_is_only_recorded(cluster: Cluster, take: Any) -> None:
    host = Here()
    take(None)
    run(cluster, host)
    store = Store(str(cluster.places.snapshots))
    take(Taken({"number": 1}))
    with store.reading():
        done = run(cluster, host)
    assert done and done.ok
    assert "are being read" in done.notes[0] and done.notes[0].startswith("prune: ")


@pytest.mark.slow
def test_prunes_blocked_repeatedly_are_reported(cluster: Cluster, take: Any) -> None:
    """A push of several hours reads the store: nothing is removed, and the disk fills."""
    host = Here()
    take(None)
    run(cluster, host)
    take(Taken({"number": 1}))
    store = Store(str(cluster.places.snapshots))
    with store.reading():
        done = [run(cluster, host) for _ in range(4)]
    assert [one and one.ok for one in done] == [True, True, True, False]
    assert done[-1] and "4 runs in a row" in done[-1].error and "are being read" in done[-1].error
    assert len(host.mails) == 1 and "hint: `sms overlay prune`" in host.mails[0]
    last = run(cluster, host)
    assert last and last.ok and last.put_off == 0
    assert "recovered" in host.mails[1]


@pytest.mark.slow
def test_the_first_run_after_a_gap_reports_it(cluster: Cluster, take: Any, with_schedule: Any) -> None:
    host = Here(cron=with_schedule(cluster.site))
    take(None)
    hold_lease(cluster, NAME, since=time.time() - 20 * 3600)
    run(cluster, host)
    assert len(host.mails) == 1 and "ran for 20 h before this one" in host.mails[0], "none ever ran"
    found = record(cluster)
    assert found and found.ok and found.number == 1
    for hours in (5, 7):
        at = time.time() - hours * 3600
        Path(record_path(cluster)).write_bytes(to_json(replace(found, started=at, ended=at + 9, missed_mailed=None)))
        run(cluster, host)
        run(cluster, host)
    assert len(host.mails) == len(host.log) == 3, "once each"
    assert "were missed" in host.mails[2] and "No scheduled snapshot ran for 7 h before this one" in host.mails[2]
    assert host.log[2].startswith("cron.err overlay snapshots of sample: no scheduled snapshot ran for 7 h")
    assert snapshot_status(cluster, host, HELD).judgement.healthy


def test_an_interrupted_run_is_recorded_without_mail(cluster: Cluster, take: Any) -> None:
    host = Here()
    take(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(cluster, host)
    found = record(cluster)
    assert found and found.error == "it was interrupted" and not host.mails
    assert len(host.log) == 1
    take(SmsError("no room"))
    run(cluster, host)
    assert len(host.mails) == 1 and "failed" in host.mails[0], "the first real failure is mailed"


def test_a_failed_dump_is_reported_although_the_snapshot_is_committed(cluster: Cluster, take: Any) -> None:
    host = Here()
    take(Taken({"number": 7}, ("mariadb was not dumped: no",)))
    done = run(cluster, host)
    assert done and (done.ok, done.number, done.error) == (False, 7, "mariadb was not dumped: no")


def test_each_push_is_reported_separately(cluster: Cluster, take: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    standby = ("admin-2", NAME, "admin-3")
    borg = BorgRepository(repository="/srv/borg", passphrase=Path("/etc/sms/borg"))
    settings = cluster.site.snapshots.model_copy(update={"standby": standby, "borg": borg})
    admin, asked, pruned = cluster.site.admin_hosts[0], [], list[str]()
    hosts: dict[str, Host] = {name: Local(name) for name in standby}
    admins = tuple(admin.model_copy(update={"name": name}) for name in hosts)

    class Noting(AgentsWithCron):
        def call(self, host: Host, command: str, *more: Any, **options: Any) -> dict[str, Any]:
            pruned.extend([host.name] if command == "remove" else [])
            return super().call(host, command, *more, **options)

    agents = Noting(cluster.env.agents.folder)
    cluster = with_env(
        replace(cluster, site=cluster.site.model_copy(update={"snapshots": settings, "admin_hosts": admins})),
        hosts=FakeHosts(hosts),
        agents=agents,
    )

    def push(_: Cluster, host: Host, wanted: push_flow.PushOptions, targets: list[str], *__: object) -> list[Any]:
        asked.append((host.name, wanted.all_missing, wanted.prune, *targets))
        state = push_flow.FAILED if targets == ["admin-2"] else push_flow.PUSHED
        return [push_flow.Pushed(targets[0], 1, state, error="no way there" if targets == ["admin-2"] else "")]

    monkeypatch.setattr(scheduled, "push", push)
    take(None)
    done = run(cluster, Here())
    assert asked == [(NAME, True, True, "borg"), (NAME, True, False, "admin-2"), (NAME, True, False, "admin-3")]
    assert pruned == [NAME, "admin-3"]
    assert done and (done.ok, done.number, done.error) == (False, 1, "push to admin-2: snapshot 1: no way there")


LOCK_TIMEOUT = json.dumps({"type": "log_message", "levelname": "ERROR", "msgid": "LockTimeout", "message": "no lock"})
LOCKED = "another push or pull is at work on admin-1"


def test_a_push_that_meets_a_drill_is_postponed(cluster: Cluster, take: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drill holds the lock of the repository, or Borg's own from another host, while Borg checks all of it."""
    borg = BorgRepository(repository="/srv/borg", passphrase=Path("/etc/sms/borg"))
    settings = cluster.site.snapshots.model_copy(update={"borg": borg})
    cluster = replace(cluster, site=cluster.site.model_copy(update={"snapshots": settings}))
    failures: list[SmsError] = []

    def work(push: push_flow.Push) -> None:
        for number, error in enumerate(failures[1:], 1):
            push.report(push_flow.failure(push.target, number, error))
        raise failures[0]

    monkeypatch.setattr(push_flow, "_to_borg", work)
    take(None)
    host = Here()
    locked = error_of(host, Repository("/srv/borg", "/etc/sms/borg", "/base"), 2, [LOCK_TIMEOUT])
    for failures[:] in ([Busy(LOCKED)], [locked], [Busy(LOCKED), locked]):
        done = run(cluster, host)
        assert done and done.ok and done.push_waits_since and host.log == host.mails == []
        assert done.notes[-1].startswith("push to borg: ") and failures[0].message in done.notes[-1]
    assert done
    Path(record_path(cluster)).write_bytes(to_json(replace(done, push_waits_since=time.time() - 90000)))
    done = run(cluster, host)
    assert done and not done.ok and "push to borg: pushes have been postponed for 25 h" in done.error
    failures[:] = [Busy(LOCKED), Refused("its key is lost")]
    done = run(cluster, host)
    assert done and not done.ok and "its key is lost" in done.error and done.push_waits_since is None


@pytest.mark.parametrize("why", ["", "sms is not installed there"])
def test_an_old_guard_is_replaced_before_the_lease_is_written(
    cluster: Cluster, take: Any, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """It would not read the new fields, and not step down when another host takes over."""
    did: list[str] = take(None)

    def ensure_guard(_: Cluster, host: Host) -> None:
        did.append(f"guard of {host.name}")
        if why:
            raise SmsError(why)

    monkeypatch.setattr(scheduled, "ensure_guard", ensure_guard)
    monkeypatch.setattr(scheduled, "name_cluster", lambda *_: did.append("UUID"))
    done = run(cluster, Here())
    assert did == [f"guard of {NAME}", "UUID", "snapshot"]
    assert done and (done.number, done.ok, done.error) == (1, not why, f"guard: {why}" if why else "")
    hold_lease(cluster, "admin-2")
    did.clear()
    assert run(cluster, Here()) is None and not did


HELD = Lease("sample", 3, NAME, 0.0)


@pytest.fixture
def with_schedule(tmp_path: Path) -> Callable[[Site], Path]:
    """A schedule of 15 minutes, installed a day ago, in a temporary folder."""
    folder = tmp_path / "cron.d"
    folder.mkdir()

    def install(site: Site) -> Path:
        path, argv = folder / Path(CRON).name, job("/usr/bin/sms", str(DEBIAN_SITE), "/s")
        path.write_text(plan_schedule(site.cluster, "cron", 15, argv=argv, folders=()).files[CRON])
        os.utime(path, (time.time() - 86400,) * 2)
        return folder

    return install


def test_status_of_restore_drills(cluster: Cluster, with_schedule: Any) -> None:
    """On every host that has a schedule for them, also where the services container does not run."""
    lease = Lease("sample", 4, "admin-2", 0.0)
    path = with_schedule(cluster.site) / Path(CRON).name
    record = Path(record_path(cluster, DRILLS))
    record.parent.mkdir(parents=True)
    record.write_bytes(to_json(Run(time.time() - 60, time.time() - 50, False, 3, "jobs: 2 lost")))
    assert snapshot_status(cluster, Local(NAME), lease).judgement.healthy, "none are scheduled"
    drill = drill_job("/usr/bin/sms", str(DEBIAN_SITE), "/s", NAME)
    argv = job("/usr/bin/sms", str(DEBIAN_SITE), "/s")
    path.write_text(plan_schedule(cluster.site.cluster, "cron", 15, argv=argv, folders=(), drill=drill).files[CRON])
    found = snapshot_status(cluster, Local(NAME), lease)
    assert found.drills and found.last_drill and found.last_drill.number == 3
    assert not found.judgement.healthy
    assert found.judgement.warnings == ("the last restore drill failed: jobs: 2 lost",)
    record.unlink()
    assert snapshot_status(cluster, Local(NAME), lease).judgement.healthy, "none has run yet"
    os.utime(path, (time.time() - 15 * 86400,) * 2)
    (warning,) = snapshot_status(cluster, Local(NAME), lease).judgement.warnings
    assert "no restore drill has run for 15 d" in warning


def test_status_of_a_site_without_a_schedule(cluster: Cluster) -> None:
    found = snapshot_status(cluster, Local(NAME), HELD)
    assert (found.count, found.newest, found.schedule, found.judgement.healthy) == (0, None, "", True)
    assert not Path(cluster.places.snapshots).exists()
    stores.fill(Path(cluster.places.snapshots), 2, start=time.time() - 7 * 86400)
    found = snapshot_status(cluster, Local(NAME), HELD)
    assert found.judgement.healthy and not found.judgement.warnings, "without a schedule their age does not matter"
    assert found.newest and found.newest["number"] == 2 and 604000 < found.newest["age_s"] < 605000


@pytest.mark.slow
def test_status_with_a_schedule(cluster: Cluster, with_schedule: Any, take: Any) -> None:
    host = Here(cron=with_schedule(cluster.site))
    assert not snapshot_status(cluster, host, HELD).judgement.healthy, "a day without a run"
    take(None)
    run(cluster, host)
    found = snapshot_status(cluster, host, HELD)
    assert (found.count, found.schedule, found.every_minutes, found.limit_minutes) == (1, "cron", 15, 35)
    assert found.judgement.healthy and found.last_run and found.bytes == found.last_run.stored_bytes
    shown = json.loads(json.dumps(found.as_dict()))
    assert shown["newest"]["method"] == "delta" and shown["last_run"]["ok"] is True and "judgement" not in shown
    take(SmsError("no room"))
    run(cluster, host)
    failed = snapshot_status(cluster, host, HELD).judgement
    assert (failed.healthy, failed.warnings) == (False, ("the last scheduled snapshot failed: no room",))
    elsewhere = snapshot_status(cluster, host, Lease("sample", 4, "admin-2", 0.0)).judgement
    assert elsewhere.healthy, "a standby host needs no new snapshots"


def test_status_sees_an_old_one_and_a_damaged_one(cluster: Cluster, with_schedule: Any) -> None:
    with_schedule(cluster.site)
    store = stores.fill(Path(cluster.places.snapshots), 3, start=time.time() - 3600)
    stores.damage(store, 3)
    Path(record_path(cluster)).write_bytes(to_json(Run(time.time() - 60, time.time() - 50, True, 3)))
    found = snapshot_status(cluster, Local(NAME), HELD)
    assert found.damaged == [3]
    assert found.judgement.warnings == (
        "the newest verified snapshot is 75 min old, more than 35 min",
        "a snapshot is damaged: `sms overlay list` shows which",
    )
    longer = cluster.site.snapshots.model_copy(update={"oldest_minutes": 90})
    site = cluster.site.model_copy(update={"snapshots": longer})
    assert snapshot_status(replace(cluster, site=site), Local(NAME), HELD).judgement.healthy


def test_status_of_a_host_that_cannot_be_queried(cluster: Cluster) -> None:
    host = Fake({("sh", "-c"): (0, "")}, name=NAME)
    found = snapshot_status(cluster, host, HELD)
    assert found.problem == "admin-1 has no Python 3.9 or newer" and found.judgement.healthy
