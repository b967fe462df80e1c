"""docs/first-day.md, as it is written, in the lab: with nodes on the provisioning network, and behind a router."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from appliance.lab import Lab
from appliance.operations.lab import demo
from tests.real.blocks import Reader
from tests.real.labs import remove_lab
from tests.real.pages import FIRST_DAY, ROUTED
from tests.shellblocks import PAGES, read_shell

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.timeout(2400)]

BLOCKS = read_shell(PAGES["first-day.md"])
VERBS = (
    *("init", "config check", "key create", "host prepare", "doctor", "build", "start", "status", "apply", "restart"),
    *("overlay snapshot", "migrate", "rehearse", "upgrade", "overlay restore"),
)
"""What an administrator does on the first day."""


@pytest.fixture
def reader() -> Iterator[Reader]:
    """Somebody on a machine without a lab."""
    remove_lab("lab")
    yield Reader("lab")
    remove_lab("lab")


def test_the_page_names_every_step() -> None:
    text = "\n".join(block.text for block in BLOCKS)
    assert [verb for verb in VERBS if f"sms {verb}" not in text] == []
    assert [block.place for block in BLOCKS if block.reason] == []


@pytest.mark.parametrize("shape", ["flat", "routed"])
def test_the_first_day(reader: Reader, shape: str) -> None:
    page = FIRST_DAY if shape == "flat" else replace(FIRST_DAY, names={**FIRST_DAY.names, **ROUTED})
    for block in BLOCKS:
        wrong = reader.follow(page, block)
        assert not wrong, "\n".join(wrong)
        if any(f"sms {verb}" in block.text for verb in ("start", "apply", "migrate", "upgrade")):
            assert_jobs_run()


def assert_jobs_run() -> None:
    """Every node of the site file is idle, and a job runs on one."""
    lab = Lab.open("lab")
    demo.wait_idle(lab.host("node1"), 3 if "node[1-3]" in (lab.etc / "sms.yaml").read_text() else 2)
    assert "COMPLETED" in demo.run_job(lab.host("node1"))
