"""Networks that are not a cluster are reported as such, and get no confident verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.confidence import NOT_A_CLUSTER
from analysis.model import Classification
from analysis.report.html import headline
from analysis.signatures import TCP, UDP
from appliance.cli.classify.view import view_text
from appliance.operations.classify.classify import ClassifyOptions, classify, render
from appliance.progress import Silent
from tests.captures import files, partial, strangers
from tests.captures.cluster import ALL, Made, Plan, simulate
from tests.captures.strangers import STRANGERS, Stranger
from tests.unit.classify_cases import NODE, SMS, make_row, run

DOUBT = "this does not look like a cluster"


def found(folder: Path, made: Made | Stranger, **options: object) -> Classification:
    file = folder / "made.pcap"
    data = files.pcap(made.packets()) if isinstance(made, Made) else files.pcap(made.frames, link=made.link)
    file.write_bytes(data)
    return classify(ClassifyOptions((str(file),), **options), Silent())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", STRANGERS)
def test_other_networks_are_not_clusters(name: str, tmp_path: Path) -> None:
    seen = found(tmp_path, STRANGERS[name]())
    assert seen.nodes.cluster is False
    assert seen.services
    assert max(one.confidence for one in seen.services) <= NOT_A_CLUSTER == 0.5
    assert seen.capture.remarks[0].startswith(f"{DOUBT}: no scheduler, file system or boot over the network is in it, ")
    assert not [one for one in seen.capture.remarks[1:] if "could be a compute node" in one], "once is enough"


def test_a_capture_of_first_packets_alone_is_of_a_cluster(tmp_path: Path) -> None:
    """As `tcpdump 'tcp[13] == 2'` makes it: nothing is answered, and nothing could be."""
    made = simulate(Plan(nodes=6, services=("slurm",), duration_s=1800))
    first = [one for one in made.packets() if one[1][23] == TCP and one[1][47] == 2]
    assert found(tmp_path, Stranger(first, files.ETHERNET)).nodes.cluster


def test_all_outputs_say_so(tmp_path: Path) -> None:
    seen = found(tmp_path, strangers.home_router())
    text = view_text(seen)
    assert text.startswith(f"note  {DOUBT}")
    assert f"nodes    7, no boot seen; {DOUBT}\n" in text
    assert headline(seen) == "This does not look like a cluster"
    assert f"<h1>{headline(seen)}</h1>" in render(seen, "html")
    assert json.loads(render(seen, "json"))["nodes"]["cluster"] is False


def test_the_sites_own_verdict_stands(tmp_path: Path) -> None:
    seen = found(tmp_path, strangers.home_router(), overrides={"dns": "deferrable"})
    assert [one.confidence for one in seen.services if one.overridden] == [0.99]


@pytest.mark.parametrize("service", ["slurm", "nfs", "provisioning"])
def test_a_scheduler_a_file_system_or_boots_make_a_cluster(service: str, tmp_path: Path) -> None:
    """Even of two nodes."""
    made = simulate(Plan(nodes=2, boots=1, duration_s=900, services=(service, "arp")))
    seen = found(tmp_path, made)
    assert seen.nodes.cluster
    assert not [one for one in seen.capture.remarks if one.startswith(DOUBT)]


@pytest.mark.parametrize(("nodes", "cluster"), [(2, False), (3, True)])
def test_three_machines_that_behave_like_nodes_make_a_cluster(nodes: int, cluster: bool, tmp_path: Path) -> None:
    """They log and query the time."""
    made = simulate(Plan(nodes=nodes, boots=0, duration_s=1200, services=("syslog", "ntp", "mail", "arp")))
    seen = found(tmp_path, made)
    assert seen.nodes.cluster is cluster
    assert (max(one.confidence for one in seen.services) > NOT_A_CLUSTER) is cluster


def test_who_names_nodes_knows_that_it_is_a_cluster(tmp_path: Path) -> None:
    made = simulate(Plan(nodes=3, boots=0, duration_s=1200, services=("ssh", "ntp", "arp")))
    assert not found(tmp_path, made).nodes.cluster
    assert found(tmp_path, made, nodes=("10.1.1.0/24",)).nodes.cluster
    assert found(tmp_path, made, node=made.nodes[0].address).nodes.cluster


def test_a_scheduler_that_never_answers_is_none() -> None:
    logs = make_row(NODE, SMS, UDP, 123, opened=9, client_hosts=2)
    tried = make_row(NODE, SMS, TCP, 6817, opened=9, unanswered=9, packets=(9, 0), bytes=(600, 0))
    assert not run([logs, tried]).nodes.cluster
    assert run([logs, make_row(NODE, SMS, TCP, 6817, opened=9)]).nodes.cluster


@pytest.mark.parametrize("expression", ["port 2049 or arp", "tcp", "udp", "not arp"])
def test_part_of_a_cluster_looks_like_a_cluster(expression: str, tmp_path: Path) -> None:
    seen = found(tmp_path, Stranger(partial.filtered(simulate(Plan(nodes=8, services=ALL)), expression)))
    assert seen.nodes.cluster
