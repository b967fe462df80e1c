"""`sms overlay drill`: the newest copy in a Borg repository or on a standby host, started beside production."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.operations.lab import demo
from tests.conftest import find_tool
from tests.real.conftest import Playground, give_image
from tests.real.isolated import assert_nothing_left, production
from tests.real.labs import build_image, fresh_lab
from tests.real.processes import begin, kill_sms, wait_for_step

pytestmark = pytest.mark.real

NAME = "t-drill"
SETTLED_S = 12
"""Seconds after which the controller has certainly saved a job."""
FOUND = "snapshots at borg"
CHECKED = "borg check of the repository"
STARTED = "the image starts on it; every service answers"
ISOLATED = "no way out of its networks"
SAME = "the controller knows the same jobs"
PRODUCTION = "it knows the jobs of production that are older than the snapshot"


@pytest.fixture(scope="module")
def stage() -> Iterator[Playground]:
    """A running services container, two jobs, and a snapshot in a Borg repository on host-b and in its store."""
    find_tool("borg")
    with fresh_lab(NAME, 1) as lab:
        stage = Playground(lab)
        give_image(stage, build_image(lab))
        (lab.etc / "keys" / "borg.pass").write_text("lab\n")
        (lab.etc / "keys" / "borg.pass").chmod(0o600)
        stage.sms("-q", "start")
        node = stage.host("node1")
        demo.wait_idle(node, 1)
        demo.as_alice(node, "sbatch", "--parsable", "--nodes=1", "--wrap=sleep 3000")
        demo.as_alice(node, "sbatch", "--parsable", "--hold", "--array=1-3", "--wrap=true")
        time.sleep(SETTLED_S)
        stage.sms("-q", "overlay", "snapshot")
        stage.sms("-q", "--site", site(stage), "overlay", "push")
        yield stage


def site(stage: Playground) -> str:
    def change(document: dict[str, Any]) -> None:
        borg = {
            "repository": "ssh://root@host-b/var/lib/sms/repo",
            "passphrase": "keys/borg.pass",
            "ssh_key": "keys/id_ed25519",
            "known_hosts": "known_hosts",
        }
        document["snapshots"] = {"borg": borg, "standby": ["host-a", "host-b"]}

    return stage.variant("drill.yaml", change)


def drill(stage: Playground, *words: str, ok: tuple[int, ...] = (0,)) -> dict[str, Any]:
    told = stage.sms("-q", "--site", site(stage), "overlay", "drill", "--json", *words, ok=ok)
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def seen(done: dict[str, Any]) -> dict[str, str]:
    return {check["what"]: check["seen"] for check in done["checks"]}


def test_the_copy_in_the_repository_is_started_and_its_jobs_compared(stage: Playground, tmp_path: Path) -> None:
    before, sockets = production(stage), munge_socket(stage)
    capture = tmp_path / "production.pcap"
    with demo.listening(stage.lab, capture):
        done = drill(stage)
    assert done["ok"], done["checks"]
    checks = seen(done)
    assert list(checks)[:3] == [CHECKED, FOUND, "snapshots at host-b"]
    assert "ssh://root@host-b/var/lib/sms/repo: 1 archives" in checks[CHECKED]
    assert "slurmctld" in checks[STARTED] and "none to this machine's" in checks[ISOLATED]
    assert "2 batch jobs of the snapshot, none lost" in checks[SAME]
    assert checks[PRODUCTION] == "2 jobs, none missing"
    assert (done["source"], done["snapshot"], done["production"]) == ("borg", 1, "host-a")
    assert done["name"].startswith("sms-lab-") and 0 < done["age_s"] < 3600
    assert any("was never exported" in note for note in done["notes"])
    assert (production(stage), munge_socket(stage)) == (before, sockets)
    assert b"rehearsal-outside" not in capture.read_bytes()
    assert_nothing_left(stage)


def munge_socket(stage: Playground) -> str:
    """Processes and sockets of munge on the host, those in its instances too, and who has the host's lock."""
    script = "pgrep -x munged | sort; find /run/munge -type s -exec stat -c '%i %n' {} + 2>/dev/null; ls /run/sms"
    return stage.host("host-a").run("sh", "-c", script, ok=None).text


def test_a_killed_one_is_cleaned_up(stage: Playground) -> None:
    """As the timer's second command does."""
    before = production(stage)
    process = begin(stage, "--site", site(stage), "overlay", "drill", "--from", "borg")
    wait_for_step(process, "start the instance")
    kill_sms(process.pid)
    process.communicate()
    left = stage.host("host-a").run("ls", "/var/lib/sms/rehearsals/lab").text
    assert left.startswith("rh-")
    words = ("-q", "--site", site(stage), "overlay", "drill", "--down", "--json")
    assert json.loads(stage.sms(*words).stdout) == [left]
    assert json.loads(stage.sms(*words).stdout) == []
    assert production(stage) == before
    assert_nothing_left(stage)


@pytest.mark.full
def test_from_a_standby_host_and_what_is_refused(stage: Playground) -> None:
    done = drill(stage, "--from", "host-b")
    assert done["ok"] and done["source"] == "host-b" and CHECKED not in seen(done), done
    steps = json.loads(stage.sms("-q", "--site", site(stage), "overlay", "drill", "-n", "--json").stdout)
    assert any("fetch snapshot 1 from borg" in step for step in steps)
    told = stage.sms("--site", site(stage), "overlay", "drill", "--from", "host-a", ok=None)
    assert told.status == 3 and b"on host-a already" in told.stderr
    told = stage.sms("overlay", "drill", ok=None)
    assert told.status == 3 and b"no push target configured" in told.stderr
    told = stage.sms("--site", site(stage), "overlay", "drill", "9", ok=(4,))
    assert "has no snapshot 9" in told.text.replace("\n", " ")
    assert_nothing_left(stage)


@pytest.mark.full
def test_damage_and_a_target_that_is_off_are_failures_which_the_schedule_reports(stage: Playground) -> None:
    there = stage.lab.layout.disk / "host-b"
    segment = max((there / "repo" / "data").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    data = bytearray(segment.read_bytes())
    for at in range(len(data) // 2, len(data) // 2 + 4096):
        data[at] ^= 255
    segment.write_bytes(data)
    done = drill(stage, "--from", "borg", ok=(4,))
    failed = [check["what"] for check in done["checks"] if not check["ok"]]
    assert failed == [CHECKED, "it is fetched and restored"], done["checks"]
    (there / "snapshots").rename(there / "snapshots.off")
    stage.sms("-q", "--site", site(stage), "overlay", "schedule", "install")
    try:
        stage.sms("-q", "--site", site(stage), "overlay", "drill", "--scheduled", ok=(1,))
        record = json.loads(stage.host("host-a").read("/var/lib/sms/snapshots/lab/drill.json") or b"")
        assert record["ok"] is False and "is damaged" in record["error"]
        assert "snapshots at host-b" in record["error"]
        assert record["mailed"] is not None
        assert any("the last restore drill failed" in warning for warning in stage.status()["warnings"])
    finally:
        (there / "snapshots.off").rename(there / "snapshots")
        stage.sms("-q", "overlay", "schedule", "remove")
    assert_nothing_left(stage)
