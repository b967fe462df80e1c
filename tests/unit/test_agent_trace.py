"""The agent's instances in the kernel's trace: which of them were left by runs that were killed."""

from __future__ import annotations

import os
from pathlib import Path

from appliance.agent.trace import SETTLED_S, pid_namespace, remove_left


def test_only_what_nobody_uses_is_removed(tmp_path: Path) -> None:
    mine, nobody = pid_namespace(), 2**22 + 1
    stays = {f"sms-{mine}-{os.getpid()}", "sms-1-5", "sms-1-6", "sms-5", "other"}
    for name in (*stays, f"sms-{mine}-{nobody}", "sms-1-7"):
        (tmp_path / name).mkdir()
    (tmp_path / "sms-1-6" / "read").touch()
    for name in ("sms-1-6", "sms-1-7"):
        os.utime(tmp_path / name, (0, (tmp_path / "other").stat().st_mtime - 2 * SETTLED_S))
    remove_left(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == stays
