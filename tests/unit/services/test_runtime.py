"""The programs inside the container, run unchanged in a temporary root."""

from __future__ import annotations

import ast
import grp
import json
import os
import re
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from appliance.tools.python import OLDEST
from tests.unit.services.conftest import (
    RUNTIME,
    load,
    needs_root,
    probe_of,
    run_program,
    write_services,
)

PROGRAMS = [path for path in sorted(RUNTIME.iterdir()) if path.is_file() and b"python3" in path.read_bytes()[:40]]
MODULES = sorted(RUNTIME.glob("*.py"))

SUPERVISE = {"sms-supervise", "smsrt.py", "smsfiles.py", "smsstart.py"}
ON_NODES = {
    "sms-run",
    "sms-probe",
    "sms-lease",
    "smslease.py",
    "smsserve.py",
    "smsstart.py",
    "smssync.py",
    "smstask.py",
}
"""Of an engine that starts slurmd and munged on compute nodes."""


@pytest.mark.parametrize("path", [*PROGRAMS, *MODULES], ids=lambda path: path.name)
def test_runs_on_the_oldest_python_of_a_base(path: Path) -> None:
    """Leap and SLE 15 have python311; their supervisor uses Python 3.6, and so do their nodes."""
    ast.parse(path.read_text(), feature_version=(3, 6) if path.name in SUPERVISE | ON_NODES else OLDEST)


def test_all_programs_are_checked() -> None:
    assert {path.name for path in PROGRAMS} >= {"sms-place", "sms-filesync", "sms-run", "sms-probe"}
    assert all(path.stat().st_mode & stat.S_IXUSR for path in PROGRAMS)


def test_back_off(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sms_run = load("sms-run", monkeypatch)
    clock = 1e9
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds
        slept.append(seconds)

    def run(lasts_s: float, *, waits_s: float = 0, prepares_s: float = 0) -> list[float]:
        """Run the service once; return the delay before it."""
        nonlocal clock
        slept.clear()
        failures = sms_run.count_failures("it")
        clock += waits_s
        sms_run.back_off("it", failures)
        clock += prepares_s
        sms_run.note_start("it", failures)
        clock += lasts_s
        return list(slept)

    monkeypatch.setattr(sms_run.time, "sleep", sleep)
    monkeypatch.setattr(sms_run.time, "time", lambda: clock)
    assert [run(1) for _ in range(9)] == [[], [0.5], [1], [2], [4], [8], [16], [30.0], [30.0]]
    assert run(9.9) == [30.0]
    assert run(10) == [30.0], "ran for 9.9 s"
    assert run(1, waits_s=60, prepares_s=60) == [], "ran for 10 s"
    assert run(1, waits_s=60, prepares_s=60) == [0.5], "what it waited for is not what it ran"
    assert run(1, waits_s=60, prepares_s=60) == [1]
    (root / "run/sms/it.starts").write_text('{"at"')
    assert run(1) == [], "a note that is broken is none"


def test_sms_run_waits_sets_up_and_executes(root: Path) -> None:
    ready = root / "ready"
    write_services(
        root,
        base={"probe": probe_of("test", "-e", str(ready))},
        it={
            "needs": ["base"],
            "setup": f"echo prepared >>{root}/log",
            "run": ["sh", "-c", f"echo ran >>{root}/log"],
        },
    )
    threading.Timer(0.4, ready.touch).start()
    began = time.monotonic()
    assert run_program("sms-run", root, "it").returncode == 0
    assert time.monotonic() - began > 0.3
    assert (root / "log").read_text().split() == ["prepared", "ran"]


def test_sms_run_waits_while_the_service_is_held(root: Path) -> None:
    """`sms adopt` holds the controller until the last of its state is there: it must not even be prepared before."""
    held = root / "etc/sms/hold/it"
    held.parent.mkdir(parents=True)
    held.touch()
    write_services(root, it={"setup": f"test ! -e {held}", "run": ["touch", str(root / "ran")]})
    argv = [sys.executable, str(RUNTIME / "sms-run"), "it"]
    environment = {**os.environ, "SMS_ROOT": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout and b"it is held by" in process.stdout.readline()
        assert not (root / "ran").exists()
        held.unlink()
        assert process.wait(60) == 0
    assert (root / "ran").exists()


def test_sms_run_does_not_start_after_failed_setup(root: Path) -> None:
    write_services(root, it={"setup": "echo no room >&2\nfalse\ntrue", "run": ["touch", str(root / "ran")]})
    done = run_program("sms-run", root, "it")
    assert done.returncode == 1
    assert b"the preparation of it ended with status 1" in done.stdout
    assert not (root / "ran").exists()
    assert b"next try in 0.5 s" in run_program("sms-run", root, "it").stdout


def test_sms_run_reports_an_unclean_stop_to_setup(root: Path) -> None:
    mark = root / "var/lib/it/.running"
    write_services(
        root,
        it={
            "running": "/var/lib/it/.running",
            "setup": f"echo ${{SMS_UNCLEAN:-clean}} >>{root}/log; [ ! -e {root}/broken ]",
            "run": ["sh", "-c", f"[ -e {mark} ] && echo marked >>{root}/log"],
        },
    )
    (root / "broken").touch()
    assert run_program("sms-run", root, "it").returncode == 1
    assert not mark.exists(), "it has not run"
    (root / "broken").unlink()
    assert run_program("sms-run", root, "it").returncode == 0
    assert run_program("sms-run", root, "it").returncode == 0
    assert (root / "log").read_text().split() == ["clean", "clean", "marked", "1", "marked"]


def load_supervise(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program with an empty supervisor: it is installed in images only."""
    for name in ("supervisor", *(f"supervisor.{each}" for each in ("dispatchers", "poller", "process", "supervisord"))):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules["supervisor"], name.rpartition(".")[2], sys.modules[name], raising=False)
    monkeypatch.setattr(sys.modules["supervisor.poller"], "Poller", object, raising=False)
    return load("sms-supervise", monkeypatch)


def test_lines_of_logs_have_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that arrive in parts; one that has it already stays as it is, and so do bytes of any kind."""
    written: list[bytes] = []
    timed = load_supervise(monkeypatch).timed(lambda _, data: written.append(data))
    dispatcher = SimpleNamespace()
    parts = [
        *(b"slurmctld: a\nmunged: b", b"ut long\n", b"", b"\n2026-11-24T12:28:20Z chronyd\n", b"Nov  4 12:28:20 x\n"),
        *(b"[2026-11-24 12:28:20] x\n\xff\r\x0bc\n", b"Not 12\n"),
    ]
    for part in parts:
        timed(dispatcher, part)
    now = rb"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "
    expected = [
        *(now + b"slurmctld: a", now + b"munged: but long", b"", b"2026-11-24T12:28:20Z chronyd", b"Nov  4 12:28:20 x"),
        *(rb"\[2026-11-24 12:28:20\] x", now + b"\xff\r\x0bc", now + b"Not 12", b""),
    ]
    assert re.fullmatch(b"\n".join(expected), b"".join(written)), written


@pytest.mark.parametrize(("status", "stays"), [(0, False), (256, True), (9, True)])
def test_mark_is_removed_by_a_clean_stop(
    root: Path, smsrt: ModuleType, monkeypatch: pytest.MonkeyPatch, status: int, stays: bool
) -> None:
    supervise = load_supervise(monkeypatch)
    write_services(root, it={"running": "/var/lib/sms/.running"}, other={})
    mark = root / "var/lib/sms/.running"
    mark.touch()
    ended = []
    finish = supervise.noted(lambda program, pid, sts: ended.append((program.config.name, pid, sts)))
    for name in ("other", "it"):
        finish(SimpleNamespace(config=SimpleNamespace(name=name), killing=False), 7, status)
    assert ended == [("other", 7, status), ("it", 7, status)]
    assert mark.exists() == stays
    assert (root / "var/lib/sms/.running.ended").exists() is not stays, "it is renamed: a full disk has no new file"


@pytest.mark.parametrize(("before_stop_s", "stays"), [(5, True), (-1, False)])
def test_the_supervisor_knows_when_it_has_asked_a_service_to_stop(
    root: Path, smsrt: ModuleType, monkeypatch: pytest.MonkeyPatch, before_stop_s: float, stays: bool
) -> None:
    supervise = load_supervise(monkeypatch)
    write_services(root, it={"running": "/var/lib/sms/.running", "saves": "/var/lib/sms/state"})
    mark, saved, now = root / "var/lib/sms/.running", root / "var/lib/sms/state", time.time()
    mark.touch()
    saved.touch()
    os.utime(saved, (now - 20 - before_stop_s,) * 2)
    config = SimpleNamespace(name="it", stopwaitsecs=90)
    supervise.noted(lambda *_: None)(SimpleNamespace(config=config, killing=True, delay=now - 20 + 90), 7, 0)
    assert mark.exists() is stays


FIRST = """\
import json, subprocess, sys
name, runtime, script = sys.argv[1:]
open("/proc/self/comm", "w").write(name)
left = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
left.stdout.readline()
program = "import sys; sys.path.insert(0, sys.argv[1]); import smsstart; smsstart.LEFT_S = 0.5; smsstart.end_left()"
status = subprocess.run([sys.executable, "-c", program, runtime]).returncode
print(json.dumps([status, left.poll()]))
"""
"""The first process of a container: what a service has left is its child."""


@needs_root
@pytest.mark.parametrize(
    ("first", "script", "end"),
    [
        ("appinit", "trap '' TERM; echo; while :; do sleep 9; done", -signal.SIGKILL),  # as mail of a cron that waits
        ("appinit", "trap 'exit 3' TERM; echo; while :; do sleep 0.1; done", 3),
        ("python", "trap 'exit 3' TERM; echo; while :; do sleep 0.1; done", None),  # no container of ours
    ],
)
def test_the_container_ends_without_what_services_have_left(first: str, script: str, end: int | None) -> None:
    argv = ("unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", FIRST)
    done = subprocess.run([*argv, first, str(RUNTIME), script], stdout=subprocess.PIPE, timeout=60, check=True)
    assert json.loads(done.stdout) == [0, end]


@pytest.mark.parametrize(("age_s", "clean"), [(0, True), (59, True), (61, False), (None, False)])
def test_a_service_that_could_not_save_its_state_has_not_ended_in_order(
    root: Path, monkeypatch: pytest.MonkeyPatch, age_s: float | None, clean: bool
) -> None:
    """T3: slurmctld ends with status 0 on a full overlay, and gave the ids of jobs that it had not saved twice."""
    smsstart = load("smsstart.py", monkeypatch)
    service = {"running": "/state/.running", "saves": "/state/job_state"}
    (root / "state").mkdir()
    mark, saved = root / "state/.running", root / "state/job_state"
    for _ in range(2):
        smsstart.set_mark(service)
        assert mark.exists()
        if age_s is not None:
            saved.touch()
            os.utime(saved, (time.time() - age_s,) * 2)
        smsstart.end_mark(service)
        assert mark.exists() is not clean


def test_a_full_overlay_does_not_hide_that_a_service_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smsstart = load("smsstart.py", monkeypatch)
    service = {"running": "/state/.running"}
    (root / "state").mkdir()
    numbers = set()
    for _ in range(3):
        smsstart.set_mark(service)
        numbers.add((root / "state/.running").stat().st_ino)
        smsstart.end_mark(service)
    assert len(numbers) == 1, "no file is made"


def job_state(next_id: int, saved: float, head: bytes = b"PROTOCOL_VERSION\0") -> bytes:
    return struct.pack("!I", len(head)) + head + struct.pack("!HqI", 0x2600, int(saved), next_id) + b"jobs"


@pytest.mark.parametrize(
    ("next_id", "age_s", "low", "high"),
    [
        (58, 0, 1058, 1100),
        (58, -3600, 1058, 1058),  # the clock was set back
        (58, 3600, 37058, 37100),
        (67043327, 0, 67043327, 67043327),  # the largest: slurmctld starts from the first again
        (66000000, 1e9, 66000000, 66000000),
    ],
)
def test_job_ids_continue_beyond_assigned_ones(root: Path, next_id: int, age_s: float, low: int, high: int) -> None:
    saved = int(time.time() - age_s)
    path = root / "job_state"
    path.write_bytes(job_state(next_id, saved))
    for _ in range(3):  # a controller that fails again and again, and never saves
        assert run_program("sms-slurm-ids", root, "/job_state").returncode == 0
        found = struct.unpack_from("!I", path.read_bytes(), 31)[0]
        assert low <= found <= high
        assert path.read_bytes() == job_state(found, saved)
    path.write_bytes(job_state(high + 1, int(time.time())))  # it has assigned some, and saved
    assert run_program("sms-slurm-ids", root, "/job_state").returncode == 0
    found = struct.unpack_from("!I", path.read_bytes(), 31)[0]
    assert found >= high + 1001 or high + 1001 >= 0x03FF0000


@pytest.mark.parametrize("data", [b"", b"\0\0\0\x11PROTOCOL_VERSION\0", job_state(5, 0, b"JOB_VERSION_NEXT\0"), None])
def test_unknown_state_format_is_not_changed(root: Path, data: bytes | None) -> None:
    path = root / "job_state"
    if data is not None:
        path.write_bytes(data)
    assert run_program("sms-slurm-ids", root, "/job_state").returncode == 0
    assert (path.read_bytes() if path.exists() else None) == data


@needs_root
def test_sms_run_drops_privileges(root: Path) -> None:
    root.chmod(0o755)
    write_services(root, it={"user": "nobody", "run": ["sh", "-c", "id -u; id -G; echo $HOME"]})
    lines = run_program("sms-run", root, "it").stdout.decode().splitlines()
    assert lines[0] == "65534"
    assert "0" not in lines[1].split()


@needs_root
@pytest.mark.parametrize("user", ["root", "nobody"])
def test_sms_run_keeps_only_the_services_capabilities(root: Path, user: str) -> None:
    root.chmod(0o755)
    argv = ["grep", "-E", "^(Uid|Cap)", "/proc/self/status"]
    write_services(root, it={"user": user, "capabilities": [0, 10], "run": argv})
    lines = run_program("sms-run", root, "it").stdout.decode().splitlines()
    found = {name: int(value.split()[0], 16) for name, _, value in (line.partition(":") for line in lines)}
    assert (found["CapBnd"], found["CapPrm"], found["CapEff"]) == (0x401, 0x401, 0x401)
    assert found["CapInh"] == found["CapAmb"] == (0x401 if user != "root" else 0)
    assert bool(found["Uid"]) == (user != "root")


@needs_root
def test_sms_run_adds_the_groups_that_the_image_has(root: Path) -> None:
    root.chmod(0o755)
    name = grp.getgrgid(12).gr_name
    write_services(root, it={"user": "nobody", "groups": [name, "unknown"], "run": ["id", "-G"]})
    groups = run_program("sms-run", root, "it").stdout.decode().split()
    assert "12" in groups and "0" not in groups
