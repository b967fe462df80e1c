"""What is removed takes no job between the judgement and the change, and is released where that fails or was killed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from appliance.catalog import read_catalog
from appliance.config.model import SystemUser
from appliance.errors import Busy, Refused, SmsError
from appliance.host.base import CommandError, Result
from appliance.operations.context import Cluster
from appliance.operations.env import LOCKED as BUSY
from appliance.operations.history import note, read_history
from appliance.operations.overlay.overlay import seeds_for
from appliance.operations.services.effect import (
    Answer,
    Judged,
    compare,
    find_answer,
    held,
    judge,
    judge_kept,
    judge_start,
    need_no_cost,
)
from appliance.operations.services.faults import find_faults
from appliance.operations.services.holding import REASON, describe_lost, release
from appliance.operations.services.new_instance import find_faults_of_instance
from appliance.operations.services.present import describe_jobs, judge_restore
from appliance.operations.services.users import find_without_directory
from appliance.plan.machine import inside_argv
from appliance.plan.nodes.accounts import GROUP, PASSWD
from appliance.plan.nodes.files import last_pulled
from appliance.plan.services.defined import read_defined
from appliance.plan.services.effect import PRESENT, read_present
from appliance.plan.services.network import running_network
from appliance.plan.services.nodes import read_nodes
from appliance.share import share
from appliance.shared.overlay import OverlayMark
from appliance.shared.records import to_json
from appliance.tools.files import HELD as LOCKED
from appliance.tools.scripts import python_argv, script_argv
from tests.support.env import Reports, fake_env
from tests.support.fake import Fake
from tests.unit.services.test_effect import node

OLD = b"NodeName=n[1-2] NodeAddr=10.0.0.1\nPartitionName=normal Nodes=ALL\nPartitionName=night Nodes=ALL\n"
NEW = b"NodeName=n1 NodeAddr=10.0.0.1\nPartitionName=normal Nodes=ALL\n"
OF_NIGHT, ELSEWHERE = (
    line.replace("|", "\t")
    for line in ("job 7|RUNNING|alice|night|n1||||||||||||||||", "job 8|RUNNING|bob|normal|n1||||||||||||||||")
)
PARTITIONS = ("partition PartitionName=normal Nodes=ALL State=UP", "partition PartitionName=night Nodes=ALL State=DOWN")


class Controller(Fake):
    """A host on which slurmctld runs. ``lines``: its jobs, one list for each time that it is asked."""

    def __init__(self, cluster: Cluster, *lines: list[str]) -> None:
        self.lines = list(lines)
        self.updates: list[str] = []
        self.generation = 7
        self.locked = False
        self.users = {"alice", "bob"}
        self.overlay = OLD.decode()
        self.accounts = {one.path: one.data.decode() for one in seeds_for(cluster) if one.path in (PASSWD, GROUP)}
        inside = inside_argv(cluster.site, cluster.services)
        super().__init__(
            {
                (*inside, *PRESENT): self.present,
                (*inside, "scontrol", "update"): self.update,
                (*inside, "sinfo"): lambda *_: (
                    0,
                    f"n1 none\nn2 {REASON if 'idle+drain' in self.second() else 'none'}\n",
                ),
                (*inside, "test", "-x"): (1, ""),
                (*inside, *script_argv("known-users")): lambda argv, _: (0, "\n".join({*argv[-2:]} & self.users)),
                ("test", "-e"): (0, ""),
                ("flock",): lambda *_: (LOCKED if self.locked else 0, ""),
                ("rm", "-f", "--"): self.removed,
                ("cat", "--"): lambda argv, _: (0, self.files[argv[2]].decode()) if argv[2] in self.files else (1, ""),
                script_argv("query-overlay"): lambda *_: (0, f"exists\nend\n={self.mark(cluster)}\n\n"),
                ("debugfs",): lambda argv, _: (0, self.in_overlay(argv[2])),
            },
            name="host-a",
        )

    def present(self, *_: object) -> tuple[int, str]:
        lines = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
        return (0, "\n".join([*lines, *PARTITIONS, node("n1", "idle"), self.second()])) if lines else (1, "no answer")

    def in_overlay(self, command: str) -> str:
        found = (text for path, text in self.accounts.items() if f'/upper{path}"' in command)
        return self.overlay if "slurm.conf" in command else next(found, "")

    def mark(self, cluster: Cluster) -> str:
        return to_json(OverlayMark(cluster.site.cluster, self.generation)).decode().replace("\n", "")

    def second(self) -> str:
        last = ([one for one in self.updates if one.startswith("NodeName=n2")] or [""])[-1]
        return node("n2", "idle+drain", REASON, "root") if "DRAIN" in last else node("n2", "idle")

    def update(self, argv: tuple[str, ...], _: object) -> tuple[int, str]:
        self.updates.append(" ".join(argv[argv.index("update") + 1 :]))
        return 0, ""

    @contextmanager
    def hold(self, *argv: str, timeout: float = 30) -> Iterator[str]:
        if self.locked:
            raise CommandError(Result(self.name, argv, BUSY, b"", b""))
        self.locked = True
        try:
            yield "held"
        finally:
            self.locked = False

    def removed(self, argv: tuple[str, ...], _: object) -> tuple[int, str]:
        self.files.pop(argv[3], None)
        return 0, ""


def judged(cluster: Cluster, host: Controller) -> Judged:
    old, new = (read_defined({"/etc/slurm/slurm.conf": data}) for data in (OLD, NEW))
    return judge(cluster, host, old, new)


HELD = ["PartitionName=night State=INACTIVE", "NodeName=n2 State=DRAIN Reason=sms: is removed from the site"]
RELEASED = ["PartitionName=night State=DOWN", "NodeName=n2 State=RESUME"]


def test_what_is_removed_takes_no_job_meanwhile(cluster: Cluster) -> None:
    host = Controller(cluster, [ELSEWHERE])
    with held(cluster, host, judged(cluster, host), "apply"):
        assert host.updates == HELD
    note(cluster, host, "apply", "applied")
    release(cluster, host)
    assert host.updates == HELD, "it is removed"


def test_a_job_that_was_submitted_meanwhile(cluster: Cluster) -> None:
    host = Controller(cluster, [ELSEWHERE], [ELSEWHERE, OF_NIGHT])
    now = judged(cluster, host)
    now.refuse("apply")
    with pytest.raises(Refused, match="job 7"), held(cluster, host, now, "apply"):
        raise AssertionError("nothing is written")
    assert host.updates == [*HELD, *RELEASED], "the state of before, which was not UP"
    release(cluster, host)
    assert host.updates == [*HELD, *RELEASED]


def test_a_change_that_fails_releases_it(cluster: Cluster) -> None:
    host = Controller(cluster, [ELSEWHERE])
    with pytest.raises(SmsError), held(cluster, host, judged(cluster, host), "apply"):
        raise SmsError("it failed")
    assert host.updates == [*HELD, *RELEASED]


def test_what_a_killed_run_held_is_released_by_the_next(cluster: Cluster) -> None:
    host = Controller(cluster, [ELSEWHERE])
    release(cluster, host)
    assert host.updates == []
    killed(cluster, host)
    release(cluster, host)
    release(cluster, host)
    assert host.updates == [*HELD, *RELEASED]


def killed(cluster: Cluster, host: Controller) -> None:
    """A run that holds something, and has been killed."""
    states = {"night": "DOWN"}
    note(cluster, host, "apply", "held", partitions=states, nodes="n2")
    host.updates += HELD


def test_what_a_run_holds_is_left_alone_while_it_lives(cluster: Cluster) -> None:
    """And status names only what a dead one holds."""
    host = Controller(cluster, [ELSEWHERE])
    drained = read_nodes([node("n2", "idle+drain", REASON, "root").removeprefix("node ")], "slurm")
    with held(cluster, host, judged(cluster, host), "apply"):
        assert describe_lost(cluster, host, drained) == ""
        with pytest.raises(Busy):
            release(cluster, host)
        note(cluster, host, "apply", "applied")
    assert host.updates == HELD and describe_lost(cluster, host, ()) == ""
    killed(cluster, host)
    shown = describe_lost(cluster, host, drained)
    assert "partition night" in shown and "nodes n2" in shown and "`sms start --host host-a`" in shown


def test_what_a_killed_run_has_written_is_left_to_the_next_apply(cluster: Cluster) -> None:
    """Its partition goes at the next reload, and jobs submitted until then would go with it."""
    host = Controller(cluster, [ELSEWHERE])
    killed(cluster, host)
    note(cluster, host, "apply", "begun", files=["/etc/slurm/slurm.conf"])
    assert not release(cluster, host) and host.updates == HELD
    assert "`sms apply --host host-a`" in describe_lost(cluster, host, ())
    note(cluster, host, "apply", "undone")
    assert release(cluster, host) and host.updates == [*HELD, *RELEASED]


def test_after_a_failover_nodes_are_known_by_their_reason(cluster: Cluster) -> None:
    """The history of that host has nothing of it."""
    host = Controller(cluster, [ELSEWHERE])
    host.updates += HELD
    assert not release(cluster, host)
    assert release(cluster, host, any_node=True) and host.updates == [*HELD, RELEASED[1]]


def test_what_was_accepted_is_no_more_than_was_seen(cluster: Cluster) -> None:
    host = Controller(cluster, [OF_NIGHT], [OF_NIGHT, OF_NIGHT.replace("7", "9")])
    seen = judged(cluster, host).costs
    more = judged(cluster, host)
    with pytest.raises(Refused, match="job 9"):
        more.refuse("apply", accepted=seen)
    more.refuse("apply", accepted=more.costs)


def test_unknown_is_not_empty(cluster: Cluster) -> None:
    """Without an answer it is refused if something is removed, and only then."""
    host = Controller(cluster, [])
    with pytest.raises(Refused):
        judged(cluster, host).refuse("apply")
    same = read_defined({"/etc/slurm/slurm.conf": NEW})
    judge(cluster, host, same, same).refuse("apply")


def test_programs(cluster: Cluster) -> None:
    host = Controller(cluster, [ELSEWHERE])
    old = read_defined({"/etc/slurm/slurm.conf": NEW})
    new = read_defined({"/etc/slurm/slurm.conf": NEW + b"Prolog=/etc/slurm/p.sh\nMailProg=/usr/bin/nomail\n"})
    assert [one.why.split("=")[0] for one in find_faults(cluster, host, (old, new), {}, {})] == ["MailProg", "Prolog"]
    assert list(find_faults(cluster, host, (new, new), {}, {})) == []


def test_a_start_is_judged_by_what_the_last_stop_recorded(cluster: Cluster) -> None:
    (rendered,) = (seed.data.decode() for seed in seeds_for(cluster) if seed.path == "/etc/slurm/slurm.conf")
    shown = Reports()
    cluster, host = cluster.showing(shown), Controller(cluster, [OF_NIGHT])
    host.overlay = f"{rendered}PartitionName=night Nodes=ALL\n"
    with pytest.raises(Refused, match="not known"):
        judge_start(cluster, host, Answer.REFUSE)
    assert describe_jobs(cluster, host, record=True)[0] == "1 running, 0 waiting"
    with pytest.raises(Refused, match="job 7"):
        judge_start(cluster, host, Answer.REFUSE)
    assert not judge_start(cluster, host, Answer.KEEP) and "files of before" in shown.lines[-1]
    for rehearsed, recorded in ((True, False), (False, True)):
        assert judge_start(cluster, host, find_answer(force=True, rehearsed=rehearsed))
        noted = any(one.get("event") == "forced" for one in read_history(cluster, host))
        assert "job 7" in shown.lines[-1] and noted is recorded
    host.generation += 1  # another host has had the services since, or a start was killed
    with pytest.raises(Refused, match="not known"):
        judge_start(cluster, host, Answer.REFUSE)
    host.lines = [[]]
    assert "not known" in describe_jobs(cluster, host, record=True)[0]
    with pytest.raises(Refused, match="not known"):
        judge_start(cluster, host, Answer.REFUSE)
    host.lines = [["job 8|PENDING|bob||||||||||||||||||".replace("|", "\t")]]
    describe_jobs(cluster, host, record=True)
    assert judge_start(cluster, host, Answer.REFUSE)
    host.overlay = rendered
    host.files.clear()
    assert judge_start(cluster, host, Answer.REFUSE), "nothing is removed"


def test_a_start_with_another_address_of_the_container(cluster: Cluster) -> None:
    """Nodes that ran jobs, or took some, at the last stop keep the address of before."""
    (rendered,) = (seed.data.decode() for seed in seeds_for(cluster) if seed.path == "/etc/slurm/slurm.conf")
    host = Controller(cluster, [OF_NIGHT, node("n1", "idle")])
    host.overlay = re.sub(r"(?m)^(SlurmctldHost=.*\()[0-9.]+", r"\g<1>10.99.0.9", rendered)
    describe_jobs(cluster, host, record=True)
    with pytest.raises(Refused, match=r"nodes in use \(\d\) keep 10.99.0.9, not .*running jobs \(1\)"):
        judge_start(cluster, host, Answer.REFUSE)
    host.overlay = rendered
    with pytest.raises(Refused, match="job 7") as raised:
        judge_start(cluster, host, Answer.REFUSE)
    assert "keep" not in raised.value.message


@pytest.mark.parametrize(("waiting", "ended", "refused"), [(9999, 0, True), (9998, 0, False), (9000, 30000, False)])
def test_a_start_with_more_jobs_than_slurm_may_have(cluster: Cluster, waiting: int, ended: int, refused: bool) -> None:
    """Tasks of an array count each; jobs that had ended when it stopped are forgotten soon."""
    (rendered,) = (seed.data.decode() for seed in seeds_for(cluster) if seed.path == "/etc/slurm/slurm.conf")
    host = Controller(cluster, [f"tasks {waiting} PENDING", f"tasks {ended} COMPLETED"])
    host.overlay = f"{rendered}MaxJobCount=50000\n"
    describe_jobs(cluster, host, record=True)
    if refused:
        with pytest.raises(Refused, match="MaxJobCount=10000"):
            judge_start(cluster, host, Answer.REFUSE)
    assert judge_start(cluster, host, Answer.KEEP) is not refused


@pytest.mark.parametrize(
    ("status", "shown", "lost"),
    [
        (0, "low||cluster|\nhigh||cluster|\n", ""),
        (0, "low||cluster|\nhigh|low|cluster|\n", "would take"),
        (1, "", "QOS are not known"),  # slurmdbd does not answer: each may
    ],
)
def test_the_database_is_asked_which_qos_preempt(cluster: Cluster, status: int, shown: str, lost: str) -> None:
    jobs = ("job 7|RUNNING|alice|normal|n1|||||||||||low|||||9", "job 8|PENDING|bob|normal||||||||||||high|||||9")
    host = Controller(cluster, [job.replace("|", "\t") for job in jobs])
    host.answers[inside_argv(cluster.site, cluster.services, "sacctmgr")] = (status, shown)
    new = OLD + b"PreemptType=preempt/qos\nPreemptMode=CANCEL\n"
    old, by_qos = (read_defined({"/etc/slurm/slurm.conf": data}) for data in (OLD, new))
    found = judge(cluster, host, old, by_qos).losses
    assert [(one.name, lost in one.why) for one in found] == ([("7", True)] if lost else [])
    host.answers.pop(inside_argv(cluster.site, cluster.services, "sacctmgr"))
    assert not judge(cluster, host, by_qos, by_qos).losses, "nor is it asked where nothing changes"


def test_a_start_that_would_remove_users_is_refused(cluster: Cluster) -> None:
    """R15: the file was emptied between stop and start. At boot the accounts of before stay."""
    shown = Reports()
    cluster, host = cluster.showing(shown), Controller(cluster, [ELSEWHERE])
    (rendered,) = (seed.data.decode() for seed in seeds_for(cluster) if seed.path == "/etc/slurm/slurm.conf")
    accounts = "".join(f"u{number}:x:{number}:100::/home:/bin/sh\n" for number in range(2000, 2100))
    files = {"/upper/etc/slurm/slurm.conf": rendered, "/upper/etc/passwd": accounts, "/upper/etc/group": ""}
    host.answers[("debugfs",)] = lambda argv, _: (0, next((files[one] for one in files if one in argv[2]), ""))
    assert any(seed.path == "/etc/passwd" for seed in seeds_for(cluster)), "the sample site has accounts"
    with pytest.raises(Refused, match="u2000"):
        judge_start(cluster, host, Answer.REFUSE)
    assert not judge_start(cluster, host, Answer.KEEP) and "u2000" in shown.lines[-1]


def test_files_that_stay_in_the_overlay_are_judged_too(cluster: Cluster) -> None:
    """Of a snapshot, or changed by hand: the seed mark is the same, and partitions with jobs are gone."""
    shown = Reports()
    cluster = replace(cluster, env=fake_env(progress=shown))
    host = Controller(cluster, [OF_NIGHT])
    describe_jobs(cluster, host, record=True)
    judge_kept(cluster, host, Answer.REFUSE)
    host.overlay = NEW.decode()
    with pytest.raises(Refused, match="job 7"):
        judge_kept(cluster, host, Answer.REFUSE)
    judge_kept(cluster, host, Answer.KEEP)
    assert "job 7" in shown.lines[-1]


def test_a_restore_is_judged_by_what_the_last_stop_recorded(cluster: Cluster) -> None:
    job = "job 7|RUNNING|alice|night|n1||||1500||||||||||||".replace("|", "\t")
    host = Controller(cluster, [job])
    assert "did not record" in judge_restore(cluster, host, 1000.0, force=False)[0], "as after a crash"
    describe_jobs(cluster, host, record=True)
    with pytest.raises(Refused, match="job 7"):
        judge_restore(cluster, host, 1000.0, force=False)
    assert "job 7" in judge_restore(cluster, host, 1000.0, force=True)[1]
    assert judge_restore(cluster, host, 1600.0, force=False) == [], "the snapshot has it"


PROLOG = "/etc/slurm/p.sh"
CALLS = NEW + b"EpilogSlurmctld=/etc/slurm/p.sh\nCliFilterPlugins=lua\n"

ALICE = "alice:x:2001:2001:Alice Example:/home/alice:/bin/bash\n"
MANY = "".join(f"u{number}:x:{number}:100::/home:/bin/sh\n" for number in range(2100, 2130))


@pytest.mark.parametrize(
    ("jobs", "pulled", "here", "lost"),
    [
        ([], "", ALICE, False),
        ([], "", "root:x:0:0::/root:/bin/sh\n", True),  # of a snapshot, or removed by hand
        ([], MANY + ALICE, MANY + ALICE, False),
        ([], MANY + ALICE, MANY, False),  # one of many
        ([OF_NIGHT], MANY + ALICE, MANY, True),  # she has a job
        ([], MANY + ALICE, MANY[:500] + ALICE, True),
        ([], MANY + ALICE, ALICE, False),  # the site's, applied after the last pull
    ],
)
def test_accounts_that_stay_in_the_overlay(
    cluster: Cluster, jobs: list[str], pulled: str, here: str, lost: bool
) -> None:
    """After `sms overlay restore --path /etc/passwd`: by the site's, or what the VM gave last."""
    shown = Reports()
    cluster = replace(cluster, env=fake_env(progress=shown))
    host = Controller(cluster, jobs or [ELSEWHERE])
    describe_jobs(cluster, host, record=True)
    host.accounts |= {PASSWD: here, last_pulled(PASSWD): pulled}
    with pytest.raises(Refused) if lost else nullcontext():
        judge_kept(cluster, host, Answer.REFUSE)
    judge_kept(cluster, host, Answer.KEEP)
    assert len(shown.lines) == lost


@pytest.mark.parametrize(
    ("old", "before", "script", "wrong"),
    [
        (NEW, {}, b"#!/bin/sh\n", False),
        (NEW, {}, b"#!/bin/sh\r\nexit 0\r\n", True),
        (CALLS, {PROLOG: "x"}, b"\n#!/bin/sh\n", True),
        (CALLS, {}, b"\n#!/bin/sh\n", False),  # it was so before
    ],
)
def test_a_program_that_does_not_run(
    cluster: Cluster, old: bytes, before: dict[str, str | None], script: bytes, wrong: bool
) -> None:
    """Each node would be drained by its first job. A filter in Lua is none."""
    host = Controller(cluster, [ELSEWHERE])
    both = tuple(read_defined({"/etc/slurm/slurm.conf": data}) for data in (old, CALLS))
    after = {PROLOG: script, "/etc/slurm/cli_filter.lua": b"function slurm_cli_pre_submit() end"}
    found = find_faults(cluster, host, (both[0], both[1]), before, after, same_image=False)
    assert ["does not run" in one.why for one in found if PROLOG in one.why] == [True] * wrong


def network_of(cluster: Cluster, **others: str) -> dict[str, str]:
    return {**running_network(cluster.site), **others}


@pytest.mark.parametrize(
    ("others", "whys"),
    [
        ({}, []),
        ({"eth0": "02:00:00:00:00:01 10.99.0.9/16"}, ["keep 10.99.0.9"]),
        ({"routes": "172.16.4.0/22 via 10.0.0.254"}, []),
        ({"routes": "172.16.0.0/12 via 10.0.0.254"}, ["no longer leads to nodes in use (1): far"]),
    ],
)
def test_another_address_or_a_removed_route(cluster: Cluster, others: dict[str, str], whys: list[str]) -> None:
    """Nodes keep the address that they have; those behind a router are no longer reached."""
    host = Controller(cluster, [OF_NIGHT])
    there = read_present(
        "\n".join([node("n1", "idle"), node("far", "mixed").replace("10.0.0.1", "172.16.9.9")]), "slurm"
    )
    found = list(
        find_faults_of_instance(cluster, host, there, network_of(cluster, **others), differs=False, same_image=True)
    )
    assert len(found) == len(whys) and all(why in one.why for why, one in zip(whys, found, strict=True)), found


def test_what_nodes_lose_is_not_known(cluster: Cluster) -> None:
    host, other = Controller(cluster, []), network_of(cluster, eth0="02:00:00:00:00:01 10.99.0.9/8")
    assert [*find_faults_of_instance(cluster, host, None, network_of(cluster), differs=False)] == []
    assert len([*find_faults_of_instance(cluster, host, None, other, differs=False)]) == 1


@pytest.mark.parametrize(("uid", "refusing", "faults"), [("64030", False, 0), ("971", False, 1), ("971", True, 0)])
def test_a_controller_whose_user_gets_another_id(cluster: Cluster, uid: str, refusing: bool, faults: int) -> None:
    """Nodes that refuse it already may have the one that it gets."""
    slurm = cluster.site.slurm.model_copy(update={"user": SystemUser(uid=64030, gid=64030)})
    cluster = replace(cluster, site=cluster.site.model_copy(update={"slurm": slurm}))
    host, inside = Controller(cluster, []), inside_argv(cluster.site, cluster.services)
    log = (
        "log sched: Allocate JobId=7 NodeList=n1 #CPUs=1\n"
        "log Killing non-startable batch JobId=7: Invalid user id\n" + node("n1", "idle+completing")
    )
    host.answers[(*inside, "id")] = (0, uid)
    host.answers[(*inside, *script_argv("inspect-inside"))] = (0, log if refusing else node("n1", "idle"))
    there = read_present(node("n1", "idle"), "slurm")
    found = list(find_faults_of_instance(cluster, host, there, network_of(cluster), differs=False))
    assert len(found) == faults


@pytest.mark.parametrize(("has", "differs", "faults"), [(True, False, 0), (True, True, 1), (False, False, 1)])
def test_users_whom_only_a_directory_knows(cluster: Cluster, has: bool, differs: bool, faults: int) -> None:
    host = Controller(cluster, [])
    if has:
        service = read_catalog(share("definitions", "services"))["sssd"]
        cluster = replace(cluster, services=(*cluster.services, service))
    host.answers[(*inside_argv(cluster.site, cluster.services), *script_argv("known-users"))] = (
        0,
        "alice\nbob\n=bob\n",
    )
    found = list(find_without_directory(cluster, host, {"alice", "bob"}, differs=differs))
    assert len(found) == faults and all("(1): alice" in one.why for one in found)


def test_users_who_are_lost_are_a_cost(cluster: Cluster) -> None:
    """They are asked for until what asks the directory has had time to answer."""
    host = Controller(cluster, [OF_NIGHT])
    before = judged(cluster, host)
    assert before.known == {"alice"}
    assert compare(cluster, host, before).users == ()
    host.users = {"bob"}
    assert compare(cluster, host, before).users == ("alice",)
    with pytest.raises(SmsError):
        need_no_cost(cluster, host, before, registers=False)


def test_nodes_that_are_no_longer_reached(cluster: Cluster) -> None:
    """slurmctld notices that after minutes."""
    host = Controller(cluster, [ELSEWHERE])
    before = judged(cluster, host)
    connect = (*inside_argv(cluster.site, cluster.services), *python_argv("connect-each"))
    host.answers[connect] = (0, "1 0\n")
    assert compare(cluster, host, before, moved=True).nodes == ()
    host.answers[connect] = (0, "1 124\n")
    assert [one.split()[0] for one in compare(cluster, host, before, moved=True).nodes] == ["n1"]
