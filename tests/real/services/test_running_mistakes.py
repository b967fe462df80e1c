"""Mistakes of an administrator while the services container runs: exit status and a hint, and nothing is changed.

Those that need no container are in tests/unit/test_mistakes.py.
"""

from __future__ import annotations

import json
import re
import shlex

import pytest

from appliance.operations.image.build import Built
from tests.mistakes import RUNNING
from tests.real.conftest import Playground, begin_on

pytestmark = [pytest.mark.real, pytest.mark.full]

ROWS = [line.split(None, 2) for line in RUNNING.strip().splitlines()]


def find_state(playground: Playground) -> dict[str, object]:
    """What no mistake may change: the process, the lease, the snapshots and the files of the state folders."""
    listed = "cd /var/lib/sms && find overlays snapshots images -type f ! -name '*lock' ! -name '*.img' | sort"
    return {
        "instances": playground.host("host-a").run("apptainer", "instance", "list", "--json").text,
        "healthy": playground.status()["healthy"],
        "lease": {host: playground.lease(host) for host in ("host-a", "host-b")},
        "files": {host: playground.host(host).run("sh", "-c", listed, ok=None).text for host in ("host-a", "host-b")},
        "snapshots": list_snapshots(playground),
    }


def list_snapshots(playground: Playground) -> list[int]:
    listed = json.loads(playground.sms("overlay", "list", "--json").stdout)
    return [one["number"] for one in listed["snapshots"]]


@pytest.fixture(scope="module")
def started(playground: Playground, built: Built) -> Playground:
    """The services container runs on host-a, which has a snapshot; one start for all tests."""
    begin_on(playground, "host-a")
    playground.sms("-q", "start", "--host", "host-a", on="admin")
    if not list_snapshots(playground):
        playground.sms("overlay", "snapshot")
    return playground


@pytest.fixture(scope="module")
def state(started: Playground) -> dict[str, object]:
    """The state before the mistakes."""
    return find_state(started)


@pytest.mark.parametrize(("status", "host", "words"), ROWS, ids=[" ".join(row[1:]) for row in ROWS])
def test_mistakes_while_it_runs(
    started: Playground, state: dict[str, object], status: str, host: str, words: str
) -> None:
    done = started.sms(*shlex.split(words), on=host, ok=None)
    text = done.stderr.decode()
    assert done.status == int(status), text
    assert re.search(r"^sms[^:\n]*: \S.*\n(.*\n)*  hint: \S", text, re.MULTILINE), text
    assert "Traceback" not in text


def test_nothing_was_changed(started: Playground, state: dict[str, object]) -> None:
    assert find_state(started) == state


def test_an_upgrade_that_cannot_build_names_the_other_way(started: Playground) -> None:
    done = started.sms("upgrade", "--no-rehearsal", ok=None)
    assert done.status
    assert "--image" in done.stderr.decode()
