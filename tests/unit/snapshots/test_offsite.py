"""Archive names, which snapshots a target should have, borg's options, and its errors."""

from __future__ import annotations

import fnmatch
import json
import shlex
from typing import Any

import pytest

from appliance.cli.snapshots.push import lines
from appliance.cli.steps import Shown
from appliance.config.model import Retention
from appliance.errors import Busy, ConfigError, Refused, SmsError
from appliance.host.base import Result, Unreachable
from appliance.operations.snapshots.pull import list_remote
from appliance.operations.snapshots.push import (
    FAILED,
    PRESENT,
    PUSHED,
    REMOVED,
    WOULD_REMOVE,
    Pushed,
    choose_targets,
    exit_status,
)
from appliance.plan.snapshots import offsite
from appliance.shared.identity import Identity
from appliance.tools import borg
from appliance.tools.borg import Repository
from tests.sites import open_debian
from tests.support.fake import Fake

FAR = Repository("ssh://borg@far:2222/srv/r", "/etc/sms/borg pass", "/base", "/key", "/known")
UUID = "01234567-89ab-4cde-8f01-23456789abcd"
NONE = Retention(last=1, hourly=0, daily=0, weekly=0, monthly=0)
ALL = Retention(last=100, hourly=0, daily=0, weekly=0, monthly=0)


def one(number: int, *, generation: int = 1, taken: float = 0.0, ok: bool = True, **more: Any) -> dict[str, Any]:
    facts = {"cluster": "lab", "number": number, "generation": generation, "taken": taken or 1000.0 * number}
    facts |= {"host": "host-a", "sequence": number}
    return {
        **facts,
        "uuid": f"{generation:08d}-0000-4000-8000-{number:012d}",
        "reason": "",
        "health": {"ok": ok},
        **more,
    }


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        (f"sms-lab-000042-{UUID}", True),
        (f"sms-lab-000042-{UUID}.checkpoint", False),
        (f"sms-lab-2-000042-{UUID}", False),
        (f"sms-lab-000001-000042-{UUID}", False),
        (f"sms-lab2-000042-{UUID}", False),
        ("sms-lab-000042", False),
        (f"sms-lab.vm-000042-{UUID}", False),
        ("mine", False),
    ],
)
def test_the_glob_matches_our_archives_only(name: str, ours: bool) -> None:
    assert fnmatch.fnmatchcase(name, offsite.archive_glob("lab")) is ours


@pytest.mark.parametrize(("label", "other"), [("lab", "lab.vm"), ("lab.vm", "lab")])
def test_archives_of_the_overlay_and_of_the_vm_are_apart(label: str, other: str) -> None:
    """Also those that are incomplete, and in a listing."""
    uuid = "5d6e71c0-0000-4000-8000-000000000000"
    for cluster_uuid in ("", uuid):
        manifest = one(42, cluster=label, host="host-a", cluster_uuid=cluster_uuid)
        name = offsite.archive_name(manifest)
        assert offsite.is_archive(name, label) and not offsite.is_archive(name, other)
        for end in ("", ".checkpoint", ".checkpoint.1"):
            assert not fnmatch.fnmatchcase(name + end, f"{offsite.archive_glob(other, cluster_uuid)}*")
            assert not fnmatch.fnmatchcase(name + end, f"sms-{other}-*"), "how archives are listed"


def test_a_manifest_goes_into_a_comment_and_comes_back() -> None:
    manifest = one(42, host="host-a", checks={"e2fsck": "clean", "heads": ["/a {b}"]})
    text = offsite.comment(manifest).format()  # as borg does
    name = offsite.archive_name(manifest)
    kept = {key: value for key, value in manifest.items() if key != "health"}
    assert offsite.read_comment(text, name) == kept
    for bad in ("", "{", "[]", "{}", "null", text.replace('"number":42', '"number":43')):
        assert offsite.read_comment(bad, name) is None


def test_archives_are_ordered_by_lease_not_by_clock() -> None:
    earlier, later = one(5, taken=9000.0), one(2, generation=2, taken=100.0)
    assert offsite.archive_time(earlier, []) == "1970-01-01T02:30:00"
    assert offsite.archive_time(later, [(earlier, 9000.0)]) == "1970-01-01T02:30:01"
    assert offsite.archive_time(earlier, [(later, 9001.0)]) == "1970-01-01T02:30:00"


def test_missing_snapshots() -> None:
    here = [one(1), one(2, ok=False), one(3), one(4)]
    assert [found["number"] for found in offsite.missing(here, [], ALL, now=1e9)] == [1, 3, 4]
    assert [found["number"] for found in offsite.missing(here, [one(3)], ALL, now=1e9)] == [1, 4]
    assert [found["number"] for found in offsite.missing(here, [], NONE, now=1e9)] == [4]
    newer = one(1, generation=2)
    assert offsite.missing(here, [newer], NONE, now=1e9) == [], "it would be pruned again"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("latest", [3]),
        ("2", [2]),
        ("9", []),
        ("00000001-0000-4000-8000-000000000002", [2]),
        ("00000001-0000-4", [1, 2]),
        ("00000001", [1]),
        ("99999999", [7]),
        ("9999999", []),
        ("0" * 400, []),
        ("sms-lab-000001-00000001-0000-4000-8000-000000000001", [1]),
        ("nonsense", []),
    ],
)
def test_selectors(wanted: str, found: list[int]) -> None:
    digits = one(7) | {"uuid": "99999999-0000-4000-8000-000000000002"}
    there = [one(3, generation=2), one(1), one(2), digits]
    assert [manifest["number"] for manifest in offsite.find(wanted, there)] == found


def test_latest_is_not_what_a_restore_replaced() -> None:
    kept = one(4, generation=2, reason="before restore of 2")
    assert offsite.find("latest", [one(3), kept, one(2)]) == [one(3)]
    assert offsite.find("latest", [kept]) == [kept]


def test_snapshots_that_would_be_pruned_are_not_sent() -> None:
    """A fixed point: nothing that was sent is pruned, and nothing that was pruned is sent again."""
    day = 86400.0
    kept = one(2, taken=95 * day, reason="before restore of 1")
    old = one(1, taken=60 * day, reason="before restore of 9")
    here = [old, kept, one(3, taken=96 * day), one(4, taken=97 * day)]
    now = 100 * day
    assert [found["number"] for found in offsite.missing(here, [], NONE, now=now)] == [2, 4]
    assert [found["number"] for found in offsite.not_kept(here, NONE, now=now)] == [1, 3]
    there = offsite.missing(here, [], NONE, now=now)
    assert offsite.not_kept(there, NONE, now=now) == []
    assert offsite.missing(here, there, NONE, now=now) == []
    later = 95 * day + 31 * day
    assert [found["number"] for found in offsite.not_kept(there, NONE, now=later)] == [2]
    assert [found["number"] for found in offsite.missing(here, there[1:], NONE, now=later)] == []


def words(msgid: str, message: str = "m", level: str = "ERROR") -> str:
    return json.dumps({"type": "log_message", "levelname": level, "message": message, "msgid": msgid})


TRACE = (
    'Traceback (most recent call last):\n  File "/usr/lib/borg/archiver.py", line 5213, in main\n'
    "borg.repository.ObjectNotFound: Object 12 not found\n\n"
    "Platform: Linux far 6.1\nSSH_ORIGINAL_COMMAND: None\n"
)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            [words("IntegrityError", "Data integrity error: Segment entry checksum mismatch"), words("", TRACE)],
            "host-a: ssh://borg@far:2222/srv/r is damaged: Data integrity error: Segment entry checksum mismatch",
        ),
        (
            [words("", "Local Exception"), words("", TRACE)],
            "host-a: ssh://borg@far:2222/srv/r is damaged: borg.repository.ObjectNotFound: Object 12 not found",
        ),
    ],
)
def test_damage_is_reported_by_the_line_that_names_it(lines: list[str], said: str) -> None:
    error = borg.error_of(Fake({}, name="host-a"), FAR, 2, lines)
    assert error.message == said
    command, _, then = error.hint.partition("; then: ")
    assert then == "sms overlay push --all-missing --to borg"
    reported = dict(word.split("=", 1) for word in shlex.split(command)[:3])
    assert reported == {name: FAR.environment()[name] for name in ("BORG_PASSCOMMAND", "BORG_BASE_DIR", "BORG_RSH")}
    assert shlex.split(command)[3:] == ["borg", "check", "--repair", FAR.url]


def test_borg_gets_no_secret_argument_and_never_prompts() -> None:
    environment = FAR.environment()
    assert environment["BORG_PASSCOMMAND"] == "cat -- '/etc/sms/borg pass'"
    for option in ("BatchMode=yes", "StrictHostKeyChecking=yes", "UserKnownHostsFile=/known", "-i /key"):
        assert option in environment["BORG_RSH"]
    argv = FAR.argv("list", FAR.url)
    assert argv[0] == "env" and argv[-2:] == ("list", FAR.url)
    assert "BORG_PASSPHRASE" in argv and not any(word.startswith("BORG_PASSPHRASE=") for word in argv)


REMOTE = '{"type": "log_message", "levelname": "WARNING", "message": "Remote: %s"}'
CLOSED = words("ConnectionClosedWithHint", "Connection closed by remote host. Is borg working on the server?")
WHY: dict[str, tuple[list[str], type[SmsError], str]] = {
    "passphrase": ([words("PassphraseWrong")], Refused, "does not open"),
    "locked": ([words("LockTimeout")], Busy, "is locked"),
    "full": ([words("", "OSError: [Errno 28] No space left on device: '/srv/r/data/0/1'")], SmsError, "no space left"),
    "quota": ([words("Repository.StorageQuotaExceeded")], SmsError, "no space left"),
    "replay": ([words("Cache.RepositoryReplay", "Cache is newer")], Refused, "was not created by this site"),
    "damaged": ([words("IntegrityError", "Data integrity error: x")], SmsError, "is damaged"),
    "host key": ([REMOTE % "Host key verification failed.", CLOSED], Refused, "host key is not in known_hosts"),
    "no borg": ([REMOTE % "bash: line 1: borg: command not found", CLOSED], Refused, "borg is not installed on far"),
    "login": ([REMOTE % "borg@far: Permission denied (publickey).", CLOSED], Refused, "authentication failed"),
    "name": ([REMOTE % "ssh: Could not resolve hostname far", CLOSED], Unreachable, "Could not resolve"),
    "restricted": ([words("PathNotAllowed")], Refused, "does not permit access"),
    "killed": ([], SmsError, "ended with status 137"),
    "unknown": (["Traceback (most recent call last):", "ValueError: x"], SmsError, "ValueError: x"),
}


@pytest.mark.parametrize("name", WHY)
def test_why_borg_failed(name: str) -> None:
    lines, kind, said = WHY[name]
    error = borg.error_of(Fake({}, name="host-a"), FAR, 137, lines)
    assert type(error) is kind or name in ("killed", "unknown")
    assert isinstance(error, kind)
    assert said in error.message
    assert error.hint


@pytest.mark.parametrize("read", [[], [REMOTE % "No ED25519 host key is known for far"], [REMOTE % "a banner"]])
def test_a_reason_that_borg_truncates_is_taken_from_ssh(read: list[str]) -> None:
    asked = Fake({("ssh",): (255, "Host key verification failed.")}, name="host-a")
    assert "host key is not in known_hosts" in borg.error_of(asked, FAR, 2, [*read, CLOSED]).message
    assert asked.asked[0][-6:] == ("2222", "-l", "borg", "far", "borg", "--version")


@pytest.mark.parametrize(
    ("version", "fine"),
    [("borg 1.2.4", True), ("borg 1.4.0", True), ("borg 1.1.16", False), ("borg 2.0.0b5", False), ("", False)],
)
def test_which_borg_works(version: str, fine: bool) -> None:
    host = Fake({("sh",): (0, ""), ("borg", "--version"): (0, version), ("stat",): (0, "600 0 45")})
    if fine:
        borg.check_ready(host, FAR)
    else:
        with pytest.raises(Refused, match="has "):
            borg.check_ready(host, FAR)


@pytest.mark.parametrize("stat", ["640 0 45", "604 0 45", "600 1000 45", "600 0 0"])
def test_a_passphrase_that_is_none(stat: str) -> None:
    with pytest.raises(Refused):
        borg.check_ready(Fake({("sh",): (0, ""), ("borg",): (0, "borg 1.2.4"), ("stat",): (0, stat)}), FAR)


@pytest.mark.parametrize(
    ("done", "line"),
    [
        (Pushed("host-b", 28, PUSHED, "28", 5 << 20, 1.25), "snapshot 28 is at host-b now, 5.0 MiB new there, 1.2 s"),
        (
            Pushed("host-b", 43, PUSHED, "44", 5 << 20, 1.25),
            "snapshot 43 is at host-b now as number 44 there (43 is taken), 5.0 MiB new there, 1.2 s",
        ),
        (Pushed("host-b", 28, PRESENT, "28"), "snapshot 28 is at host-b already"),
        (Pushed("borg", 28, PRESENT, "sms-a-000028-u"), "snapshot 28 is at borg already: sms-a-000028-u"),
        (Pushed("host-b", 3, REMOVED, "3"), "snapshot 3 at host-b is removed: no rule keeps it"),
        (
            Pushed("borg", 3, WOULD_REMOVE, "sms-a-000003-u"),
            "snapshot 3 at borg would be removed: no rule keeps it (sms-a-000003-u)",
        ),
    ],
)
def test_a_result_is_one_line(done: Pushed, line: str) -> None:
    assert list(lines([done])) == [line]


NOTHING = "no snapshots are to be removed there: a rule keeps each"


@pytest.mark.parametrize(
    ("done", "count"),
    [
        ([], 2),
        ([Pushed("host-b", 28, PRESENT, "28")], 2),
        ([Pushed("host-b", 28, PRESENT, "28"), Pushed("host-b", 3, WOULD_REMOVE, "3")], 2),
        ([Pushed("host-b", 3, REMOVED, "3")], 1),
    ],
)
def test_a_prune_that_removes_nothing_says_so(done: list[Pushed], count: int) -> None:
    shown = list(lines(done, pruned=True))
    assert len(shown) == count
    assert (shown[-1] == NOTHING) == all(one.state == PRESENT for one in done)
    assert NOTHING not in list(lines(done))


def test_exit_statuses() -> None:
    refused, broken = (Pushed("borg", 0, FAILED, status=status) for status in (3, 1))
    present, pushed = Pushed("host-b", 1, PRESENT, "1"), Pushed("host-b", 1, PUSHED, "1")
    assert exit_status([]) == exit_status([present, pushed]) == 0
    assert exit_status([refused]) == exit_status([present, refused, refused]) == 3
    assert exit_status([refused, broken]) == exit_status([broken]) == 1
    assert exit_status([pushed, refused]) == 1, "something was changed"


def test_hints_name_the_option_that_was_used() -> None:
    cluster = open_debian()
    name = cluster.site.admin_hosts[0].name
    for option in ("--to", "--from"):
        with pytest.raises(Refused) as caught:
            choose_targets(cluster, name, [name], option=option)
        assert caught.value.hint == f"name another one with {option}"
        with pytest.raises(ConfigError) as wrong:
            choose_targets(cluster, name, ["nowhere"], option=option)
        assert wrong.value.hint.endswith(f"or {option} borg")
    with pytest.raises(Refused, match=f"on {name} already") as pulled:
        list_remote(cluster, Fake({}, name=name), name, Identity())
    assert "--from" in pulled.value.hint


def test_progress_of_less_than_a_mebibyte_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Shown().step("small") as step:
        for done in (0, 500_000):
            step.moved(done, 500_000)
    with Shown().step("large") as step:
        step.moved(1 << 20, 2 << 20)
    small, large = capsys.readouterr().err.splitlines()
    assert "MiB" not in small and "large: 1 of 2 MiB" in large


@pytest.mark.parametrize(
    ("there", "vanished"),
    [
        ({"a": "1", "b": "2"}, []),
        ({"a": "1", "b": "2", "c": "3"}, []),
        ({"b": "2"}, ["a"]),
        ({"a": "9", "b": "2"}, ["a"]),
        ({}, ["a", "b"]),
    ],
    ids=["the same", "a new one", "one is missing", "one was replaced", "all are missing"],
)
def test_archives_that_have_vanished(there: dict[str, str], vanished: list[str]) -> None:
    assert offsite.find_vanished(offsite.KnownArchives({"b": "2", "a": "1"}), there) == vanished
    assert offsite.find_vanished(offsite.KnownArchives(), there) == []


class Logging(Fake):
    """A host whose borg writes one line to standard error."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__({}, name="host-a")
        self.status, self.line = status, line

    def run(self, *argv: str, **_: Any) -> Result:
        return Result(self.name, argv, self.status, b"", self.line.encode())


def test_a_compaction_that_frees_nothing_is_noticed() -> None:
    assert borg.compact(Logging(0, words("", "compaction freed about 0 B repository space.", "INFO")), FAR)
    assert not borg.compact(Logging(0, ""), FAR)


def test_what_a_check_of_the_repository_reports() -> None:
    borg.check(Logging(0, ""), FAR)
    for status, line, kind, message in (
        (1, words("", "Index mismatch for key 1"), SmsError, "is damaged: Index mismatch"),
        (2, words("LockTimeout"), Busy, "is locked"),
        (2, words("RepoKeyNotFoundError", "No key entry found"), Refused, "has lost its key"),
    ):
        with pytest.raises(kind, match=message):
            borg.check(Logging(status, line), FAR)
