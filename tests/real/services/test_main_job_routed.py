"""The main job with nodes in a network of their own behind a router, as in the cabinets of an HPE Cray EX."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from appliance.operations.lab import demo
from tests.real.conftest import Playground, give_image
from tests.real.labs import build_image, fresh_lab

pytestmark = pytest.mark.real

CABINET = "10.100.0.0/17"


@pytest.fixture(scope="module")
def routed() -> Iterator[Playground]:
    """The services container runs on host-a; both admin hosts have the image."""
    with fresh_lab("t-routed", 2, shape="routed") as lab:
        place = Playground(lab)
        built = build_image(lab)
        for name in ("host-a", "host-b"):
            give_image(place, built, name)
        place.sms("-q", "start", "--host", "host-a", on="admin")
        yield place


def assert_served(place: Playground, on: str) -> None:
    """Every service of the container works for nodes behind the router."""
    node, other = place.host("node1"), place.host("node2")
    demo.wait_idle(node, 2)
    seen = demo.run_job(node)
    assert "COMPLETED" in seen
    assert "COMPLETED" in demo.mail_arrives(place.host("outside"), seen.split()[1])
    assert sorted(demo.as_alice(other, "srun", "--nodes=2", "hostname").split()) == ["node1", "node2"]
    assert "10.78.0.2" in demo.fetch_outside(other)
    assert "node2" in demo.syslog_arrives(place.lab, other, on)
    assert "10.77.0.1" in demo.clock_follows(other)
    status = place.status(on)
    assert status["healthy"] and status["warnings"] == []
    (probe,) = status["probes"]
    assert (probe["network"], probe["ok"]) == (CABINET, True)


def test_nodes_behind_a_router(routed: Playground) -> None:
    """They are on no bridge of an admin host; a job survives the move of the container to the other one."""
    assert (
        routed.lab.host("node1").run("ip", "-br", "-4", "address", "show", "eth0").text.split()[2] == "10.100.0.101/17"
    )
    assert_served(routed, "host-a")
    node = routed.host("node2")
    long = demo.as_alice(node, "sbatch", "--parsable", "--wrap=until [ -e go ]; do sleep 0.2; done; echo survived")
    demo.wait_for("the job", lambda: "yes" if demo.job_state(node, long) == "RUNNING" else "")
    moved = json.loads(routed.sms("-q", "migrate", "host-b", "--force", "--json", on="admin").stdout)
    assert moved["target"] == "host-b"
    assert_served(routed, "host-b")
    demo.as_alice(node, "touch", "go")
    assert demo.wait_for("the end of the job", lambda: demo.ended_as(node, long)) == "COMPLETED"
