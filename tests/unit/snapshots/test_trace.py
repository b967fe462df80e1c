"""Which trace instances of killed runs are removed: all pid namespaces of a kernel share them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from appliance.agent.trace import OLD_S, pid_namespace, remove_left


def test_only_what_nobody_uses_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    mine, dead, live = pid_namespace(), ended.pid, os.getpid()
    kept = {f"sms-{mine}-{live}", f"sms-{live}", f"sms-1-{dead}", "another"}
    removed = {f"sms-{mine}-{dead}", f"sms-{dead}", f"sms-2-{live}"}
    for name in kept | removed:
        (tmp_path / name).mkdir()
    past = (tmp_path / "another").stat().st_mtime - OLD_S - 1
    os.utime(tmp_path / f"sms-2-{live}", (past, past))
    remove_left(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_one_that_is_in_use_is_passed_over(tmp_path: Path) -> None:
    """rmdir(2) fails, as the kernel's does where a trace is being read."""
    with subprocess.Popen(["true"]) as ended:
        pass
    (tmp_path / f"sms-{ended.pid}" / "held").mkdir(parents=True)
    remove_left(str(tmp_path))
    assert (tmp_path / f"sms-{ended.pid}").exists()
