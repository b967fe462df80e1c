"""The output of `sms classify`: the table on terminals of every width, in files and in pipes."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from analysis.model import Classification, Interval, Nodes, Service
from appliance.cli.classify.view import MIN_WIDTH, Timelines, console_for, view, view_text
from tests.unit import classification_example as example


def screen(found: Classification, width: int = 80, **options: Any) -> str:
    console = Console(file=StringIO(), width=width, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(view(found, console, **options))
    return captured.get()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 150, 250])
@pytest.mark.parametrize("made", [example.paper(), example.empty(), example.many(), example.moved()])
def test_no_line_is_wider_than_the_screen(made: Classification, width: int) -> None:
    console = console_for(width)
    assert console.width == max(width, MIN_WIDTH)
    text = screen(made, console.width, verbose=True)
    assert [line for line in text.splitlines() if len(line) > console.width] == []


def test_the_two_groups_as_in_table_1() -> None:
    """One below the other on narrow terminals, side by side on wide ones; every service in its group."""
    narrow = screen(example.paper())
    above, below = narrow.split("SMS-mgmt: deferrable")
    for each in example.SERVICES:
        assert re.search(rf"^{each.name} ", above if each.verdict == "time-critical" else below, re.MULTILINE)
    wide = screen(example.paper(), 180)
    assert re.search(
        r"^SMS-services: time-critical, must never stop \(7\) +SMS-mgmt: deferrable, can wait \(3\)", wide, re.M
    )
    assert "…" not in narrow + wide


def test_a_narrow_screen_drops_columns_not_digits() -> None:
    text = screen(example.paper(), 64)
    assert re.search(r"^slurmctld +both +98\.4 s +5 min +98 %", text, re.MULTILINE)
    assert not re.search(r"service .* contacts", text)
    assert "too narrow for: contacts, nodes" in text
    assert "too narrow" not in screen(example.paper())


def test_a_file_or_pipe_has_one_fact_per_line() -> None:
    """For grep: no trailing spaces, no groups side by side, remarks first."""
    lines = view_text(example.paper(), verbose=True).splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines[0] == f"note  {example.paper().capture.remarks[0]}"
    assert sum(example.WAREWULF.reasons[1] in line for line in lines) == 1
    assert [line for line in lines if "SMS-services" in line and "SMS-mgmt" in line] == []
    assert sum("too narrow" in line for line in lines) == 0


def test_the_meaning_of_time_critical_is_explained() -> None:
    """Nodes do not notice at once: the column "tolerated outage" says when."""
    text = " ".join(screen(example.paper()).split())
    assert '"tolerated outage" is how long they can do without an answer' in text


BOOTS: list[tuple[Nodes, str]] = [
    (Nodes(8, (), 2), "8, 2 boots seen"),
    (Nodes(8, ()), "8, no boot seen"),
    (Nodes(8, (), 0, True), "8, boots cannot be counted in these packets"),
    (Nodes(0, ()), "none seen"),
]


@pytest.mark.parametrize(("nodes", "text"), BOOTS)
def test_nodes_and_their_boots(nodes: Nodes, text: str) -> None:
    assert f"nodes    {text}\n" in view_text(replace(example.paper(), nodes=nodes))


ROWS: list[tuple[Service, str]] = [
    (replace(example.SLURM, contacts=819_990), "slurmctld both 819,990 450 98.4 s 5 min 98 %"),
    (replace(example.RSYSLOG, contacts=529_000), "rsyslog nodes 529,000 450 61.2 s none 99 %"),
    (replace(example.PROVISIONING, contacts=64), "provisioning nodes 64 64 boot only 30 days 88 %"),
    (example.SSH, "ssh SMS 1,840 450 - 7 days by site"),
    (replace(example.SSH, interval_s=Interval(100, 51), overridden=False), "ssh SMS 1,840 450 ~100 s 7 days 90 %"),
    (replace(example.SSH, interval_s=Interval(100, 49)), "ssh SMS 1,840 450 100 s 7 days by site"),
    (example.CHRONY, "chrony nodes 38,020 450 17.1 min 17.1 min 97 %"),
]


@pytest.mark.parametrize(("service", "row"), ROWS, ids=range(len(ROWS)))
def test_a_row(service: Service, row: str) -> None:
    text = screen(replace(example.paper(), services=(service,)))
    assert row in [" ".join(line.split()) for line in text.splitlines()]


def test_services_that_the_container_cannot_run_have_advice() -> None:
    text = " ".join(screen(example.paper()).split())
    assert "Time-critical, but cannot run in the container nfs move files into the node image" in text
    assert "ganglia send monitoring through syslog" in text
    bare = replace(example.NFS, name="tcp/4444", advice="")
    text = " ".join(screen(replace(example.paper(), services=(bare,))).split())
    assert "tcp/4444 keep it on a machine that stays up" in text


def test_timelines_on_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not side by side, not in files, and not on the text console, which lacks the characters."""
    monkeypatch.setenv("TERM", "xterm")
    found = example.interrupted()
    text = screen(found, 120)
    assert re.search(r"^ganglia .* 99 %  █{8}▆···▃█{9}$", text, re.MULTILINE)
    assert re.search(r"^provisioning .* 88 %        ██ ···· +$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 120
    for shown in (screen(found, 80), screen(found, 180), view_text(found), screen(example.empty(), 120)):
        assert "over time" not in shown
    monkeypatch.setenv("TERM", "linux")
    assert "over time" not in screen(found, 120)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 0.0])
def test_timelines_of_lengths_that_cannot_be(bad: float) -> None:
    found = replace(example.interrupted(), bin_s=bad)
    service = replace(example.NFS, timeline=(5, -3), timeline_boot=())
    assert "█" in Timelines(found).line(service)
    assert set(Timelines(found).line(replace(service, timeline=()))) <= {" ", "·"}
    assert Timelines(example.empty()).line(service) == ""


def test_what_moved_stands_before_the_groups() -> None:
    text = view_text(example.moved())
    assert text.index("compared  with before.yaml: captured 24 h, was 1 h; 450 nodes, was 448") < text.index(
        "SMS-services"
    )
    for line in (
        "moved     nfs: time-critical, was deferrable; tolerated outage 1 min, was 24 h",
        "appeared  rsyslog: time-critical; confidence 99 %",
        "gone      nis: was time-critical; this capture is too short: 2 days would show it",
        "changed   chrony: time-critical; tolerated outage 17.1 min, was 8.53 min",
        "same      7 services: same verdict, similar numbers",
    ):
        assert f"\n{line}\n" in text
    for width in (40, 80, 120):
        assert max(map(len, screen(example.moved(), width).splitlines())) <= width


def test_reasons_on_demand() -> None:
    found = example.paper()
    reason = example.WAREWULF.reasons[1]
    flat = [" ".join(screen(found, **options).split()) for options in ({}, {"why": ["warewulf"]}, {"verbose": True})]
    assert [reason in text for text in flat] == [False, True, True]
    assert [example.NFS.budget_why in text for text in flat] == [False, False, True]
    alone = view_text(found, why=["nfs", "slurmrestd", "munge"])
    assert "capture  " not in alone
    assert "SMS-mgmt" not in alone
    assert "slurmrestd: not seen\n  why  once a month, by hand" in alone
    assert "munge: not seen\n  why  it has no traffic of its own" in alone
    assert "interquartile range" in alone
    assert "source" in alone


def test_all_that_was_read_and_not_read_is_shown() -> None:
    text = " ".join(screen(example.paper(), 250).split())
    expected = [
        "8 files: 78,868,179 packets, 63.4 GB, 24 h from 2024-03-05",
        "52:54:00:0a:01:01",
        "450 nodes use its DHCP",
    ]
    expected += [
        "450, 64 boots seen",
        "198.51.100.10 tcp/443",
        "hardly used here (95 % confidence): mariadb",
        "capture needed for 95 % confidence: slurmrestd 30 days",
        "no capture can show it",
    ]
    expected += [
        "ARP (190,400)",
        "tcp/7860 (804,119)",
        "118 x IPv4 header truncated",
        "ends in the middle",
        "byte 812,004,112",
    ]
    assert [part for part in expected if part not in text] == []


def test_a_capture_is_hostile() -> None:
    """Its text is neither markup nor control characters for the terminal, and does not hide other output."""
    made = example.with_text(example.moved(), lambda: example.HOSTILE)
    text = screen(made, 80, verbose=True)
    assert {letter for letter in text if not letter.isprintable()} == {"\n"}
    assert "[red]" in text
    console = Console(file=StringIO(), width=80, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(view(made, console, verbose=True))
    assert set(re.findall(r"\x1b[^m]*m", captured.get())) <= {
        f"\x1b[{code}m" for code in ("0", "1", "2", "1;31", "1;32", "1;33")
    }
