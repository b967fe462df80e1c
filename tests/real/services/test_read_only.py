"""A file system becomes read-only under a verb: an error with a hint, nothing is lost, and the next run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.real.conftest import Playground
from tests.real.faults import JOURNAL, make_read_only, own_disk

pytestmark = pytest.mark.real

SNAPSHOTS, OVERLAYS = "/var/lib/sms/snapshots", "/var/lib/sms/overlays"
OVERLAYS_MB = 256


def refused(running: Playground, *words: str, changed: bool = False) -> str:
    """The error of a verb on a read-only disk, which says what it is and what to do.

    Args:
        changed: it could do its work, and only not write that down.
    """
    done = running.sms("-q", *words, "--json", ok=(1,) if changed else (1, 3, 5))
    error = json.loads(done.stdout)["error"]
    assert error["status"] == done.status and "findmnt" in error["hint"], error
    return str(error["message"])


@contextmanager
def read_only(running: Playground, folder: str, stack: ExitStack, *, size_mb: int = 16) -> Iterator[None]:
    """The folder is a file system of its own until the end of the stack, and read-only in the context."""
    own_disk(running, "host-a", folder, stack, size_mb=size_mb)
    with ExitStack() as healing:
        make_read_only(running, "host-a", folder, healing)
        yield


def picture(running: Playground) -> tuple[Any, ...]:
    lease = running.lease()
    return running.instances(), len(running.loops()), lease["holder"], lease["generation"]


@pytest.mark.parametrize("folder", [SNAPSHOTS, pytest.param(JOURNAL, marks=pytest.mark.full)])
def test_a_snapshot(running: Playground, folder: str) -> None:
    running.sms("-q", "overlay", "snapshot")
    before = picture(running)
    with ExitStack() as stack:
        with read_only(running, folder, stack, size_mb=OVERLAYS_MB):
            if folder == SNAPSHOTS:
                refused(running, "overlay", "snapshot")
            else:
                running.sms("-q", "overlay", "snapshot", ok=(0, 1))
            found = running.status()
            assert all(one["ok"] for one in found["services"]) and found["snapshots"]["damaged"] == []
        running.sms("-q", "overlay", "snapshot")
        assert running.status()["healthy"]
    assert picture(running) == before


@pytest.mark.full
def test_an_apply(running: Playground) -> None:
    before = picture(running)

    def change(document: dict[str, Any]) -> None:
        document["slurm"]["extra"] = [*document["slurm"].get("extra", []), "MinJobAge=301"]

    site = running.variant("read-only.yaml", change)
    with ExitStack() as stack:
        with read_only(running, JOURNAL, stack):
            refused(running, "--site", site, "apply")
            assert all(one["ok"] for one in running.status()["services"])
        for path in (site, "/etc/sms/sms.yaml"):
            running.sms("--site", path, "-q", "apply")
            shown = running.sms("exec", "--", "grep", "-c", "^MinJobAge=301", "/etc/slurm/slurm.conf", ok=(0, 1)).text
            assert shown == str(int(path == site))
    assert picture(running) == before and running.status()["healthy"]


@pytest.mark.full
def test_a_stop(running: Playground) -> None:
    """It stops, and releases the lease; what it cannot write down is the error."""
    with ExitStack() as stack:
        with read_only(running, JOURNAL, stack):
            refused(running, "stop", changed=True)
            running.assert_nothing_runs()
        running.sms("-q", "stop")
        running.sms("-q", "start")
    assert running.status()["healthy"]


@pytest.mark.full
@pytest.mark.parametrize(("folder", "size_mb"), [(OVERLAYS, OVERLAYS_MB), (JOURNAL, 16)])
def test_a_start(running: Playground, folder: str, size_mb: int) -> None:
    generation = running.lease()["generation"]
    running.sms("-q", "stop")
    with ExitStack() as stack:
        with read_only(running, folder, stack, size_mb=size_mb):
            refused(running, "start")
            running.assert_nothing_runs()
        running.sms("-q", "start")
        assert running.status()["healthy"] and running.lease()["generation"] > generation
        running.sms("-q", "stop")
    running.sms("-q", "start")
    assert running.status()["healthy"]
