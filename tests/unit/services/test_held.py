"""Jobs that nodes refuse to launch after a failover: which ones are released, and for how long they are watched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.operations.context import Cluster, open_cluster
from appliance.operations.services.held import EVERY_S, WATCH_S, release_refused
from appliance.plan.machine import inside_argv
from appliance.plan.services.jobs import NOT_LAUNCHED, QUEUE, read_refused
from appliance.progress import Silent
from tests.places import DEBIAN_SITE
from tests.support.env import NOW, fake_env
from tests.support.fake import Fake


def row(job: str, priority: int, when: str, reason: str, state: str = "PENDING", start: str = "N/A") -> str:
    return f"{job:<200}{state:<20}{priority:<20}{when:<20}{start:<20}{reason:<80}\n"


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("", (False, [])),
        (row("12", 0, "1100", NOT_LAUNCHED) + row("13_4", 0, "1000", NOT_LAUNCHED), (False, ["12", "13_4"])),
        (row("12", 0, "999", NOT_LAUNCHED), (False, [])),
        (row("12", 0, "N/A", NOT_LAUNCHED), (False, [])),
        (row("12", 0, "1100", "JobHeldUser") + row("14_[1-9]", 7, "1100", "Resources"), (True, [])),
        (row("12", 0, "1100", f"{NOT_LAUNCHED} x"), (False, [])),
        (row("12+0", 0, "1100", NOT_LAUNCHED) + row("14_[1-900]", 0, "1", "x"), (False, ["12+0"])),
        (row("12", 7, "1100", "None", "RUNNING", "999"), (False, [])),
        (row("12", 7, "1100", "None", "RUNNING", "1000"), (True, [])),
        (row("12", 7, "1100", "None", "CONFIGURING", "1200"), (True, [])),
        ("squeue: error\nslurm_load_jobs error: x\n12; rm 0 1100 " + NOT_LAUNCHED, (False, [])),
    ],
)
def test_which_jobs_are_released(output: str, found: tuple[bool, list[str]]) -> None:
    assert read_refused(output, 1000.7) == found


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return replace(open_cluster(DEBIAN_SITE, tmp_path, Silent()), env=fake_env())


def host(cluster: Cluster, *outputs: str | int) -> Fake:
    """A host whose squeue answers with these in turn, the last one again and again."""
    left = list(outputs)

    def answer(argv: tuple[str, ...], _: bytes | None) -> tuple[int, str]:
        if "release" in argv:
            return 0, ""
        one = left.pop(0) if len(left) > 1 else left[0]
        return (one, "") if isinstance(one, int) else (0, one)

    return Fake({inside_argv(cluster.site, cluster.services, *QUEUE)[:1]: answer}, name="host-a")


def released(one: Fake) -> list[str]:
    return [argv[-1] for argv in one.asked if "release" in argv]


def test_each_is_released_once(cluster: Cluster) -> None:
    now = str(int(NOW))
    waiting, refused = row("9", 5, now, "Resources"), row("12", 0, now, NOT_LAUNCHED)
    one = host(cluster, waiting, waiting + refused, waiting + refused + row("13", 0, now, NOT_LAUNCHED))
    assert release_refused(cluster, one, NOW) == ["12", "13"] and released(one) == ["12", "13"]


@pytest.mark.parametrize(("output", "queries"), [("", 1), (row("9", 5, "1", "Resources"), WATCH_S // EVERY_S), (1, 1)])
def test_it_watches_as_long_as_jobs_wait(cluster: Cluster, output: str | int, queries: int) -> None:
    one = host(cluster, output)
    assert release_refused(cluster, one, NOW) == []
    assert len(one.asked) == queries
