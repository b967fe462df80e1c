"""The benchmarks' runner: what is reported when a peer, or the project's own way, fails."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import bench
from appliance.errors import SmsError
from appliance.progress import Silent
from bench.__main__ import exit_status, reasons, run_one, table
from bench.rig import Rig
from bench.rig.measure import find_program, interleave, result, wall

PEER_FIELDS = ("peer_value", "ratio", "peer_spread")


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(3, stack=stack, progress=Silent())


def missing() -> float:
    return wall(find_program("no-such-program", "no-such-package"))


def broken() -> float:
    raise SmsError("the lab is down")


def refused() -> float:
    subprocess.run(["sh", "-c", "echo no room >&2; exit 3"], check=True, capture_output=True)
    return 1.0


def late() -> float:
    subprocess.run(["sleep", "5"], check=True, timeout=0.05)
    return 1.0


def crash() -> float:
    return {"other": 1.0}["key"]


def failing_later() -> float:
    failing_later.calls += 1  # type: ignore[attr-defined]
    if failing_later.calls == 2:  # type: ignore[attr-defined]
        raise SmsError("gone")
    return 2.0


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (missing, "no-such-package"),
        (refused, "no room"),
        (late, "TimeoutExpired"),
        (crash, "KeyError"),
    ],
)
def test_a_peer_that_fails_costs_its_own_fields_alone(peer: Any, reason: str, rig: Rig, capsys: Any) -> None:
    def measure(rig: Rig) -> Iterator[dict[str, Any]]:
        samples = rig.interleave({"own": lambda: 1.0}, {"peer": peer, "other": lambda: 4.0})
        yield result("absolute", samples["own"], "the peer", samples["peer"], below=5)
        yield result("relative", samples["own"], "the peer", samples["peer"], ratio_below=1)
        yield result("other", samples["own"], "another", samples["other"], ratio_below=1)

    results = run_one("name", measure, rig)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == results
    absolute, relative, other = results
    for one in (absolute, relative):
        assert (one["value"], one["runs"], one["spread"]) == (1.0, 3, [1.0, 1.0])
        assert [one[key] for key in PEER_FIELDS] == [None] * 3 and reason in one["reason"]
    assert absolute["holds"] is True and relative["holds"] is None
    assert (other["ratio"], other["holds"], other["reason"]) == (0.25, True, None)
    assert exit_status(results) == 0
    assert table(results).row_count == 3
    assert [line.partition(":")[0] for line in reasons(results)] == ["absolute", "relative"]


def test_a_peer_that_failed_is_not_run_again_and_has_no_figure_of_half_its_runs() -> None:
    failing_later.calls = 0  # type: ignore[attr-defined]
    samples = interleave({"own": lambda: 1.0}, {"peer": failing_later}, 5)
    assert len(samples["own"]) == 5
    assert (samples["peer"], samples["peer"].reason) == ([], "gone")
    assert failing_later.calls == 2  # type: ignore[attr-defined]


def test_where_the_own_figure_fails_there_is_a_line_with_the_reason_and_a_status(rig: Rig, capsys: Any) -> None:
    def measure(rig: Rig) -> Iterator[dict[str, Any]]:
        samples = rig.interleave({"own": lambda: 1.0}, {"peer": lambda: 2.0})
        yield result("first", samples["own"], "the peer", samples["peer"], below=5)
        rig.interleave({"own": broken}, {"peer": lambda: 2.0})

    results = run_one("name", measure, rig)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == results
    assert results[0]["value"] == 1.0
    assert results[1] == {"name": "name", "value": None, "reason": "the lab is down"}
    assert exit_status(results) == 1 and exit_status(results[:1]) == 0
    assert table(results).row_count == 2


def test_every_module_is_registered_and_the_usual_set_fits_its_limit() -> None:
    modules = {path.stem for path in Path(bench.__file__).parent.glob("*.py")} - {"__init__", "__main__"}
    assert modules == set(bench.BENCHMARKS)
    usual = [one.minutes for one in bench.BENCHMARKS.values() if not one.full]
    assert bench.MAKE_MIN + sum(usual) <= bench.LIMIT_MIN
