"""What seed-overlay writes at a start, and what sms-apply changes later, in a temporary root."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.plan.overlay.seed import seed_program
from tests.unit.services.conftest import (
    ALICE,
    OWN_PASSWD,
    needs_root,
    run_program,
)


def archive(*files: tuple[str, bytes, str, int]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, data, owner, mode in files:
            member = tarfile.TarInfo(path)
            member.size, member.mode, member.uname, member.gname = len(data), mode, owner, "root"
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def run_seed(root: Path, mark: str, *, input: bytes) -> subprocess.CompletedProcess[bytes]:
    argv = (sys.executable, *seed_program(str(root), mark)[1:])
    return subprocess.run(argv, input=input, capture_output=True, timeout=20)


def seed(root: Path, *files: tuple[str, bytes, str, int]) -> dict[str, list[str]]:
    done = run_seed(root, "mark", input=archive(*files))
    assert not done.returncode, done.stderr.decode()
    report: dict[str, list[str]] = json.loads(done.stdout)
    report["changed"] = [path for path in report["changed"] if path != "/etc/munge/munge.key"]
    return report


@needs_root
def test_seed_twice_changes_nothing(root: Path) -> None:
    file = ("etc/sms/it.conf", b"one", "root", 0o640)
    assert seed(root, file) == {"changed": ["/etc/sms/it.conf"], "kept": []}
    assert seed(root, file) == {"changed": [], "kept": []}
    assert stat.S_IMODE((root / "etc/sms/it.conf").stat().st_mode) == 0o640
    assert stat.S_IMODE((root / "etc/sms/seeded.json").stat().st_mode) == 0o600


@needs_root
def test_seed_keeps_local_changes(root: Path) -> None:
    path = root / "etc/sms/it.conf"
    seed(root, ("etc/sms/it.conf", b"one", "root", 0o644))
    path.write_bytes(b"changed by hand")
    assert seed(root, ("etc/sms/it.conf", b"one", "root", 0o644)) == {"changed": [], "kept": []}
    assert path.read_bytes() == b"changed by hand"
    report = seed(root, ("etc/sms/it.conf", b"two", "root", 0o644))
    assert report == {"changed": ["/etc/sms/it.conf"], "kept": ["/etc/sms/it.conf.sms-old"]}
    assert path.read_bytes() == b"two"
    assert path.with_name("it.conf.sms-old").read_bytes() == b"changed by hand"


@needs_root
def test_seed_removes_slurm_files_that_the_site_no_longer_has(root: Path) -> None:
    """Others, such as a munge key, stay; a changed one is kept beside."""
    folder = root / "etc/slurm"
    files = [(f"etc/slurm/{name}", b"one", "root", 0o644) for name in ("slurm.conf", "gres.conf", "prolog.sh")]
    other = ("etc/sms/it.conf", b"one", "root", 0o644)
    seed(root, *files, other)
    (folder / "by-hand.conf").write_bytes(b"not the site's")
    (folder / "prolog.sh").write_bytes(b"changed by hand")
    report = seed(root, files[0])
    assert report["changed"] == ["/etc/slurm/gres.conf", "/etc/slurm/prolog.sh"]
    assert report["kept"] == ["/etc/slurm/prolog.sh.sms-old"]
    assert {path.name for path in folder.iterdir()} == {"slurm.conf", "by-hand.conf", "prolog.sh.sms-old"}
    assert (folder / "prolog.sh.sms-old").read_bytes() == b"changed by hand"
    assert (root / "etc/sms/it.conf").exists()
    assert seed(root, files[0]) == {"changed": [], "kept": []}


@needs_root
def test_seed_does_not_take_a_damaged_record_for_an_empty_one(root: Path) -> None:
    """It would replace what somebody has changed."""
    path = root / "etc/sms/it.conf"
    seed(root, ("etc/sms/it.conf", b"one", "root", 0o644))
    path.write_bytes(b"changed by hand")
    (root / "etc/sms/seeded.json").write_bytes(b'{"/etc/sms/it.conf": "12')
    done = run_seed(root, "mark", input=archive(("etc/sms/it.conf", b"two", "root", 0o644)))
    assert done.returncode == 1
    assert done.stderr.decode() == (
        "seed of the overlay: /etc/sms/seeded.json cannot be read: restore it from a snapshot, or remove it\n"
    )
    assert path.read_bytes() == b"changed by hand"


ODD: dict[str, Callable[[Path], object]] = {
    "a link to what has no end": lambda path: path.symlink_to("/dev/zero"),
    "a pipe that nobody writes to": os.mkfifo,
    "a terabyte of nothing": lambda path: subprocess.run(["truncate", "-s", "1T", path], check=True),
}


@needs_root
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["it.conf", "seeded.json", "seed.mark"])
def test_seed_reads_no_more_than_files_of_a_site(root: Path, name: str, odd: str) -> None:
    """Root in the container has put something else there: the mark is replaced, others are an error that names them."""
    seed(root, ("etc/sms/it.conf", b"one", "root", 0o644))
    path = root / "etc/sms" / name
    path.unlink()
    ODD[odd](path)
    done = run_seed(root, "mark", input=archive(("etc/sms/it.conf", b"two", "root", 0o644)))
    if name == "seed.mark":
        assert done.returncode == 0 and path.read_bytes() == b"mark\n"
    else:
        assert done.returncode == 1 and f"/etc/sms/{name}" in done.stderr.decode() and b"Traceback" not in done.stderr


@needs_root
def test_seed_merges_accounts(root: Path) -> None:
    site = f"root:x:0:0:evil:/:/bin/sh\n{ALICE}\nr\xe9my:x:2002:2002::/:/bin/sh\n".encode("latin-1")
    seed(root, ("etc/passwd", site, "root", 0o644))
    expected = OWN_PASSWD.encode() + f"{ALICE}\nr\xe9my:x:2002:2002::/:/bin/sh\n".encode("latin-1")
    assert (root / "etc/passwd").read_bytes() == expected


@needs_root
def test_seed_reports_an_unknown_owner(root: Path) -> None:
    done = run_seed(root, "mark", input=archive(("etc/x", b"", "no-such-user", 0o600)))
    assert done.returncode
    assert (
        done.stderr.decode().strip()
        == "seed of the overlay: /etc/x is for no-such-user:root, whom the image does not know"
    )
    assert not (root / "etc/x").exists()


def run_apply(root: Path, *words: str, input: bytes = b"") -> dict[str, Any]:
    done = run_program("sms-apply", root, *words, input=input)
    assert not done.returncode, done.stderr.decode()
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def tree(root: Path) -> dict[str, bytes]:
    """All files but those of an apply and the key of munge."""
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if "run/sms/apply" not in name and "munge.key" not in name}


ONE = ("etc/sms/it.conf", b"one\n", "root", 0o644)
TWO = ("etc/sms/it.conf", b"two\n", "root", 0o644)
SECRET = ("etc/sms/key", b"secret\n", "root", 0o600)


@needs_root
def test_apply_compares_and_shows_no_secret(root: Path) -> None:
    run_seed(root, "1", input=archive(ONE, SECRET))
    before = tree(root)
    found = run_apply(root, "compare", input=archive(TWO, (*SECRET[:1], b"other\n", *SECRET[2:])))
    assert found == {
        "mark": "1",
        "changed": [
            {"path": "/etc/sms/it.conf", "edited": False, "text": "one\n"},
            {"path": "/etc/sms/key", "edited": False, "text": None},
        ],
        "pending": {},
        "left": "",
    }
    assert tree(root) == before
    assert run_apply(root, "compare", input=archive(ONE, SECRET))["changed"] == []


@needs_root
def test_apply_can_be_undone_until_it_is_finished(root: Path) -> None:
    """Also after two runs that were killed: what was there before the first is back."""
    run_seed(root, "1", input=archive(ONE))
    before = tree(root)
    run_apply(root, "write", "2", '{"postfix": "reload"}', input=archive(TWO, SECRET))
    run_apply(root, "write", "3", '{"chrony": "restart"}', input=archive((*ONE[:1], b"three\n", *ONE[2:]), SECRET))
    found = run_apply(root, "compare", input=archive(ONE))
    assert found["pending"] == {"postfix": "reload", "chrony": "restart"} and found["left"] == "incomplete"
    for name in ("apply.pending", "apply.saved"):
        assert stat.S_IMODE((root / "run/sms" / name).stat().st_mode) == 0o600
    run_apply(root, "done", "chrony")
    assert run_apply(root, "compare", input=archive(ONE))["pending"] == {"postfix": "reload"}
    run_apply(root, "done", "postfix")
    assert run_apply(root, "compare", input=archive(ONE))["left"] == "complete"
    undone = {"pending": {"chrony": "restart", "postfix": "reload", "munge": "restart"}}
    assert run_apply(root, "undo", '{"chrony": "reload", "munge": "restart"}') == undone, (
        "those done have read the files"
    )
    assert tree(root) == before
    found = run_apply(root, "compare", input=archive(ONE))
    assert {"pending": found["pending"]} == undone and found["left"] == "incomplete"
    run_apply(root, "finish")
    assert not list((root / "run/sms").glob("apply*"))
    assert run_apply(root, "undo", "{}") == {"pending": {}}


@needs_root
def test_links_of_the_overlay_lead_to_where_they_do_in_the_container(root: Path, tmp_path: Path) -> None:
    """Root in the container makes them: no file is written anywhere else by a run whose own root is another one."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "srv").mkdir()
    for name, target in {"absolute": str(outside), "above": "../../../../../../../.." + str(outside)}.items():
        (root / "srv" / name).symlink_to(target)
        seed(root, (f"srv/{name}/file", b"x", "root", 0o600))
    assert not list(outside.iterdir())
    assert (root / str(outside).lstrip("/") / "file").read_bytes() == b"x"
    (root / "srv/loop").symlink_to("loop")
    assert run_seed(root, "mark", input=archive(("srv/loop/file", b"x", "root", 0o600))).returncode
