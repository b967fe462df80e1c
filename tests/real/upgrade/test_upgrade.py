"""`sms upgrade`: another image, the same jobs; rolled back automatically when the image fails.

A second instance takes over, as in `sms apply`; where that is not possible, the container is stopped and started.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from appliance.host.base import Result
from appliance.operations.image.build import Built
from appliance.operations.lab import demo
from tests.real.conftest import Playground, give_image
from tests.real.images import BROKEN, make_variant
from tests.real.labs import build_image, fresh_lab
from tests.real.outage import watching
from tests.real.power import power_off, power_on
from tests.real.processes import begin, kill_sms, wait_for_step
from tests.real.services.test_apply_switch import KILL_AGENTS, assert_one_instance, first_process
from tests.waiting import wait_until

pytestmark = pytest.mark.real

NAME = "t-upgrade"
FULL = pytest.mark.full
QUICK = ("--no-rehearsal",)
GIVES_UP = (*QUICK, "--wait", "12")
"""For an image that does not do: what was has as much time to come back."""


@dataclass(frozen=True)
class Stage:
    """A lab, the image that it was built with, and its variants' paths; the site file in use."""

    play: Playground
    built: Built
    site: str = "/etc/sms/sms.yaml"
    good: str = "/etc/sms/good.sif"
    broken: str = "/etc/sms/broken.sif"

    def sms(self, *words: str, ok: tuple[int, ...] | None = (0,)) -> Result:
        return self.play.sms("--site", self.site, *words, ok=ok)

    def upgrade(self, *words: str, ok: tuple[int, ...] = (0,)) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.sms("-q", "upgrade", *words, "--json", ok=ok).stdout)
        return found

    def begin(self, *words: str) -> subprocess.Popen[bytes]:
        return begin(self.play, "--site", self.site, "upgrade", *words)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.sms("status", "--json", ok=(0, 4)).stdout)
        return found

    def key(self) -> str:
        """The key of what runs."""
        return str(self.status()["image"].get("key"))

    def inode(self) -> str:
        return self.play.host("host-a").run("stat", "-c", "%i", "/var/lib/sms/overlays/lab.img").text

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
    return begin_with_old(stage)


@pytest.fixture
def shared(stage: Stage) -> Iterator[Stage]:
    """As ``old``, on an overlay that both hosts share: no second instance."""

    def change(document: dict[str, Any]) -> None:
        document["overlay"]["directory"] = "/srv/shared/overlays"

    if stage.play.instances():
        stage.sms("-q", "stop")
    other = begin_with_old(replace(stage, site=stage.play.variant("shared.yaml", change)))
    yield other
    other.sms("-q", "stop")


def begin_with_old(stage: Stage) -> Stage:
    path = f"/var/lib/sms/images/{stage.built.key}.sif"
    if stage.play.instances() and stage.key() != stage.built.key:
        stage.sms("-q", "stop")
    stage.sms("-q", "start", "--image", path)
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
    assert old.sms("exec", "--", "cat", "/opt/sms/variant").text == "good"
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
    reported = old.sms("upgrade", "--image", old.broken, "--wait", "12", ok=None)
    assert (
        reported.status == 3
        and "production was not changed" in reported.stderr.decode()
        and BROKEN in reported.stderr.decode()
    )
    assert old.play.lease()["generation"] == generation and running(old.jobs()) == jobs
    assert old.key() == old.built.key


@pytest.mark.full
def test_a_broken_image_goes_by_itself_and_what_was_is_back(old: Stage) -> None:
    """slurmctld fails in the second instance: for a node, the first one's NAT does not stop meanwhile."""
    jobs, first = running(old.jobs()), first_process(old.play)
    with watching(old.play.host("node1"), old.play.host("outside")) as seen:
        reported = old.sms("upgrade", "--image", old.broken, *GIVES_UP, ok=None)
    assert seen.away["nat"] < seen.away["slurmctld"] / 4
    words = reported.stderr.decode()
    assert reported.status == 5, words
    assert "slurmctld does not answer" in words and "WARNING" in words
    assert first_process(old.play) == first and old.key() == old.built.key
    assert_one_instance(old.play)
    wait_until(lambda: old.status()["healthy"], "health")
    assert running(old.jobs()) == jobs and old.phase() == "returned"


REFUSED = [
    (("--image", "/etc/sms/good-unsigned.sif"), "it is not signed", 3),
    (("--image", "/nowhere.sif"), "there is no image /nowhere.sif", 3),
    (("--with-snapshot",), "requires --undo", 2),
]


def test_what_is_refused(old: Stage) -> None:
    for words, said, status in REFUSED:
        reported = old.sms("upgrade", *words, *QUICK, ok=None)
        assert reported.status == status and said in reported.stderr.decode()
        assert old.status()["healthy"] and old.key() == old.built.key


def test_the_plan_is_printed(old: Stage) -> None:
    steps = "\n".join(json.loads(old.sms("-q", "upgrade", "-n", "--json").stdout))
    assert "second instance" in steps and "predicted outage at most 0." in steps and "1 running" in steps


@pytest.mark.full
def test_apply_notes_a_current_image_that_does_not_run(old: Stage) -> None:
    """As after `sms build`; it goes on with the running one."""
    host, images = old.play.host("host-a"), "/var/lib/sms/images"
    assert json.loads(old.sms("-q", "apply", "-n", "--json").stdout)["newer"] == ""
    host.run("cp", old.good, f"{images}/built.sif")
    host.run("ln", "-sfn", "built.sif", f"{images}/lab.sif")
    for words in (("-n",), ()):
        newer = json.loads(old.sms("-q", "apply", *words, "--json").stdout)["newer"]
        assert f"`sms upgrade --image {images}/built.sif`" in newer and old.key() == old.built.key
    host.run("ln", "-sfn", f"{old.built.key}.sif", f"{images}/lab.sif")
    host.run("rm", f"{images}/built.sif")


SWITCH_STEPS = (
    "copy the overlay",
    "stop stateful services",
    "start isolated",
    "switch the addresses",
    "probe the way out",
    "probe every service",
    "clean up on",
    "check every job",
)


def assert_image_of_overlay(stage: Stage, inode: str) -> None:
    """The old image runs on the overlay of before only; the new one on the copy."""
    assert (stage.inode() == inode) == (stage.key() == stage.built.key)


@FULL
@pytest.mark.parametrize("agents", [False, True])
@pytest.mark.parametrize("step", SWITCH_STEPS)
def test_a_killed_switch_resumes(old: Stage, step: str, agents: bool) -> None:
    """`sms start` serves with the image of the overlay, and loses no job; `sms upgrade` completes it."""
    jobs, inode = running(old.jobs()), old.inode()
    process = old.begin("--image", old.good, *QUICK)
    wait_for_step(process, step)
    kill_sms(process.pid)
    if agents:
        old.play.host("host-a").run("sh", "-c", KILL_AGENTS, ok=None)
    process.communicate()
    old.sms("-q", "start")
    assert_one_instance(old.play)
    assert_image_of_overlay(old, inode)
    held = old.submit("--hold", "--wrap=hostname")
    done = old.upgrade("--image", old.good, *QUICK)
    assert done["after"]["key"] == old.key() != old.built.key and old.phase() == "done"
    assert_one_instance(old.play)
    assert_image_of_overlay(old, inode)
    assert running(old.jobs()) == jobs and old.jobs()[held] == "PENDING"
    wait_until(lambda: old.status()["healthy"], "health")


@pytest.mark.full
@pytest.mark.parametrize("step", SWITCH_STEPS)
def test_a_power_failure_in_a_switch(old: Stage, step: str) -> None:
    """At boot the image of the overlay is started; the next upgrade completes it or begins."""
    jobs, inode = running(old.jobs()), old.inode()
    process = old.begin("--image", old.good, *QUICK)
    wait_for_step(process, step)
    power_off(old.play.lab, "host-a")
    process.kill()
    process.communicate()
    power_on(old.play.lab, "host-a")
    old.sms("-q", "start", "--boot")
    assert_one_instance(old.play)
    assert_image_of_overlay(old, inode)
    demo.wait_for("nodes", lambda: "yes" if old.play.host("node1").works("scontrol", "ping") else "")
    held = old.submit("--hold", "--wrap=hostname")
    old.upgrade("--image", old.good, *QUICK)
    assert old.key() != old.built.key and old.phase() == "done"
    assert_image_of_overlay(old, inode)
    assert old.jobs()[held] == "PENDING" and running(old.jobs()) == jobs


@pytest.mark.full
def test_a_new_image_that_does_not_start_any_more(old: Stage) -> None:
    """After a power failure: the old one is not started on the new one's overlay, unless that is restored, too."""
    process = old.begin("--image", old.good, *QUICK)
    wait_for_step(process, "probe every service")
    power_off(old.play.lab, "host-a")
    process.kill()
    process.communicate()
    power_on(old.play.lab, "host-a")
    host = old.play.host("host-a")
    recorded = json.loads(host.read("/var/lib/sms/journal/lab.upgrade.json") or b"{}")
    assert recorded["phase"] == "switching"
    host.run("mv", recorded["after"]["path"], "/var/lib/sms/images/gone")
    old.sms("-q", "start", "--boot", ok=(3,))
    failed = old.sms("-q", "upgrade", "--image", old.good, *QUICK, ok=(3,)).stderr.decode()
    assert "--undo --with-snapshot --force" in failed and old.play.instances() == []
    words = ("--undo", "--with-snapshot", *QUICK)
    old.sms("-q", "upgrade", *words, ok=(3,))
    done = old.upgrade(*words, "--force")
    assert old.key() == done["after"]["key"] == old.built.key and old.phase() == "returned"
    assert "RUNNING" in old.jobs().values()
    host.run("rm", "/var/lib/sms/images/gone")


# Stop and start, where a second instance is not possible

STOPPED = (
    ("stop the services", "good", "upgrade"),
    ("commit the snapshot", "good", "upgrade"),  # of the stopped overlay: it is the second one that is waited for
    ("seed the overlay", "good", "upgrade"),
    ("start the instance", "good", "upgrade"),
    ("start the instance", "good", "start"),
    ("write the overlay", "broken", "upgrade"),  # during the rollback
)


@pytest.mark.full
def test_a_shared_overlay_is_stopped_and_started(shared: Stage) -> None:
    jobs = running(shared.jobs())
    steps = "\n".join(json.loads(shared.sms("-q", "upgrade", "-n", "--json").stdout))
    assert "shares its overlay" in steps and "predicted outage: " in steps
    done = shared.upgrade("--image", shared.good, *QUICK)
    assert "shares its overlay" in done["stopped"] and done["outage"] == {}
    assert done["outage_s"] > sum(done["parts"].values()) * 0.5
    assert shared.key() == done["after"]["key"] and running(shared.jobs()) == jobs
    undone = shared.upgrade("--undo", *QUICK)
    assert undone["stopped"] and shared.key() == shared.built.key and running(shared.jobs()) == jobs
    words = shared.sms("upgrade", "--image", shared.broken, *GIVES_UP, ok=(5,)).stderr.decode()
    assert BROKEN in words and "runs again, every service answers" in words
    assert shared.key() == shared.built.key and running(shared.jobs()) == jobs and shared.phase() == "returned"
    listed = json.loads(shared.sms("overlay", "list", "--json").stdout)
    assert any(one["reason"].endswith(", stopped") for one in listed["snapshots"])


@pytest.mark.full
@pytest.mark.parametrize(("step", "image", "verb"), STOPPED)
def test_a_killed_stop_and_start_resumes(shared: Stage, step: str, image: str, verb: str) -> None:
    jobs = running(shared.jobs())
    process = shared.begin("--image", f"/etc/sms/{image}.sif", *(QUICK if image == "good" else GIVES_UP))
    if step != "write the overlay":
        wait_for_step(process, "stop the services")
    if step != "stop the services":
        wait_for_step(process, step)
    kill_sms(process.pid)
    process.communicate()
    if verb == "start":
        # Whichever image goes with the overlay as it is.
        shared.sms("-q", "start")
        assert shared.status()["healthy"] and running(shared.jobs()) == jobs
    shared.sms("-q", "upgrade", "--image", shared.good, *QUICK)
    assert shared.play.instances() == ["sms-lab"]
    assert shared.status()["healthy"] and shared.key() != shared.built.key and shared.phase() == "done"
    assert running(shared.jobs()) == jobs


@pytest.mark.full
def test_back_to_the_state_of_before(old: Stage) -> None:
    """The snapshot replaces the overlay: the container is stopped for it."""
    old.upgrade("--image", old.good, *QUICK)
    came = old.submit("--hold", "--wrap=hostname")
    reported = old.sms("upgrade", "--undo", "--with-snapshot", *QUICK, ok=None)
    assert reported.status == 3 and came in reported.stderr.decode()
    done = old.upgrade("--undo", "--with-snapshot", "--force", *QUICK)
    assert old.key() == old.built.key and "as in snapshot" in done["jobs"] and done["stopped"]
    assert came not in old.jobs() and "RUNNING" in old.jobs().values()
