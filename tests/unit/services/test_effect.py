"""What a change of the site costs: parsers of the controller's output, and what it would end."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from appliance.plan.nodes.accounts import compare_accounts, without_own
from appliance.plan.services.defined import Defined, count_cores, find_described, find_new, find_plugins, read_defined
from appliance.plan.services.effect import (
    PRESENT,
    Present,
    Reservation,
    can_cost,
    count_losses,
    find_failed,
    find_forgotten,
    find_losses,
    find_moved,
    find_unusable,
    read_present,
    shown_losses,
)
from appliance.plan.services.jobs import Job
from appliance.plan.services.nodes import ADDRESS, NAME, PORT, STATE, USER

CONF = b"""ClusterName=lab
Include nodes.conf
PartitionName=DEFAULT State=UP
PartitionName=normal Nodes=n[1-4] Default=YES
partitionname=long Nodes=ALL
"""
FILES = {
    "/etc/slurm/slurm.conf": CONF,
    "/etc/slurm/nodes.conf": b"NodeName=DEFAULT CPUs=2\nNodeName=n[1-3] RealMemory=100\nNodeName=n4 RealMemory=200\n",
}


def node(name: str, state: str, reason: str = "none", user: str = "Unknown") -> str:
    fields = ((name, NAME), ("10.0.0.1", ADDRESS), ("6818", PORT), (state, STATE), (user, USER))
    return "node " + "".join(text.ljust(width) for text, width in fields) + reason


def present(*lines: str) -> Present:
    """What is read of lines; those of jobs may end before the limits of partitions."""
    whole = (line + "\t" * 9 if line.startswith("job ") and line.count("\t") == 11 else line for line in lines)
    return read_present("\n".join(whole), "slurm")


def test_what_a_configuration_defines() -> None:
    found = read_defined(FILES)
    assert {*found.nodes} == {"n1", "n2", "n3", "n4"} and {*found.partitions} == {"normal", "long"}
    more = read_defined({**FILES, "/etc/slurm/nodes.conf": FILES["/etc/slurm/nodes.conf"].replace(b"100", b"999")})
    assert find_described(found, more) == {"n1", "n2", "n3"}
    assert find_described(found, read_defined({"/etc/slurm/slurm.conf": CONF})) == set(), "removed is not described"


def test_what_the_controller_has() -> None:
    found = present(
        "job 7\tRUNNING\talice\tlong\tn[1-2]\t\t(null)\t(null)\tN/A\t0\t1\t0",
        "job 8_[1-500%4]\tPENDING\tbob\tlong,normal\t\tn4\tmatlab:2,ansys\t[rack1*2&gpu]\tN/A\t1.5G\t4\t500M\t"
        "1:00:00\t2\tphysics\tnormal\tmaint\t1764500000\tafterok:7(unfulfilled)\t1764490000\t0",
        "job 9+1\tSUSPENDED\teve\tnormal\tn3\t\t(null)\t(null)\tN/A\t0\t1\t0",
        "job 10\tCOMPLETING\teve\tgone\tn9\t\t(null)\t(null)\tN/A\t0\t1\t0",
        "job 11\tCOMPLETED\teve\tgone\tn9\t\t(null)\t(null)\tN/A\t0\t1\t0",
        "job x\tRUNNING\teve\tgone\tn9\t\t(null)\t(null)\tN/A\t0\t1\t0",
        "job 12\tRUNNING\teve\tgone\tn9",
        "more 8_[1-500%4] 8 30:00 login1 1 gres/gpu:a100:2 N/A N/A N/A N/A JobHeldUser",
        "more 7 0 0:00 login1 0 N/A N/A N/A N/A N/A Prolog",
        "tasks 500 PENDING",
        "tasks 2 RUNNING",
        "now 1764500100",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
        "reservation ReservationName=maint StartTime=1764500000 EndTime=1764503600 Nodes=n[1-2] PartitionName=(null)",
        "reservation ReservationName=lic EndTime=1764503600 Nodes=(null) PartitionName=long Users=root Flags=FLEX",
        "reservation ReservationName=all Nodes=n[1-4] Flags=MAINT,SPEC_NODES,ALL_NODES Licenses=a:2",
        "described NodeName=n1 AvailableFeatures=ib,gpu Weight=1",
        node("n1", "idle"),
    )
    assert found.jobs == (
        Job(
            "7", "RUNNING", "alice", ("long",), frozenset({"n1", "n2"}), cpus=1, host="login1", batch=False, prolog=True
        ),
        Job(
            "8_[1-500%4]",
            "PENDING",
            "bob",
            ("long", "normal"),
            frozenset(),
            frozenset({"n4"}),
            frozenset({"matlab", "ansys"}),
            frozenset({"rack1", "gpu"}),
            frozenset({"gpu", "gpu:a100"}),
            license_counts=frozenset({("matlab", 2), ("ansys", 1)}),
            gres_counts=frozenset({("gpu", 1), ("gpu:a100", 1)}),
            gres_total=frozenset({("gpu", 2), ("gpu:a100", 2)}),
            memory_mb=1536,
            cpus=4,
            disk_mb=500,
            minutes=30,
            least_nodes=2,
            most_nodes=8,
            account="physics",
            qos="normal",
            reservation="maint",
            host="login1",
            depends="afterok:7(unfulfilled)",
            ends=1764500000,
            began=1764490000,
            priority=0,
        ),
        Job("9+1", "SUSPENDED", "eve", ("normal",), frozenset({"n3"}), cpus=1),
    )
    assert found.reservations == (
        Reservation("maint", frozenset({"n1", "n2"}), ends=1764503600),
        Reservation("lic", partition="long", users=frozenset({"root"})),
        Reservation("all", licenses="a:2"),
    )
    assert found.now == 1764500100 and found.tasks == {"PENDING": 500, "RUNNING": 2}
    assert found.described["n1"]["AvailableFeatures"] == "ib,gpu"
    assert found.usable == {"n1"}


@pytest.mark.parametrize("failing", ["", "squeue", "scontrol", "sinfo"])
def test_a_controller_that_does_not_answer_has_not_no_jobs(tmp_path: Path, failing: str) -> None:
    """The shell is a real one: a pipe would hide the failure."""
    prints = {
        "squeue": "job 7\tRUNNING\talice\tlong\tn1\t\t(null)\t(null)\tN/A\t0\t1\t0\t1:00\t1\t\t\t(null)\tN/A\t\t\t",
        "scontrol": "ReservationName=r Nodes=n1\nNodeName=n1 Arch=x AvailableFeatures=ib Gres=(null) Weight=2 Owner=N",
        "sinfo": node("n1", "idle")[5:],
    }
    for name, text in prints.items():
        status = int(name == failing)
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '%s\\n' '{text}'\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        PRESENT, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) is (not failing)
    if not failing:
        found = read_present(done.stdout, "slurm")
        assert (len(found.jobs), len(found.reservations), found.usable) == (1, 1, {"n1"})
        assert found.described == {"n1": {"NodeName": "n1", "AvailableFeatures": "ib", "Weight": "2"}}


def job(number: int = 1, state: str = "RUNNING", partitions: str = "normal", **sets: set[str] | int) -> Job:
    frozen: dict[str, Any] = {name: one if isinstance(one, int) else frozenset(one) for name, one in sets.items()}
    counts = frozenset((name, 1) for name in frozen.get("gres", ()))
    return Job(str(number), state, "alice", tuple(partitions.split(",")), **{"gres_counts": counts, **frozen})


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (job(nodes={"n1"}), ""),
        (job(state="PENDING"), ""),
        (job(partitions="gone"), "partition gone is removed"),
        (job(partitions="normal,gone", state="PENDING"), "partition gone is removed"),
        (job(nodes={"n1", "n9"}), "it runs on n9, which is removed"),
        (job(state="PENDING", required={"n8", "n9"}), "it requires n[8-9], which are removed"),
        (job(nodes={"d1"}), ""),
    ],
)
def test_jobs_that_are_lost(one: Job, why: str) -> None:
    """A node that registered itself is in no file, and stays."""
    now = Present((one,), (), present(node("d1", "IDLE+DYNAMIC_NORM")).nodes)
    losses = find_losses(now, Defined(), Defined({"n1": {}, "n2": {}}, {"normal": {}}))
    assert [loss.why for loss in losses] == ([why] if why else [])


@pytest.mark.parametrize(
    ("one", "lost"),
    [
        (Reservation("r", frozenset({"n1"})), False),
        (Reservation("r", frozenset({"n1", "n9"})), True),
        (Reservation("r", frozenset(), "normal"), False),
        (Reservation("r", frozenset(), "gone"), True),
        (Reservation("r", licenses="matlab:4"), True),
        (Reservation("r", licenses="matlab:3"), False),
        (Reservation("r", licenses="flex:9"), False),
    ],
)
def test_reservations_that_are_lost(one: Reservation, lost: bool) -> None:
    old, new = Defined(licenses={"matlab": 4}), Defined({"n1": {}}, {"normal": {}}, licenses={"matlab": 3})
    assert bool(find_losses(Present((), (one,)), old, new)) is lost and can_cost(old, new)


def test_the_first_ten_are_listed_running_ones_first() -> None:
    jobs = tuple(job(number, "PENDING" if number % 2 else "RUNNING", "gone") for number in range(24))
    losses = find_losses(Present(jobs, (Reservation("r", frozenset(), "gone"),)), Defined(), read_defined(FILES))
    lines = shown_losses(losses)
    assert len(lines) == 11 and lines[-1] == "and 15 more" and all("RUNNING" in line for line in lines[:10])
    assert count_losses(losses) == "24 jobs and 1 reservation"


@pytest.mark.parametrize(
    ("state", "lost"),
    [
        ("idle", False),
        ("mixed+completing", False),
        ("idle+drain", True),
        ("inval", True),
        ("idle+drain+invalid_reg", True),
        ("down+not_responding", False),
    ],
)
def test_nodes_that_take_no_job_since(state: str, lost: bool) -> None:
    """Those that a daemon has taken out. One that is switched off, or that a person drains meanwhile, is not."""
    defined = read_defined(FILES)
    before = present(node("n1", "idle"), node("n2", "idle+drain", "disk", "root"), node("n9", "idle"))
    after = present(node("n1", state, "Low RealMemory", "slurm"), node("n2", "down"), node("n9", "down"))
    assert [one.name for one in find_unusable(before, after, defined)] == (["n1"] if lost else [])
    by_hand = present(node("n1", state, "disk", "root"), node("n2", "idle"))
    assert find_unusable(before, by_hand, defined) == ()


BEFORE = b"""Licenses=matlab:4,ansys
PreemptMode=SUSPEND,GANG
GresTypes=gpu,shard,tmp
NodeName=DEFAULT Sockets=2 CoresPerSocket=4 ThreadsPerCore=2 Features=ib,rack1 RealMemory=8000 TmpDisk=9
NodeName=n1 Gres=gpu:a100:4,shard:8
NodeName=n3 Gres=gpu:a100:4,tmp:400 Features=big
NodeName=n2
NodeName=s1 RealMemory=100
NodeSet=big Feature=big
PartitionName=normal Nodes=n[1-2]
PartitionName=small Nodes=s1
PartitionName=set Nodes=big
"""


@pytest.mark.parametrize(
    ("one", "change", "why"),
    [
        (job(nodes={"n1"}), (b"CoresPerSocket=4", b"CoresPerSocket=8"), "the number of cores of n1"),
        (job(nodes={"n1"}, state="SUSPENDED"), (b"Sockets=2 ", b""), "the number of cores of n1"),
        (job(nodes={"n1"}), (b"ThreadsPerCore=2", b"ThreadsPerCore=1"), ""),
        (job(nodes={"n1"}), (b"CoresPerSocket=4", b"CoresPerSocket=8 RealMemory=9 Weight=2"), "the number of cores"),
        (job(nodes={"n1"}), (b"Sockets=2 CoresPerSocket=4 ", b"CPUs=16 "), ""),
        (job(state="PENDING"), (b"CoresPerSocket=4", b"CoresPerSocket=8"), ""),
        (job(nodes={"n1"}), (b"Licenses", b"SelectType=select/linear\nLicenses"), ""),
        (job(nodes={"n1"}, gres={"gpu"}), (b"a100:4,s", b"a100:2,s"), "the number of gpu of n1"),
        (job(nodes={"n1"}, gres={"gpu"}), (b"Gres=gpu:a100:4,shard:8", b""), "the number of gpu of n1"),
        (job(nodes={"n1"}, gres={"gpu"}), (b"shard:8", b"shard:16"), ""),
        (job(nodes={"n1"}, gres={"shard"}), (b"shard:8", b"shard:16"), ""),
        (job(nodes={"n1"}, gres={"shard"}), (b"a100:4", b"a100:2"), "the number of shard of n1"),
        (job(nodes={"n1"}, gres={"gpu"}), (b"gpu:a100:4", b"gpu:a100:2,gpu:v100:2"), ""),
        (job(nodes={"n1"}, gres={"gpu"}), (b"gpu:a100:4", b"gpu:4"), ""),
        (job(nodes={"n1"}), (b"a100:4", b"a100:2"), ""),
        (job(state="PENDING", gres={"shard"}), (b",shard:8", b""), "it waits for resource shard"),
        (
            job(state="PENDING", features={"rack1"}),
            (b"Features=ib,rack1", b"Features=ib"),
            "it waits for feature rack1",
        ),
        (job(state="PENDING", features={"rack9"}), (b"Features=ib,rack1", b"Features=ib"), ""),
        (job(state="PENDING", licenses={"matlab"}), (b"matlab:4,", b""), "it waits for licence matlab"),
        (job(nodes={"n1"}, licenses={"matlab"}), (b"matlab:4,", b""), ""),
        (job(state="PENDING", licenses={"flex"}), (b"matlab:4,", b""), ""),
        (job(state="PENDING", memory_mb=4000), (b"NodeName=n2", b"NodeName=n2 RealMemory=9000"), ""),
        (
            job(state="PENDING", memory_mb=4000),
            (b"RealMemory=8000", b""),
            "no node of its partitions would have 4000 MB",
        ),
        (job(state="PENDING", memory_mb=9000), (b"RealMemory=8000", b""), ""),
        (job(memory_mb=4000), (b"RealMemory=8000", b""), ""),
        (job(state="PENDING", partitions="normal,small", memory_mb=90), (b"RealMemory=8000", b""), ""),
        (job(state="PENDING", cpus=16), (b"ThreadsPerCore=2", b"ThreadsPerCore=1"), "no node of its partitions"),
        (
            job(state="PENDING", memory_mb=8000),
            (b"RealMemory=8000", b"RealMemory=8000 MemSpecLimit=500\nSelectTypeParameters=CR_Core_Memory"),
            "no node of its partitions",
        ),
        (job(state="PENDING", memory_mb=8000), (b"RealMemory=8000", b"RealMemory=8000 MemSpecLimit=500"), ""),
        (job(state="PENDING", cpus=16), (b"Cores", b"CoreSpecCount=1 Cores"), "no node of its partitions"),
        (job(state="PENDING", cpus=16), (b"Cores", b"CpuSpecList=0-1,8 Cores"), "no node of its partitions"),
        (
            job(state="PENDING", cpus=13),
            (b"Cores", b"CpuSpecList=0,8 Cores"),
            "no node of its partitions",
        ),  # whole cores
        (job(state="PENDING", cpus=12), (b"Cores", b"CpuSpecList=0-1,8,8 Cores"), ""),
        (job(cpus=16), (b"Cores", b"CoreSpecCount=1 Cores"), ""),
        (job(state="PENDING", disk_mb=7), (b"TmpDisk=9", b"TmpDisk=6"), "no node of its partitions"),
        (job(state="PENDING", features={"ib"}, gres={"gpu"}), (b"n1 Gres", b"n1 Features=no Gres"), "no node of its"),
        (job(state="PENDING", partitions="set", gres={"gpu"}), (b"Feature=big", b"Feature=none"), "no node of its"),
        (job(state="PENDING", partitions="set", gres={"gpu"}), (b"Nodes=big", b"Nodes=odd"), ""),
        (
            job(nodes={"n1"}, gres={"gpu"}),
            (b"GresTypes=gpu,shard,tmp", b"GresTypes=tmp"),
            "GresTypes no longer has gpu",
        ),
        (job(nodes={"n1"}, gres={"tmp"}), (b"tmp:400", b"tmp:380"), ""),
        (job(nodes={"n1"}, state="SUSPENDED"), (b"SUSPEND,GANG", b"OFF"), "jobs no longer take turns"),
        (job(nodes={"n1"}, state="SUSPENDED"), (b"Licenses", b"MinJobAge=9\nLicenses"), ""),
        (job(nodes={"n2"}), (b"Licenses", b"DownNodes=n2 State=DOWN\nLicenses"), "it runs on n2, which becomes DOWN"),
    ],
)
def test_jobs_whose_resources_change(one: Job, change: tuple[bytes, bytes], why: str) -> None:
    old, new = (read_defined({"/etc/slurm/slurm.conf": text}) for text in (BEFORE, BEFORE.replace(*change)))
    losses = [loss.why for loss in find_losses(Present((one,)), old, new)]
    assert [loss[: len(why)] for loss in losses] == ([why] if why else [])
    assert can_cost(old, new) or not losses


@pytest.mark.parametrize(
    ("settings", "cores"),
    [
        ({}, 1),
        ({"cpus": "8"}, 8),
        ({"procs": "8", "threadspercore": "2"}, 4),
        ({"cpus": "64", "sockets": "2", "corespersocket": "16", "threadspercore": "2"}, 32),
        ({"boards": "2", "socketsperboard": "2", "corespersocket": "8"}, 32),
        ({"cpus": "16", "corespersocket": "4", "threadspercore": "2"}, 8),
        ({"cpus": "many"}, 1),
    ],
)
def test_cores_of_a_node(settings: dict[str, str], cores: int) -> None:
    assert count_cores(settings) == cores


def test_jobs_with_odd_fields_are_read_or_counted() -> None:
    """Alternatives of features have a `|`, arrays may have a step; what cannot be read is not nothing."""
    found = present(
        "job 1\tRUNNING\talice\tnormal\tn1\t\t(null)\tgpu|ib\t1700000000\t0\t1\t0",
        "job 12_[0-98:2]\tPENDING\talice\tnormal\t\t\t(null)\t(null)\tN/A\t0\t1\t0",
        "job 3|RUNNING|alice|normal|n1||",
    )
    assert [one.id for one in found.jobs] == ["1", "12_[0-98:2]"] and found.unread == 1
    assert found.jobs[0].features == frozenset()
    assert [one.submitted for one in found.jobs] == [1_700_000_000, 0]


def test_jobs_that_failed_since() -> None:
    """Not those that ended by themselves, that were foreseen, or that Slurm no longer knows."""
    lines = (
        "1|RUNNING",
        "2|RUNNING",
        "3|RUNNING",
        "4|PENDING",
        "5|RUNNING",
        "6_[1-9]|PENDING",
        "7|COMPLETED",
        "8|RUNNING",
    )
    now = (
        "1|RUNNING",
        "2|NODE_FAIL",
        "3|PENDING",
        "4|RUNNING",
        "5|FAILED",
        "6_[2-9]|PENDING",
        "7|NODE_FAIL",
        "9|NODE_FAIL",
    )
    before, after = (
        present(*(f"job {one}|u|normal|n1|||||||".replace("|", "\t") for one in all_lines))
        for all_lines in (lines, now)
    )
    assert [line.split()[1] for line in find_failed(before, after, set(), {"n1"})] == ["2", "3"]
    assert [line.split()[1] for line in find_failed(before, after, {"2"}, {"n1"})] == ["3"]
    assert [line.split()[1] for line in find_failed(before, after, set(), set())] == ["2"]


def test_programs_that_only_the_new_configuration_names() -> None:
    old = read_defined({"/etc/slurm/slurm.conf": b"Prolog=/etc/slurm/a.sh\nEpilog=/etc/slurm/b.sh\n"})
    new = read_defined({"/etc/slurm/slurm.conf": b"prolog=/etc/slurm/a.sh\nEPILOG=/etc/slurm/c.sh\nTaskProlog=/x\n"})
    assert find_new(old.programs, new.programs) == {"Epilog": "/etc/slurm/c.sh", "TaskProlog": "/x"}


SYSTEM = "root:x:0:0::/root:/bin/sh\nslurm:x:64030:64::/var:/bin/false\nnobody:x:65534:65534::/:/bin/false\n"


def user(name: str, number: int) -> str:
    return f"{name}:x:{number}:100::/home/{name}:/bin/bash\n"


def test_accounts_that_a_change_removes() -> None:
    """Those of the container's image are none of the site's, whatever their ids are."""
    before = without_own(SYSTEM + user("a", 1001) + user("b", 1002), {"slurm"})
    assert before == user("a", 1001) + user("b", 1002)
    changes, problems = compare_accounts({"/etc/passwd": before}, {"/etc/passwd": user("b", 1002) + user("c", 1003)})
    assert changes["/etc/passwd"].removed == ("a",) and changes["/etc/passwd"].before == 2 and not problems
    changes, _ = compare_accounts({"/etc/passwd": before}, {"/etc/passwd": ""})
    assert changes["/etc/passwd"].removed_percent == 100


@pytest.mark.parametrize(
    "line", ["a:x:1001:100::/home/a:/bin/bash\r\n", "a:x:1001\n", user("a", 1001) + user("a", 1005)]
)
def test_accounts_that_are_not_valid(line: str) -> None:
    assert compare_accounts({}, {"/etc/passwd": line})[1]


@pytest.mark.parametrize(
    ("before", "after", "files"),
    [
        ("", "SchedulerType=sched/backfill\n", ["sched_backfill.so"]),
        ("SchedulerType=sched/backfill\n", "SchedulerType=sched/backfill\n", []),
        ("SchedulerType=sched/backfill\n", "schedulertype=sched/builtin\n", ["sched_builtin.so"]),
        ("", "JobSubmitPlugins=lua,require_timelimit\n", ["job_submit_lua.so", "job_submit_require_timelimit.so"]),
        ("", "AuthAltTypes=auth/jwt\nMCSPlugin=mcs/none\n", ["auth_jwt.so"]),
        (
            "",
            "NodeFeaturesPlugins=node_features/helpers\nPrEpPlugins=prep/script\n",
            ["node_features_helpers.so", "prep_script.so"],
        ),
        ("", "TaskPlugin=task/cgroup\nProctrackType=proctrack/x\n", ["proctrack_x.so", "task_cgroup.so"]),
        ("AuthType=auth/munge\n", "AuthType=auth/munge\nPluginDir=/opt/slurm/lib:/usr/lib\n", ["auth_munge.so"]),
    ],
)
def test_plugins_that_only_the_new_configuration_loads(before: str, after: str, files: list[str]) -> None:
    old, new = (read_defined({"/etc/slurm/slurm.conf": text.encode()}).plugins for text in (before, after))
    assert sorted(find_plugins(old, new)) == files


def test_which_jobs_a_snapshot_does_not_have() -> None:
    jobs = (("1", "RUNNING", 900), ("2", "PENDING", 2000), ("3", "RUNNING", 995), ("4", "COMPLETED", 2000))
    found = present(*(f"job {name}\t{state}\tbob\tnormal\t\t\t\t\t{at}\t\t\t" for name, state, at in jobs))
    assert [one.name for one in find_forgotten(found, 1000.0)] == ["3", "2"], "running ones first; saved within seconds"


COUNTS = b"""Licenses=matlab:10,ansys:2
NodeName=n[1-2] CPUs=8 Gres=gpu:a100:8,tmp:400G
NodeName=n3 CPUs=4
PartitionName=gpus Nodes=n[1-2]
PartitionName=all Nodes=ALL MaxCPUsPerNode=6
"""


@pytest.mark.parametrize(
    ("licenses", "cpus", "more", "change", "why"),
    [
        ("", 1, "N/A N/A gres/gpu:8 N/A N/A", (b"a100:8", b"a100:4"), "would have gpu:8"),
        ("", 1, "N/A N/A gres:gpu:a100:8 N/A N/A", (b"a100:8", b"a100:4"), "would have gpu:8, gpu:a100:8"),
        ("", 1, "N/A N/A gres/gpu:a100=8 N/A N/A", (b"a100:8", b"a100:4,gpu:v100:4"), "gpu:a100:8"),
        ("", 1, "N/A N/A gres/gpu:4 N/A N/A", (b"a100:8", b"a100:4"), ""),
        ("", 1, "N/A N/A gres/gpu N/A N/A", (b"a100:8", b"a100:4"), ""),
        ("", 1, "N/A N/A gres/gpu:9 N/A N/A", (b"a100:8", b"a100:4"), ""),  # it never could
        ("", 1, "N/A N/A N/A gres/gpu:6 N/A", (b"a100:8", b"a100:4"), "gpu:6"),
        ("", 1, "N/A N/A N/A N/A gres/gpu:6", (b"a100:8", b"a100:4"), "gpu:6"),
        ("", 1, "N/A N/A gres/tmp:300G N/A N/A", (b"tmp:400G", b"tmp:200G"), "tmp"),
        ("", 1, "N/A gres/gpu:16 N/A N/A N/A", (b"a100:8", b"a100:4"), "asks for more of gpu"),
        ("", 1, "N/A gres/gpu:8 N/A N/A N/A", (b"a100:8", b"a100:4"), ""),  # by two nodes
        ("", 1, "cpu=1,node=1,gres/gpu=12 N/A N/A N/A N/A", (b"gpus Nodes=n[1-2]", b"gpus Nodes=n1"), "more of gpu"),
        ("matlab:8", 1, "N/A N/A N/A N/A N/A", (b"matlab:10", b"matlab:4"), "8 of licence matlab"),
        ("matlab:4", 1, "N/A N/A N/A N/A N/A", (b"matlab:10", b"matlab:4"), ""),
        ("matlab:8|ansys:1", 1, "N/A N/A N/A N/A N/A", (b"matlab:10", b"matlab:4"), ""),  # or the other
        ("", 6, "N/A N/A N/A N/A N/A", (b"gpus Nodes=n[1-2]", b"gpus Nodes=n[1-2] MaxCPUsPerNode=4"), "MaxCPUsPerNode"),
        ("", 4, "N/A N/A N/A N/A N/A", (b"gpus Nodes=n[1-2]", b"gpus Nodes=n[1-2] MaxCPUsPerNode=4"), ""),
        ("", 1, "cpu=9,mem=1G N/A N/A N/A N/A", (b"n[1-2]\nP", b"n[1-2] MaxCPUsPerNode=4\nP"), "asks for 9 processors"),
        ("", 1, "cpu=16,mem=1G N/A N/A N/A N/A", (b"CPUs=8", b"CPUs=6"), "asks for 16 processors"),
        ("", 1, "cpu=12,mem=1G N/A N/A N/A N/A", (b"CPUs=8", b"CPUs=6"), ""),
        ("", 1, "N/A N/A N/A N/A N/A", (b"MaxCPUsPerNode=6", b"MaxMemPerCPU=1"), ""),
    ],
)
def test_waiting_jobs_that_ask_for_more_than_is_left(
    licenses: str, cpus: int, more: str, change: tuple[bytes, bytes], why: str
) -> None:
    assert change[0] in COUNTS
    old, new = (read_defined({"/etc/slurm/slurm.conf": text}) for text in (COUNTS, COUNTS.replace(*change)))
    for state in ("PENDING", "RUNNING"):
        found = present(f"job 1\t{state}\tbob\tgpus\t\t\t{licenses}\t\t\t0\t{cpus}\t0", f"more 1 2 N/A host 1 {more}")
        losses = [one.why for one in find_losses(found, old, new)]
        assert [why in one for one in losses] == ([True] if why and state == "PENDING" else []), losses
    assert can_cost(old, new) or not why


LINE = "n[1-4] NodeAddr=10.0.0.[1-4] Gres=gpu:a100:2"
TWO = f"NodeName={LINE}\nPartitionName=normal Nodes=ALL\nPartitionName=b Nodes=n[1-2]\n".encode()


@pytest.mark.parametrize(
    ("was", "becomes", "line", "why"),
    [
        (
            "n[1-4] NodeAddr=10.0.0.[1-4] Gres=gpu:a100:2",
            "n[1-4] Gres=gpu:a100:2 State=FUTURE",
            "n1||",
            "becomes FUTURE",
        ),
        ("n[1-4] NodeAddr=10.0.0.[1-4] Gres=gpu:a100:2", "n[1-4] Gres=gpu:a100:2 State=DOWN", "|n2|", "becomes DOWN"),
        ("Nodes=n[1-2]", "Nodes=n1", "|n2|", "n2, no longer in its partition"),
        ("Nodes=n[1-2]", "Nodes=ALL", "|n2|", ""),
        ("Nodes=n[1-2]", "Nodes=n1", "|n3|", ""),  # it was refused before, too
        ("Nodes=n[1-2]", "Nodes=n1", "n2||", ""),  # it runs
    ],
)
def test_what_a_job_loses_without_a_removal(was: str, becomes: str, line: str, why: str) -> None:
    """From public reports: nodes become FUTURE or DOWN in slurm.conf, a partition shrinks."""
    runs, requires, _ = line.split("|")
    old, new = (
        read_defined({"/etc/slurm/slurm.conf": text.encode()})
        for text in (TWO.decode(), TWO.decode().replace(was, becomes))
    )
    state = "RUNNING" if runs else "PENDING"
    found = present(f"job 1\t{state}\tbob\tb\t{runs}\t{requires}\t\t\t0\t\t\t")
    losses = find_losses(found, old, new)
    assert [why in one.why for one in losses] == ([True] if why else []), losses
    assert can_cost(old, new) is (becomes != "Nodes=ALL")


@pytest.mark.parametrize(
    ("was", "becomes", "costs"),
    [
        ("Nodes=n[1-2]", "Nodes=n[1-3]", False),
        ("Nodes=n[1-2]", "Nodes=ALL", False),
        ("Nodes=ALL", "Nodes=n[1-4]", False),
        ("Nodes=ALL", "Nodes=n[1-3]", True),
        ("Nodes=n[1-2]", "Nodes=n[2-3]", True),
        ("NodeAddr", "RealMemory=9 NodeAddr", False),
        ("gpu:a100:2\nP", "gpu:a100:2 RealMemory=0\nP", True),
    ],
)
def test_a_partition_that_only_gains_nodes_costs_nothing(was: str, becomes: str, costs: bool) -> None:
    """A start after a crash, which does not know the jobs, is not refused for it."""
    changed = TWO.replace(was.encode(), becomes.encode())
    old, new = (read_defined({"/etc/slurm/slurm.conf": text}) for text in (TWO, changed))
    assert can_cost(old, new) is costs


def test_a_type_of_a_resource_that_is_removed() -> None:
    old, new = (
        read_defined({"/etc/slurm/slurm.conf": text}) for text in (TWO, TWO.replace(b"gpu:a100:2", b"gpu:h100:2"))
    )
    jobs = [f"job {name}\tPENDING\tbob\tb\t\t\t\t\t0\t\t\t" for name in "12"]
    found = present(*jobs, "more 1 1 0:00 a 1 gres/gpu:a100:1 N/A", "more 2 1 0:00 a 1 gres/gpu:1 N/A")
    assert [(one.name, "gpu:a100" in one.why) for one in find_losses(found, old, new)] == [("1", True)]


def test_nodes_with_the_address_of_another_one() -> None:
    old, swapped, other = (
        read_defined({"/etc/slurm/slurm.conf": TWO.replace(b"10.0.0.[1-4]", addresses)})
        for addresses in (b"10.0.0.[1-4]", b"10.0.0.[2,1,3-4]", b"10.0.0.[11-14]")
    )
    assert find_moved(old, swapped) == {"n1": "n2", "n2": "n1"}
    assert find_moved(old, other) == {} == find_moved(old, old)
    shared = read_defined({"/etc/slurm/slurm.conf": TWO.replace(b"10.0.0.[1-4]", b"10.0.0.1")})
    assert find_moved(shared, shared) == {}, "several slurmd on one machine"


def test_what_nodes_need_besides_programs() -> None:
    """The script of a filter, and the plugins that plugstack.conf requires: without them nobody submits there."""
    files = {
        "/etc/slurm/slurm.conf": TWO + b"CliFilterPlugins=user_defaults,lua\n",
        "/etc/slurm/plugstack.conf": b"required /usr/lib/x.so a=b\n# required /no\noptional /y.so\ninclude /z\n",
    }
    wanted = {"/etc/slurm/cli_filter.lua", "/usr/lib/x.so"}
    assert set(read_defined(files).programs.values()) == wanted
