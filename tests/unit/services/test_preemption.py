"""Running jobs that make room for one that waits, by the tier of its partition or by its QOS."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.plan.services.defined import Defined, read_defined
from appliance.plan.services.effect import Present, Reservation, can_cost, find_losses
from appliance.plan.services.jobs import Job
from appliance.plan.services.preemption import Qos, find_preempted, preempts_more, read_qos

CONF = """\
ClusterName=lab
NodeName=n[1-4]
PartitionName=low Nodes=n[1-2] PriorityTier=1
PartitionName=high Nodes=n[1-4] PriorityTier=10
PartitionName=far Nodes=n[3-4] PriorityTier=20
"""
NOW = 1_764_500_000
RUNS = Job("1", "RUNNING", "alice", ("low",), frozenset({"n1"}), began=NOW - 600, ends=NOW + 600, qos="low")
WAITS = Job("4", "PENDING", "bob", ("high",), depends="(null)", qos="high")
BY_TIER = ("PreemptType=preempt/partition_prio", "PreemptMode=CANCEL")
BY_QOS = ("PreemptType=preempt/qos", "PreemptMode=REQUEUE")
SHOWN = """\
normal||cluster|
low||cluster|00:00:00
mild||gang,suspend|
hard||cancel|
long||cluster|01:00:00
high|hard,long,low,mild|cluster|
inner||within,requeue|
picky|low|priority,cancel|
Warning: |||
"""


def defined(*more: str, conf: str = CONF) -> Defined:
    return read_defined({"/etc/slurm/slurm.conf": (conf + "\n".join(more)).encode()})


def lost(job: Job, old: Defined, new: Defined, *others: Job, qos: dict[str, Qos] | None = None, now: int = NOW) -> str:
    """Why the job is ended; empty if it is not."""
    return dict(find_preempted([job, *others], {"maint"}, qos, now, old, new)).get(job.id, "")


@pytest.mark.parametrize(
    ("before", "after", "ends"),
    [
        ((), BY_TIER, True),
        ((), ("PreemptType=partition_prio", "PreemptMode=GANG,REQUEUE"), True),
        ((), ("PreemptType=preempt/partition_prio", "PreemptMode=SUSPEND,GANG"), False),
        ((), ("PreemptType=preempt/partition_prio",), False),
        (("PreemptType=preempt/partition_prio", "PreemptMode=SUSPEND,GANG"), BY_TIER, True),
        (BY_TIER, BY_TIER, False),
        (BY_TIER, ("PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE"), False),
    ],
)
def test_a_partition_of_a_higher_tier(before: tuple[str, ...], after: tuple[str, ...], ends: bool) -> None:
    old, new = defined(*before), defined(*after)
    assert bool(lost(RUNS, old, new, WAITS)) == preempts_more(old, new) == can_cost(old, new) == ends
    assert not lost(RUNS, old, new, replace(WAITS, partitions=("far",))), "it has none of its nodes"
    assert not lost(RUNS, old, new, replace(WAITS, partitions=("low",))), "it is not above it"
    assert not lost(RUNS, old, new, replace(WAITS, depends="afterok:1")), "it may wait for that"
    assert not lost(RUNS, old, new, replace(WAITS, priority=0)), "it is held"
    elsewhere = replace(WAITS, required=frozenset({"n4"}), most_nodes=1)
    assert not lost(RUNS, old, new, elsewhere), "it requires another one"
    for other in (replace(elsewhere, most_nodes=2), replace(WAITS, id="5", priority=0), replace(WAITS, id="5")):
        takes = other.most_nodes == 2 or other.priority
        assert bool(lost(RUNS, old, new, elsewhere, other)) == (ends and bool(takes)), "another one may"
    assert not lost(RUNS, old, new)
    assert not lost(replace(RUNS, state="SUSPENDED"), old, new, WAITS), "it has no processors to give"
    inside = replace(RUNS, reservation="maint")
    assert not lost(inside, old, new, WAITS), "nodes of a reservation are for its jobs"
    assert bool(lost(inside, old, new, replace(WAITS, reservation="maint"))) == ends
    assert bool(lost(replace(RUNS, reservation="flex"), old, new, WAITS)) == ends


def test_a_partition_that_rises_above_others() -> None:
    flat = CONF.replace("PriorityTier=10", "PriorityTier=1")
    assert lost(RUNS, defined(*BY_TIER, conf=flat), defined(*BY_TIER), WAITS)
    exempt = CONF.replace("PriorityTier=1\n", "PriorityTier=1 PreemptMode=OFF\n")
    assert not lost(RUNS, defined(*BY_TIER, conf=flat), defined(*BY_TIER, conf=exempt), WAITS)


@pytest.mark.parametrize(
    ("old", "new", "more"),
    [
        (CONF, CONF + "PartitionName=extra Nodes=n1\n", False),
        (CONF + "PartitionName=extra Nodes=n1\n", CONF, False),
        (CONF, CONF.replace("PriorityTier=20", "PriorityTier=30"), False),  # it came first before
        (CONF, CONF.replace("PriorityTier=20", "PriorityTier=5"), True),  # that of 10 comes before it now
        (CONF, CONF.replace("PriorityTier=20", "PriorityTier=20 PreemptMode=OFF"), False),
        (CONF.replace("PriorityTier=1\n", "PriorityTier=1 PreemptMode=OFF\n"), CONF, True),
    ],
)
def test_what_preempts_more_where_some_are_preempted_already(old: str, new: str, more: bool) -> None:
    assert preempts_more(defined(*BY_TIER, conf=old), defined(*BY_TIER, conf=new)) == more


def test_what_the_database_prints() -> None:
    found = read_qos(SHOWN)
    assert found["high"] == Qos(frozenset({"low", "mild", "hard", "long"}))
    assert found["mild"] == Qos(modes=frozenset({"GANG", "SUSPEND"}))
    assert (found["long"].exempt_s, found["low"].exempt_s, found["high"].exempt_s) == (3600, 0, None)
    assert found["inner"].modes == {"WITHIN", "REQUEUE"}


@pytest.mark.parametrize(
    ("runs", "waits", "ends"),
    [
        ("low", "high", True),
        ("high", "low", False),
        ("normal", "high", False),  # not in its list
        ("low", "low", False),
        ("mild", "high", False),  # it is only suspended
        ("hard", "high", True),
        ("long", "high", True),  # in 50 minutes, and it has no time limit
        ("", "high", False),
        ("low", "", False),
        ("gone", "high", False),
        ("low", "normal,high", True),  # it waits with several
        ("inner", "inner", True),  # of a higher priority
        ("low", "picky", True),
    ],
)
def test_a_qos_that_preempts_another_one(runs: str, waits: str, ends: bool) -> None:
    old, new, qos = defined(), defined(*BY_QOS), read_qos(SHOWN)
    job, other = replace(RUNS, qos=runs, ends=0, priority=10), replace(WAITS, qos=waits, priority=20)
    assert bool(lost(job, old, new, other, qos=qos)) == ends
    lower = replace(other, priority=10)
    assert bool(lost(job, old, new, lower, qos=qos)) == (ends and waits not in ("inner", "picky"))
    assert not lost(job, old, new, replace(other, partitions=("far",)), qos=qos)
    assert not lost(job, new, new, other, qos=qos)
    assert can_cost(old, new)


@pytest.mark.parametrize(
    ("before", "after", "ends"),
    [
        ("SUSPEND,GANG", "CANCEL", {"low", "long"}),  # the other one has a mode of its own
        ("CANCEL", "REQUEUE", set()),
        ("CANCEL", "SUSPEND,GANG", set()),
        ("CANCEL", "WITHIN,CANCEL", {"high"}),
        ("PRIORITY,CANCEL", "CANCEL", {"hard", "low", "long"}),
        ("CANCEL", "PRIORITY,CANCEL", set()),
    ],
)
def test_another_mode_where_a_qos_preempts(before: str, after: str, ends: set[str]) -> None:
    old, new = (defined("PreemptType=preempt/qos", f"PreemptMode={mode}") for mode in (before, after))
    priorities = {"high": 10}
    jobs = [
        replace(RUNS, qos=name, ends=0, priority=priorities.get(name, 30)) for name in ("low", "hard", "long", "high")
    ]
    waits = replace(WAITS, priority=20)
    assert {job.qos for job in jobs if lost(job, old, new, waits, qos=read_qos(SHOWN))} == ends
    assert preempts_more(old, new) == can_cost(old, new) == bool(ends)


def test_qos_that_are_not_known() -> None:
    """As at a start, and where slurmdbd does not answer: each other QOS may preempt."""
    old, new = defined(), defined(*BY_QOS)
    assert "may take its place by QOS high, as the QOS are not known" in lost(RUNS, old, new, WAITS)
    assert not lost(replace(RUNS, qos="high"), old, new, WAITS), "the same one"
    assert not lost(replace(RUNS, qos=""), old, new, WAITS), "without a QOS nobody is preempted"
    within = defined("PreemptType=preempt/qos", "PreemptMode=REQUEUE,WITHIN")
    assert lost(replace(RUNS, qos="high"), old, within, replace(WAITS, priority=2))
    assert not lost(RUNS, new, new, WAITS)


@pytest.mark.parametrize(
    ("before", "after", "age_s", "ends"),
    [
        ("1:00:00", "5:00", 600, True),
        ("1:00:00", "", 600, True),
        ("1:00:00", "15:00", 600, True),  # in five minutes, while its time limit passes in ten
        ("1:00:00", "30:00", 600, False),  # its time limit is before that
        ("5:00", "1:00", 600, False),  # it could be before
        ("5:00", "1:00:00", 600, False),
        ("-1", "0", 600, False),  # both are none
    ],
)
@pytest.mark.parametrize("more", [BY_TIER, BY_QOS])
def test_a_time_in_which_no_job_is_preempted(
    before: str, after: str, age_s: int, ends: bool, more: tuple[str, ...]
) -> None:
    old, new = (defined(*more, f"PreemptExemptTime={text}" if text else "") for text in (before, after))
    qos = read_qos(SHOWN.replace("low||cluster|00:00:00", "low||cluster|"))
    job = replace(RUNS, began=NOW - age_s)
    assert bool(lost(job, old, new, WAITS, qos=qos)) == ends
    assert not lost(job, old, new, WAITS, qos=read_qos(SHOWN)), "its QOS has a time of its own"
    late = replace(job, ends=NOW - 60)  # OverTimeLimit keeps it
    assert bool(lost(late, old, new, WAITS, qos=qos)) == (ends and after != "15:00")
    assert not ends or can_cost(old, new)


def test_the_qos_of_a_partition_decides_first() -> None:
    part = CONF.replace("PriorityTier=1\n", "PriorityTier=1 QoS=long\n")
    job, qos = replace(RUNS, ends=NOW + 600), read_qos(SHOWN)
    assert lost(job, defined(), defined(*BY_QOS), WAITS, qos=qos)
    assert not lost(job, defined(conf=part), defined(*BY_QOS, conf=part), WAITS, qos=qos), "its hour outlasts the job"


def test_they_are_among_the_losses() -> None:
    present = Present((RUNS, WAITS), now=NOW, qos=read_qos(SHOWN))
    assert [one.name for one in find_losses(present, defined(), defined(*BY_QOS))] == ["1"]
    inside = replace(RUNS, reservation="maint")
    kept = replace(present, jobs=(inside, WAITS), reservations=(Reservation("maint", ends=NOW + 60),))
    assert not find_losses(kept, defined(), defined(*BY_QOS))
    assert find_losses(replace(kept, now=NOW + 120), defined(), defined(*BY_QOS)), "it has ended, and frees its nodes"


@pytest.mark.parametrize("more", [BY_TIER, BY_QOS])
def test_many_jobs_are_judged_quickly(more: tuple[str, ...]) -> None:
    """A hostile list has as many as fit: each pair of a running and a waiting one would take hours."""
    jobs = [replace(RUNS, id=str(number), nodes=frozenset({f"n{number % 4 + 1}"})) for number in range(20000)]
    jobs += [replace(WAITS, id=str(number), partitions=("low",), qos="normal") for number in range(20000, 40000)]
    assert not [*find_preempted(jobs, set(), read_qos(SHOWN), NOW, defined(), defined(*more))]
