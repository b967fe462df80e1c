"""`sms upgrade`: another image, the same jobs; rolled back automatically when the image fails.

A second instance takes over, as in `sms apply`; where that is not possible, the container is stopped and started.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from appliance.operations.image.build import Built
from appliance.operations.lab import demo
from tests.real.conftest import Playground, give_image
from tests.real.images import BROKEN, make_variant
from tests.real.labs import build_image, fresh_lab
from tests.real.processes import begin, kill_sms, wait_for_step
from tests.real.services.test_apply_switch import assert_one_instance, first_process
from tests.waiting import wait_until

pytestmark = pytest.mark.real

NAME = "t-upgrade"
QUICK = ("--no-rehearsal",)
GIVES_UP = (*QUICK, "--wait", "12")
"""For an image that does not do: what was has as much time to come back."""


@dataclass(frozen=True)
class Stage:
    """A lab, the image that it was built with, and its variants' paths."""

    play: Playground
    built: Built
    good: str = "/etc/sms/good.sif"
    broken: str = "/etc/sms/broken.sif"

    def upgrade(self, *words: str, ok: tuple[int, ...] = (0,)) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.play.sms("-q", "upgrade", *words, "--json", ok=ok).stdout)
        return found

    def key(self) -> str:
        """The key of what runs."""
        return str(self.play.status()["image"].get("key"))

    def jobs(self) -> dict[str, str]:
        """State by id."""
        reported = self.play.host("node1").run("squeue", "--states=all", "--noheader", "--format=%i %T").text
        return dict(line.split() for line in reported.splitlines())

    def submit(self, *words: str) -> str:
        return demo.as_alice(self.play.host("node1"), "sbatch", "--parsable", *words)

    def phase(self) -> str:
        return str(json.loads(self.play.host("host-a").read("/var/lib/sms/journal/lab.upgrade.json") or b"{}")["phase"])


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """A lab whose variants of the image are made."""
    with fresh_lab(NAME, 2) as lab:
        built = build_image(lab)
        for name in ("good", "broken"):
            make_variant(built, lab, name)
        make_variant(built, lab, "good", signed=False)
        give_image(Playground(lab), built)
        yield Stage(Playground(lab), built)


@pytest.fixture
def old(stage: Stage) -> Stage:
    """The image of the build runs, and a job on one node."""
    path = f"/var/lib/sms/images/{stage.built.key}.sif"
    if stage.play.instances() and stage.key() != stage.built.key:
        stage.play.sms("-q", "stop")
    stage.play.sms("-q", "start", "--image", path)
    demo.wait_for("nodes", lambda: "yes" if stage.play.host("node1").works("scontrol", "ping") else "")
    if "RUNNING" not in stage.jobs().values():
        stage.submit("--wrap=sleep 3000")
        demo.wait_for("the job", lambda: "yes" if "RUNNING" in stage.jobs().values() else "")
    return stage


def running(jobs: dict[str, str]) -> dict[str, str]:
    return {job: state for job, state in jobs.items() if state == "RUNNING"}


def test_jobs_run_across_an_upgrade_and_its_undoing(old: Stage) -> None:
    node = old.play.host("node1")
    held = old.submit("--hold", "--wrap=hostname")
    across = old.submit("--wrap=sleep 25; echo across")
    demo.wait_for("the job", lambda: "yes" if old.jobs().get(across) == "RUNNING" else "")
    before = old.jobs()
    done = old.upgrade("--image", old.good)
    assert done["rehearsed"] and not done["same"] and not done["stopped"]
    assert done["outage"]["nat"] < done["outage"]["slurmctld"] == done["outage_s"]
    assert {one["name"] for one in done["away"]} == set(done["outage"])
    assert old.key() == done["after"]["key"] != old.built.key
    assert old.play.sms("exec", "--", "cat", "/opt/sms/variant").text == "good"
    after = old.jobs()
    assert {job: after[job] for job in before if before[job] != "COMPLETED"}.keys() <= after.keys()
    assert after[held] == "PENDING" and after[across] in ("RUNNING", "COMPLETED")
    assert done["kept"] > done["snapshot"] and done["jobs"].endswith("none lost")
    assert old.phase() == "done"
    history = old.play.host("host-a").read("/var/lib/sms/journal/lab.history") or b""
    events = [json.loads(line) for line in history.splitlines()]
    begun = [line["event"] for line in events if line["verb"] == "upgrade"]
    assert begun[begun.index("switching") + 1] == "begun" and begun[-2:] == ["switched", "done"]
    assert_one_instance(old.play)
    assert old.play.host("host-a").run("readlink", "-f", "/var/lib/sms/images/lab.sif").text == done["after"]["path"]

    same = old.upgrade("--image", old.good)
    assert same["same"] and old.phase() == "done"

    undone = old.upgrade("--undo", *QUICK)
    assert old.key() == undone["after"]["key"] == old.built.key
    demo.wait_for("its end", lambda: "yes" if old.jobs().get(across) == "COMPLETED" else "")
    assert "across" in node.run("cat", f"/home/alice/slurm-{across}.out").text
    assert old.jobs()[held] == "PENDING"


def test_a_broken_image_is_stopped_by_the_rehearsal(old: Stage) -> None:
    generation, jobs = old.play.lease()["generation"], running(old.jobs())
    reported = old.play.sms("upgrade", "--image", old.broken, "--wait", "6", ok=None)
    assert (
        reported.status == 3
        and "production was not changed" in reported.stderr.decode()
        and BROKEN in reported.stderr.decode()
    )
    assert old.play.lease()["generation"] == generation and running(old.jobs()) == jobs
    assert old.key() == old.built.key


def test_a_broken_image_goes_by_itself_and_what_was_is_back(old: Stage) -> None:
    jobs, first = running(old.jobs()), first_process(old.play)
    reported = old.play.sms("upgrade", "--image", old.broken, *GIVES_UP, ok=None)
    words = reported.stderr.decode()
    assert reported.status == 5, words
    assert "slurmctld does not answer" in words and "WARNING" in words
    assert first_process(old.play) == first and old.key() == old.built.key
    assert_one_instance(old.play)
    wait_until(lambda: old.play.status()["healthy"], "health")
    assert running(old.jobs()) == jobs and old.phase() == "returned"


@pytest.mark.parametrize(
    ("words", "said", "status"),
    [
        (("--image", "/etc/sms/good-unsigned.sif"), "it is not signed", 3),
        (("--image", "/nowhere.sif"), "there is no image /nowhere.sif", 3),
        (("--with-snapshot",), "requires --undo", 2),
    ],
)
def test_what_is_refused(old: Stage, words: tuple[str, ...], said: str, status: int) -> None:
    reported = old.play.sms("upgrade", *words, *QUICK, ok=None)
    assert reported.status == status and said in reported.stderr.decode()
    assert old.play.status()["healthy"] and old.key() == old.built.key


def test_the_plan_is_printed(old: Stage) -> None:
    steps = "\n".join(json.loads(old.play.sms("-q", "upgrade", "-n", "--json").stdout))
    assert "second instance" in steps and "predicted outage at most 0." in steps and "1 running" in steps


KILLED = (
    pytest.param("stop the services", "good", "upgrade", marks=pytest.mark.full),
    # Of the stopped overlay: it is the second one that is waited for.
    pytest.param("commit the snapshot", "good", "upgrade", marks=pytest.mark.full),
    pytest.param("seed the overlay", "good", "upgrade", marks=pytest.mark.full),
    ("start the instance", "good", "upgrade"),
    pytest.param("start the instance", "good", "start", marks=pytest.mark.full),
    pytest.param("write the overlay", "broken", "upgrade", marks=pytest.mark.full),  # during the rollback
)


@pytest.mark.parametrize(("step", "image", "verb"), KILLED)
def test_a_killed_one_resumes(old: Stage, step: str, image: str, verb: str) -> None:
    jobs = running(old.jobs())
    process = begin(old.play, "upgrade", "--image", f"/etc/sms/{image}.sif", *(QUICK if image == "good" else GIVES_UP))
    if step != "write the overlay":
        wait_for_step(process, "stop the services")
    if step != "stop the services":
        wait_for_step(process, step)
    kill_sms(process.pid)
    process.communicate()
    if verb == "start":
        # Whichever image goes with the overlay as it is.
        old.play.sms("-q", "start")
        assert old.play.status()["healthy"] and running(old.jobs()) == jobs
    old.play.sms("-q", "upgrade", "--image", old.good, *QUICK)
    assert old.play.instances() == ["sms-lab"] and len(old.play.loops()) == 1
    assert old.play.status()["healthy"] and old.key() != old.built.key and old.phase() == "done"
    assert running(old.jobs()) == jobs


def test_back_to_the_state_of_before(old: Stage) -> None:
    old.upgrade("--image", old.good, *QUICK)
    came = old.submit("--hold", "--wrap=hostname")
    reported = old.play.sms("upgrade", "--undo", "--with-snapshot", *QUICK, ok=None)
    assert reported.status == 3 and came in reported.stderr.decode()
    done = old.upgrade("--undo", "--with-snapshot", "--force", *QUICK)
    assert old.key() == old.built.key and "as in snapshot" in done["jobs"]
    assert came not in old.jobs() and "RUNNING" in old.jobs().values()
