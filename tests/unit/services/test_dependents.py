"""Jobs that a lost one takes with it."""

from __future__ import annotations

import pytest

from appliance.plan.services.defined import read_defined
from appliance.plan.services.effect import Present, find_losses
from appliance.plan.services.jobs import Job

ONE = read_defined({"/etc/slurm/slurm.conf": b"NodeName=n1\nPartitionName=normal Nodes=ALL\n"})


@pytest.mark.parametrize(
    ("depends", "lost"),
    [
        ("", False),
        ("(null)", False),
        ("afterok:1(unfulfilled)", True),
        ("afterok:1+30(unfulfilled)", True),
        ("afterany:1(unfulfilled)", False),
        ("afternotok:1(unfulfilled)", False),
        ("afterok:9(unfulfilled)", False),
        ("afterany:9(unfulfilled),afterok:9:1(unfulfilled)", True),
        ("afterok:9(unfulfilled)?afterok:1(unfulfilled)", False),
        ("singleton(unfulfilled)", False),
        ("afterany:2(unfulfilled)", True),  # that is held
        ("afterok:3_*(unfulfilled)", True),
        ("afterok:3_4(unfulfilled)", True),
        ("afterok:4_5(unfulfilled)", True),
        ("afterok:4_6(unfulfilled)", False),
    ],
)
def test_jobs_that_depend_on_one_that_is_lost(depends: str, lost: bool) -> None:
    gone = ("gone",)
    jobs = (
        Job("1", "RUNNING", "bob", gone),
        Job("2", "PENDING", "bob", gone),
        Job("3_[1-9]", "PENDING", "bob", gone),
        Job("4_5", "RUNNING", "bob", gone),
        Job("7", "PENDING", "bob", ("normal",), depends="afterok:6(unfulfilled)"),
        Job("6", "PENDING", "bob", ("normal",), depends=depends),
    )
    losses = find_losses(Present(jobs), ONE, ONE)
    assert [one.name for one in losses] == ["1", "4_5", "2", "3_[1-9]", *(["7", "6"] if lost else [])]


def test_components_of_one_job_are_lost_together() -> None:
    jobs = (
        Job("1+0", "PENDING", "bob", ("normal",)),
        Job("1+1", "PENDING", "bob", ("gone",)),
        Job("11+0", "PENDING", "bob", ("normal",)),
        Job("2", "PENDING", "bob", ("normal",), depends="afterok:1+0(unfulfilled)"),
    )
    losses = find_losses(Present(jobs), ONE, ONE)
    assert sorted(one.name for one in losses) == ["1+0", "1+1", "2"]


@pytest.mark.parametrize("step", [1, -1])
def test_a_long_chain_among_many_jobs(step: int) -> None:
    """Each depends on the one after it, in whatever order squeue lists them: the numbers do not multiply."""
    count = 3000
    chain = [Job(f"{at}", "PENDING", "bob", ("normal",), depends=f"afterok:{at + 1}(x)") for at in range(count)]
    ends = [Job(f"{at}", "RUNNING", "bob", ("gone",)) for at in range(count, 2 * count)]
    losses = find_losses(Present((*chain, *ends)[::step]), ONE, ONE)
    assert losses[0].who == "bob, RUNNING" and len(losses) == 2 * count
