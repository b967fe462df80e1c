"""The record of an upgrade, the check for lost jobs, and the predicted outage."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.errors import SmsError
from appliance.plan.services.jobs import active_jobs, count_jobs, lost_jobs, read_ended, read_jobs
from appliance.plan.upgrade.upgrade import (
    COMMANDS,
    DONE,
    KEEP_S,
    RETURNED,
    START_S,
    STARTING,
    STOP_S,
    STOPPING,
    Side,
    Upgrade,
    predict_outage,
    read_upgrade,
)
from appliance.shared.records import to_json

OLD, NEW = Side("/i/old.sif", "old", "aa"), Side("/i/new.sif", "new", "bb")
BEGUN = Upgrade("alpha", STOPPING, OLD, NEW, 100.0, snapshot=3, jobs={"7": "RUNNING"})


def test_a_record_survives_its_file() -> None:
    assert read_upgrade(None, "alpha") is None
    assert read_upgrade(to_json(BEGUN), "alpha") == BEGUN
    later = BEGUN.at(STARTING, kept=4, stopped_at=5.0)
    assert (later.phase, later.kept, later.snapshot, later.ended) == (STARTING, 4, 3, False)
    assert BEGUN.at(DONE).ended and BEGUN.at(RETURNED).ended


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"before": 1, "after": 2}', b"\xff"])
def test_an_invalid_record_is_reported(data: bytes) -> None:
    with pytest.raises(SmsError, match="is invalid"):
        read_upgrade(data, "alpha")


def test_a_record_of_another_cluster_is_reported() -> None:
    with pytest.raises(SmsError, match="belongs to cluster alpha"):
        read_upgrade(to_json(BEGUN), "beta")


def test_jobs_are_read_and_counted() -> None:
    jobs = read_jobs("7 RUNNING\n8_[2-9] PENDING\n9 COMPLETED\nslurm_load_jobs error: Zero Bytes\n\n")
    assert jobs == {"7": "RUNNING", "8_[2-9]": "PENDING", "9": "COMPLETED"}
    assert count_jobs(jobs) == "1 running, 1 waiting"
    assert set(active_jobs(jobs)) == {"7", "8_[2-9]"}


def test_jobs_that_have_ended_according_to_the_log() -> None:
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
        ("RUNNING", "FAILED", ""),  # it ended on its own
        ("RUNNING", "TIMEOUT", ""),
        ("RUNNING", None, "is now unknown"),
        ("RUNNING", "PENDING", "was RUNNING and is now PENDING"),
        ("RUNNING", "NODE_FAIL", "is now NODE_FAIL"),
        ("RUNNING", "BOOT_FAIL", "is now BOOT_FAIL"),
        ("PENDING", "PENDING", ""),
        ("PENDING", "RUNNING", ""),
        ("PENDING", "COMPLETED", ""),
        ("PENDING", None, "was PENDING and is now unknown"),
        ("COMPLETING", None, ""),
        ("COMPLETED", None, ""),
        ("CANCELLED", None, ""),
    ],
)
def test_lost_jobs(before: str, after: str | None, lost: str) -> None:
    found = lost_jobs({"7": before}, {"7": after} if after else {})
    assert bool(found) is bool(lost) and all(lost in line for line in found)


STOPPED: dict[str, Any] = {"verb": "stop", "event": "stopped", "seconds": 2.5}
UPGRADED: dict[str, Any] = {
    "verb": "upgrade",
    "event": "done",
    "outage_s": 9.0,
    "parts": {"stop": 3.0, "snapshot": 1.0, "probes": 2.0},
}


def test_round_trips_count_unless_an_upgrade_was_measured() -> None:
    assert predict_outage([], {"probes": 2.0}, 0.1)[0] == pytest.approx(STOP_S + KEEP_S + 2.0 + COMMANDS * 0.1)
    assert predict_outage([], {}, 0.1)[0] == pytest.approx(STOP_S + KEEP_S + START_S + COMMANDS * 0.1)
    assert predict_outage([UPGRADED], {}, 0.1)[0] == pytest.approx(9.0), "measured with round trips"


@pytest.mark.parametrize(
    ("history", "parts", "seconds", "basis"),
    [
        ([], {}, STOP_S + KEEP_S + START_S, "by default values"),
        ([STOPPED], {}, 2.5 + KEEP_S + START_S, "by the last stop and default values"),
        ([UPGRADED], {}, 9.0, "by the last upgrade"),
        ([UPGRADED, STOPPED], {}, 8.5, "by the last upgrade"),
        ([UPGRADED], {"verify": 2.0, "probes": 8.0}, 14.0, "by the rehearsal and the last stop"),
        (
            [{"verb": "upgrade", "event": "returned"}, {"verb": "start"}],
            {},
            STOP_S + KEEP_S + START_S,
            "by default values",
        ),
    ],
)
def test_an_outage_is_predicted(
    history: list[dict[str, Any]], parts: dict[str, float], seconds: float, basis: str
) -> None:
    predicted, text = predict_outage(history, parts)
    assert predicted == pytest.approx(seconds) and text == basis
