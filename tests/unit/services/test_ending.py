"""Settings that end running jobs although their partitions and nodes stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.plan.services.defined import Defined, read_defined
from appliance.plan.services.effect import Present, can_cost, find_losses
from appliance.plan.services.ending import find_ended, may_end
from appliance.plan.services.jobs import Job
from appliance.plan.services.nodes import NodeState

CONF = """\
ClusterName=lab
NodeName=n[1-4]
PartitionName=low Nodes=n[1-2] PriorityTier=1
PartitionName=high Nodes=n[1-4] PriorityTier=10
PartitionName=far Nodes=n[3-4] PriorityTier=20
"""
NOW = 1_764_500_000
RUNS = Job("1", "RUNNING", "alice", ("low",), frozenset({"n1"}), ends=NOW + 600)
LATE = replace(RUNS, id="2", ends=NOW - 300)
WAITS = Job("4", "PENDING", "bob", ("high",), depends="(null)")


def defined(*more: str, conf: str = CONF) -> Defined:
    return read_defined({"/etc/slurm/slurm.conf": (conf + "\n".join(more)).encode()})


def ended(job: Job, old: Defined, new: Defined, *others: Job, silent: frozenset[str] = frozenset()) -> str:
    """Why the job is ended; empty if it is not."""
    return dict(find_ended([job, *others], silent, NOW, old, new)).get(job.id, "")


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ("OverTimeLimit=10", "OverTimeLimit=4", True),
        ("OverTimeLimit=UNLIMITED", "", True),
        ("OverTimeLimit=10", "OverTimeLimit=6", False),
        ("OverTimeLimit=4", "", False),  # it is being ended already
        ("", "OverTimeLimit=10", False),
    ],
)
def test_a_job_beyond_its_time_limit(before: str, after: str, lost: bool) -> None:
    old, new = defined(before), defined(after)
    assert bool(ended(LATE, old, new)) == lost
    assert not ended(RUNS, old, new), "one within its limit goes on"
    assert not ended(replace(LATE, state="SUSPENDED"), old, new), "its time stands still"
    assert bool(ended(replace(LATE, state="SIGNALING"), old, new)) == lost, "it runs, too"
    assert not ended(replace(LATE, ends=0), old, new), "it has no limit"
    assert can_cost(old, new) or not lost


def test_the_limit_of_a_partition_counts_before_that_of_all() -> None:
    own = CONF.replace("PriorityTier=1\n", "PriorityTier=1 OverTimeLimit=60\n")
    assert not ended(LATE, defined("OverTimeLimit=10", conf=own), defined(conf=own))
    assert ended(LATE, defined(conf=own), defined())


def test_a_node_that_does_not_answer() -> None:
    old, new, silent = defined("SlurmdTimeout=3600"), defined("SlurmdTimeout=60"), frozenset({"n1"})
    assert "lowered to 60 s" in ended(RUNS, old, new, silent=silent)
    assert ended(RUNS, defined("SlurmdTimeout=0"), new, silent=silent), "0 was for ever"
    assert ended(replace(RUNS, state="SUSPENDED"), old, new, silent=silent), "that of a suspended job, too"
    assert not ended(RUNS, old, new, silent=frozenset({"n2"}))
    assert not ended(RUNS, new, old, silent=silent)
    assert not ended(RUNS, defined(), defined("SlurmdTimeout=300"), silent=silent), "300 is the default"
    assert ended(RUNS, defined("SlurmdTimeout=UNLIMITED"), old, silent=silent)


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ("", "PreemptType=preempt/partition_prio\nPreemptMode=CANCEL", True),
        ("", "PreemptType=partition_prio\nPreemptMode=GANG,REQUEUE", True),
        ("", "PreemptType=preempt/partition_prio\nPreemptMode=SUSPEND,GANG", False),
        ("", "PreemptType=preempt/partition_prio", False),
        ("", "PreemptType=preempt/qos\nPreemptMode=CANCEL", False),
        (*["PreemptType=preempt/partition_prio\nPreemptMode=CANCEL"] * 2, False),
    ],
)
def test_a_waiting_job_that_would_take_its_place(before: str, after: str, lost: bool) -> None:
    old, new = defined(before), defined(after)
    assert bool(ended(RUNS, old, new, WAITS)) == lost
    assert not ended(RUNS, old, new, replace(WAITS, partitions=("far",))), "it has none of its nodes"
    assert not ended(RUNS, old, new, replace(WAITS, partitions=("low",))), "it is not above it"
    assert not ended(RUNS, old, new, replace(WAITS, depends="afterok:1")), "it may wait for that"
    assert not ended(RUNS, old, new)


def test_a_partition_that_rises_above_others() -> None:
    words = ("PreemptType=preempt/partition_prio", "PreemptMode=CANCEL")
    flat = CONF.replace("PriorityTier=10", "PriorityTier=1")
    assert ended(RUNS, defined(*words, conf=flat), defined(*words), WAITS)
    exempt = CONF.replace("PriorityTier=1\n", "PriorityTier=1 PreemptMode=OFF\n")
    assert not ended(RUNS, defined(*words, conf=flat), defined(*words, conf=exempt), WAITS)


@pytest.mark.parametrize(
    ("old", "new", "may"),
    [
        (CONF, CONF + "PartitionName=extra Nodes=n1\n", False),
        (CONF + "PartitionName=extra Nodes=n1\n", CONF, False),
        (CONF, CONF.replace("PriorityTier=20", "PriorityTier=30"), False),  # it came first before
        (CONF, CONF.replace("PriorityTier=20", "PriorityTier=5"), True),  # that of 10 comes before it now
        (CONF, CONF.replace("PriorityTier=20", "PriorityTier=20 PreemptMode=OFF"), False),
        (CONF.replace("PriorityTier=1\n", "PriorityTier=1 PreemptMode=OFF\n"), CONF, True),
    ],
)
def test_what_may_end_jobs_where_some_are_preempted_already(old: str, new: str, may: bool) -> None:
    words = ("PreemptType=preempt/partition_prio", "PreemptMode=CANCEL")
    assert may_end(defined(*words, conf=old), defined(*words, conf=new)) == may


def test_many_jobs_are_judged_quickly() -> None:
    """A hostile list has as many as fit: each pair of a running and a waiting one would take hours."""
    jobs = [replace(RUNS, id=str(number), nodes=frozenset({f"n{number % 4 + 1}"})) for number in range(20000)]
    jobs += [replace(WAITS, id=str(number), partitions=("low",)) for number in range(20000, 40000)]
    words = ("PreemptType=preempt/partition_prio", "PreemptMode=CANCEL")
    assert not [*find_ended(jobs, frozenset(), NOW, defined(), defined(*words))]


def test_they_are_among_the_losses_with_what_depends_on_them() -> None:
    after = replace(WAITS, id="5", partitions=("low",), depends="afterok:2(unfulfilled)")
    nodes = (NodeState("n1", "n1", 6818, "mixed+not_responding", "", silent=True, acknowledged=False),)
    present = Present((RUNS, LATE, after), nodes=nodes, now=NOW)
    old, new = defined("OverTimeLimit=10"), defined()
    assert can_cost(old, new)
    assert [one.name for one in find_losses(present, old, new)] == ["2", "5"]
    assert not find_losses(replace(present, now=0), old, new), "not known is not judged"
    lowered = find_losses(present, defined("SlurmdTimeout=600"), defined("SlurmdTimeout=60"))
    assert {one.name for one in lowered} == {"1", "2", "5"}
