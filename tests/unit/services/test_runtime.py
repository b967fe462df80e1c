"""The programs inside the container, run unchanged in a temporary root."""

from __future__ import annotations

import ast
import grp
import io
import json
import os
import re
import stat
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from appliance.tools.python import OLDEST
from tests.places import GOLDEN
from tests.unit.services.conftest import (
    ALICE,
    OWN_GROUP,
    OWN_PASSWD,
    RUNTIME,
    load,
    needs_root,
    probe_of,
    run_program,
    write_services,
)

PROGRAMS = [path for path in sorted(RUNTIME.iterdir()) if path.is_file() and b"python3" in path.read_bytes()[:40]]
MODULES = sorted(RUNTIME.glob("*.py"))

SUPERVISE = {"sms-supervise", "smsrt.py", "smsfiles.py"}
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
    assert {path.name for path in PROGRAMS} >= {"sms-seed", "sms-filesync", "sms-run", "sms-probe"}
    assert all(path.stat().st_mode & stat.S_IXUSR for path in PROGRAMS)


# Accounts


MERGED = [
    ("", [], "nothing of the site's"),
    (ALICE, [ALICE], "a user"),
    ("root:x:0:0:evil:/:/bin/sh", [], "the name and id of root"),
    ("toor:x:0:0::/:/bin/sh", [], "another name for id 0"),
    ("toor:x:00:0::/:/bin/sh", [], "id 0 written otherwise"),
    ("toor:x:4294967296:0::/:/bin/sh", [], "wraps around to id 0"),
    ("toor:x:4294967295:0::/:/bin/sh", [], "stands for no id"),
    ("toor:x:99999999999999999999:0::/:/bin/sh", [], "no id at all"),
    ("toor:x:-1:0::/:/bin/sh", [], "a negative id"),
    ("toor:x:+0:0::/:/bin/sh", [], "a sign"),
    ("toor:x: 0:0::/:/bin/sh", [], "a blank"),
    ("toor:x:0x0:0::/:/bin/sh", [], "hexadecimal"),
    ("toor:x:²:0::/:/bin/sh", [], "a digit that is not a number"),
    ("toor:x:١٠٠١:0::/:/bin/sh", [], "digits of another script"),
    ("munge:x:3000:3000::/:/bin/sh", [], "a name of the image's"),
    ("other:x:105:105::/:/bin/sh", [], "an id of the image's"),
    ("sshd:x:74:74::/:/bin/sh", [], "a system id that the image does not use"),
    ("other:x:65534:1::/:/bin/sh", [], "nobody's id"),
    ("other:x:065534:1::/:/bin/sh", [], "nobody's id written otherwise"),
    ("short", [], "no fields"),
    ("short:x", [], "fields are missing"),
    (":x:2001:2001::/:/bin/sh", [], "no name"),
    ("+::::::", [], "the old mark of NIS"),
    ("-evil::::::", [], "the other one"),
    ("# a comment: with a colon", [], "a comment"),
    (f"{ALICE}\nalice:x:2002:2002::/:/bin/sh", [ALICE], "the same name twice"),
    (f"\n\n{ALICE}\n\n", [ALICE], "empty lines"),
    (f"{ALICE}\nbroken\n{ALICE.replace('alice', 'bob')}", [ALICE, ALICE.replace("alice", "bob")], "one bad line"),
]


@pytest.mark.parametrize(("site", "added", "why"), MERGED, ids=[case[2] for case in MERGED])
def test_merge_passwd(smsfiles: ModuleType, site: str, added: list[str], why: str) -> None:
    merged = smsfiles.merge_accounts("/etc/passwd", OWN_PASSWD, site)
    assert merged == OWN_PASSWD + "".join(f"{line}\n" for line in added), why


def test_merge_group_keeps_groups_of_the_image(smsfiles: ModuleType) -> None:
    site = "root:x:0:alice\nmunge:x:2000:\nstaff:x:50:alice\nalice:x:2001:\nteam:x:2002:alice,bob\nx:x:65534:\n"
    merged = smsfiles.merge_accounts("/etc/group", OWN_GROUP, site)
    assert merged == OWN_GROUP + "alice:x:2001:\nteam:x:2002:alice,bob\n"


def test_merge_shadow_by_name(smsfiles: ModuleType, root: Path) -> None:
    current = (root / "etc" / "shadow").read_text()
    merged = smsfiles.merge_accounts("/etc/shadow", current, "root:$6$evil:1::::::\nalice:$6$hash:1::::::\n")
    assert merged == current + "alice:$6$hash:1::::::\n"


def test_merge_removes_accounts_dropped_by_the_site(smsfiles: ModuleType) -> None:
    assert smsfiles.merge_accounts("/etc/passwd", OWN_PASSWD + ALICE + "\n", "") == OWN_PASSWD


def test_merge_adds_accounts_of_a_newer_image(smsfiles: ModuleType) -> None:
    old = OWN_PASSWD.splitlines(keepends=True)[0]
    assert smsfiles.merge_accounts("/etc/passwd", old, ALICE) == OWN_PASSWD + ALICE + "\n"


def test_merge_takes_the_ids_of_a_newer_image(smsfiles: ModuleType) -> None:
    """What the overlay's own lines have besides stays: another shell, members."""
    for path, own in (("/etc/passwd", OWN_PASSWD), ("/etc/group", OWN_GROUP)):
        name, _, rest = own.splitlines()[-1].split(":", 2)
        other = rest.split(":")
        other[0] = "971"
        if path == "/etc/passwd":
            other[1], other[-1] = "972", "/bin/other"
            wanted = [*rest.split(":")[:2], *other[2:]]
        else:
            other[-1] = "alice"
            wanted = [rest.split(":")[0], "alice"]
        head = "".join(own.splitlines(keepends=True)[:-1])
        merged = smsfiles.merge_accounts(path, head + ":".join([name, "x", *other]) + "\n", "")
        assert merged == head + ":".join([name, "x", *wanted]) + "\n"


def test_merge_without_accounts_of_the_image_writes_nothing(smsfiles: ModuleType, root: Path) -> None:
    (root / "opt/sms/accounts/passwd").unlink()
    with pytest.raises(FileNotFoundError):
        smsfiles.merge_accounts("/etc/passwd", OWN_PASSWD, ALICE)


def test_replace(smsfiles: ModuleType, root: Path) -> None:
    mine = (os.geteuid(), os.getegid())
    assert smsfiles.replace("/etc/new/file", b"one", 0o640, *mine)
    path = root / "etc/new/file"
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"one", 0o640)
    before = path.stat()
    assert not smsfiles.replace("/etc/new/file", b"one", 0o640, *mine)
    assert path.stat().st_ino == before.st_ino
    assert smsfiles.replace("/etc/new/file", b"one", 0o600, *mine), "another mode is a change"
    with path.open("rb") as reader:
        assert smsfiles.replace("/etc/new/file", b"two", 0o600, *mine)
        assert reader.read() == b"one", "who reads sees the whole old file"
    assert list(path.parent.iterdir()) == [path]


def test_replace_by_two_at_once(smsfiles: ModuleType, root: Path) -> None:
    """sms-filesync and sms-apply: each would remove what the other one has begun to write."""
    script = """import sys, smsfiles
for number in range(400):
    smsfiles.replace("/etc/file", b"%d %d" % (int(sys.argv[1]), number), 0o600, *map(int, sys.argv[2:]))
"""
    argv = [sys.executable, "-c", script]
    ids = [str(os.geteuid()), str(os.getegid())]
    environment = {**os.environ, "PYTHONPATH": str(RUNTIME), "PYTHONDONTWRITEBYTECODE": "1", "SMS_ROOT": str(root)}
    both = [subprocess.Popen([*argv, str(one), *ids], env=environment) for one in range(2)]
    assert [one.wait(60) for one in both] == [0, 0]
    assert (root / "etc/file").read_bytes() in (b"0 399", b"1 399")


def test_replace_after_a_killed_run(smsfiles: ModuleType, root: Path) -> None:
    (root / "etc/file.sms-new").symlink_to(root / "etc/shadow")
    shadow = (root / "etc/shadow").read_text()
    assert smsfiles.replace("/etc/file", b"data", 0o600, os.geteuid(), os.getegid())
    assert (root / "etc/shadow").read_text() == shadow
    assert not (root / "etc/file").is_symlink()


# sms-run


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
    threading.Timer(0.4, held.unlink).start()
    done = run_program("sms-run", root, "it")
    assert done.returncode == 0 and b"it is held by" in done.stdout
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
        finish(SimpleNamespace(config=SimpleNamespace(name=name)), 7, status)
    assert ended == [("other", 7, status), ("it", 7, status)]
    assert mark.exists() == stays


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


# sms-seed


def archive(*files: tuple[str, bytes, str, int]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, data, owner, mode in files:
            member = tarfile.TarInfo(path)
            member.size, member.mode, member.uname, member.gname = len(data), mode, owner, "root"
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def seed(root: Path, *files: tuple[str, bytes, str, int]) -> dict[str, list[str]]:
    done = run_program("sms-seed", root, "mark", input=archive(*files))
    assert not done.returncode, done.stderr.decode()
    report: dict[str, list[str]] = json.loads(done.stdout)
    report["changed"] = [path for path in report["changed"] if path != "/etc/munge/munge.key"]
    return report


@needs_root
def test_seed_twice_changes_nothing(root: Path) -> None:
    file = ("etc/sms/it.conf", b"one", "root", 0o640)
    assert seed(root, file) == {"changed": ["/etc/sms/it.conf"], "kept": []}
    assert seed(root, file) == {"changed": [], "kept": []}
    assert stat.S_IMODE((root / "etc/sms/it.conf").stat().st_mode) == 0o640
    assert stat.S_IMODE((root / "etc/sms/seeded.json").stat().st_mode) == 0o600


@needs_root
def test_seed_keeps_local_changes(root: Path) -> None:
    path = root / "etc/sms/it.conf"
    seed(root, ("etc/sms/it.conf", b"one", "root", 0o644))
    path.write_bytes(b"changed by hand")
    assert seed(root, ("etc/sms/it.conf", b"one", "root", 0o644)) == {"changed": [], "kept": []}
    assert path.read_bytes() == b"changed by hand"
    report = seed(root, ("etc/sms/it.conf", b"two", "root", 0o644))
    assert report == {"changed": ["/etc/sms/it.conf"], "kept": ["/etc/sms/it.conf.sms-old"]}
    assert path.read_bytes() == b"two"
    assert path.with_name("it.conf.sms-old").read_bytes() == b"changed by hand"


@needs_root
def test_seed_removes_slurm_files_that_the_site_no_longer_has(root: Path) -> None:
    """Others, such as a munge key, stay; a changed one is kept beside."""
    folder = root / "etc/slurm"
    files = [(f"etc/slurm/{name}", b"one", "root", 0o644) for name in ("slurm.conf", "gres.conf", "prolog.sh")]
    other = ("etc/sms/it.conf", b"one", "root", 0o644)
    seed(root, *files, other)
    (folder / "by-hand.conf").write_bytes(b"not the site's")
    (folder / "prolog.sh").write_bytes(b"changed by hand")
    report = seed(root, files[0])
    assert report["changed"] == ["/etc/slurm/gres.conf", "/etc/slurm/prolog.sh"]
    assert report["kept"] == ["/etc/slurm/prolog.sh.sms-old"]
    assert {path.name for path in folder.iterdir()} == {"slurm.conf", "by-hand.conf", "prolog.sh.sms-old"}
    assert (folder / "prolog.sh.sms-old").read_bytes() == b"changed by hand"
    assert (root / "etc/sms/it.conf").exists()
    assert seed(root, files[0]) == {"changed": [], "kept": []}


@needs_root
def test_seed_does_not_take_a_damaged_record_for_an_empty_one(root: Path) -> None:
    """It would replace what somebody has changed."""
    path = root / "etc/sms/it.conf"
    seed(root, ("etc/sms/it.conf", b"one", "root", 0o644))
    path.write_bytes(b"changed by hand")
    (root / "etc/sms/seeded.json").write_bytes(b'{"/etc/sms/it.conf": "12')
    done = run_program("sms-seed", root, "mark", input=archive(("etc/sms/it.conf", b"two", "root", 0o644)))
    assert done.returncode == 1
    assert done.stderr.decode() == (
        "sms-seed: /etc/sms/seeded.json cannot be read: restore it from a snapshot, or remove it\n"
    )
    assert path.read_bytes() == b"changed by hand"


@needs_root
def test_seed_merges_accounts(root: Path) -> None:
    site = f"root:x:0:0:evil:/:/bin/sh\n{ALICE}\nr\xe9my:x:2002:2002::/:/bin/sh\n".encode("latin-1")
    seed(root, ("etc/passwd", site, "root", 0o644))
    expected = OWN_PASSWD.encode() + f"{ALICE}\nr\xe9my:x:2002:2002::/:/bin/sh\n".encode("latin-1")
    assert (root / "etc/passwd").read_bytes() == expected


@needs_root
def test_seed_reports_an_unknown_owner(root: Path) -> None:
    done = run_program("sms-seed", root, "mark", input=archive(("etc/x", b"", "no-such-user", 0o600)))
    assert done.returncode
    assert done.stderr.decode().strip() == "sms-seed: /etc/x is for no-such-user:root, whom the image does not know"
    assert not (root / "etc/x").exists()


@needs_root
def test_full_disk_keeps_the_old_file(smsfiles: ModuleType, root: Path) -> None:
    small = root / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "sms-test", str(small)], check=True)
    try:
        smsfiles.replace("/small/x", b"old", 0o644, 0, 0)
        with pytest.raises(OSError, match="No space"):
            smsfiles.replace("/small/x", bytes(200000), 0o644, 0, 0)
        assert [path.name for path in small.iterdir()] == ["x"]
        assert (small / "x").read_bytes() == b"old"
    finally:
        subprocess.run(["umount", str(small)], check=True)


# What comes in over the public network

TRAFFIC = r"""
set -eu
mount -t tmpfs tmpfs /run
mkdir /run/netns
ip link set lo up
for n in 0 1; do
    ip netns add p$n
    ip link add eth$n type veth peer name peer netns p$n
    ip addr add 10.7$((7 + n)).0.1/24 dev eth$n
    ip link set eth$n up
    ip -n p$n addr add 10.7$((7 + n)).0.9/24 dev peer
    ip -n p$n link set peer up
done
for twice in 1 2; do nft -f "$1"; done
cat >/run/serve.py <<'END'
import socket, sys
server = socket.create_server((sys.argv[1], 8000))
open(sys.argv[2], "w").close()
while True:
    server.accept()[0].close()
END
python3 /run/serve.py 0.0.0.0 /run/up & first=$!
ip netns exec p1 python3 /run/serve.py 10.78.0.9 /run/up1 & second=$!
trap 'kill $first $second' EXIT
while [ ! -e /run/up ] || [ ! -e /run/up1 ]; do sleep 0.05; done
try() {
    name=$1; shift
    "$@" python3 -c 'import socket, sys; socket.create_connection((sys.argv[1], 8000), 0.7)' "$address" 2>/dev/null &&
        echo "$name=yes" || echo "$name=no"
}
address=10.77.0.1 try node ip netns exec p0
address=10.78.0.1 try public ip netns exec p1
address=127.0.0.1 try itself env
address=10.78.0.9 try out env
ip netns exec p1 ping -qc 1 -W 1 10.78.0.1 >/dev/null && echo ping=yes || echo ping=no
"""


@needs_root
@pytest.mark.slow
def test_public_network_cannot_reach_daemons(need: Callable[[str], None]) -> None:
    for program in ("nft", "unshare", "ip", "ping"):
        need(program)
    (rules,) = (GOLDEN / "debian-12").rglob("nat.nft")
    argv = ["unshare", "--net", "--mount", "sh", "-c", TRAFFIC, "traffic", str(rules)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    answers = dict(line.split("=") for line in done.stdout.splitlines())
    assert answers == {"node": "yes", "public": "no", "itself": "yes", "out": "yes", "ping": "yes"}, done.stderr


# sms-apply


def run_apply(root: Path, *words: str, input: bytes = b"") -> dict[str, Any]:
    done = run_program("sms-apply", root, *words, input=input)
    assert not done.returncode, done.stderr.decode()
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def tree(root: Path) -> dict[str, bytes]:
    """All files but those of an apply and the key of munge."""
    found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if "run/sms/apply" not in name and "munge.key" not in name}


ONE = ("etc/sms/it.conf", b"one\n", "root", 0o644)
TWO = ("etc/sms/it.conf", b"two\n", "root", 0o644)
SECRET = ("etc/sms/key", b"secret\n", "root", 0o600)


@needs_root
def test_apply_compares_and_shows_no_secret(root: Path) -> None:
    run_program("sms-seed", root, "1", input=archive(ONE, SECRET))
    before = tree(root)
    found = run_apply(root, "compare", input=archive(TWO, (*SECRET[:1], b"other\n", *SECRET[2:])))
    assert found == {
        "mark": "1",
        "changed": [
            {"path": "/etc/sms/it.conf", "edited": False, "text": "one\n"},
            {"path": "/etc/sms/key", "edited": False, "text": None},
        ],
        "pending": {},
        "left": "",
    }
    assert tree(root) == before
    assert run_apply(root, "compare", input=archive(ONE, SECRET))["changed"] == []


@needs_root
def test_apply_can_be_undone_until_it_is_finished(root: Path) -> None:
    """Also after two runs that were killed: what was there before the first is back."""
    run_program("sms-seed", root, "1", input=archive(ONE))
    before = tree(root)
    run_apply(root, "write", "2", '{"postfix": "reload"}', input=archive(TWO, SECRET))
    run_apply(root, "write", "3", '{"chrony": "restart"}', input=archive((*ONE[:1], b"three\n", *ONE[2:]), SECRET))
    found = run_apply(root, "compare", input=archive(ONE))
    assert found["pending"] == {"postfix": "reload", "chrony": "restart"} and found["left"] == "incomplete"
    for name in ("apply.pending", "apply.saved"):
        assert stat.S_IMODE((root / "run/sms" / name).stat().st_mode) == 0o600
    run_apply(root, "done", "chrony")
    assert run_apply(root, "compare", input=archive(ONE))["pending"] == {"postfix": "reload"}
    run_apply(root, "done", "postfix")
    assert run_apply(root, "compare", input=archive(ONE))["left"] == "complete"
    undone = {"pending": {"chrony": "restart", "postfix": "reload", "munge": "restart"}}
    assert run_apply(root, "undo", '{"chrony": "reload", "munge": "restart"}') == undone, (
        "those done have read the files"
    )
    assert tree(root) == before
    found = run_apply(root, "compare", input=archive(ONE))
    assert {"pending": found["pending"]} == undone and found["left"] == "incomplete"
    run_apply(root, "finish")
    assert not list((root / "run/sms").glob("apply*"))
    assert run_apply(root, "undo", "{}") == {"pending": {}}
