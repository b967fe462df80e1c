"""Removal of trace instances of killed runs, which all pid namespaces of a kernel share."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from appliance.agent.trace import STALE_S, pid_namespace, remove_stale


def test_only_unused_instances_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    mine, dead, live = pid_namespace(), ended.pid, os.getpid()
    kept = {f"sms-{mine}-{live}", f"sms-{live}", f"sms-1-{dead}", "another"}
    removed = {f"sms-{mine}-{dead}", f"sms-{dead}", f"sms-2-{live}"}
    for name in kept | removed:
        (tmp_path / name).mkdir()
    past = (tmp_path / "another").stat().st_mtime - STALE_S - 1
    os.utime(tmp_path / f"sms-2-{live}", (past, past))
    remove_stale(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_an_instance_in_use_is_skipped(tmp_path: Path) -> None:
    """rmdir(2) fails, as it does while a trace is being read."""
    with subprocess.Popen(["true"]) as ended:
        pass
    (tmp_path / f"sms-{ended.pid}" / "held").mkdir(parents=True)
    remove_stale(str(tmp_path))
    assert (tmp_path / f"sms-{ended.pid}").exists()
