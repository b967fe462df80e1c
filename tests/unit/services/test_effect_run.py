"""What is removed takes no job between the judgement and the change, and is released where that fails or was killed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from appliance.errors import Refused, SmsError
from appliance.operations.context import Cluster
from appliance.operations.history import note, read_history
from appliance.operations.overlay.overlay import seeds_for
from appliance.operations.services.effect import (
    REASON,
    Answer,
    Judged,
    find_answer,
    held,
    judge,
    judge_kept,
    judge_start,
    release,
)
from appliance.operations.services.faults import find_faults
from appliance.operations.services.present import describe_jobs, judge_restore
from appliance.plan.machine import inside_argv
from appliance.plan.nodes.accounts import GROUP, PASSWD
from appliance.plan.nodes.files import last_pulled
from appliance.plan.services.defined import read_defined
from appliance.plan.services.effect import PRESENT
from appliance.shared.overlay import OverlayMark
from appliance.shared.records import to_json
from appliance.tools.scripts import script_argv
from tests.support.env import Reports, fake_env
from tests.support.fake import Fake
from tests.unit.services.test_effect import node

OLD = b"NodeName=n[1-2]\nPartitionName=normal Nodes=ALL\nPartitionName=night Nodes=ALL\n"
NEW = b"NodeName=n1\nPartitionName=normal Nodes=ALL\n"
OF_NIGHT, ELSEWHERE = (
    line.replace("|", "\t")
    for line in ("job 7|RUNNING|alice|night|n1||||||||||||||", "job 8|RUNNING|bob|normal|n1||||||||||||||")
)
PARTITIONS = ("partition PartitionName=normal Nodes=ALL State=UP", "partition PartitionName=night Nodes=ALL State=DOWN")


class Controller(Fake):
    """A host on which slurmctld runs. ``lines``: its jobs, one list for each time that it is asked."""

    def __init__(self, cluster: Cluster, *lines: list[str]) -> None:
        self.lines = list(lines)
        self.updates: list[str] = []
        self.generation = 7
        self.overlay = OLD.decode()
        self.accounts = {one.path: one.data.decode() for one in seeds_for(cluster) if one.path in (PASSWD, GROUP)}
        inside = inside_argv(cluster.site, cluster.services)
        super().__init__(
            {
                (*inside, *PRESENT): self.present,
                (*inside, "scontrol", "update"): self.update,
                (*inside, "test", "-x"): (1, ""),
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
    run = held(cluster, host, judged(cluster, host), "apply")
    run.__enter__()  # and it is killed
    release(cluster, host)
    release(cluster, host)
    assert host.updates == [*HELD, *RELEASED]


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
    host.lines = [["job 8|PENDING|bob||||||||||||||||".replace("|", "\t")]]
    describe_jobs(cluster, host, record=True)
    assert judge_start(cluster, host, Answer.REFUSE)
    host.overlay = rendered
    host.files.clear()
    assert judge_start(cluster, host, Answer.REFUSE), "nothing is removed"


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
    job = "job 7|RUNNING|alice|night|n1||||1500||||||||||".replace("|", "\t")
    host = Controller(cluster, [job])
    assert "did not record" in judge_restore(cluster, host, 1000.0, force=False)[0], "as after a crash"
    describe_jobs(cluster, host, record=True)
    with pytest.raises(Refused, match="job 7"):
        judge_restore(cluster, host, 1000.0, force=False)
    assert "job 7" in judge_restore(cluster, host, 1000.0, force=True)[1]
    assert judge_restore(cluster, host, 1600.0, force=False) == [], "the snapshot has it"


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


WHOLE = b"function slurm_job_submit(a, b, c) return 0 end function slurm_job_modify(a, b, c, d) return 0 end"


@pytest.mark.parametrize(
    ("script", "printed", "why"),
    [(WHOLE, "", ""), (WHOLE[:-3], "1: 'end' expected", "expected"), (b"-- slurm_job_submit", "", "slurm_job_modify")],
)
def test_a_lua_script_with_which_slurmctld_would_not_start(
    cluster: Cluster, script: bytes, printed: str, why: str
) -> None:
    host = Controller(cluster, [ELSEWHERE])
    host.answers[inside_argv(cluster.site, cluster.services, *script_argv("check-lua"))] = (0, printed)
    new = read_defined({"/etc/slurm/slurm.conf": NEW})
    path = "/etc/slurm/job_submit.lua"
    found = find_faults(cluster, host, (new, new), {path: "old"}, {path: script})
    assert [why in one.why for one in found] == ([True] if why else [])
    assert list(find_faults(cluster, host, (new, new), {}, {path: script})) == []
