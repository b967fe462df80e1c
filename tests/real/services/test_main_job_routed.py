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
    addresses = routed.host("node1").run("ip", "-br", "-4", "address", "show", "eth0").text.split()
    assert addresses[2:] == ["10.100.0.101/17"]
    assert_served(routed, "host-a")
    node = routed.host("node2")
    long = demo.as_alice(node, "sbatch", "--parsable", "--wrap=until [ -e go ]; do sleep 0.2; done; echo survived")
    demo.wait_for("the job", lambda: "yes" if demo.job_state(node, long) == "RUNNING" else "")
    moved = json.loads(routed.sms("-q", "migrate", "host-b", "--force", "--json", on="admin").stdout)
    assert moved["target"] == "host-b"
    demo.as_alice(node, "touch", "go")
    assert demo.wait_for("the end of the job", lambda: demo.ended_as(node, long)) == "COMPLETED"
    assert_served(routed, "host-b")


@pytest.mark.full
def test_a_rehearsal_has_the_router_too(routed: Playground) -> None:
    host = next(name for name in ("host-a", "host-b") if routed.instances(name))
    routed.sms("-q", "overlay", "snapshot", on=host)
    done = json.loads(routed.sms("-q", "rehearse", "--json", on=host, ok=(0, 1)).stdout)
    assert done["ok"], done["checks"]
    seen = {check["what"]: check["seen"] for check in done["checks"]}
    assert "COMPLETED, a step on node1, node2" in seen["a Slurm job from a compute node"]
    assert "outside sees 10.78.0.2" in seen["the outside, through the container's NAT"]


@pytest.mark.full
def test_a_node_whose_only_route_leads_to_the_container_reaches_those_behind_the_router(routed: Playground) -> None:
    """Its packets pass the container, the replies do not: `ct state invalid drop` must not see these connections."""
    serving = next(name for name in ("host-a", "host-b") if routed.instances(name))
    other = routed.host("host-b" if serving == "host-a" else "host-a")
    other.run("ip", "route", "add", "10.100.0.0/17", "via", "10.77.0.1")
    try:
        other.run("sysctl", "-q", "net.ipv4.conf.all.accept_redirects=0", "net.ipv4.conf.br-prov.accept_redirects=0")
        banner = 'exec 3<>/dev/tcp/10.100.0.101/22; read -t 5 -r line <&3; echo "$line"'
        assert other.run("bash", "-c", banner).text.startswith("SSH-2.0")
    finally:
        other.run("ip", "route", "del", "10.100.0.0/17")


@pytest.mark.full
def test_status_names_a_router_that_is_off_and_a_route_that_is_gone(routed: Playground) -> None:
    serving = next(name for name in ("host-a", "host-b") if routed.instances(name))
    router, bridge = routed.host("router"), "br-prov"
    (pid,) = {str(each["pid"]) for each in running(routed, serving)}
    inside = ("nsenter", f"--net=/proc/{pid}/ns/net", "--")
    router.run("ip", "link", "set", "prov0", "down")
    try:
        named = f"the router 10.77.0.254 to {CABINET} does not answer on {bridge}"
        demo.wait_for("the fault", lambda: "yes" if named in routed.status(serving)["warnings"] else "")
        assert routed.sms("status", on=serving, ok=None).status == 4
    finally:
        router.run("ip", "link", "set", "prov0", "up")
        router.run("ip", "route", "replace", "default", "via", "10.77.0.1")
    demo.wait_for("the router", lambda: "yes" if routed.status(serving)["healthy"] else "")
    routed.host(serving).run(*inside, "ip", "route", "del", CABINET)
    try:
        status = routed.status(serving)
        assert not status["healthy"] and any(f"no route to {CABINET}" in each for each in status["warnings"])
        applied = routed.sms("apply", "--dry-run", on=serving, ok=None)
        assert b"routes is unset" in applied.stdout + applied.stderr
    finally:
        routed.host(serving).run(*inside, "ip", "route", "add", CABINET, "via", "10.77.0.254")


def running(place: Playground, on: str) -> list[dict[str, int]]:
    """The instances that run on a host."""
    found: list[dict[str, int]] = json.loads(place.host(on).run("apptainer", "instance", "list", "--json").stdout)[
        "instances"
    ]
    return found
