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
from appliance.plan.services.associations import list_argv
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
    ("fields", "users", "group", "lost"),
    [
        ("Users=ann", "eve", "", True),
        ("Users=-ann", "eve", "", True),
        ("Users=ann,eve", "eve", "", False),
        ("Users=ann", "ann,eve", "", False),
        ("Users=root", "eve", "", False),  # of the container's image
        ("Users=(null) Accounts=physics", "eve", "", False),
        ("Users=(null) Groups=physics", "ann,eve", "physics:x:5000:ann\n", False),
        ("Users=(null) Groups=physics", "ann,eve", "physics:x:5000:\n", True),
        ("Users=(null) Groups=physics", "ann,eve", "other:x:5001:ann\n", True),
        ("Users=(null) Groups=physics,other", "ann,eve", "other:x:5001:ann\n", False),
        ("Users=(null) Groups=wheel", "ann,eve", "other:x:5001:ann\n", False),
    ],
)
def test_reservations_without_users(cluster: Cluster, fields: str, users: str, group: str, lost: bool) -> None:
    """slurmctld deletes one of which no user is known any more, and holds its jobs."""
    others = "".join(f"g{number}:x:{6000 + number}:\n" for number in range(20))
    physics = "physics:x:5000:ann\n"
    new = MANY + "".join(user(name, {"ann": 1003, "eve": 1004}[name]) for name in users.split(","))
    old = "root:x:0:0::/root:/bin/sh\n" + MANY + user("ann", 1003) + user("eve", 1004)
    before = {PASSWD: old, GROUP: others + physics}
    after = {PASSWD: new.encode(), GROUP: (others + (group or physics)).encode()}
    present = read_present(f"reservation ReservationName=r Nodes=n1 {fields}", "slurm")
    found = [one.why for one in find_faults_for_users(cluster, Fake({}), present, before, after)]
    assert ["reservations lose" in one for one in found] == [True] * lost


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
    ("old", "new", "status", "shown", "words"),
    [
        ("", "limits", 0, "bob|physics|normal\n", []),
        ("", "limits", 0, "|physics|normal\nbob|art|normal\n", ["bob (physics)"]),
        ("", "limits", 0, "Bob|Physics|normal\n", []),
        ("", "associations,limits", 0, "eve|physics|normal\n", ["bob (physics)"]),
        ("none", "safe", 1, "", ["may have"]),
        ("", "nosteps", 0, "", []),
        ("associations", "associations,limits", 0, "", []),
        ("associations", "associations,qos", 0, "bob|physics|normal,long\n", []),
        ("associations", "associations,qos", 0, "bob|physics|normal\n", ["with their QOS in cluster sample (1): 9"]),
        ("", "qos", 0, "eve|physics|long\n", ["bob (physics)"]),
    ],
)
def test_jobs_without_an_association(
    cluster: Cluster, old: str, new: str, status: int, shown: str, words: list[str]
) -> None:
    """Of this cluster, by user and account. Job 9 waits, with QOS long; what runs has its QOS already."""
    lines = (
        "job 8|RUNNING|bob|normal|n1||||||||||physics|big|||||",
        "job 9|PENDING|bob|normal|||||||||||physics|long|||||",
    )
    sacctmgr = inside_argv(cluster.site, cluster.services, "sacctmgr")
    host = Fake({sacctmgr: (status, shown), inside_argv(cluster.site, cluster.services, "scontrol"): (0, "")})
    now = read_present("\n".join(line.replace("|", "\t") for line in lines), "slurm")
    both = [read_defined({"/etc/slurm/slurm.conf": f"{ENFORCE}{one}\n".encode() * bool(one)}) for one in (old, new)]
    found = [one.why for one in find_faults_of_present(cluster, host, now, (both[0], both[1]))]
    assert [word in one for word, one in zip(words, found, strict=True)] == [True] * len(words), found
    asked = [argv for argv in host.asked if "sacctmgr" in argv]
    assert all("cluster=sample" in argv for argv in asked) and bool(asked) == (bool(words) or bool(shown))


@pytest.mark.parametrize(
    ("old", "new", "status", "shown", "why"),
    [
        ("", "qos\nPartitionName=a QOS=Big", 0, "normal\nbig\n", ""),
        ("", "qos\nPartitionName=a QOS=big", 0, "normal\n", "a (big)"),
        ("", "qos\nPartitionName=a QOS=big", 1, "", "may have"),
        ("", "limits\nPartitionName=a QOS=big", 0, "normal\n", ""),  # Slurm goes on without it
        ("qos", "qos\nPartitionName=a QOS=big", 0, "normal\n", "a (big)"),
        ("qos\nPartitionName=a QOS=big", "qos\nPartitionName=a QOS=big\nPartitionName=b", 0, "", ""),
    ],
)
def test_a_qos_that_the_database_lacks(cluster: Cluster, old: str, new: str, status: int, shown: str, why: str) -> None:
    """slurmctld is not there any more after its next start."""
    sacctmgr = inside_argv(cluster.site, cluster.services, "sacctmgr")
    host = Fake({sacctmgr: (0, ""), (*sacctmgr, *list_argv("qos", "name")[1:]): (status, shown)})
    both = [read_defined({"/etc/slurm/slurm.conf": f"{ENFORCE}{one}\n".encode() * bool(one)}) for one in (old, new)]
    found = [one.why for one in find_faults_of_present(cluster, host, read_present("", "slurm"), (both[0], both[1]))]
    assert [why in one for one in found] == [True] * bool(why), found


def test_users_without_a_wckey(cluster: Cluster) -> None:
    sacctmgr = inside_argv(cluster.site, cluster.services, "sacctmgr")
    both = [
        read_defined({"/etc/slurm/slurm.conf": f"{ENFORCE}associations{more}\n".encode()}) for more in ("", ",wckeys")
    ]
    for shown, lacks in (("bob\n", False), ("eve\n", True)):
        found = [
            one.why
            for one in find_faults_of_present(cluster, Fake({sacctmgr: (0, shown)}), PRESENT, (both[0], both[1]))
        ]
        assert ["wckey" in one and "bob" in one for one in found] == [True] * lacks


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
        ("AccountingStorageType=accounting_storage/slurmdbd\n", "AccountingStorageType=accounting_storage/none\n", 1),
        ("AccountingStorageType=accounting_storage/slurmdbd\n", "", 1),
        ("AccountingStorageType=accounting_storage/none\n", "AccountingStorageType=accounting_storage/slurmdbd\n", 0),
    ],
)
def test_daemons_that_slurmctld_would_not_find(old: str, new: str, faults: int) -> None:
    """By what slurmd reads only when it starts; also a setting that one of both does not have. Or without slurmdbd."""
    both = (read_defined({"/etc/slurm/slurm.conf": (NODES + text).encode()}) for text in (old, new))
    assert len(list(find_unreached(*both))) == faults
