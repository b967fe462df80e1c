"""Absence is evidence only where the capture could have shown use: filtered captures and idle networks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.classification import read_classification
from analysis.model import Classification
from appliance.cli.classify.view import view_text
from appliance.operations.classify.classify import ClassifyOptions, classify, render
from appliance.progress import Silent
from tests.captures import files, partial
from tests.captures.cluster import Made


@pytest.fixture(scope="module")
def whole() -> Made:
    return partial.whole()


def found(folder: Path, frames: partial.Frames, node: str = "") -> Classification:
    file = folder / "made.pcap"
    file.write_bytes(files.pcap(frames))
    return classify(ClassifyOptions((str(file),), node=node), Silent())


def named(seen: Classification, finding: str) -> set[str]:
    return {one.name for one in seen.unseen if one.finding == finding}


REMARK = "no service counts as hardly used, because the capture may not show it: "


def test_a_capture_of_a_cluster_at_work_shows_what_nodes_do_not_use(tmp_path: Path, whole: Made) -> None:
    seen = found(tmp_path, whole.packets())
    assert named(seen, "hardly used") >= {"iscsi", "pbs", "dns", "nis", "http"}
    assert named(seen, "not shown") == set()
    assert named(seen, "elsewhere") == {"https"}, "outside"
    assert seen.capture.remarks == ()


FILTERED = {
    "ip": "no ARP nor neighbour discovery in 15 min, as if it was filtered",
    "not arp": "no ARP nor neighbour discovery in 15 min",
    "tcp": "no ARP nor neighbour discovery in ",
    "udp": "no ARP nor neighbour discovery in ",
    "tcp or arp": "only TCP in ",
    "udp or arp": "only UDP in ",
    "port 22": "all of its traffic is tcp/22, as if it was filtered",
    "port 22 or arp": "all of its traffic is tcp/22",
    "port 2049 or arp": "all of its traffic is tcp/2049",
    "port 22 or port 123 or arp": "all of its traffic is tcp/22 and udp/123, as if it was filtered",
    "port 514 or port 123": "no ARP nor neighbour discovery in ",
}


@pytest.mark.parametrize("expression", FILTERED)
def test_filtered_captures_show_no_absence(expression: str, tmp_path: Path, whole: Made) -> None:
    seen = found(tmp_path, partial.filtered(whole, expression))
    assert named(seen, "hardly used") == set()
    assert named(seen, "not shown")
    (remark,) = (one for one in seen.capture.remarks if one.startswith(REMARK))
    assert remark.removeprefix(REMARK).startswith(FILTERED[expression])


def test_every_filter_has_a_case() -> None:
    assert FILTERED.keys() == partial.FILTERS.keys()


IDLE: dict[str, tuple[Callable[[], Made], str]] = {
    "ssh": (partial.ssh_alone, "all of its traffic is tcp/22, as if it was filtered"),
    "time": (partial.links_only, "only UDP in 6 h, as if it was filtered"),
    "scheduler": (partial.idle, "its nodes contacted services 252 times in 6.01 h: they are idle"),
}


@pytest.mark.parametrize("case", IDLE)
def test_idle_networks_show_no_absence(case: str, tmp_path: Path) -> None:
    """Six hours without a job."""
    make, reason = IDLE[case]
    seen = found(tmp_path, make().packets())
    assert named(seen, "hardly used") == set()
    assert named(seen, "not shown") >= {"nfs", "dns", "ldap", "nis", "http"}
    assert f"{REMARK}{reason}" in seen.capture.remarks
    (why,) = (one.why for one in seen.unseen if one.name == "nfs")
    assert why.endswith(f"but cannot show it: {reason}")


def test_all_outputs_say_what_a_capture_may_not_show(tmp_path: Path) -> None:
    seen = found(tmp_path, partial.idle().packets())
    text = view_text(seen)
    assert "hardly used here" not in text
    assert "not seen   in a capture that may not show it: gmetad, ganglia, " in text
    assert text.startswith(f"note  {REMARK}")
    page = render(seen, "html")
    assert REMARK in page
    assert "of all traffic in use" in page
    # A build reports the usual services that it knows nothing about.
    for form in ("json", "yaml"):
        assert {"nfs", "rsyslog"} <= set(read_classification(render(seen, form)).undetermined)


def test_what_nodes_use_elsewhere_is_determined(tmp_path: Path, whole: Made) -> None:
    seen = found(tmp_path, whole.packets())
    assert "https" not in read_classification(render(seen, "json")).undetermined


def test_one_node_has_little_arp(tmp_path: Path, whole: Made) -> None:
    """--node leaves frames out: that is not a filter of the capture."""
    seen = found(tmp_path, whole.packets(), node=whole.nodes[0].address)
    assert not [one for one in seen.capture.remarks if "neighbour discovery" in one]
