"""Whether a migration is possible, and what it is predicted to take, from what was found on both hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from appliance.catalog import read_catalog, select
from appliance.errors import Refused
from appliance.plan.migration.plan import (
    RECENT,
    RESERVE,
    START_ROOM,
    Facts,
    HostFacts,
    judge,
    plan_migration,
    recent_parts,
)
from appliance.share import share

SERVICES = select(read_catalog(share("definitions", "services")), ("slurmctld", "munge"))
SOURCE = HostFacts("host-a", (), 100.0, (1, 3))
TARGET = HostFacts("host-b", (), 100.5, (1, 3))
USED = 256 << 20
FACTS = Facts(
    SOURCE,
    TARGET,
    "/images/a.sif",
    "abc",
    7,
    "/overlays",
    shared=False,
    used_bytes=USED,
    free_bytes=USED + RESERVE,
    address_problems=(),
    outdated=False,
    measured=(),
    mirrored=False,
)
UNSEEN = "host-b does not see 10.1.0.1"


def target(**changes: Any) -> dict[str, Any]:
    return {"target": replace(TARGET, **changes)}


@pytest.mark.parametrize(
    ("changes", "problems", "warnings"),
    [
        ({}, [], []),
        (target(lacks=["host-b lacks conntrack"]), ["host-b lacks conntrack"], []),
        ({"address_problems": [UNSEEN]}, [UNSEEN], []),
        # Reported only if nothing else explains it.
        ({**target(lacks=["x"]), "address_problems": [UNSEEN]}, ["x"], []),
        (target(offset_s=103.0), [], ["the clocks of host-a and host-b are 3.0 s apart"]),
        (target(offset_s=700.0), ["the clock of host-b is 600 s ahead of that of host-a"], []),
        (target(offset_s=30.0), ["the clock of host-b is 70 s behind that of host-a"], []),
        (target(apptainer=(1, 4)), [], ["host-a has Apptainer 1.3, host-b 1.4"]),
        (target(apptainer=(1, 2)), ["host-a has Apptainer 1.3, host-b 1.2"], []),
        ({"free_bytes": USED}, ["the file system of /overlays on host-b has 256 MiB free, 272 are needed"], []),
        ({"free_bytes": USED, "shared": True}, [], []),
        ({"shared": True, "mirrored": True}, ["both share an overlay that is on a mirror"], []),
        ({"outdated": True}, [], ["the site file has changed since the start"]),
        ({"by_hand": ["partition p: State is DOWN, and would be UP"]}, ["partition p: State is DOWN"], []),
        ({"room_bytes": START_ROOM}, [], []),
        ({"room_bytes": START_ROOM - 1}, ["the overlay has 15 MiB free, and services may need 16 to start"], []),
        ({"room_bytes": 0}, ["the overlay has 0 MiB free, and services may need 16 to start"], []),
    ],
)
def test_judgement(changes: dict[str, Any], problems: list[str], warnings: list[str]) -> None:
    for lines, beginnings in zip(judge(replace(FACTS, **changes), force=False), (problems, warnings), strict=True):
        assert [line[: len(each)] for line, each in zip(lines, beginnings, strict=True)] == beginnings


def test_force_allows_an_older_version() -> None:
    facts = replace(FACTS, **target(apptainer=(1, 2)))
    assert plan_migration(facts, SERVICES, force=True).warnings == ["host-a has Apptainer 1.3, host-b 1.2"]
    with pytest.raises(Refused) as caught:
        plan_migration(facts, SERVICES, force=False)
    assert "sms host prepare host-b" in caught.value.hint and "--force" in caught.value.hint


def test_all_problems_are_reported_at_once() -> None:
    facts = replace(FACTS, **target(lacks=["one", "two"]), mirror_problems=["its mirror"], free_bytes=0)
    with pytest.raises(Refused, match="cannot migrate from host-a to host-b:\n  one") as caught:
        plan_migration(facts, SERVICES, force=False)
    assert len(caught.value.message.splitlines()) == 5 and "--force" not in caught.value.hint


def test_the_plan() -> None:
    parts = {"stop": 1.0, "last changes": 2.0, "start": 3.0, "switch": 0.5}
    plan = plan_migration(replace(FACTS, measured=(parts,)), SERVICES, force=False)
    assert (plan.source, plan.target, plan.generation, plan.skew_s) == ("host-a", "host-b", 7, 0.5)
    assert (plan.parts, plan.measured) == (parts, 1)
    assert {one.name: one.predicted_s for one in plan.away}["slurmctld"] == 6.5


def test_recent_parts() -> None:
    def line(at: float, **changes: Any) -> dict[str, Any]:
        whole = {"event": "moved", "host": "b", "to": "b", "shared": False, "at": at, "parts": {"stop": at, "x": None}}
        return whole | changes

    lines = [line(float(at)) for at in range(RECENT + 2)]
    others = [line(90.0, event="begun"), line(91.0, host="a"), line(92.0, shared=True), line(93.0, parts=None)]
    found = recent_parts([*reversed(lines), *others, line(94.0) | {"at": "?"}], shared=False)
    assert found == [{"stop": float(at)} for at in range(2, RECENT + 2)]
