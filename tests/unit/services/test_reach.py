"""What `sms status` runs to see whether nodes are served, and since when that counts."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from appliance.errors import SmsError
from appliance.operations.context import Cluster
from appliance.operations.services.reach import inspect_inside, inspect_links, inspect_reach
from appliance.operations.services.status import list_answers
from appliance.plan.machine import inside_argv
from appliance.plan.services.inside import Inside, Process
from appliance.plan.services.links import Links
from appliance.plan.services.nodes import NodeState
from tests.sites import open_debian
from tests.support.fake import Fake

BROKEN: tuple[Links, str] = (Links(), "the network of host-a cannot be inspected: x")
ANSWER = 'answer {"name": "munge", "ok": true, "detail": "", "ms": 1.0}\n'
GONE = NodeState("n1", "10.0.0.9", 6818, "down+not_responding", "Not responding", True, False)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return open_debian(tmp_path)


def inside(*nodes: NodeState, age_s: float = 61, state: str = "S") -> Inside:
    return Inside(processes=(Process(1, 0, "S", 900, "appinit"), Process(5, 1, state, age_s, "slurmctld")), nodes=nodes)


@pytest.mark.parametrize(("age_s", "faults"), [(59, 0), (61, 2)])
def test_nodes_count_some_time_after_the_controllers_start(cluster: Cluster, age_s: float, faults: int) -> None:
    host = Fake({("nsenter",): (0, "1 124 \n")}, name="host-a")
    found = inspect_reach(cluster, host, 7, (Links(), ""), inside(GONE, age_s=age_s))
    about_nodes = [problem for problem in found.problems if "node" in problem]
    assert len(about_nodes) == faults, found.problems
    assert found.nodes and len(found.nodes.silent) == 1 and not found.probes[0].ok, "it is shown at once"


def test_nodes_that_are_not_installed_yet_are_a_notice(cluster: Cluster) -> None:
    """Neither they nor their network make it unhealthy, nor what ARP has not found."""
    network = str(cluster.site.networks.provisioning.address.network)
    absent = replace(GONE, address="10.20.0.9", state="unknown+not_responding", registered=False)
    here = replace(GONE, name="n2", address="192.0.2.2", state="idle", silent=False)
    host = Fake({("nsenter",): (0, "1 124 \n2 0 \n")}, name="host-a")
    links = Links(neighbours=(("eth0", "10.20.0.9", "FAILED"),), routes=(IPv4Network(network),))
    found = inspect_reach(cluster, host, 7, (links, ""), inside(absent, here))
    assert not any("node" in problem or "neighbour" in problem for problem in found.problems), found.problems
    assert [probe.ok for probe in found.probes] == [False, True]
    assert found.notices == ["1 of 2 nodes have not registered with slurmctld: n1"]


def test_a_broken_node_of_many_is_a_notice(cluster: Cluster) -> None:
    """And the connections show which of those that do not respond are not just broken."""
    others = tuple(replace(GONE, name=f"n{n}", address=f"10.0.1.{n}", state="idle", silent=False) for n in range(3, 90))
    host = Fake({("nsenter",): (0, "1 0 \n2 0 \n3 0 \n4 124 \n5 0 \n")}, name="host-a")
    found = inspect_reach(cluster, host, 7, BROKEN, inside(GONE, replace(GONE, name="n2"), *others))
    assert found.nodes and [node.accepts for node in found.nodes.silent] == [False, True]
    assert "n2 (Not responding), but accept connections" in found.problems[1] and len(found.problems) == 2
    assert len(found.notices) == 1 and "1 of 89 nodes do not respond to slurmctld: n1 " in found.notices[0]
    assert [(probe.network, probe.ok) for probe in found.probes] == [("no route", True)]


def test_names_are_resolved_in_the_container(cluster: Cluster) -> None:
    host = Fake({("nsenter",): (0, "1 0 \n"), ("unshare",): (0, "1 0 \n")}, name="host-a")
    one = inspect_reach(cluster, host, 7, BROKEN, inside(replace(GONE, silent=False, state="idle")))
    two = inspect_reach(cluster, host, 7, BROKEN, inside(replace(GONE, address="n1.example.org")))
    assert one.probes[0].ok and two.probes[0].ok
    assert [argv[0] for argv in host.asked] == ["nsenter", "unshare"]
    assert host.asked[0][:2] == ("nsenter", "--net=/proc/7/ns/net") and host.asked[0][-2:] == ("10.0.0.9", "6818")
    assert one.problems == [BROKEN[1]] and one.networks == ()


def test_a_site_without_a_controller(cluster: Cluster) -> None:
    services = tuple(service for service in cluster.services if service.role != "controller")
    host = Fake({("unshare",): (0, f"space 4 1\n{ANSWER}")}, name="host-a")
    without = replace(cluster, services=services)
    found_inside = inspect_inside(without, host, confined=True)
    assert found_inside.space == {"size": 4, "used": 1} and "sinfo" not in host.asked[0]
    found = inspect_reach(without, host, 7, BROKEN, inside(state="T"))
    assert (found.nodes, found.probes) == (None, ()) and [process.pid for process in found.stopped] == [5]
    assert "kill -CONT 5" in found.problems[1]


def test_an_overlay_that_refuses_changes_is_a_problem(cluster: Cluster) -> None:
    shown = f"unwritable\nspace 4 1\nnode unwritable\n{ANSWER}", f"space 4 1\nnode unwritable\n{ANSWER}"
    found, forged = (
        inspect_inside(cluster, Fake({("unshare",): (0, text)}, name="host-a"), confined=True) for text in shown
    )
    assert (found.unwritable, forged.unwritable) == (True, False)
    problems = inspect_reach(cluster, Fake({}, name="host-a"), 7, BROKEN, replace(inside(), unwritable=True)).problems
    assert any("cannot be written" in problem for problem in problems)


def test_services_are_probed_meanwhile(cluster: Cluster) -> None:
    """As the instance is confined: one that an early version started would lack what its probes need."""
    for confined in (True, False):
        host = Fake({("unshare",): (0, ANSWER)}, name="host-a")
        assert [one.name for one in inspect_inside(cluster, host, confined=confined).answers] == ["munge"]
        names = " ".join(service.name for service in cluster.services)
        argv = inside_argv(cluster.site, cluster.services, "inspect-inside", names, confined=confined)
        assert names in host.asked[0] and set(argv) - {"inspect-inside"} <= set(host.asked[0])
    for answer in ((1, "no instance"), (0, "answer Traceback\n")):
        silent = inspect_inside(cluster, Fake({("unshare",): answer}, name="host-a"), confined=True)
        with pytest.raises(SmsError, match="does not answer: "):
            list_answers(cluster, silent)


def test_a_container_that_shows_nothing_is_a_problem(cluster: Cluster) -> None:
    found = inspect_reach(cluster, Fake({}, name="host-a"), 7, BROKEN, Inside())
    assert found.problems[1:] == ["the processes of the services container cannot be listed"]


def test_links_that_cannot_be_read() -> None:
    for answer in ((1, "nsenter: no such process"), (0, "host []\n")):
        links, problem = inspect_links(Fake({("sh",): answer}, name="host-a"), 7)
        assert links == Links() and problem.startswith("the network of host-a cannot be inspected: ")
