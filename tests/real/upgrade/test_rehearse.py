"""`sms rehearse`, `sms overlay drill`: production's own state beside it, and nothing of it is felt there."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.host.local import Local
from appliance.lab import Layout, render
from appliance.lab.down import loops_below
from appliance.lab.layout import LabHost, Plan
from appliance.operations.lab import demo
from appliance.operations.site.ca import make_ca
from tests.conftest import find_tool
from tests.real.conftest import Playground, give_image
from tests.real.images import BROKEN, make_variant
from tests.real.labs import build_image, fresh_lab
from tests.real.processes import begin, kill_sms, sms_pids, wait_for_step

pytestmark = pytest.mark.real

NAME = "t-rehearse"
SETTLED_S = 12
"""Seconds after which the controller has certainly saved a job, and a rehearsal checks for it."""


@pytest.fixture(scope="module")
def stage() -> Iterator[Playground]:
    """A lab with a running appliance, a job that runs, one that waits for more nodes than there are, and a snapshot."""
    with fresh_lab(NAME, 2) as lab:
        stage = Playground(lab)
        built = build_image(lab)
        give_image(stage, built)
        stage.sms("-q", "start")
        node = stage.host("node1")
        demo.wait_idle(node, 2)
        demo.as_alice(node, "sbatch", "--parsable", "--nodes=1", "--wrap=sleep 3000")
        demo.as_alice(node, "sbatch", "--parsable", "--nodes=2", "--wrap=touch /home/alice/was-run")
        submitted = time.monotonic()
        for name in ("good", "broken"):
            make_variant(built, lab, name)
        make_variant(built, lab, "good", signed=False)
        time.sleep(max(0, submitted + SETTLED_S - time.monotonic()))
        stage.sms("-q", "overlay", "snapshot")
        yield stage


ASK = """
import socket, sys
question = b"\\0\\1\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\4mail\\4site\\0\\0\\1\\0\\1"
for address in sys.argv[1:]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(5)
        asking.connect((address, 53))  # takes no answer of another address
        asking.send(question)
        print(socket.inet_ntoa(asking.recv(512)[-4:]))
"""


def rehearse(stage: Playground, *words: str, on: str = "host-a", ok: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """`sms rehearse --json` where mirrors are reached by a proxy, which a rehearsal does not have."""
    proxy = ("env", "http_proxy=http://192.0.2.1:3128")
    done = stage.host(on).run(*proxy, "sms", "-q", "rehearse", *words, "--json", ok=ok, timeout=240)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def assert_nothing_left(stage: Playground, on: str = "host-a") -> None:
    """No folder, no namespace, no loop device of a rehearsal."""
    script = "ls -A /var/lib/sms/rehearsals/lab /run/sms-lab /run/netns 2>/dev/null | grep rh-"
    assert stage.host(on).run("sh", "-c", script, ok=None).text == ""
    # By inode: `losetup` lists the devices of other labs as well.
    assert loops_below(stage.lab.layout.disk / on / "rehearsals") == []
    demo.wait_for("devices on files that are gone", lambda: "" if gone_loops() else "none", 30)


def gone_loops() -> list[str]:
    """Loop devices on a removed file of a rehearsal, of this lab or another."""
    listed = Local().run("losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE").text.splitlines()
    return [line for line in listed if "rehearsals" in line and line.endswith("(deleted)")]


def production(stage: Playground) -> tuple[Any, ...]:
    """What a rehearsal must leave as it is."""
    state = "/var/lib/sms"
    script = 'stat -c %i "$1.img" && cat "$1.lease" "$2/journal/lab.json" && readlink "$2/images/lab.sif"'
    files = stage.host("host-a").run("sh", "-c", script, "look", f"{state}/overlays/lab", state).text
    jobs = stage.host("node1").run("squeue", "--noheader", "--format=%i %T %N").text
    return files, stage.instances(), len(stage.loops()), jobs


def test_a_good_image_does_and_production_feels_nothing(stage: Playground, tmp_path: Path) -> None:
    before = production(stage)
    capture = tmp_path / "production.pcap"
    with demo.listening(stage.lab, capture):
        done = rehearse(stage, "/etc/sms/good.sif")
        word = f"production-{time.time_ns()}"
        stage.host("node2").run("logger", word)
        demo.wait_for("the line", lambda: "yes" if word.encode() in capture.read_bytes() else "")
    assert done["ok"], done["checks"]
    seen = {check["what"]: check["seen"] for check in done["checks"]}
    assert "2 batch jobs of the snapshot, none lost" in seen["the controller knows the same jobs"]
    assert "COMPLETED, a step on node1, node2" in seen["a Slurm job from a compute node"]
    assert "outside sees 10.78.0.2" in seen["the outside, through the container's NAT"]
    assert set(seen) >= {
        "its mail arrives outside",
        "no way out of its networks",
        "a node's clock follows the container",
    }
    assert b"sms-rehearsal" not in capture.read_bytes(), "not one line of it was seen in production's network"
    assert production(stage) == before
    assert not stage.host("outside").works("grep", "-q", "sms-rehearsal", "/var/log/remote.log")
    assert_nothing_left(stage)


def test_a_broken_service_is_reported_with_its_last_lines(stage: Playground) -> None:
    before = production(stage)
    done = rehearse(stage, "/etc/sms/broken.sif", "--nodes", "0", "--wait", "15", ok=(4,))
    failed = [check for check in done["checks"] if not check["ok"]]
    assert [check["what"] for check in failed] == ["the image starts on it; every service answers"]
    assert "slurmctld does not answer" in failed[0]["seen"] and BROKEN in failed[0]["seen"]
    assert production(stage) == before
    assert_nothing_left(stage)


@pytest.mark.parametrize(
    ("words", "said", "status"),
    [
        (("/etc/sms/good-unsigned.sif",), "it is not signed", 3),
        (("/etc/sms/sms.yaml",), "cannot be trusted", 3),
        (("0123",), "there is no image 0123", 3),
        (("--snapshot", "77"), "there is no snapshot 77", 3),
        (("--nodes", "17"), "invalid number of nodes 17", 2),
        (("--user", "nobody-here"), "no user nobody-here", 2),
        (("--host", "host-c"), "no admin host named host-c", 2),
    ],
)
def test_what_is_refused_before_anything_is_made(
    stage: Playground, words: tuple[str, ...], said: str, status: int
) -> None:
    reported = stage.sms("rehearse", *words, ok=None)
    assert reported.status == status and said in reported.stderr.decode()
    assert_nothing_left(stage)


def test_a_dry_run_makes_nothing(stage: Playground) -> None:
    steps = json.loads(stage.sms("-q", "rehearse", "-n", "--json").stdout)
    assert any("node1 (10.77.0.101), node2 (10.77.0.102)" in step for step in steps)
    assert_nothing_left(stage)


@pytest.mark.full
def test_two_at_once_and_one_of_them_is_kept(stage: Playground) -> None:
    other = begin(stage, "-q", "rehearse", "--json", "--nodes", "1", "--user", "alice")
    kept = rehearse(stage, "--keep")
    said, _ = other.communicate()
    one = json.loads(said)
    assert one["ok"] and kept["ok"] and one["name"] != kept["name"] and kept["kept"]
    # Only its own job is run there: that of production still waits.
    jobs = stage.sms(
        "lab", "exec", "--name", kept["name"], "node1", "--", "squeue", "--noheader", "--format=%i %T"
    ).text
    assert {"1 PENDING", "2 PENDING"} == set(jobs.splitlines())
    assert not stage.host("node1").works("test", "-e", "/home/alice/was-run")
    rehearse_again = stage.sms("-q", "rehearse", "-n", "--json")
    assert rehearse_again.status == 0
    assert json.loads(stage.sms("-q", "rehearse", "--down", "--json").stdout) == [kept["name"]]
    assert json.loads(stage.sms("-q", "rehearse", "--down", "--json").stdout) == []
    assert_nothing_left(stage)


KILLED = (
    pytest.param("check the file system", marks=pytest.mark.full),
    pytest.param("start the hosts", marks=pytest.mark.full),
    "start the instance",
)


@pytest.mark.parametrize("step", KILLED)
def test_what_a_killed_one_leaves_the_next_one_clears(stage: Playground, step: str) -> None:
    process = begin(stage, "rehearse", "--nodes", "1")
    wait_for_step(process, step)
    kill_sms(process.pid)
    process.communicate()
    left = stage.host("host-a").run("ls", "/var/lib/sms/rehearsals/lab").text
    assert left.startswith("rh-")
    assert json.loads(stage.sms("-q", "rehearse", "--down", "--json").stdout) == [left]
    assert_nothing_left(stage)


def test_names_are_answered_from_the_address_that_was_queried(tmp_path: Path) -> None:
    outside = LabHost(
        "out", "outside", {"public": "192.0.2.1", "provisioning": "10.1.0.53"}, more=(("lo", "203.0.113.4/32"),)
    )
    layout = Layout("x", 0, Plan(hosts=(outside,), answers={}))
    files = render.host_files(layout, outside, render.Keys(b"", b"", {}), sms="")
    (tmp_path / "names.py").write_bytes(files["lab/names.py"].data)
    (tmp_path / "ask.py").write_text(ASK)
    script = """
        mount -t tmpfs tmpfs /run && ip link set lo up && cd "$1" && shift
        for address; do ip addr add "$address/24" dev lo; done
        python3 names.py & until [ -e /run/names.ready ]; do sleep 0.1; done
        python3 ask.py "$@"
    """
    addresses = ("192.0.2.1", "192.0.2.53", "10.1.0.53", "203.0.113.4")
    text = (
        files["lab/names.py"]
        .data.decode()
        .replace('"192.0.2.1", "10.1.0.53"', '"192.0.2.1", "192.0.2.53", "10.1.0.53"')
    )
    (tmp_path / "names.py").write_text(text)
    isolated = ("unshare", "-n", "-m", "-p", "-f", "--kill-child", "sh", "-c", script, "ask", str(tmp_path))
    assert Local().run(*isolated, *addresses).text.split() == ["192.0.2.1"] * 4


def test_one_that_is_interrupted_leaves_nothing(stage: Playground) -> None:
    process = begin(stage, "rehearse", "--nodes", "1")
    wait_for_step(process, "start the instance")
    for pid in sms_pids(process.pid):
        os.kill(pid, signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert_nothing_left(stage)


@pytest.mark.full
def test_another_machine_rehearses_on_what_it_is_sent_for_a_site_of_large_nodes_and_names(stage: Playground) -> None:
    def change(site: dict[str, Any]) -> None:
        # Many times what this machine has; peers by name, on other ports, far away, and beside the nodes.
        site["slurm"]["nodes"][0] |= {"cpus": 64, "memory_mb": 250_000}
        site["slurm"]["nodes"][0] |= {"extra": "Sockets=2 CoresPerSocket=32 ThreadsPerCore=1"}
        site["networks"]["dns"] = ["10.78.0.53"]
        site |= {"ntp": ["time.example.org"], "syslog_forward": "10.77.0.44:1514"}
        site["mail"]["relay"] = "203.0.113.25:587"

    path = stage.variant("large.yaml", change)
    words = ("--site", path, "-q", "rehearse", "--nodes", "1", "--json")
    done = json.loads(stage.sms(*words, on="host-b", ok=(0, 4)).stdout)
    assert [check for check in done["checks"] if not check["ok"]] == []
    seen = {check["what"]: check["seen"] for check in done["checks"]}
    assert done["host"] == "host-a" and "its mail arrives outside" in seen
    assert "forwarded to 10.77.0.44:1514" in seen["a node's syslog arrives in the container"]
    assert_nothing_left(stage, "host-b")


@pytest.mark.full
def test_without_the_provisioning_vm_all_keeps_running_and_only_polls_reach_for_it(stage: Playground) -> None:
    def change(site: dict[str, Any]) -> None:
        site["provisioning"] = {"address": "10.77.0.99/24", "mac": "02:00:0a:4d:00:63"}

    path = stage.variant("with-vm.yaml", change)
    make_ca(stage.lab.etc / "tls")
    done = json.loads(stage.sms("--site", path, "-q", "rehearse", "--without-vm", "--nodes", "1", "--json").stdout)
    seen = {check["what"]: check["seen"] for check in done["checks"]}
    assert done["ok"], done["checks"]
    polls = "only the container's file synchronisation has tried to reach 10.77.0.99"
    assert polls in seen["nobody needs the provisioning VM"]
    assert "filesync" in seen["the image starts on it; every service answers"]
    assert "COMPLETED" in seen["a Slurm job from a compute node"]
    assert_nothing_left(stage)


CHECKED = "borg check of the repository"
"""A check of a drill, as SAME and PRODUCTION are."""
SAME = "the controller knows the same jobs"
PRODUCTION = "it knows the jobs of production that are older than the snapshot"


@pytest.fixture(scope="module")
def elsewhere(stage: Playground) -> Playground:
    """Its snapshot is in a Borg repository on host-b and in the store there, too."""
    find_tool("borg")
    (stage.lab.etc / "keys" / "borg.pass").write_text("lab\n")
    (stage.lab.etc / "keys" / "borg.pass").chmod(0o600)
    stage.sms("-q", "--site", drill_site(stage), "overlay", "push")
    return stage


def drill_site(stage: Playground) -> str:
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
    reported = stage.sms("-q", "--site", drill_site(stage), "overlay", "drill", "--json", *words, ok=ok)
    found: dict[str, Any] = json.loads(reported.stdout)
    return found


def seen(done: dict[str, Any]) -> dict[str, str]:
    return {check["what"]: check["seen"] for check in done["checks"]}


def test_a_drill_starts_the_copy_in_the_repository_and_compares_its_jobs(elsewhere: Playground, tmp_path: Path) -> None:
    before, sockets = production(elsewhere), munge_socket(elsewhere)
    capture = tmp_path / "production.pcap"
    with demo.listening(elsewhere.lab, capture):
        done = drill(elsewhere)
    assert done["ok"], done["checks"]
    checks = seen(done)
    assert list(checks)[:3] == [CHECKED, "snapshots at borg", "snapshots at host-b"]
    assert "ssh://root@host-b/var/lib/sms/repo: 1 archives" in checks[CHECKED]
    assert "slurmctld" in checks["the image starts on it; every service answers"]
    assert "none to this machine's" in checks["no way out of its networks"]
    assert "2 batch jobs of the snapshot, none lost" in checks[SAME]
    assert checks[PRODUCTION] == "2 jobs, none missing"
    assert (done["source"], done["snapshot"], done["production"]) == ("borg", 1, "host-a")
    assert done["name"].startswith("sms-lab-") and 0 < done["age_s"] < 3600
    assert any("was never exported" in note for note in done["notes"])
    assert (production(elsewhere), munge_socket(elsewhere)) == (before, sockets)
    assert b"rehearsal-outside" not in capture.read_bytes()
    assert_nothing_left(elsewhere)


def munge_socket(stage: Playground) -> str:
    """Processes and sockets of munge on the host, those in its instances too, and who has the host's lock."""
    script = "pgrep -x munged | sort; find /run/munge -type s -exec stat -c '%i %n' {} + 2>/dev/null; ls /run/sms"
    return stage.host("host-a").run("sh", "-c", script, ok=None).text


@pytest.mark.full
def test_a_killed_drill_is_cleaned_up(elsewhere: Playground) -> None:
    """As the timer's second command does."""
    before = production(elsewhere)
    process = begin(elsewhere, "--site", drill_site(elsewhere), "overlay", "drill", "--from", "borg")
    wait_for_step(process, "start the instance")
    kill_sms(process.pid)
    process.communicate()
    left = elsewhere.host("host-a").run("ls", "/var/lib/sms/rehearsals/lab").text
    assert left.startswith("rh-")
    words = ("-q", "--site", drill_site(elsewhere), "overlay", "drill", "--down", "--json")
    assert json.loads(elsewhere.sms(*words).stdout) == [left]
    assert json.loads(elsewhere.sms(*words).stdout) == []
    assert production(elsewhere) == before
    assert_nothing_left(elsewhere)


@pytest.mark.full
def test_a_drill_from_a_standby_host_and_what_is_refused(elsewhere: Playground) -> None:
    done = drill(elsewhere, "--from", "host-b")
    assert done["ok"] and done["source"] == "host-b" and CHECKED not in seen(done), done
    steps = json.loads(elsewhere.sms("-q", "--site", drill_site(elsewhere), "overlay", "drill", "-n", "--json").stdout)
    assert any("fetch snapshot 1 from borg" in step for step in steps)
    reported = elsewhere.sms("--site", drill_site(elsewhere), "overlay", "drill", "--from", "host-a", ok=None)
    assert reported.status == 3 and b"on host-a already" in reported.stderr
    reported = elsewhere.sms("overlay", "drill", ok=None)
    assert reported.status == 3 and b"no push target configured" in reported.stderr
    reported = elsewhere.sms("--site", drill_site(elsewhere), "overlay", "drill", "9", ok=(4,))
    assert "has no snapshot 9" in reported.text.replace("\n", " ")
    assert_nothing_left(elsewhere)


@pytest.mark.full
def test_damage_and_a_target_that_is_off_fail_a_drill_which_the_schedule_reports(elsewhere: Playground) -> None:
    there = elsewhere.lab.layout.disk / "host-b"
    segment = max((there / "repo" / "data").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    data = bytearray(segment.read_bytes())
    for at in range(len(data) // 2, len(data) // 2 + 4096):
        data[at] ^= 255
    segment.write_bytes(data)
    done = drill(elsewhere, "--from", "borg", ok=(4,))
    failed = [check["what"] for check in done["checks"] if not check["ok"]]
    assert failed == [CHECKED, "it is fetched and restored"], done["checks"]
    (there / "snapshots").rename(there / "snapshots.off")
    elsewhere.sms("-q", "--site", drill_site(elsewhere), "overlay", "schedule", "install")
    try:
        elsewhere.sms("-q", "--site", drill_site(elsewhere), "overlay", "drill", "--scheduled", ok=(1,))
        record = json.loads(elsewhere.host("host-a").read("/var/lib/sms/snapshots/lab/drill.json") or b"")
        assert record["ok"] is False and "is damaged" in record["error"]
        assert "snapshots at host-b" in record["error"]
        assert record["mailed"] is not None
        assert any("the last restore drill failed" in warning for warning in elsewhere.status()["warnings"])
    finally:
        (there / "snapshots.off").rename(there / "snapshots")
        elsewhere.sms("-q", "overlay", "schedule", "remove")
    assert_nothing_left(elsewhere)
