"""sms-place: a copy of the image's /etc with the files of the site."""

from __future__ import annotations

import grp
import json
import os
import pwd
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.places import ROOT

PROGRAM = ROOT / "definitions" / "runtime" / "sms-place"
USER, GROUP = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The root of an image, and a folder of an engine with files."""
    for folder in ("etc/slurm", "opt/sms/accounts", "run", "var/log", "sms/config"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run").chmod(0o777)
    for name, text in (("passwd", "root:x:0:0::/root:/bin/sh\n"), ("group", "root:x:0:\n")):
        (tmp_path / "etc" / name).write_text(text)
        (tmp_path / "opt/sms/accounts" / name).write_text(text)
    (tmp_path / "etc" / "os-release").write_text("image\n")
    return tmp_path


def place(image: Path, files: dict[str, str], **changes: Any) -> subprocess.CompletedProcess[str]:
    rows = []
    for number, (path, text) in enumerate(files.items()):
        (image / "sms/config" / str(number)).write_text(text)
        row = {"path": path, "source": f"/sms/config/{number}", "owner": USER, "group": GROUP, "mode": "0600"}
        rows.append({**row, **changes})
    (image / "sms/config/files.json").write_text(json.dumps(rows))
    return subprocess.run(
        [sys.executable, str(PROGRAM), "/sms/config/files.json", "/sms/etc"],
        env={**os.environ, "SMS_ROOT": str(image)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_files_are_placed_and_accounts_merged(image: Path) -> None:
    files = {
        "/etc/slurm/slurm.conf": "ClusterName=x\n",
        "/etc/passwd": "root:x:7:7::/:/bin/sh\nalice:x:2001:2001::/home/alice:/bin/sh\n",
    }
    for _ in range(2):  # an engine may run it again
        assert place(image, files).returncode == 0
        etc = image / "sms/etc"
        assert (etc / "slurm/slurm.conf").read_text() == "ClusterName=x\n"
        assert (etc / "slurm/slurm.conf").stat().st_mode & 0o777 == 0o600
        assert (etc / "os-release").read_text() == "image\n"
        names = [line.split(":")[0] for line in (etc / "passwd").read_text().splitlines()]
        assert names == ["root", "alice"]
        assert "root:x:0:0" in (etc / "passwd").read_text()
    assert (image / "run").stat().st_mode & 0o777 == 0o755
    assert (image / "run/sms/jobsync").stat().st_mode & 0o7777 == 0o1777
    assert (image / "etc/passwd").read_text() == "root:x:0:0::/root:/bin/sh\n"


def test_files_that_the_site_has_no_more_are_removed(image: Path) -> None:
    """Volumes of engines keep /etc; the image's own files come back."""
    (image / "etc/issue").write_text("image\n")
    files = {"/etc/slurm/slurm.conf": "x\n", "/etc/slurm/prolog.d/old.sh": "x\n", "/etc/issue": "site\n"}
    etc = image / "sms/etc"
    assert place(image, files).returncode == 0
    (etc / "adjtime").write_text("of a service\n")
    assert (etc / "issue").read_text() == "site\n"
    del files["/etc/slurm/prolog.d/old.sh"], files["/etc/issue"]
    for _ in range(2):
        assert place(image, files).returncode == 0
        assert not (etc / "slurm/prolog.d/old.sh").exists()
        assert (etc / "slurm/slurm.conf").read_text() == "x\n"
        assert (etc / "issue").read_text() == "image\n"
        assert (etc / "adjtime").read_text() == "of a service\n"


def test_placed_files_are_never_missing_or_older(image: Path) -> None:
    """Another run beside services, where the image has other files; what is the same stays the same file."""
    files = {"/etc/issue": "site\n", "/etc/slurm/slurm.conf": "x\n"}
    (image / "etc/issue").write_text("image\n")
    assert place(image, files).returncode == 0
    etc = image / "sms/etc"
    before = {path: (etc / path).stat().st_ino for path in ("issue", "slurm/slurm.conf", "os-release", "slurm")}
    (etc / ".sms-etc").mkdir()  # of a run that was killed
    (etc / ".sms-etc" / "left").touch()
    (image / "etc/os-release").write_text("newer image\n")
    seen, ended = set(), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            for path in ("issue", "slurm/slurm.conf"):
                try:
                    seen.add((path, (etc / path).read_text()))
                except FileNotFoundError:
                    seen.add((path, "missing"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(5):
        assert place(image, files).returncode == 0
    ended.set()
    watcher.join()
    assert seen == {("issue", "site\n"), ("slurm/slurm.conf", "x\n")}
    after = {path: (etc / path).stat().st_ino for path in before}
    assert {path for path in before if before[path] != after[path]} == {"os-release"}
    assert (etc / "os-release").read_text() == "newer image\n" and not (etc / ".sms-etc").exists()


def test_what_is_of_another_kind_is_replaced(image: Path) -> None:
    assert place(image, {}).returncode == 0
    etc = image / "sms/etc"
    (etc / "os-release").unlink()
    (etc / "os-release").mkdir()
    (etc / "os-release/file").touch()
    (etc / "slurm").rmdir()
    (etc / "slurm").symlink_to("/nowhere")
    assert place(image, {"/etc/slurm/slurm.conf": "x\n"}).returncode == 0
    assert (etc / "os-release").read_text() == "image\n" and not (etc / "slurm").is_symlink()
    assert (etc / "slurm/slurm.conf").read_text() == "x\n"


@pytest.mark.parametrize("path", ["/var/lib/x", "/etc/../root/x", "/etcetera"])
def test_nothing_is_placed_elsewhere(path: str, image: Path) -> None:
    assert place(image, {path: "x"}).returncode != 0
    assert not (image / "root").exists()


def test_an_unknown_owner_is_an_error(image: Path) -> None:
    assert "does not know" in place(image, {"/etc/x": "x"}, owner="nobody-at-all").stderr
