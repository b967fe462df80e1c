"""Every copy of the lease is lost: the next start exceeds what snapshots know, and what is taken then is the latest."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.operations.image.build import Built
from tests.real.conftest import Playground
from tests.waiting import wait_until

pytestmark = [pytest.mark.real, pytest.mark.full]

HERE, OTHER = "host-a", "host-b"
LEASE = "/var/lib/sms/overlays/lab.lease"
HISTORY = "/var/lib/sms/journal/lab.history"


def small(document: dict[str, Any]) -> None:
    document["services"] = ["munge", "chrony"]
    document["overlay"] = {"size_mb": 64}
    document["retention"] = {"last": 1, "hourly": 0, "daily": 0, "weekly": 0, "monthly": 0}


@pytest.fixture
def clean(stopped: Playground, built: Built) -> Iterator[Playground]:
    """Nothing of earlier tests, nor of this one afterwards."""
    forget = "rm -rf /var/lib/sms/overlays /var/lib/sms/snapshots /var/lib/sms/journal/lab.*"
    for name in (HERE, OTHER):
        stopped.host(name).run("sh", "-c", forget)
    yield stopped
    cable(stopped, "up")
    stopped.sms("-q", "stop")
    for name in (HERE, OTHER):
        stopped.host(name).run("sh", "-c", forget)


def cable(playground: Playground, state: str) -> None:
    for port in (f"p-{OTHER}", f"u-{OTHER}"):
        switch = f"sms-{playground.lab.name}-switch"
        subprocess.run(["ip", "-n", switch, "link", "set", port, state], check=True)
    if state == "up":
        wait_until(lambda: playground.host("admin").works("ssh", OTHER, "true"), f"ssh to {OTHER}")


def test_snapshots_after_the_loss_are_the_latest(clean: Playground) -> None:
    site = clean.variant("small.yaml", small)

    def sms(*words: str, ok: tuple[int, ...] = (0,)) -> str:
        done = clean.sms("--site", site, "-q", *words, ok=ok)
        return (done.stdout or done.stderr).decode()

    def snapshots() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(sms("overlay", "list", "--json"))["snapshots"]
        return found

    for _ in range(3):  # generations 1, 2 and 3
        sms("start")
        sms("overlay", "snapshot")
        sms("overlay", "snapshot")
        sms("stop")
    sms("overlay", "push", "--to", OTHER)
    places = [(one["generation"], one["sequence"]) for one in snapshots()]
    assert places == [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5), (3, 6)] and clean.lease()["sequence"] == 6
    uuid = clean.lease()["cluster_uuid"]
    assert clean.lease(OTHER)["cluster_uuid"] == uuid
    for name in (HERE, OTHER):
        clean.host(name).run("rm", LEASE, HISTORY, "/var/lib/sms/journal/lab.json", ok=None)
    sms("overlay", "restore", "latest")
    lease = clean.lease()
    assert lease["generation"] == 4 and lease["holder"] is None and lease["since"] == 0
    cable(clean, "down")
    reported = clean.sms("--site", site, "start", ok=(3,)).stderr.decode()
    assert f"{OTHER} (" in reported and "--without-remote" in reported
    clean.assert_nothing_runs()
    cable(clean, "up")
    reported = clean.sms("--site", site, "start").stderr.decode()
    assert "every copy of the lease was lost; the highest known generation is 3" in reported
    assert clean.lease()["generation"] == 5
    assert clean.lease()["cluster_uuid"] == clean.lease(OTHER)["cluster_uuid"] == uuid
    for _ in range(2):
        sms("overlay", "snapshot")
        sms("overlay", "prune")
        newest = snapshots()[-1]
        assert (newest["generation"], newest["reason"]) == (5, "")
        assert json.loads(sms("overlay", "show", "latest", "--json"))["number"] == newest["number"]
    clean.host(HERE).run("rm", LEASE)
    sms("overlay", "snapshot")  # while it runs
    last = snapshots()[-1]
    assert (last["generation"], last["sequence"]) == (5, newest["sequence"] + 1)
    assert {one["cluster_uuid"] for one in snapshots()} == {uuid}
    sms("stop")
