"""What a change breaks besides jobs: accounts, partitions, associations, addresses, the munge key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import IO, Any

import pytest

from appliance.errors import Refused
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.nodes.files import hold_key
from appliance.operations.services.faults import (
    find_faults,
    find_faults_for_users,
    find_faults_of_present,
    find_unreached,
)
from appliance.operations.services.munge_key import NEXT, KeySwap, find_key_faults, judge_key
from appliance.plan.machine import inside_argv
from appliance.plan.nodes.files import MUNGE_KEY, Difference, Master
from appliance.plan.services.defined import read_defined
from appliance.plan.services.effect import PRESENT as COMMAND
from appliance.plan.services.effect import read_present
from appliance.progress import Silent
from appliance.tools.provision import VmUnreachable
from appliance.tools.scripts import python_argv
from tests.places import DEBIAN_SITE
from tests.support.env import fake_env
from tests.support.fake import Fake
from tests.unit.services.test_effect import node

JOB = "job 8|RUNNING|bob|normal|n1|||||||".replace("|", "\t")
PRESENT = read_present("\n".join([JOB, node("n1", "mixed"), node("n2", "idle"), node("n3", "down")]), "slurm")
NODES = "NodeName=n[1-3] NodeAddr=10.0.0.[1-3]\n"
PASSWD, GROUP = "/etc/passwd", "/etc/group"


@pytest.fixture
def cluster() -> Cluster:
    return replace(open_cluster(DEBIAN_SITE, None, Silent()), env=fake_env())


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
        (MANY + user("eve", 1002), "1 users with jobs are removed, or get another id: bob"),
        (MANY + user("bob", 1009) + user("eve", 1002), "1 users with jobs are removed, or get another id: bob"),
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
    host = Fake({inside_argv(cluster.site, cluster.services, "sacctmgr"): (0, shown)})
    found = texts(cluster, host, f"{NODES}{ENFORCE}{old}\n" if old else NODES, f"{NODES}{ENFORCE}{new}\n")
    assert ["bob" in one for one in found] == [True] * refused


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
    ],
)
def test_nodes_that_do_not_answer_where_they_are_looked_for(
    cluster: Cluster, new: str, asked: tuple[str, ...], answer: str, silent: str
) -> None:
    """Only those in use are tried: n3 is down."""
    argv = inside_argv(cluster.site, cluster.services, *python_argv("connect-each", *asked))
    found = texts(cluster, Fake({argv: (0, answer)}), NODES, new)
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


@pytest.mark.parametrize(("old", "new", "faults"), [(b"a", b"b", 1), (b"a", b"a", 0), (b"", b"b", 0)])
def test_a_start_with_another_key(old: bytes, new: bytes, faults: int) -> None:
    assert len(list(judge_key(lambda _: old, new))) == faults


@dataclass
class Vm:
    """The VM's files and clients. ``lacking``: clients that take no file; ``silent``: that it has never heard of."""

    files: dict[str, str] = field(default_factory=dict)
    lacking: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    away: bool = False
    secrets: list[bytes] = field(default_factory=list)

    def request(self, method: str, path: str, body: Any = None, **_: Any) -> Any:
        if self.away:
            raise VmUnreachable("it does not answer")
        if path.endswith("/reports"):
            names = ("services", "n1", "n2", "n3")
            clients = [self.client(name) for name in names]
            return {"push": 1, "began": 0.0, "now": 9e9, "clients": clients, "unknown": []}
        if path.endswith("/push"):
            return {"push": 1}
        name = path.removeprefix("/sms/v1/files")
        if method == "DELETE":
            return self.files.pop(name, None)
        self.files[name] = body["sha256"]
        return {"path": name, "version": 1, "size": 4, "made": 1.0, **body}

    def send(self, path: str, stream: IO[bytes], size: int, **_: Any) -> None:
        assert len(stream.read()) == size

    def client(self, name: str) -> dict[str, Any]:
        taken = {} if name in self.lacking else self.files
        at = None if name in self.silent else 9e9 - 1
        has = {path: {"sha256": digest, "since": 1.0} for path, digest in taken.items()}
        lists: dict[str, list[str]] = {"missing": [], "left": [], "held": []}
        return {"client": name, "kind": "node", "at": at, "seen": at, "push": 1, "has": has, "failed": {}, **lists}


def key_host(cluster: Cluster) -> Fake:
    """A host whose container has the old key; n3 is down."""
    inside = inside_argv(cluster.site, cluster.services)
    shown = "\n".join([JOB, node("n1", "mixed"), node("n2", "idle"), node("n3", "down")])
    update = (*inside, "scontrol", "update")
    return Fake({(*inside, *COMMAND): (0, shown), (*inside, "cat", "--", MUNGE_KEY): (0, "old"), update: (0, "")})


@pytest.mark.parametrize(
    ("vm", "switch", "why"),
    [
        (Vm(), False, ""),
        (Vm(silent=frozenset({"n3"})), False, ""),
        (Vm(silent=frozenset({"n2"})), False, "the VM does not reach 1 nodes: n2"),
        (Vm(away=True), False, "is not known"),
        (None, False, "there is no provisioning VM"),
        (Vm(), True, "a second instance cannot swap it"),
    ],
)
def test_whom_a_new_key_would_not_reach(cluster: Cluster, vm: Any, switch: bool, why: str) -> None:
    """A node that takes no job now gets it when it boots."""
    found = list(find_key_faults(cluster, key_host(cluster), {"n1", "n2", "n3"}, vm, switch=switch))
    assert [why in one.why for one in found] == ([True] if why else [])


def swap(cluster: Cluster, vm: Any) -> KeySwap:
    return KeySwap(cluster, key_host(cluster), b"new", {"n1", "n2", "n3"}, vm)


def digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def test_a_key_is_laid_beside_the_old_one_and_then_swapped(cluster: Cluster) -> None:
    vm = Vm({MUNGE_KEY: digest(b"old")}, lacking=frozenset({"n3"}))
    work = swap(cluster, vm)
    work.stage(frozenset())
    assert vm.files == {MUNGE_KEY: digest(b"old"), NEXT: digest(b"new")}
    work.begin()
    assert work.finish() == () and vm.files == {MUNGE_KEY: digest(b"new")}


def test_a_node_that_does_not_take_it(cluster: Cluster) -> None:
    """Refused, and nothing is left; with --force, or as a person has seen it, it is drained afterwards."""
    vm = Vm({MUNGE_KEY: digest(b"old")}, lacking=frozenset({"n2"}))
    work = swap(cluster, vm)
    with pytest.raises(Refused) as refused:
        work.stage(frozenset())
    assert vm.files == {MUNGE_KEY: digest(b"old")}
    work.stage(frozenset({refused.value.message.partition("\n  ")[2]}))
    work.stage(None)
    work.begin()
    assert "n2" in work.finish()[0]
    assert "NodeName=n2" in work.host.asked[-1] and "State=DRAIN" in work.host.asked[-1]  # type: ignore[attr-defined]


def test_a_swap_that_is_taken_back(cluster: Cluster) -> None:
    """Nodes get the key that the container has again; a VM that is away is reported."""
    vm = Vm({MUNGE_KEY: digest(b"old")})
    work = swap(cluster, vm)
    work.stage(frozenset())
    work.begin()
    work.take_back()
    assert vm.files == {MUNGE_KEY: digest(b"old")}
    vm.away = True
    work.take_back()
    assert "not known" in work.finish()[0], "what the container has stays"


@pytest.mark.parametrize(("here", "held"), [("host-a", True), ("", False)])
def test_a_push_alone_does_not_change_the_key(here: str, held: bool) -> None:
    one = Difference("change", MUNGE_KEY, "content", Master(MUNGE_KEY, b"new", "0400"))
    assert (hold_key(one, lambda _: here).what == "held") is held
    other = replace(one, path="/etc/motd")
    assert hold_key(other, lambda _: here) == other
