"""Limits of accounts and QOS that are used up, as slurmctld 22.05 prints them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.plan.services.defined import read_defined
from appliance.plan.services.jobs import Job
from appliance.plan.services.used_up import begins_to_end, read_usage

MORE = "Priority=0 ID=7 SharesRaw/Norm/Level/Factor=1/0.50/2/0.00 UsageRaw/Norm/Efctv=0.00/0.00/0.00"


def account(
    name: str, parent: str, *, user: str = "", of: str = "", minutes: str = "cpu=N(5)", wall: str = "N(0.00)"
) -> str:
    words = f"ClusterName=lab Account={name} UserName={user} Partition={of} {MORE} ParentAccount={parent} DefAssoc=No"
    return f"{words} GrpJobs=N(1) GrpWall={wall} GrpTRES=cpu=4(4) GrpTRESMins={minutes} MaxTRESMinsPJ= MaxJobs="


OUTPUT = f"""\
Current Association Manager state
Association Records
{account("root", "", minutes="cpu=1(9)")}
{account("physics", "root(1)", minutes="cpu=100(57),mem=N(3),node=10(10)")}
{account("lasers", "physics(2)")}
{account("bio", "root(1)", wall="60(59.90)")}
{account("bio", "", user="eve(1003)", wall="60(60.25)")}
{account("loop", "loop(9)")}
{account("gpus", "root(1)", minutes="cpu=N(5),energy=0(0),gres/gpu=100(100),license/matlab=1(1)")}
{account("parts", "root(1)", user="alice(1001)", of="long", minutes="cpu=1(1)")}
{account("parts", "root(1)", user="alice(1001)")}
{account("parts", "root(1)")}
{account("root", "", user="root(0)", minutes="cpu=1(1)")}
QOS Records
QOS=normal(1) GrpWall=N(3.00) GrpTRESMins=cpu=N(1),gres/gpu=N(1) MaxWallPJ=
QOS=short(2) GrpWall=N(3.00) GrpTRESMins=cpu=N(1),gres/gpu:a100=30(31) MaxWallPJ=
QOS=wide(3) GrpWall=1000(61.00) GrpTRESMins=cpu=N(1),node=1000(10) MaxWallPJ=
QOS=full(4) GrpWall=N(3.00) GrpTRESMins=cpu=10(50) MaxWallPJ=
"""


@pytest.mark.parametrize(
    ("user", "of", "qos", "why"),
    [
        ("alice", "physics", "normal", "account physics: GrpTRESMins=node=10"),
        ("alice", "lasers", "normal", "account physics: GrpTRESMins=node=10"),
        ("alice", "lasers", "wide", ""),  # the QOS has a limit of its own for nodes
        ("alice", "bio", "normal", ""),
        ("eve", "bio", "normal", "account bio: GrpWall=60"),
        ("eve", "bio", "wide", ""),
        ("alice", "bio", "full", "QOS full: GrpTRESMins=cpu=10"),
        ("alice", "bio", "short", ""),  # it has no gpu
        ("alice", "gpus", "normal", ""),
        ("alice", "parts", "normal", ""),
        ("root", "root", "", "account root: GrpTRESMins=cpu=1"),
        ("alice", "root", "", ""),
        ("alice", "other", "", ""),
        ("alice", "loop", "", ""),
    ],
)
def test_a_limit_of_a_job(user: str, of: str, qos: str, why: str) -> None:
    assert read_usage(OUTPUT).why(Job("1", "RUNNING", user, ("normal",), account=of, qos=qos)) == why


def test_only_what_a_job_has_counts() -> None:
    job = Job("1", "RUNNING", "alice", ("long",), account="gpus", qos="normal")
    usage = read_usage(OUTPUT)
    assert usage.why(replace(job, gres=frozenset({"gpu"}))) == "account gpus: GrpTRESMins=gres/gpu=100"
    assert usage.why(replace(job, licenses=frozenset({"matlab"}))) == "account gpus: GrpTRESMins=license/matlab=1"
    assert usage.why(replace(job, account="bio", qos="short", gres=frozenset({"gpu", "gpu:a100"})))
    assert usage.why(replace(job, account="parts")) == "account parts: GrpTRESMins=cpu=1", "of this partition"
    assert usage.why(replace(job, account="bio"), "full") == "QOS full: GrpTRESMins=cpu=10", "that of the partition"
    assert not usage.why(replace(job, account="lasers"), "wide"), "it hides what it sets"


@pytest.mark.parametrize(
    ("before", "after", "ends"),
    [
        ("", "limits", True),
        ("associations", "associations,limits", True),
        ("limits,safe", "limits", True),
        ("limits", "limits,qos", False),
        ("", "safe", False),
        ("", "all", False),
        ("", "associations,qos", False),
        ("limits", "", False),
        ("1", "2", True),
        ("limits", "2", False),
    ],
)
def test_what_begins_to_end_jobs(before: str, after: str, ends: bool) -> None:
    both = (
        read_defined({"/etc/slurm/slurm.conf": f"AccountingStorageEnforce={one}\n".encode()}) for one in (before, after)
    )
    assert begins_to_end(*both) == ends
