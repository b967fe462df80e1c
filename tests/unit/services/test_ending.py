"""Settings that end running jobs although their partitions and nodes stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.plan.services.defined import Defined, read_defined
from appliance.plan.services.effect import Present, Reservation, can_cost, find_losses, find_lowered
from appliance.plan.services.ending import find_ended
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


def node(name: str, state: str) -> NodeState:
    return NodeState(name, name, 6818, state, "", silent="not_responding" in state, acknowledged=False)


def ended(job: Job, old: Defined, new: Defined, *nodes: NodeState, ends: int = 0) -> str:
    """Why the job is ended; empty if it is not. ``ends``: of reservation maint."""
    return dict(find_ended([job], nodes, {"maint": ends} if ends else {}, NOW, old, new)).get(job.id, "")


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
    old, new, silent = defined("SlurmdTimeout=3600"), defined("SlurmdTimeout=60"), node("n1", "mixed+not_responding")
    assert "lowered to 60 s" in ended(RUNS, old, new, silent)
    assert ended(RUNS, defined("SlurmdTimeout=0"), new, silent), "0 was for ever"
    assert ended(replace(RUNS, state="SUSPENDED"), old, new, silent), "that of a suspended job, too"
    assert not ended(RUNS, old, new, replace(silent, name="n2"))
    assert not ended(RUNS, new, old, silent)
    assert not ended(RUNS, defined(), defined("SlurmdTimeout=300"), silent), "300 is the default"
    assert ended(RUNS, defined("SlurmdTimeout=UNLIMITED"), old, silent)


@pytest.mark.parametrize(
    ("before", "after", "ends", "lost"),
    [
        ("ResvOverRun=10", "", NOW - 300, True),
        ("ResvOverRun=UNLIMITED", "ResvOverRun=4", NOW - 300, True),
        ("ResvOverRun=10", "ResvOverRun=6", NOW - 300, True),  # a minute is left of five
        ("ResvOverRun=4", "", NOW - 300, False),  # it is being ended already
        ("", "ResvOverRun=10", NOW - 300, False),
        ("ResvOverRun=10", "", NOW + 300, True),  # half of its time
        ("ResvOverRun=10", "", NOW + 600, False),  # its time limit ends it then
        ("ResvOverRun=10", "ResvOverRun=5", NOW + 300, False),
        ("ResvOverRun=10", "", 0, False),  # flag FLEX
    ],
)
def test_a_job_that_exceeds_its_reservation(before: str, after: str, ends: int, lost: bool) -> None:
    old, new = defined(before), defined(after)
    job = replace(RUNS, reservation="maint")
    assert bool(ended(job, old, new, ends=ends)) == lost
    assert bool(ended(replace(job, ends=0), old, new, ends=ends)) == (lost or ends >= NOW), "without a time limit"
    assert not ended(replace(job, state="SUSPENDED"), old, new, ends=ends)
    assert not ended(RUNS, old, new, ends=ends), "it runs in none"
    assert can_cost(old, new) or not lost


OWN = CONF.replace("PriorityTier=1\n", "PriorityTier=1 ResumeTimeout=900\n")


@pytest.mark.parametrize(
    ("old", "new", "state", "lost"),
    [
        (defined("ResumeTimeout=600"), defined(), "allocated#+cloud+not_responding+powering_up", True),
        (defined("ResumeTimeout=600"), defined(), "allocated", False),
        (defined("ResumeTimeout=600"), defined(), "idle+powered_down", False),
        (defined(), defined("ResumeTimeout=600"), "mixed+powering_up", False),
        (defined(), defined("ResumeTimeout=60"), "mixed+powering_up", False),  # that is the default
        (defined(conf=OWN), defined(), "mixed+powering_up", True),
        (defined("ResumeTimeout=600", conf=OWN), defined(conf=OWN), "mixed+powering_up", False),
        (defined("ResumeTimeout=600", conf=OWN), defined(conf=OWN), "idle+not_responding+reboot_issued", True),
        (defined("ResumeTimeout=UNLIMITED"), defined("ResumeTimeout=600"), "mixed+powering_up", True),
    ],
)
def test_a_node_that_boots(old: Defined, new: Defined, state: str, lost: bool) -> None:
    """Its job is lost with it, and the node stays DOWN, also without a job."""
    boots = node("n1", state)
    assert bool(ended(replace(RUNS, state="CONFIGURING"), old, new, boots)) == lost
    assert not ended(replace(RUNS, nodes=frozenset({"n2"})), old, new, boots)
    faults = [one.why for one in find_lowered(Present(nodes=(boots,)), old, new)]
    assert len(faults) == lost and all("n1" in why for why in faults)
    assert can_cost(old, new) or not lost


PROLOG = "Prolog=/etc/slurm/prolog"


@pytest.mark.parametrize(
    ("more", "age_s", "prolog", "lost"),
    [
        ([PROLOG, "PrologFlags=Contain"], 100, True, True),
        ([PROLOG, "PrologFlags=Contain"], 100, False, False),
        ([PROLOG, "PrologFlags=Contain"], 400, True, False),  # too long also before
        ([PROLOG, "PrologFlags=Contain"], 30, True, False),
        ([PROLOG, "PrologFlags=Alloc,NoHold"], 100, False, True),  # slurmctld does not know
        ([PROLOG], 100, False, True),
        ([PROLOG], 30, False, False),
        ([], 100, False, False),
    ],
)
def test_a_job_in_its_prolog(more: list[str], age_s: int, prolog: bool, lost: bool) -> None:
    """Nodes register when they have a new slurm.conf, and do not report jobs whose script has not begun."""
    old, new = defined("BatchStartTimeout=300", *more), defined("BatchStartTimeout=60", *more)
    job = replace(RUNS, began=NOW - age_s, prolog=prolog)
    assert bool(ended(job, old, new)) == lost
    assert not ended(job, new, old)
    for other in (replace(job, batch=False), replace(job, state="CONFIGURING"), replace(job, began=0)):
        assert not ended(other, old, new)
    assert can_cost(old, new)


@pytest.mark.parametrize(
    ("old", "new", "jobs", "full"),
    [
        ("", "", 20000, False),
        ("", "MaxJobCount=1000", 999, True),  # the next would be one too many
        ("", "MaxJobCount=1000", 998, False),
        ("", "MaxJobCount=20000", 30000, False),
        ("MaxJobCount=1000", "MaxJobCount=1000", 1000, False),
    ],
)
def test_more_jobs_than_slurm_may_have(old: str, new: str, jobs: int, full: bool) -> None:
    present = Present(tasks={"PENDING": jobs - 1, "COMPLETED": 1})
    assert ["nobody could submit" in one.why for one in find_lowered(present, defined(old), defined(new))] == [
        True
    ] * full
    assert can_cost(defined(old), defined(new)) or not full


def test_they_are_among_the_losses_with_what_depends_on_them() -> None:
    after = replace(WAITS, id="5", partitions=("low",), depends="afterok:2(unfulfilled)")
    maint = Reservation("maint", ends=NOW - 300)
    in_it = replace(RUNS, id="6", reservation="maint")
    present = Present((RUNS, LATE, after, in_it), (maint,), nodes=(node("n1", "mixed+not_responding"),), now=NOW)
    old, new = defined("OverTimeLimit=10"), defined()
    assert can_cost(old, new)
    assert [one.name for one in find_losses(present, old, new)] == ["2", "5"]
    assert not find_losses(replace(present, now=0), old, new), "not known is not judged"
    lowered = find_losses(present, defined("SlurmdTimeout=600"), defined("SlurmdTimeout=60"))
    assert {one.name for one in lowered} == {"1", "2", "5", "6"}
    assert [one.name for one in find_losses(present, defined("ResvOverRun=10"), defined())] == ["6"]
