"""Waiting jobs that no partition admits any more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from appliance.plan.services.admission import find_limits, read_groups
from appliance.plan.services.defined import Defined, read_defined
from appliance.plan.services.effect import Present, can_cost, find_losses
from appliance.plan.services.jobs import Job

PASSWD = "root:x:0:0:::\nalice:x:1001:100:::\nbob:x:1002:200:::\ncarol:x:1003:100:::\n"
GROUP = "users:x:100:\nbio:x:200:\nchem:x:300:alice,\n"
BOB = Job(
    *("1", "PENDING", "bob", ("normal",)),
    account="Bio",
    qos="normal",
    minutes=600,
    least_nodes=2,
    most_nodes=4,
    memory_mb=4000,
    host="login1",
)


def defined(partition: str, *, more: str = "", group: str = GROUP) -> Defined:
    text = f"{more}\nNodeName=n[1-4] CPUs=8 RealMemory=8000\nPartitionName=normal Nodes=ALL {partition}\n"
    text += "PartitionName=other Nodes=ALL MaxTime=1\n"
    return replace(read_defined({"/etc/slurm/slurm.conf": text.encode()}), groups=read_groups(PASSWD, group))


def waiting(user: str, **asks: Any) -> Job:
    return Job("1", "PENDING", user, ("normal",), **asks)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("", "MaxTime=10:00:00", ""),
        ("", "MaxTime=9:59:00", "asks for more time than MaxTime (599 minutes)"),
        ("MaxTime=1:00", "MaxTime=60", ""),  # it was over the limit before, too
        ("MaxTime=1:00", "MaxTime=INFINITE", ""),
        ("MaxTime=10:00:00", "MaxTime=9:59:00", ""),  # squeue prints that of the partition where a job has none
        ("", "MaxNodes=3", "asks for more nodes than MaxNodes (3)"),
        ("", "MaxNodes=4", ""),
        ("", "MinNodes=3", "asks for fewer nodes than MinNodes (3)"),
        ("", "MaxMemPerNode=3999", "asks for more memory than MaxMemPerNode (3999 MB)"),
        ("", "MaxMemPerNode=0", ""),
        ("", "AllowAccounts=bio,chem", ""),
        ("", "AllowAccounts=chem", "has account bio"),
        ("", "AllowAccounts=ALL", ""),
        ("", "DenyAccounts=bio", "has account bio"),
        ("", "AllowAccounts=bio DenyAccounts=bio", ""),
        ("", "AllowQos=high", "has QOS normal"),
        ("", "DenyQos=normal", "has QOS normal"),
        ("", "AllowGroups=bio", ""),
        ("", "AllowGroups=users,chem", "has a user in none of AllowGroups"),
        ("", "AllowGroups=unknown", ""),  # of a directory
        ("AllowGroups=chem", "AllowGroups=chem,users", ""),
        ("", "AllocNodes=login[1-2]", ""),
        ("", "AllocNodes=login2", "was submitted on login1"),
        ("", "RootOnly=YES", "is not of root, as RootOnly demands"),
        ("", "DisableRootJobs=YES", ""),
        ("", "ReqResv=YES", "has no reservation, which ReqResv demands"),
    ],
)
def test_partitions_that_admit_a_job_no_more(old: str, new: str, why: str) -> None:
    """Rules of _part_access_check and part_policy_valid_acct of slurmctld; each was a change without a word."""
    before, after = defined(old), defined(new)
    losses = find_losses(Present((BOB,)), before, after)
    assert [one.why for one in losses] == ([f"it {why} of partition normal: it would never start"] if why else [])
    assert can_cost(before, after) or not why
    assert not find_losses(Present((replace(BOB, state="RUNNING"),)), before, after), "what runs goes on"
    assert not can_cost(after, after)


@pytest.mark.parametrize(
    ("job", "new", "barred"),
    [
        (waiting("root", minutes=5), "AllowGroups=bio", False),
        (waiting("root", minutes=5), "DisableRootJobs=YES", True),
        (waiting("root", minutes=5), "RootOnly=YES", False),
        (waiting("eve"), "AllowAccounts=bio", True),  # without accounting nobody has an account
        (waiting("eve"), "DenyAccounts=bio AllowQos=high", False),
        (waiting("eve"), "MaxTime=1 MinNodes=3", False),  # it gets the partition's
        (waiting("eve", minutes=float("inf")), "MaxTime=100-0", True),
        (waiting("eve", reservation="maint"), "ReqResv=YES", False),
        (waiting("alice"), "AllowGroups=chem", False),
        (waiting("alice"), "AllowGroups=users", False),
        (waiting("carol"), "AllowGroups=chem", True),
    ],
)
def test_who_is_barred(job: Job, new: str, barred: bool) -> None:
    assert bool(find_limits(defined(new))["normal"].why_barred(job)) is barred


def test_a_limit_of_all_partitions() -> None:
    before, after = defined(""), defined("", more="MaxMemPerNode=3000")
    assert [one.name for one in find_losses(Present((BOB,)), before, after)] == ["1"]
    assert not find_losses(Present((BOB,)), before, defined("MaxMemPerNode=5000", more="MaxMemPerNode=3000"))


def test_a_job_of_two_partitions_needs_one() -> None:
    names = (("normal", "other"), ("other",), ("normal",))
    jobs = tuple(replace(BOB, id=f"{at}", partitions=each) for at, each in enumerate(names, 1))
    before, after = defined("", more=""), defined("MaxTime=60")
    assert [one.name for one in find_losses(Present(jobs), before, after)] == ["1", "3"]


def test_a_member_who_leaves_a_group() -> None:
    before, after = defined("AllowGroups=chem"), defined("AllowGroups=chem", group=GROUP.replace("alice,", ""))
    jobs = tuple(replace(waiting(name), id=f"{at}") for at, name in enumerate(("alice", "bob", "root")))
    assert [one.who for one in find_losses(Present(jobs), before, after)] == ["alice, PENDING"]
    assert can_cost(before, after) and not can_cost(after, before)


def test_fewer_nodes_than_a_job_asks_for() -> None:
    before, jobs = defined(""), (BOB, replace(BOB, id="2", least_nodes=3))
    after = defined("", more="")
    after = replace(after, partitions={**after.partitions, "normal": {"nodes": "n[1-2]"}})
    (lost,) = find_losses(Present(jobs), before, after)
    assert (lost.name, lost.why.partition(" of partition")[0]) == ("2", "it asks for 3 nodes, of 2 that are left")
