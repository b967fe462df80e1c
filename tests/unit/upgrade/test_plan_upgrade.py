"""An upgrade's note, what becomes of jobs, and the outage that is told beforehand."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.errors import SmsError
from appliance.plan.services.jobs import read_jobs
from appliance.plan.upgrade.upgrade import (
    DONE,
    KEEP_S,
    RETURNED,
    START_S,
    STARTING,
    STOP_S,
    STOPPING,
    Side,
    Upgrade,
    active_jobs,
    count_jobs,
    lost_jobs,
    predict_outage,
    read_ended,
    read_upgrade,
)

OLD, NEW = Side("/i/old.sif", "old", "aa"), Side("/i/new.sif", "new", "bb")
BEGUN = Upgrade("alpha", STOPPING, OLD, NEW, 100.0, snapshot=3, jobs={"7": "RUNNING"})


def test_a_note_survives_its_file() -> None:
    assert read_upgrade(None, "alpha") is None
    assert read_upgrade(BEGUN.text(), "alpha") == BEGUN
    later = BEGUN.at(STARTING, kept=4, stopped_at=5.0)
    assert (later.phase, later.kept, later.snapshot, later.ended) == (STARTING, 4, 3, False)
    assert BEGUN.at(DONE).ended and BEGUN.at(RETURNED).ended


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"before": 1, "after": 2}', b"\xff"])
def test_a_note_that_is_none_is_told(data: bytes) -> None:
    with pytest.raises(SmsError, match="cannot be read"):
        read_upgrade(data, "alpha")


def test_a_note_of_another_cluster_is_told() -> None:
    with pytest.raises(SmsError, match="of cluster alpha"):
        read_upgrade(BEGUN.text(), "beta")


def test_jobs_are_read_and_counted() -> None:
    jobs = read_jobs("7 RUNNING\n8_[2-9] PENDING\n9 COMPLETED\nslurm_load_jobs error: Zero Bytes\n\n")
    assert jobs == {"7": "RUNNING", "8_[2-9]": "PENDING", "9": "COMPLETED"}
    assert count_jobs(jobs) == "1 running, 1 waiting"
    assert set(active_jobs(jobs)) == {"7", "8_[2-9]"}


def test_jobs_that_the_log_says_have_ended() -> None:
    log = (
        "slurmctld: _job_complete: JobId=5 WEXITSTATUS 0\nslurmctld: _job_complete: JobId=5 done\n"
        "[2026-11-21T21:51:28.178] _job_complete: JobId=12_3(15) done\nslurmctld: _slurm_rpc_submit: JobId=9 usec=1\n"
    )
    assert set(read_ended(log)) == {"5", "12_3"}


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ("RUNNING", "RUNNING", ""),
        ("RUNNING", "COMPLETED", ""),
        ("RUNNING", "FAILED", ""),  # by itself: what it runs is its own business
        ("RUNNING", "TIMEOUT", ""),
        ("RUNNING", None, "is not known any more"),
        ("RUNNING", "PENDING", "was RUNNING and is PENDING"),
        ("RUNNING", "NODE_FAIL", "is NODE_FAIL"),
        ("RUNNING", "BOOT_FAIL", "is BOOT_FAIL"),
        ("PENDING", "PENDING", ""),
        ("PENDING", "RUNNING", ""),
        ("PENDING", "COMPLETED", ""),
        ("PENDING", None, "was PENDING and is not known"),
        ("COMPLETING", None, ""),
        ("COMPLETED", None, ""),
        ("CANCELLED", None, ""),
    ],
)
def test_what_becomes_of_a_job(before: str, after: str | None, lost: str) -> None:
    found = lost_jobs({"7": before}, {"7": after} if after else {})
    assert bool(found) is bool(lost) and all(lost in line for line in found)


STOPPED: dict[str, Any] = {"verb": "stop", "event": "stopped", "seconds": 2.5}
UPGRADED: dict[str, Any] = {
    "verb": "upgrade",
    "event": "done",
    "outage_s": 9.0,
    "parts": {"stop": 3.0, "snapshot": 1.0, "probes": 2.0},
}


def test_the_way_to_the_host_is_part_of_it_where_no_upgrade_went_that_way() -> None:
    assert predict_outage([], {"probes": 2.0}, 0.1)[0] == pytest.approx(STOP_S + KEEP_S + 2.0 + 5.0)
    assert predict_outage([], {}, 0.1)[0] == pytest.approx(STOP_S + KEEP_S + START_S + 5.0)
    assert predict_outage([UPGRADED], {}, 0.1)[0] == pytest.approx(9.0), "it went that way"


@pytest.mark.parametrize(
    ("history", "parts", "seconds", "known"),
    [
        ([], {}, STOP_S + KEEP_S + START_S, "nothing was measured yet"),
        ([STOPPED], {}, 2.5 + KEEP_S + START_S, "as the last stop and what is usual"),
        ([UPGRADED], {}, 9.0, "as the last upgrade"),
        ([UPGRADED, STOPPED], {}, 8.5, "as the last upgrade"),
        ([UPGRADED], {"verify": 2.0, "probes": 8.0}, 14.0, "as the rehearsal and the last stop"),
        ([{"verb": "upgrade", "event": "returned"}, {"verb": "start"}], {}, STOP_S + KEEP_S + START_S, "nothing"),
    ],
)
def test_an_outage_is_predicted(
    history: list[dict[str, Any]], parts: dict[str, float], seconds: float, known: str
) -> None:
    predicted, words = predict_outage(history, parts)
    assert predicted == pytest.approx(seconds) and words.startswith(known)
