"""Files and accounts that programs of the container write, in a temporary root."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit.services.conftest import (
    ALICE,
    OWN_GROUP,
    OWN_PASSWD,
    RUNTIME,
    needs_root,
)

MERGED = [
    ("", [], "nothing of the site's"),
    (ALICE, [ALICE], "a user"),
    ("root:x:0:0:evil:/:/bin/sh", [], "the name and id of root"),
    ("toor:x:0:0::/:/bin/sh", [], "another name for id 0"),
    ("toor:x:00:0::/:/bin/sh", [], "id 0 written otherwise"),
    ("toor:x:4294967296:0::/:/bin/sh", [], "wraps around to id 0"),
    ("toor:x:4294967295:0::/:/bin/sh", [], "stands for no id"),
    ("toor:x:99999999999999999999:0::/:/bin/sh", [], "no id at all"),
    ("toor:x:-1:0::/:/bin/sh", [], "a negative id"),
    ("toor:x:+0:0::/:/bin/sh", [], "a sign"),
    ("toor:x: 0:0::/:/bin/sh", [], "a blank"),
    ("toor:x:0x0:0::/:/bin/sh", [], "hexadecimal"),
    ("toor:x:²:0::/:/bin/sh", [], "a digit that is not a number"),
    ("toor:x:١٠٠١:0::/:/bin/sh", [], "digits of another script"),
    ("munge:x:3000:3000::/:/bin/sh", [], "a name of the image's"),
    ("other:x:105:105::/:/bin/sh", [], "an id of the image's"),
    ("sshd:x:74:74::/:/bin/sh", [], "a system id that the image does not use"),
    ("other:x:65534:1::/:/bin/sh", [], "nobody's id"),
    ("other:x:065534:1::/:/bin/sh", [], "nobody's id written otherwise"),
    ("short", [], "no fields"),
    ("short:x", [], "fields are missing"),
    (":x:2001:2001::/:/bin/sh", [], "no name"),
    ("+::::::", [], "the old mark of NIS"),
    ("-evil::::::", [], "the other one"),
    ("# a comment: with a colon", [], "a comment"),
    (f"{ALICE}\nalice:x:2002:2002::/:/bin/sh", [ALICE], "the same name twice"),
    (f"\n\n{ALICE}\n\n", [ALICE], "empty lines"),
    (f"{ALICE}\nbroken\n{ALICE.replace('alice', 'bob')}", [ALICE, ALICE.replace("alice", "bob")], "one bad line"),
]


@pytest.mark.parametrize(("site", "added", "why"), MERGED, ids=[case[2] for case in MERGED])
def test_merge_passwd(smsfiles: ModuleType, site: str, added: list[str], why: str) -> None:
    merged = smsfiles.merge_accounts("/etc/passwd", OWN_PASSWD, site)
    assert merged == OWN_PASSWD + "".join(f"{line}\n" for line in added), why


def test_merge_group_keeps_groups_of_the_image(smsfiles: ModuleType) -> None:
    site = "root:x:0:alice\nmunge:x:2000:\nstaff:x:50:alice\nalice:x:2001:\nteam:x:2002:alice,bob\nx:x:65534:\n"
    merged = smsfiles.merge_accounts("/etc/group", OWN_GROUP, site)
    assert merged == OWN_GROUP + "alice:x:2001:\nteam:x:2002:alice,bob\n"


def test_merge_shadow_by_name(smsfiles: ModuleType, root: Path) -> None:
    current = (root / "etc" / "shadow").read_text()
    merged = smsfiles.merge_accounts("/etc/shadow", current, "root:$6$evil:1::::::\nalice:$6$hash:1::::::\n")
    assert merged == current + "alice:$6$hash:1::::::\n"


def test_merge_removes_accounts_dropped_by_the_site(smsfiles: ModuleType) -> None:
    assert smsfiles.merge_accounts("/etc/passwd", OWN_PASSWD + ALICE + "\n", "") == OWN_PASSWD


def test_merge_adds_accounts_of_a_newer_image(smsfiles: ModuleType) -> None:
    old = OWN_PASSWD.splitlines(keepends=True)[0]
    assert smsfiles.merge_accounts("/etc/passwd", old, ALICE) == OWN_PASSWD + ALICE + "\n"


def test_merge_takes_the_ids_of_a_newer_image(smsfiles: ModuleType) -> None:
    """What the overlay's own lines have besides stays: another shell, members."""
    for path, own in (("/etc/passwd", OWN_PASSWD), ("/etc/group", OWN_GROUP)):
        name, _, rest = own.splitlines()[-1].split(":", 2)
        other = rest.split(":")
        other[0] = "971"
        if path == "/etc/passwd":
            other[1], other[-1] = "972", "/bin/other"
            wanted = [*rest.split(":")[:2], *other[2:]]
        else:
            other[-1] = "alice"
            wanted = [rest.split(":")[0], "alice"]
        head = "".join(own.splitlines(keepends=True)[:-1])
        merged = smsfiles.merge_accounts(path, head + ":".join([name, "x", *other]) + "\n", "")
        assert merged == head + ":".join([name, "x", *wanted]) + "\n"


def test_merge_without_accounts_of_the_image_writes_nothing(smsfiles: ModuleType, root: Path) -> None:
    (root / "opt/sms/accounts/passwd").unlink()
    with pytest.raises(FileNotFoundError):
        smsfiles.merge_accounts("/etc/passwd", OWN_PASSWD, ALICE)


def test_replace(smsfiles: ModuleType, root: Path) -> None:
    mine = (os.geteuid(), os.getegid())
    assert smsfiles.replace("/etc/new/file", b"one", 0o640, *mine)
    path = root / "etc/new/file"
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"one", 0o640)
    before = path.stat()
    assert not smsfiles.replace("/etc/new/file", b"one", 0o640, *mine)
    assert path.stat().st_ino == before.st_ino
    assert smsfiles.replace("/etc/new/file", b"one", 0o600, *mine), "another mode is a change"
    with path.open("rb") as reader:
        assert smsfiles.replace("/etc/new/file", b"two", 0o600, *mine)
        assert reader.read() == b"one", "who reads sees the whole old file"
    assert list(path.parent.iterdir()) == [path]


def test_replace_by_two_at_once(smsfiles: ModuleType, root: Path) -> None:
    """sms-filesync and sms-apply: each would remove what the other one has begun to write."""
    script = """import sys, smsfiles
for number in range(400):
    smsfiles.replace("/etc/file", b"%d %d" % (int(sys.argv[1]), number), 0o600, *map(int, sys.argv[2:]))
"""
    argv = [sys.executable, "-c", script]
    ids = [str(os.geteuid()), str(os.getegid())]
    environment = {**os.environ, "PYTHONPATH": str(RUNTIME), "PYTHONDONTWRITEBYTECODE": "1", "SMS_ROOT": str(root)}
    both = [subprocess.Popen([*argv, str(one), *ids], env=environment) for one in range(2)]
    assert [one.wait(60) for one in both] == [0, 0]
    assert (root / "etc/file").read_bytes() in (b"0 399", b"1 399")


def test_replace_after_a_killed_run(smsfiles: ModuleType, root: Path) -> None:
    (root / "etc/.file.new~").symlink_to(root / "etc/shadow")
    shadow = (root / "etc/shadow").read_text()
    assert smsfiles.replace("/etc/file", b"data", 0o600, os.geteuid(), os.getegid())
    assert (root / "etc/shadow").read_text() == shadow
    assert not (root / "etc/file").is_symlink()


@needs_root
def test_full_disk_keeps_the_old_file(smsfiles: ModuleType, root: Path) -> None:
    small = root / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "sms-test", str(small)], check=True)
    try:
        smsfiles.replace("/small/x", b"old", 0o644, 0, 0)
        with pytest.raises(OSError, match="No space"):
            smsfiles.replace("/small/x", bytes(200000), 0o644, 0, 0)
        assert [path.name for path in small.iterdir()] == ["x"]
        assert (small / "x").read_bytes() == b"old"
    finally:
        subprocess.run(["umount", str(small)], check=True)
