"""All workloads; and wrong ways to write a state file, which the replay must find."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from appliance.shared.files import sync_folder
from tests.crash.in_container import CONTAINER
from tests.crash.in_vm import IN_VM
from tests.crash.on_admin import ADMIN
from tests.crash.on_hosts import HOSTS
from tests.crash.workload import Mark, Marks, Workload


def prepare_record(root: Path) -> None:
    (root / "record").write_bytes(b"old" * 100)


def run_wrong(root: Path, mark: Mark, *, flush: bool = True, folder: bool = True, whole: bool = True) -> None:
    data = b"new" * 100
    descriptor = os.open(root / "new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    while (done := os.write(descriptor, data)) < len(data) and whole:
        data = data[done:]
    if flush:
        os.fsync(descriptor)
    os.close(descriptor)
    (root / "new").rename(root / "record")
    if folder:
        sync_folder(str(root))
    mark("written")


def check_record(root: Path, marks: Marks) -> None:
    found = (root / "record").read_bytes()
    assert found == b"new" * 100 or (found == b"old" * 100 and not marks)


WRONG = {
    "not flushed": Workload(prepare_record, partial(run_wrong, flush=False), check_record),
    "folder not flushed": Workload(prepare_record, partial(run_wrong, folder=False), check_record),
    "not written whole": Workload(prepare_record, partial(run_wrong, whole=False), check_record),
}
WORKLOADS = {**HOSTS, **ADMIN, **IN_VM, **CONTAINER}
