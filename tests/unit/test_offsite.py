"""What archives are called, which snapshots another place is to have, what borg is told, and how it fails."""

from __future__ import annotations

import fnmatch
import json
from typing import Any

import pytest

from appliance.config.model import Retention
from appliance.errors import Busy, Refused, SmsError
from appliance.host.base import Unreachable
from appliance.host.fake import Fake
from appliance.plan import offsite
from appliance.tools import borg
from appliance.tools.borg import Repository

UUID = "01234567-89ab-4cde-8f01-23456789abcd"
NONE = Retention(last=1, hourly=0, daily=0, weekly=0, monthly=0)
ALL = Retention(last=100, hourly=0, daily=0, weekly=0, monthly=0)


def one(number: int, *, generation: int = 1, taken: float = 0.0, ok: bool = True, **more: Any) -> dict[str, Any]:
    facts = {"cluster": "lab", "number": number, "generation": generation, "taken": taken or 1000.0 * number}
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
        ("mine", False),
    ],
)
def test_the_pattern_takes_our_archives_and_no_others(name: str, ours: bool) -> None:
    assert fnmatch.fnmatchcase(name, offsite.archive_glob("lab")) is ours


def test_a_manifest_goes_into_a_comment_and_comes_back() -> None:
    manifest = one(42, host="host-a", checks={"e2fsck": "clean", "heads": ["/a {b}"]})
    text = offsite.comment(manifest).format()  # as borg does
    name = offsite.archive_name(manifest)
    kept = {key: value for key, value in manifest.items() if key != "health"}
    assert offsite.read_comment(text, name) == kept
    for bad in ("", "{", "[]", "{}", "null", text.replace('"number":42', '"number":43')):
        assert offsite.read_comment(bad, name) is None


def test_archives_are_in_the_order_of_the_leases_whatever_the_clock_said() -> None:
    earlier, later = one(5, taken=9000.0), one(2, generation=2, taken=100.0)
    assert offsite.archive_time(earlier, []) == "1970-01-01T02:30:00"
    assert offsite.archive_time(later, [(earlier, 9000.0)]) == "1970-01-01T02:30:01"
    assert offsite.archive_time(earlier, [(later, 9001.0)]) == "1970-01-01T02:30:00"


def test_what_is_missing_there() -> None:
    here = [one(1), one(2, ok=False), one(3), one(4)]
    assert [found["number"] for found in offsite.missing(here, [], ALL, now=1e9)] == [1, 3, 4]
    assert [found["number"] for found in offsite.missing(here, [one(3)], ALL, now=1e9)] == [1, 4]
    assert [found["number"] for found in offsite.missing(here, [], NONE, now=1e9)] == [4]
    newer = one(1, generation=2)
    assert offsite.missing(here, [newer], NONE, now=1e9) == [], "it would be removed again"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("latest", [3]),
        ("2", [2]),
        ("9", []),
        ("00000001-0000-4000-8000-000000000002", [2]),
        ("00000001-0000-4", [1, 2]),
        ("sms-lab-000001-00000001-0000-4000-8000-000000000001", [1]),
        ("nonsense", []),
    ],
)
def test_what_is_meant(wanted: str, found: list[int]) -> None:
    there = [one(3, generation=2), one(1), one(2)]
    assert [manifest["number"] for manifest in offsite.find(wanted, there)] == found


def test_the_retention_as_borg_has_it() -> None:
    assert offsite.prune_options(Retention(weekly=0)) == [
        "--keep-last=3",
        "--keep-hourly=24",
        "--keep-daily=7",
        "--keep-monthly=6",
    ]


FAR = Repository("ssh://borg@far:2222/srv/r", "/etc/sms/borg pass", "/base", "/key", "/known")


def test_borg_is_told_nothing_secret_and_asks_nothing() -> None:
    environment = FAR.environment()
    assert environment["BORG_PASSCOMMAND"] == "cat -- '/etc/sms/borg pass'"
    for option in ("BatchMode=yes", "StrictHostKeyChecking=yes", "UserKnownHostsFile=/known", "-i /key"):
        assert option in environment["BORG_RSH"]
    argv = FAR.argv("list", FAR.url)
    assert argv[0] == "env" and argv[-2:] == ("list", FAR.url)
    assert "BORG_PASSPHRASE" in argv and not any(word.startswith("BORG_PASSPHRASE=") for word in argv)


def words(msgid: str, message: str = "m", level: str = "ERROR") -> str:
    return json.dumps({"type": "log_message", "levelname": level, "message": message, "msgid": msgid})


REMOTE = '{"type": "log_message", "levelname": "WARNING", "message": "Remote: %s"}'
CLOSED = words("ConnectionClosedWithHint", "Connection closed by remote host. Is borg working on the server?")
WHY: dict[str, tuple[list[str], type[SmsError], str]] = {
    "passphrase": ([words("PassphraseWrong")], Refused, "does not open"),
    "locked": ([words("LockTimeout")], Busy, "is locked"),
    "full": ([words("", "OSError: [Errno 28] No space left on device: '/srv/r/data/0/1'")], SmsError, "no room left"),
    "quota": ([words("Repository.StorageQuotaExceeded")], SmsError, "no room left"),
    "replay": ([words("Cache.RepositoryReplay", "Cache is newer")], Refused, "not one that this site made"),
    "damaged": ([words("IntegrityError", "Data integrity error: x")], SmsError, "is damaged"),
    "host key": ([REMOTE % "Host key verification failed.", CLOSED], Refused, "has no known host key"),
    "no borg": ([REMOTE % "bash: line 1: borg: command not found", CLOSED], Refused, "borg is not installed on far"),
    "login": ([REMOTE % "borg@far: Permission denied (publickey).", CLOSED], Refused, "refuses the login"),
    "name": ([REMOTE % "ssh: Could not resolve hostname far", CLOSED], Unreachable, "Could not resolve"),
    "restricted": ([words("PathNotAllowed")], Refused, "does not let us use"),
    "killed": ([], SmsError, "ended with status 137"),
    "unknown": (["Traceback (most recent call last):", "ValueError: x"], SmsError, "ValueError: x"),
}


@pytest.mark.parametrize("name", WHY)
def test_why_borg_failed(name: str) -> None:
    lines, kind, said = WHY[name]
    error = borg.why(Fake({}, name="host-a"), FAR, 137, lines)
    assert type(error) is kind or name in ("killed", "unknown")
    assert isinstance(error, kind)
    assert said in error.message
    assert error.hint


def test_a_reason_that_borg_did_not_read_is_asked_of_ssh() -> None:
    asked = Fake({("ssh",): (255, "borg@far: Permission denied (publickey).")}, name="host-a")
    assert "refuses the login" in borg.why(asked, FAR, 2, [CLOSED]).message
    assert asked.asked[0][-6:] == ("2222", "-l", "borg", "far", "borg", "--version")


@pytest.mark.parametrize(
    ("version", "fine"),
    [("borg 1.2.4", True), ("borg 1.4.0", True), ("borg 1.1.16", False), ("borg 2.0.0b5", False), ("", False)],
)
def test_which_borg_works(version: str, fine: bool) -> None:
    host = Fake({("sh",): (0, version), ("stat",): (0, "600 0 45")})
    if fine:
        borg.check_ready(host, FAR)
    else:
        with pytest.raises(Refused, match="has "):
            borg.check_ready(host, FAR)


@pytest.mark.parametrize("stat", ["640 0 45", "604 0 45", "600 1000 45", "600 0 0"])
def test_a_passphrase_that_is_none(stat: str) -> None:
    with pytest.raises(Refused):
        borg.check_ready(Fake({("sh",): (0, "borg 1.2.4"), ("stat",): (0, stat)}), FAR)
