"""Limits of accounts and QOS that are used up, as slurmctld 22.05 prints them."""

from __future__ import annotations

import pytest

from appliance.plan.services.defined import read_defined
from appliance.plan.services.jobs import Job
from appliance.plan.services.used_up import begins_to_end, read_used_up

MORE = "Priority=0 ID=7 SharesRaw/Norm/Level/Factor=1/0.50/2/0.00 UsageRaw/Norm/Efctv=0.00/0.00/0.00"


def account(name: str, parent: str, *, user: str = "", minutes: str = "cpu=N(5)", wall: str = "N(0.00)") -> str:
    words = f"ClusterName=lab Account={name} UserName={user} Partition= {MORE} ParentAccount={parent} Lft=2 DefAssoc=No"
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
QOS Records
QOS=normal(1) GrpWall=N(3.00) GrpTRESMins=cpu=N(1),gres/gpu=N(1) MaxWallPJ=
QOS=short(2) GrpWall=N(3.00) GrpTRESMins=cpu=N(1),gres/gpu:a100=30(31) MaxWallPJ=
"""


@pytest.mark.parametrize(
    ("user", "of", "qos", "why"),
    [
        ("alice", "physics", "normal", "account physics: GrpTRESMins=node=10"),
        ("alice", "lasers", "normal", "account physics: GrpTRESMins=node=10"),
        ("alice", "bio", "normal", ""),
        ("eve", "bio", "normal", "account bio: GrpWall=60"),
        ("alice", "bio", "short", "QOS short: GrpTRESMins=gres/gpu:a100=30"),
        ("alice", "root", "", ""),
        ("alice", "other", "", ""),
        ("alice", "loop", "", ""),
    ],
)
def test_a_limit_of_a_job(user: str, of: str, qos: str, why: str) -> None:
    assert read_used_up(OUTPUT).why(Job("1", "RUNNING", user, ("normal",), account=of, qos=qos)) == why


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
    ],
)
def test_what_begins_to_end_jobs(before: str, after: str, ends: bool) -> None:
    both = (
        read_defined({"/etc/slurm/slurm.conf": f"AccountingStorageEnforce={one}\n".encode()}) for one in (before, after)
    )
    assert begins_to_end(*both) == ends
