"""Account lines, valid and invalid; comparison of account files."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import ConfigError, Refused
from appliance.operations.context import open_cluster
from appliance.operations.nodes.users import Source, SyncOptions, query_sssd, read_folder, sync
from appliance.operations.services.pushes import Pushes
from appliance.plan.nodes.accounts import compare_lines, read_accounts, too_many_removed
from appliance.progress import Silent
from appliance.tools.provision import Api
from tests.places import DEBIAN_SITE
from tests.support.fake import Fake

ALICE = "alice:x:2001:2001:Alice:/home/alice:/bin/bash"
TEAM = "team:x:3000:alice,bob"

WRONG = [
    ("alice:x:2001:2001:Alice:/home/alice", "6 fields"),
    ("al ice:x:2001:2001::/home/a:/bin/sh", "invalid account name"),
    ("-alice:x:2001:2001::/home/a:/bin/sh", ""),
    ("alice:x:0x7d1:2001::/home/a:/bin/sh", "is not a number"),
    ("alice:x:20 01:2001::/home/a:/bin/sh", "is not a number"),
    ("alice:x:٢٠٠١:2001::/home/a:/bin/sh", "is not a number"),
    ("alice:x:2001:-5::/home/a:/bin/sh", "is not a number"),
    ("alice:x:2001:2001:\x1b[2J:/home/a:/bin/sh", "not printable"),
    ("alice:x:2001:2001::/home/../root:/bin/sh", "home that is not a valid path"),
    ("alice:x:2001:2001::home:/bin/sh", "home that is not a valid path"),
    ("alice:x:2001:2001::/home/a:bash -c evil", "shell that is not a valid path"),
    ("alice:x:2001:2001::/home/a:/bin/sh\r", "shell that is not a valid path"),
]


@pytest.mark.parametrize(("line", "words"), WRONG)
def test_invalid_passwd_line(line: str, words: str) -> None:
    accounts, problems = read_accounts(f"{ALICE.replace('alice', 'carol')}\n{line}\n", "")
    assert [user.name for user in accounts.users] == ["carol"]
    if words:
        assert problems
        assert problems[0].line == 2
        assert words in problems[0].message
    else:
        assert not problems, "+ and - are lines of NIS"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("team:x:1e3:", "is not a number"),
        ("team:x:3000:a b", "invalid member name"),
        ("team:x", "fields"),
        ("team:x:3000:a,../b", "name"),
    ],
)
def test_invalid_group_line(line: str, words: str) -> None:
    _, problems = read_accounts(ALICE, line)
    assert words in problems[0].message


@pytest.mark.parametrize("uid", ["0", "999", "65534", "65535", "4294967295", "2000000001", "9999999999"])
def test_ids_out_of_bounds_are_left_out(uid: str) -> None:
    accounts, problems = read_accounts(f"{ALICE}\nevil:x:{uid}:2001::/:/bin/sh\n", "")
    assert not problems
    assert [user.name for user in accounts.users] == ["alice"]
    assert accounts.left_out == 1


def test_passwords_are_only_in_shadow_and_only_of_known_users() -> None:
    passwd = ALICE.replace(":x:", ":$6$hash:")
    shadow = "alice:$6$salt$hash:19000:0:99999:7:::\nroot:$6$x:1::::::\n"
    accounts, problems = read_accounts(passwd, TEAM, shadow)
    assert not problems
    texts = accounts.texts()
    assert texts["/etc/passwd"] == f"{ALICE}\n".encode()
    assert texts["/etc/shadow"] == b"alice:$6$salt$hash:19000:0:99999:7:::\n"
    assert texts["/etc/group"] == b"team:x:3000:alice\n", "bob does not exist"
    _, problems = read_accounts(ALICE, "", "alice:two words:1::::::\n")
    assert "two words" not in str(problems[0])


def test_duplicates_are_refused() -> None:
    _, problems = read_accounts(f"{ALICE}\n{ALICE}\nalso:x:2001:1::/:/bin/sh\n", "")
    assert [problem.message for problem in problems] == ["is a duplicate", "has the id 2001 of alice"]


def test_groups_choose_users() -> None:
    people = [("a", 2001, 3000), ("b", 2002, 3001), ("c", 2003, 3001)]
    passwd = "\n".join(f"{name}:x:{uid}:{gid}::/home/{name}:/bin/sh" for name, uid, gid in people)
    group = "first:x:3000:\nother:x:3001:\nhpc:x:3002:b\nmore:x:3003:a,b,c\n"
    accounts, problems = read_accounts(passwd, group, only=["hpc"])
    assert not problems
    assert [user.name for user in accounts.users] == ["b"]
    assert [each.name for each in accounts.groups] == ["other", "hpc"]
    _, problems = read_accounts(passwd, group, only=["nobodys"])
    assert problems[0].path == "nobodys"


def test_compare_lines() -> None:
    found = compare_lines("a:1\nb:2\nc:3\n", "b:2\nc:4\nd:5\n")
    assert (found.added, found.changed, found.removed) == (("d",), ("c",), ("a",))
    assert round(found.removed_percent) == 33
    assert compare_lines("", "a:1\n").removed_percent == 0
    assert compare_lines("", "u10:1\nu2:1\n7x:1\na:1\n").added == ("7x", "a", "u2", "u10")


def test_too_many_removed() -> None:
    changes = {"/etc/passwd": compare_lines("a:1\nb:2\n", "b:2\n"), "/etc/group": compare_lines("a:1\n", "a:1\n")}
    assert too_many_removed(changes, 49) == "/etc/passwd: 1 of 2 would be removed (50 %)"
    assert too_many_removed(changes, 50) == ""


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_folder(tmp_path, None)
    for name in ("passwd", "group", "shadow"):
        (tmp_path / name).write_text("")
    (tmp_path / "shadow").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by everybody"):
        read_folder(tmp_path, tmp_path / "shadow")
    assert read_folder(tmp_path / "passwd", None).group == ""


@pytest.mark.parametrize(("passwd", "words"), [("\n", "passwd is empty"), ("r:x:0:0::/:/bin/sh\n", "out of bounds")])
def test_no_users_selected(passwd: str, words: str) -> None:
    api = Api("https://127.0.0.1:1", Path("ca"), Path("cert"), Path("key"))  # never contacted
    judge = Pushes(open_cluster(DEBIAN_SITE, None, Silent()), api, "user sync")
    with pytest.raises(Refused, match=words):
        sync(api, Source(passwd, ""), Silent(), judge, SyncOptions(uid_min=1000, uid_max=2000))


def test_sssd_is_queried_for_the_members_of_groups() -> None:
    getent = ("getent", "-s", "sss", "--")
    host = Fake(
        {
            (*getent, "group", "hpc"): (0, "hpc:*:3002:bob,-evil\n"),
            (*getent, "passwd", "bob"): (0, "bob:*:2002:3001:Bob:/home/bob:/bin/sh\n"),
            (*getent, "group", "3001"): (0, "people:*:3001:\n"),
        },
    )
    source = query_sssd(host, ["hpc"])
    assert source.passwd == "bob:*:2002:3001:Bob:/home/bob:/bin/sh\n"
    assert source.group == "hpc:*:3002:bob,-evil\npeople:*:3001:\n"


def _lines(kind: str, ids: range, members: str = "u1,u2,u3") -> str:
    rest = ":100::/home:/bin/sh" if kind == "passwd" else f":{members}"
    return "".join(f"{kind}{at}:x:{number}{rest}\n" for at, number in enumerate(ids))


@pytest.mark.parametrize(
    ("kind", "before", "after", "refused"),
    [
        ("passwd", _lines("passwd", range(1000, 1020)), _lines("passwd", range(2000, 2020)), True),
        (
            "passwd",
            _lines("passwd", range(1000, 1020)),
            _lines("passwd", range(1000, 1020)).replace(":100:", ":200:"),
            True,
        ),
        (
            "passwd",
            _lines("passwd", range(1000, 1020)),
            _lines("passwd", range(1000, 1020)).replace(":1001:", ":2001:"),
            False,
        ),
        (
            "passwd",
            _lines("passwd", range(1000, 1002)),
            _lines("passwd", range(1000, 1002)).replace(":1001:", ":2001:"),
            False,
        ),
        (
            "passwd",
            _lines("passwd", range(1000, 1020)),
            _lines("passwd", range(1000, 1020)).replace("/sh", "/zsh"),
            False,
        ),
        ("group", _lines("group", range(1000, 1020)), _lines("group", range(2000, 2020)), True),
        ("group", _lines("group", range(1000, 1020)), _lines("group", range(1000, 1020), ""), True),
        ("group", _lines("group", range(1000, 1020)), _lines("group", range(1000, 1020), "u1,u2"), True),
        ("group", _lines("group", range(1000, 1020)), _lines("group", range(1000, 1020), "u1,u2,u3,u4"), False),
        ("group", _lines("group", range(1000, 1001)), _lines("group", range(1000, 1001), "u1,u2"), False),
        ("shadow", "a:x:1:0:9:7:::\nb:x:1:0:9:7:::\n", "a:x:2:0:9:7:::\nb:x:2:0:9:7:::\n", False),
    ],
)
def test_ids_and_members_that_change(kind: str, before: str, after: str, refused: bool) -> None:
    """An export with other ids, or without members, is as bad as one without users."""
    assert bool(too_many_removed({f"/etc/{kind}": compare_lines(before, after)}, 10)) is refused
