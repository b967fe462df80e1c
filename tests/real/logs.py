"""What a failed test leaves to read: logs and state of lab hosts, logs of containers and engines, consoles."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from appliance.lab.engines import hosts
from appliance.lab.layout import DISK, RUNNING

LAST_BYTES = 1 << 20
"""Of each file, at most."""
TASKS = "*/nomad/alloc/*/alloc/logs/*"
"""What tasks of Nomad have printed, below the disks of engine hosts."""
KEPT = 20
"""Folders of earlier failures that stay."""


def keep_logs(test: str) -> Path:
    """Copy what there is; give the folder, readable by root only, outside of the test's own machine."""
    root = Path(os.environ.get("SMS_TESTS", "/var/lib/sms-tests")) / "logs"
    root.mkdir(parents=True, exist_ok=True)
    for old in sorted(root.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", test.rpartition("/")[2])[:80]
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root))
    for label, source in find_logs():
        with suppress(OSError):
            copy_last(source, folder / label)
    return folder


def find_logs() -> Iterator[tuple[str, Path]]:
    """Files by the name that each gets in the folder."""
    for journal in sorted(RUNNING.glob("*/journal.json")):
        lab = json.loads(journal.read_text())
        yield from below(f"{lab['name']}/start", journal.parent, "*/log")
        yield from below(f"{lab['name']}/metal", journal.parent / "metal", "*")
        yield from below(f"{lab['name']}/vm", DISK / lab["name"], "host-*/vm/**/*console*")
        yield from below(f"{lab['name']}/state", DISK / lab["name"], "host-*/journal/*")
        for pattern in ("var/log/**/*log", "var/lib/sms-adopt/*"):
            yield from below(f"{lab['name']}/old", DISK / lab["name"], f"*/upper/{pattern}")
        for host, pid in lab["pids"].items():
            yield from below(f"{lab['name']}/{host}", Path(f"/proc/{pid}/root/var/log/lab"), "*")
            yield from below(
                f"{lab['name']}/{host}", Path(f"/proc/{pid}/root/var/lib/engines"), TASKS.removeprefix("*/")
            )
    yield from below("engines", hosts.FOLDER, "*/*.log")
    yield from below("engines", hosts.DISK, TASKS)
    yield from below("engines", hosts.DISK, "*/log/pods/*/*/*.log")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"/sms/supervisord.conf" in (process / "cmdline").read_bytes():
                yield from below(f"services-{process.name}", process / "root/var/log", "**/*")


def below(label: str, folder: Path, pattern: str) -> Iterator[tuple[str, Path]]:
    """Files of a folder."""
    for file in folder.glob(pattern):
        if file.is_file() and not file.is_symlink():
            yield f"{label}/{file.relative_to(folder)}", file


def copy_last(source: Path, target: Path) -> None:
    """The end of a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as stream, target.open("wb") as copy:
        stream.seek(max(0, source.stat().st_size - LAST_BYTES))
        shutil.copyfileobj(stream, copy)
