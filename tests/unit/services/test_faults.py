"""What a change breaks besides jobs: accounts, partitions, associations, addresses."""

from __future__ import annotations

import pytest

from appliance.operations.context import Cluster
from appliance.operations.services.faults import (
    find_faults,
    find_faults_for_users,
    find_faults_of_present,
    find_unreached,
)
from appliance.plan.machine import inside_argv
from appliance.plan.services.defined import read_defined
from appliance.plan.services.effect import read_present
from appliance.tools.scripts import python_argv
from tests.support.fake import Fake
from tests.unit.services.test_effect import node

JOB = "job 8|RUNNING|bob|normal|n1||||||||||||||||".replace("|", "\t")
PRESENT = read_present("\n".join([JOB, node("n1", "mixed"), node("n2", "idle"), node("n3", "down")]), "slurm")
NODES = "NodeName=n[1-3] NodeAddr=10.0.0.[1-3]\n"
PASSWD, GROUP = "/etc/passwd", "/etc/group"


def user(name: str, number: int) -> str:
    return f"{name}:x:{number}:100::/home/{name}:/bin/bash\n"


def texts(cluster: Cluster, host: Fake, old: str, new: str, **files: tuple[str, str]) -> list[str]:
    """Why a change of slurm.conf, and of accounts, is refused."""
    both = (
        read_defined({"/etc/slurm/slurm.conf": old.encode()}),
        read_defined({"/etc/slurm/slurm.conf": new.encode()}),
    )
    before = {f"/etc/{name}": pair[0] for name, pair in files.items()}
    after = {f"/etc/{name}": pair[1].encode() for name, pair in files.items()}
    found = [
        *find_faults_for_users(cluster, host, PRESENT, before, after),
        *find_faults(cluster, host, both, before, after),
        *find_faults_of_present(cluster, host, PRESENT, both),
    ]
    return [one.why for one in found]


MANY = "".join(user(f"u{number}", 2000 + number) for number in range(30))


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (MANY + user("bob", 1001) + user("eve", 1003), ""),
        (MANY + user("bob", 1001), ""),
        (MANY + user("eve", 1002), "users with jobs are removed, or get another id (1): bob"),
        (MANY + user("bob", 1009) + user("eve", 1002), "users with jobs are removed, or get another id (1): bob"),
    ],
)
def test_users_with_jobs(cluster: Cluster, new: str, why: str) -> None:
    """One of many is under the limit that holds for all; its jobs are requeued for ever."""
    old = MANY + user("bob", 1001) + user("eve", 1002)
    found = texts(cluster, Fake({}), NODES, NODES, passwd=(old, new))
    assert [one[: len(why)] for one in found] == ([why] if why else [])


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("PartitionName=a Default=YES\n", "PartitionName=a\n", "no partition is the default one, as a was"),
        ("PartitionName=a Default=YES\n", "PartitionName=b Default=yes\n", ""),
        ("PartitionName=a\n", "PartitionName=b\n", ""),
        ("PartitionName=a\n", "PartitionName=a AllowGroups=users\n", ""),
        ("PartitionName=a\n", "PartitionName=a AllowGroups=site\n", ""),
        ("PartitionName=a\n", "PartitionName=a AllowGroups=ALL\n", ""),
        ("PartitionName=a\n", "PartitionName=a AllowGroups=usres\n", "partition a allows group usres"),
        ("PartitionName=a AllowGroups=usres\n", "PartitionName=a AllowGroups=usres MaxTime=9\n", ""),
    ],
)
def test_who_may_submit(cluster: Cluster, old: str, new: str, why: str) -> None:
    getent = inside_argv(cluster.site, cluster.services, "getent", "group")
    host = Fake({(*getent, "users"): (0, ""), getent: (2, "")})
    group = ("site:x:5000:\n", "site:x:5000:\n")
    found = texts(cluster, host, NODES + old, NODES + new, group=group)
    assert [one[: len(why)] for one in found] == ([why] if why else [])


ENFORCE = "AccountingStorageEnforce="


@pytest.mark.parametrize(
    ("old", "new", "shown", "refused"),
    [
        ("", "limits", "bob\n", False),
        ("", "associations,limits", "eve\n", True),
        ("none", "safe", "", True),
        ("", "nosteps", "", False),
        ("associations", "associations,limits,qos", "", False),
    ],
)
def test_users_without_an_association(cluster: Cluster, old: str, new: str, shown: str, refused: bool) -> None:
    answers = {"sacctmgr": (0, shown), "scontrol": (0, "")}
    host = Fake({inside_argv(cluster.site, cluster.services, name): one for name, one in answers.items()})
    found = texts(cluster, host, f"{NODES}{ENFORCE}{old}\n" if old else NODES, f"{NODES}{ENFORCE}{new}\n")
    assert ["bob" in one for one in found] == [True] * refused


@pytest.mark.parametrize(
    ("status", "limit", "why"),
    [(0, "cpu=9(9)", "8 (account physics: GrpTRESMins=cpu=9)"), (0, "cpu=9(8)", ""), (1, "", "is not known")],
)
def test_a_limit_that_is_used_up(cluster: Cluster, status: int, limit: str, why: str) -> None:
    job = "job 8|RUNNING|bob|normal|n1||||||||||physics||||||".replace("|", "\t")
    shown = f"Account=physics UserName= ParentAccount=root(1) GrpTRESMins={limit}"
    host = Fake({inside_argv(cluster.site, cluster.services, "scontrol"): (status, shown)})
    both = tuple(
        read_defined({"/etc/slurm/slurm.conf": f"{ENFORCE}associations{more}\n".encode()}) for more in ("", ",limits")
    )
    found = [one.why for one in find_faults_of_present(cluster, host, read_present(job, "slurm"), (both[0], both[1]))]
    assert len(found) == bool(why) and all(why in one for one in found)


@pytest.mark.parametrize(
    ("new", "asked", "answer", "silent"),
    [
        (NODES.replace("[1-3]\n", "[1,12,13]\n"), ("10.0.0.12", "6818"), "1 0 \n", ""),
        (NODES.replace("[1-3]\n", "[1,12,3]\n"), ("10.0.0.12", "6818"), "1 124 \n", "n2 (10.0.0.12:6818)"),
        (
            NODES.replace("[1-3]\n", "[1-3] Port=7000\n"),
            ("10.0.0.1", "7000", "10.0.0.2", "7000"),
            "1 0 \n2 1 x\n",
            "n2",
        ),
        (NODES, (), "", ""),
        (NODES.replace("10.0.0.[1-3]\n", "10.0.0.1,rack2,10.0.0.3\n"), ("10.0.0.2", "6818"), "1 0 \n", ""),
        (NODES.replace("10.0.0.[1-3]\n", "10.0.0.1,rack9,10.0.0.3\n"), ("rack9", "6818"), "1 1 x\n", "n2 (rack9:6818)"),
    ],
)
def test_nodes_that_do_not_answer_where_they_are_looked_for(
    cluster: Cluster, new: str, asked: tuple[str, ...], answer: str, silent: str
) -> None:
    """Only those in use are tried: n3 is down. Names are resolved by the host, as those in the container will be."""
    argv = inside_argv(cluster.site, cluster.services, *python_argv("connect-each", *asked))
    names = python_argv("resolve-names")
    found = texts(cluster, Fake({argv: (0, answer), names: (0, "rack2 10.0.0.2\n")}), NODES, new)
    assert [silent in one for one in found] == ([True] if silent else [])


@pytest.mark.parametrize(
    ("old", "new", "faults"),
    [
        ("", "SwitchType=switch/hpe_slingshot\n", 1),
        ("", "CredType=cred/munge\n", 0),
        ("", "SlurmdUser=slurmd\n", 1),
        ("ProctrackType=proctrack/linuxproc\n", "", 1),
    ],
)
def test_what_slurmd_reads_only_when_it_starts(old: str, new: str, faults: int) -> None:
    """Also a setting that one of both does not have: it has a default."""
    both = (read_defined({"/etc/slurm/slurm.conf": (NODES + text).encode()}) for text in (old, new))
    assert len(list(find_unreached(*both))) == faults
