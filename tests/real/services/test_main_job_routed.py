"""The main job with nodes in a network of their own behind a router, as in the cabinets of an HPE Cray EX."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.operations.classify.classify import ClassifyOptions, classify, render
from appliance.operations.lab import demo
from appliance.operations.site.find import open_site
from appliance.progress import Silent
from tests.real.conftest import Playground, give_image
from tests.real.labs import build_image, fresh_lab

pytestmark = [pytest.mark.real, pytest.mark.full]

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


def test_a_route_to_nodes_in_use_stays(routed: Playground) -> None:
    """Removed, they would fall silent minutes after a switch that ended with status 0."""
    host = next(name for name in ("host-a", "host-b") if routed.instances(name))

    def change(document: dict[str, Any]) -> None:
        document["networks"]["provisioning"]["routes"] = []
        for one in document["slurm"]["nodes"]:
            one.pop("address", None)

    site = ("--site", routed.variant("no-route.yaml", change))
    refused = json.loads(routed.sms(*site, "-q", "apply", "-n", "--json", on=host, ok=(3,)).stdout)["refused"]
    assert any("no longer leads to nodes in use (2): node[1-2]" in one for one in refused), refused


def test_a_download_from_behind_the_router_survives_two_moves(routed: Playground) -> None:
    if routed.instances("host-b"):
        routed.sms("-q", "migrate", "host-a", "--force", on="admin")
    assert "downloaded without a break" in demo.moves(routed.lab)


def test_a_rehearsal_has_the_router_too(routed: Playground) -> None:
    host = next(name for name in ("host-a", "host-b") if routed.instances(name))
    routed.sms("-q", "overlay", "snapshot", on=host)
    done = json.loads(routed.sms("-q", "rehearse", "--json", on=host, ok=(0, 1)).stdout)
    assert done["ok"], done["checks"]
    seen = {check["what"]: check["seen"] for check in done["checks"]}
    assert "COMPLETED, a step on node1, node2" in seen["a Slurm job from a compute node"]
    assert "outside sees 10.78.0.2" in seen["the outside, through the container's NAT"]


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


def test_another_network_of_nodes_is_applied(routed: Playground) -> None:
    """A second instance has the route; nothing else changes. Without it in the site file it is gone again."""
    serving = next(name for name in ("host-a", "host-b") if routed.instances(name))
    more = {"network": "10.101.0.0/17", "gateway": "10.77.0.253"}
    site = routed.variant("more.yaml", lambda site: site["networks"]["provisioning"]["routes"].append(more))

    def lines() -> list[str]:
        routes = routed.sms("exec", "--", "ip", "route", "show", "dev", "eth0", on=serving).text.splitlines()
        return sorted(line.strip() for line in routes if " via " in line)

    before = lines()
    routed.sms("--site", site, "-q", "apply", on=serving)
    assert lines() == [*before, "10.101.0.0/17 via 10.77.0.253"]
    rules = routed.sms("exec", "--", "cat", "/etc/sms/nat.nft", "/etc/chrony/sms.conf", on=serving).text
    assert "allow 10.101.0.0/17" in rules and "10.101.0.0/17, 169.254.77.0/30" in rules
    demo.wait_idle(routed.host("node1"), 2)
    routed.sms("-q", "apply", on=serving)
    assert lines() == before
    demo.wait_for("health", lambda: "yes" if routed.status(serving)["healthy"] else "")


def test_a_capture_knows_the_nodes_behind_the_router(routed: Playground, tmp_path: Path) -> None:
    """The site file agrees with the classification; one of the lab's other shape does not have these nodes."""
    node, capture = routed.host("node1"), tmp_path / "routed.pcap"
    with demo.listening(routed.lab, capture):
        demo.wait_idle(node, 2)
        demo.run_job(node)
        demo.fetch_outside(routed.host("node2"))
    found = classify(ClassifyOptions(captures=(str(capture),), nodes=(CABINET,)), Silent())
    assert found.nodes.count == 2 and found.nodes.addresses == ("10.100.0.101", "10.100.0.102")
    assert "time-critical" in {one.verdict for one in found.services if one.name == "slurmctld"}
    (tmp_path / "c.yaml").write_text(render(found, "yaml"))
    site = routed.lab.etc / "sms.yaml"
    assert not [each for each in open_site(site, None, tmp_path / "c.yaml").notices if "compute nodes" in each]
    flat = routed.lab.etc / Path(routed.variant("flat.yaml", make_flat)).name
    (notice,) = [each for each in open_site(flat, None, tmp_path / "c.yaml").notices if "compute nodes" in each]
    assert "10.100.0.101" in notice and "routes" in notice


def make_flat(site: dict[str, Any]) -> None:
    """Without the route, and without nodes that need it."""
    site["networks"]["provisioning"].pop("routes")
    site["slurm"]["nodes"][0].pop("address")


def running(place: Playground, on: str) -> list[dict[str, int]]:
    """The instances that run on a host."""
    found: list[dict[str, int]] = json.loads(place.host(on).run("apptainer", "instance", "list", "--json").stdout)[
        "instances"
    ]
    return found
