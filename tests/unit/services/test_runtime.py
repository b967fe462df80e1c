"""The programs inside the container, run unchanged in a temporary root."""

from __future__ import annotations

import ast
import grp
import hashlib
import importlib.machinery
import importlib.util
import io
import json
import os
import pwd
import signal
import socket
import ssl
import stat
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from appliance.tools.python import OLDEST
from tests.places import GOLDEN, ROOT
from tests.servers import free_port, server_context
from tests.waiting import soon

RUNTIME = ROOT / "definitions" / "runtime"
PROGRAMS = [path for path in sorted(RUNTIME.iterdir()) if path.is_file() and b"python3" in path.read_bytes()[:40]]
MODULES = sorted(RUNTIME.glob("*.py"))

SUPERVISE = {"sms-supervise", "smsrt.py", "smsfiles.py"}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of the container belong to root")

OWN_PASSWD = "root:x:0:0:root:/root:/bin/sh\nmunge:x:105:105::/:/bin/false\nnobody:x:65534:65534::/:/bin/false\n"
OWN_GROUP = "root:x:0:\nmunge:x:105:\nnogroup:x:65534:\n"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a program or module of the container again, without writing into the checkout."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = RUNTIME / name
    loader = importlib.machinery.SourceFileLoader(name.replace("-", "_").removesuffix(".py"), str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)
    loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with the accounts of an image."""
    monkeypatch.setenv("SMS_ROOT", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(RUNTIME), *sys.path])
    for name in ("smsfiles", "smskept", "smslink", "smsrt"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for folder in ("opt/sms/accounts", "etc/sms/tls", "run/sms", "var/lib/sms"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("etc", "opt/sms/accounts"):
        (tmp_path / folder / "passwd").write_text(OWN_PASSWD)
        (tmp_path / folder / "group").write_text(OWN_GROUP)
    (tmp_path / "etc" / "shadow").write_text("root:*:19000:0:99999:7:::\nmunge:!:19000::::::\nnobody:*:19000::::::\n")
    return tmp_path


@pytest.fixture
def smsfiles(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("smsfiles.py", monkeypatch)


@pytest.fixture
def smsrt(smsfiles: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("smsrt.py", monkeypatch)


@pytest.mark.parametrize("path", [*PROGRAMS, *MODULES], ids=lambda path: path.name)
def test_runs_on_the_oldest_python_of_a_base(path: Path) -> None:
    """Leap and SLE 15 have python311; their supervisor uses Python 3.6, and sms-supervise with what it imports."""
    ast.parse(path.read_text(), feature_version=(3, 6) if path.name in SUPERVISE else OLDEST)


def test_all_programs_are_checked() -> None:
    assert {path.name for path in PROGRAMS} >= {"sms-seed", "sms-filesync", "sms-run", "sms-probe"}
    assert all(path.stat().st_mode & stat.S_IXUSR for path in PROGRAMS)


# Accounts


ALICE = "alice:x:2001:2001:Alice:/home/alice:/bin/bash"
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


def test_replace_after_a_killed_run(smsfiles: ModuleType, root: Path) -> None:
    (root / "etc/file.sms-new").symlink_to(root / "etc/shadow")
    shadow = (root / "etc/shadow").read_text()
    assert smsfiles.replace("/etc/file", b"data", 0o600, os.geteuid(), os.getegid())
    assert (root / "etc/shadow").read_text() == shadow
    assert not (root / "etc/file").is_symlink()


# Probes


@contextmanager
def served(server: socket.socket, work: Callable[[socket.socket], None]) -> Iterator[None]:
    """Run ``work`` with a bound socket in a thread."""

    def run() -> None:
        with server:
            work(server)

    server.settimeout(5)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(6)
    assert not thread.is_alive()


def udp_server() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    return sock


def ask(smsrt: ModuleType, kind: str, **spec: Any) -> tuple[bool, str]:
    answer = smsrt.probe("it", {"probe": {"kind": kind, "timeout_s": 2, **spec}})
    assert answer["name"] == "it"
    assert answer["ms"] < 5000
    return answer["ok"], answer["detail"]


NTP = [
    (4, 2, True, True, "stratum 2, offset"),
    (4, 16, True, False, "not synchronised"),
    (4, 0, True, False, "not synchronised"),
    (3, 2, True, False, "no answer to the question"),
    (4, 2, False, False, "no answer to the question"),
]


@pytest.mark.parametrize(("mode", "stratum", "cookie", "fine", "words"), NTP)
def test_probe_ntp(
    smsrt: ModuleType, mode: int, stratum: int, cookie: bool, fine: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(sock: socket.socket) -> None:
        question, peer = sock.recvfrom(512)
        seconds = int(time.time()) + smsrt.NTP_DELTA
        reply = struct.pack(
            "!BB22x8sQII", 4 << 3 | mode, stratum, question[40:48] if cookie else b"x" * 8, 0, seconds, 0
        )
        sock.sendto(reply, peer)

    server = udp_server()
    monkeypatch.setattr(smsrt, "NTP_PORT", server.getsockname()[1])
    with served(server, answer):
        ok, detail = ask(smsrt, "ntp", ntp="127.0.0.1")
    assert (ok, words in detail) == (fine, True), detail


def test_probe_ntp_without_server(smsrt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smsrt, "NTP_PORT", free_port(kind=socket.SOCK_DGRAM))
    ok, detail = ask(smsrt, "ntp", ntp="127.0.0.1")
    assert not ok
    assert "refused" in detail


@pytest.mark.parametrize(
    ("greeting", "fine"),
    [(b"220 host ESMTP\r\n", True), (b"421 too busy\r\n", False), (b"", False), (b"SSH-2.0\r\n", False)],
)
def test_probe_smtp(smsrt: ModuleType, greeting: bytes, fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []

    def greet(sock: socket.socket) -> None:
        peer, _ = sock.accept()
        with peer:
            peer.sendall(greeting)
            peer.shutdown(socket.SHUT_WR)
            heard.append(peer.recv(100))

    server = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(smsrt, "SMTP_PORT", server.getsockname()[1])
    with served(server, greet):
        ok, detail = ask(smsrt, "smtp", smtp="127.0.0.1")
    assert ok is fine, detail
    assert heard == [b"QUIT\r\n"]


@pytest.mark.parametrize("there", [True, False])
def test_probe_syslog(smsrt: ModuleType, root: Path, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    log = root / "messages"
    log.write_text("sms-probe: an old line\n")

    def receive(sock: socket.socket) -> None:
        line = sock.recv(1000)
        if there:
            with log.open("ab") as stream:
                stream.write(line + b"\n")

    server = udp_server()
    monkeypatch.setattr(smsrt, "SYSLOG_PORT", server.getsockname()[1])
    with served(server, receive):
        ok, detail = ask(smsrt, "syslog", syslog="127.0.0.1", file="/messages", timeout_s=5 if there else 0.3)
    assert ok is there, detail


def test_probe_syslog_finds_its_line_after_rotation(
    smsrt: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = root / "messages"
    log.write_text("x" * 10000)

    def receive(sock: socket.socket) -> None:
        log.write_bytes(sock.recv(1000))

    server = udp_server()
    monkeypatch.setattr(smsrt, "SYSLOG_PORT", server.getsockname()[1])
    with served(server, receive):
        assert ask(smsrt, "syslog", syslog="127.0.0.1", file="/messages") == (True, "a line arrived")


@pytest.mark.parametrize(
    ("answer", "fine"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 302 Found\r\n\r\n", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n", False),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", False),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", False),
        (b"HTTP/1.1 500 Oops\r\n\r\n", False),
        (b"hello\r\n", False),
        (b"", False),
    ],
)
@pytest.mark.parametrize("unix", [True, False])
def test_probe_http(smsrt: ModuleType, tmp_path: Path, answer: bytes, fine: bool, unix: bool) -> None:
    asked: list[bytes] = []

    def reply(sock: socket.socket) -> None:
        peer, _ = sock.accept()
        with peer:
            asked.append(peer.recv(1000))
            peer.sendall(answer)

    if unix:
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(tmp_path / "s"))
        server.listen()
        target = f"http+unix:{tmp_path}/s:/slurm/ping"
    else:
        server = socket.create_server(("127.0.0.1", 0))
        target = f"http://127.0.0.1:{server.getsockname()[1]}/slurm/ping"
    with served(server, reply):
        ok, detail = ask(smsrt, "http", http=target)
    assert ok is fine, detail
    assert asked[0].startswith(b"GET /slurm/ping HTTP/1.0\r\n")


@pytest.mark.parametrize(
    ("status", "fine", "words"),
    [
        ({"state": "synced", "detail": "up to date", "until": 60}, True, "up to date"),
        ({"state": "waiting", "detail": "nobody there", "until": 60}, True, "nobody there"),
        ({"state": "failed", "detail": "wrong digest", "until": 60}, False, "wrong digest"),
        ({"state": "synced", "detail": "up to date", "until": -5}, False, "silent for 5 s"),
        (None, False, "No such file"),
        ("{", False, ""),
    ],
)
def test_probe_fresh(smsrt: ModuleType, root: Path, status: Any, fine: bool, words: str) -> None:
    if isinstance(status, dict):
        status = json.dumps({**status, "until": time.time() + status["until"]})
    if status is not None:
        (root / "run/sms/f.json").write_text(status)
    ok, detail = ask(smsrt, "fresh", fresh="/run/sms/f.json")
    assert (ok, words in detail) == (fine, True), detail


EXEC: list[tuple[list[list[str]], str | None, bool, str]] = [
    ([["true"]], None, True, "ok"),
    ([["echo", "STATUS:   Success"]], "STATUS: +Success", True, "STATUS: Success"),
    ([["echo", "down"]], "UP", False, "unexpected answer: down"),
    ([["echo", "one two"], ["tr", "a-z", "A-Z"]], "ONE", True, "ONE"),
    ([["false"], ["echo", "UP"]], "UP", False, "false: status 1"),
    ([["sh", "-c", "echo first >&2; echo why it failed >&2; exit 3"]], None, False, "sh: why it failed"),
    ([["no-such-program-here"]], None, False, "no-such-program-here"),
]


@pytest.mark.parametrize(("pipeline", "expect", "fine", "words"), EXEC)
def test_probe_exec(smsrt: ModuleType, pipeline: list[list[str]], expect: str | None, fine: bool, words: str) -> None:
    spec = {"exec": pipeline, **({"expect": expect} if expect else {})}
    ok, detail = ask(smsrt, "exec", **spec)
    assert (ok, words in detail) == (fine, True), detail


def test_probe_exec_kills_its_children(smsrt: ModuleType, tmp_path: Path) -> None:
    """A background process of a command keeps its output open, but must not delay the probe."""
    began = time.monotonic()
    script = f"sleep 30 & echo $! >{tmp_path}/pid; wait; true"
    ok, detail = ask(smsrt, "exec", exec=[["sh", "-c", script]], timeout_s=0.3)
    assert not ok
    assert "no answer within 0.3 s" in detail
    assert time.monotonic() - began < 3
    process = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}")
    soon(lambda: not process.exists() or "\nState:\tZ" in (process / "status").read_text(), "the command has ended")


def run_program(name: str, root: Path, *argv: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "SMS_ROOT": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, str(RUNTIME / name), *argv], env=environment, capture_output=True, timeout=20, **options
    )


def write_services(root: Path, **services: dict[str, Any]) -> None:
    usual = {"run": ["true"], "user": "root", "groups": [], "capabilities": [], "setup": "", "needs": [], "sync": []}
    full = {name: {**usual, **service} for name, service in services.items()}
    (root / "etc/sms/services.json").write_text(json.dumps({"services": full}))


def probe_of(*argv: str) -> dict[str, Any]:
    return {"kind": "exec", "exec": [list(argv)], "timeout_s": 2}


def test_sms_probe_waits_and_reports(root: Path) -> None:
    write_services(
        root,
        quick={"probe": probe_of("true")},
        late={"probe": probe_of("sh", "-c", f"[ -e {root}/there ] || {{ touch {root}/there; exit 1; }}")},
        never={"probe": probe_of("false")},
    )
    done = run_program("sms-probe", root, "--wait", "0.5")
    answers = {answer["name"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    assert {name: answer["ok"] for name, answer in answers.items()} == {"quick": True, "late": True, "never": False}
    assert done.returncode == 4
    assert answers["never"]["after_s"] >= 0.5
    assert run_program("sms-probe", root, "quick").returncode == 0


def test_sms_probe_detects_a_pending_restart(root: Path) -> None:
    """The site file selects a service that this container was not started with."""
    write_services(root, quick={"probe": probe_of("true")})
    done = run_program("sms-probe", root, "--wait", "10", "quick", "new")
    answers = {answer["name"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    assert answers["quick"]["ok"]
    assert not answers["new"]["ok"]
    assert answers["new"]["detail"] == "not started here: restart to apply the site file"
    assert answers["new"].keys() == answers["quick"].keys()
    assert answers["new"]["after_s"] < 5, "waiting does not bring it"
    assert (done.returncode, done.stderr) == (4, b"")


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


@pytest.mark.parametrize(("status", "stays"), [(0, False), (256, True), (9, True)])
def test_mark_is_removed_by_a_clean_stop(
    root: Path, smsrt: ModuleType, monkeypatch: pytest.MonkeyPatch, status: int, stays: bool
) -> None:
    for name in ("supervisor", "supervisor.poller", "supervisor.process", "supervisor.supervisord"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules["supervisor"], name.rpartition(".")[2], sys.modules[name], raising=False)
    monkeypatch.setattr(sys.modules["supervisor.poller"], "Poller", object, raising=False)
    supervise = load("sms-supervise", monkeypatch)
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


def test_packets_of_the_routed_probe(smsrt: ModuleType) -> None:
    packet = smsrt.echo_request("192.0.2.1", 77, b"c" * 16)
    assert smsrt.checksum(packet[:20]) == smsrt.checksum(packet[20:]) == 0, "valid: it sums up to ones"
    assert (packet[12:16], packet[16:20]) == (socket.inet_aton("169.254.77.2"), socket.inet_aton("192.0.2.1"))
    reply = packet[:12] + packet[16:20] + packet[12:16] + b"\0" + packet[21:]
    assert smsrt.is_reply(reply, "192.0.2.1", 77, b"c" * 16)
    others = [packet, reply[:40], b"", reply[:12] + packet[12:20] + reply[20:], reply[:20] + b"\3" + reply[21:]]
    assert not any(smsrt.is_reply(other, "192.0.2.1", 77, b"c" * 16) for other in others)
    assert not smsrt.is_reply(reply, "192.0.2.1", 78, b"c" * 16)


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


# sms-filesync, against a server that requires a certificate


class Store(BaseHTTPRequestHandler):
    """Serves the bytes of a table; 404 for other paths."""

    table: dict[str, bytes]
    asked: list[str]

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        data = self.table.get(self.path)
        self.send_response(200 if data is not None else 404)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(data or b"")

    def log_message(self, *_: object) -> None:
        pass


class Provisioning:
    """A provisioning node: an HTTPS server with its own CA that authenticates its clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.handler = type("Handler", (Store,), {"table": {}, "asked": []})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        context = server_context(folder, folder, clients=ssl.CERT_REQUIRED)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def serve(self, files: dict[str, bytes], *, digests: dict[str, str] | None = None) -> None:
        """Offer files, with the wrong digests in ``digests``."""
        named = {path: (digests or {}).get(path, hashlib.sha256(data).hexdigest()) for path, data in files.items()}
        entries = [{"path": path, "sha256": named[path], "size": len(data)} for path, data in files.items()]
        self.handler.table = {f"/files/{named[path]}": data for path, data in files.items()}
        self.handler.table["/manifest.json"] = json.dumps({"files": entries}).encode()

    def trust(self, root: Path) -> None:
        """Write the certificates of the container."""
        tls = root / "etc/sms/tls"
        for name, source in (("ca.pem", "ca.pem"), ("cert.pem", "services.pem"), ("key.pem", "services.key")):
            (tls / name).write_bytes((self.folder / source).read_bytes())

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def provisioning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provisioning]:
    server = Provisioning(tmp_path_factory.mktemp("provisioning"))
    yield server
    server.close()


@pytest.fixture
def filesync(root: Path, provisioning: Provisioning, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    write_services(root, slurmctld={"sync": ["/etc/slurm/slurm.conf"]})
    provisioning.trust(root)
    (root / "var/lib/sms/filesync").mkdir()
    return load("sms-filesync", monkeypatch)


CONF = "/etc/slurm/slurm.conf"


def pull(filesync: ModuleType, provisioning: Provisioning) -> list[str]:
    return list(filesync.pull(provisioning.url, filesync.allowed_paths()))


@needs_root
def test_filesync_fetches_changed_files(filesync: ModuleType, provisioning: Provisioning, root: Path) -> None:
    site = f"root:x:0:0:evil:/:/bin/sh\n{ALICE}\n".encode()
    provisioning.serve({"/etc/passwd": site, CONF: b"ClusterName=x\n", "/etc/shadow": b"alice:$6$x:1::::::\n"})
    assert pull(filesync, provisioning) == ["/etc/passwd", "/etc/shadow", CONF]
    assert (root / "etc/passwd").read_text() == OWN_PASSWD + ALICE + "\n"
    assert (root / "etc/slurm/slurm.conf").read_bytes() == b"ClusterName=x\n"
    assert "root:*:" in (root / "etc/shadow").read_text()
    kept = list((root / "var/lib/sms/filesync").iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}
    provisioning.handler.asked.clear()
    assert pull(filesync, provisioning) == []
    assert provisioning.handler.asked == ["/manifest.json"], "what is here already is not fetched again"


@needs_root
def test_filesync_merges_again_after_an_image_change(
    filesync: ModuleType, provisioning: Provisioning, root: Path
) -> None:
    provisioning.serve({"/etc/passwd": f"{ALICE}\n".encode()})
    pull(filesync, provisioning)
    newer = OWN_PASSWD + "slurm:x:64030:64030::/:/bin/false\n"
    (root / "opt/sms/accounts/passwd").write_text(newer)
    assert pull(filesync, provisioning) == ["/etc/passwd"]
    assert (root / "etc/passwd").read_text() == newer + ALICE + "\n"


@needs_root
def test_filesync_replaces_files_seeded_by_a_start(
    filesync: ModuleType, provisioning: Provisioning, root: Path
) -> None:
    provisioning.serve({CONF: b"ClusterName=x\n", "/etc/group": b"team:x:2002:alice\n"})
    pull(filesync, provisioning)
    (root / "etc/slurm/slurm.conf").write_bytes(b"of the site file")
    (root / "etc/group").write_text(OWN_GROUP)
    provisioning.handler.asked.clear()
    assert pull(filesync, provisioning) == ["/etc/group", CONF]
    assert (root / "etc/slurm/slurm.conf").read_bytes() == b"ClusterName=x\n"
    assert (root / "etc/group").read_text() == OWN_GROUP + "team:x:2002:alice\n"
    assert provisioning.handler.asked == ["/manifest.json"]
    assert pull(filesync, provisioning) == []


@needs_root
@pytest.mark.parametrize(
    "path",
    [
        "/etc/sudoers",
        "/etc/slurm/../sudoers",
        "../../etc/sudoers",
        "/etc/slurm/slurm.conf/",
        "//etc/slurm/slurm.conf",
        "",
    ],
)
def test_filesync_writes_no_other_path(
    filesync: ModuleType,
    provisioning: Provisioning,
    root: Path,
    path: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(root.rglob("*"))
    provisioning.serve({path: b"evil"})
    assert pull(filesync, provisioning) == []
    assert pull(filesync, provisioning) == []
    assert sorted(root.rglob("*")) == before
    assert capsys.readouterr().out.count("is not a file of ours") == 1, "said once"
    assert set(provisioning.handler.asked) == {"/manifest.json"}


@needs_root
def test_filesync_refuses_a_wrong_digest(filesync: ModuleType, provisioning: Provisioning, root: Path) -> None:
    provisioning.serve({CONF: b"good"})
    pull(filesync, provisioning)
    provisioning.serve({CONF: b"evil"}, digests={CONF: "0" * 64})
    with pytest.raises(ValueError, match="is not what the manifest says"):
        pull(filesync, provisioning)
    assert (root / "etc/slurm/slurm.conf").read_bytes() == b"good"


@needs_root
def test_filesync_refuses_large_files(
    filesync: ModuleType, provisioning: Provisioning, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesync, "LARGEST", 100)
    provisioning.serve({CONF: b"x" * 101})
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        pull(filesync, provisioning)
    assert not (root / "etc/slurm").exists()
    provisioning.serve({CONF: b"x" * 100})
    assert pull(filesync, provisioning) == [CONF]


@needs_root
def test_copies_of_similar_paths_are_distinct(
    filesync: ModuleType, provisioning: Provisioning, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original of each is restored regardless of its name, also from copies of an older version."""
    alike = ["/etc/a%b", "/etc/a/b", "/etc/a/b%before", "/etc/a/b/before"]
    assert len({filesync.smskept.good_copy(path) for path in alike}) == len(alike)
    kept = filesync.smskept.Kept()
    for path in alike[:3]:
        (root / path[1:]).parent.mkdir(exist_ok=True)
        (root / path[1:]).write_text(f"own {path}")
        data = path.encode()
        kept.apply({"path": path, "sha256": hashlib.sha256(data).hexdigest()}, data)
    store = root / "var/lib/sms/filesync"
    for path, old in (("/etc/a%b", ""), ("/etc/a/b%before", "etc%a%b%before")):
        for suffix in ("", "%before") if old else ():
            (root / (filesync.smskept.good_copy(path) + suffix)[1:]).rename(store / (old + suffix))
    kept = filesync.smskept.Kept()
    assert not [path.name for path in store.iterdir() if path.name.startswith("etc%")]
    for path in alike[:3]:
        assert kept.remove(path)
        assert (root / path[1:]).read_text() == f"own {path}"


@needs_root
def test_filesync_does_not_take_a_damaged_record_for_an_empty_one(
    filesync: ModuleType, provisioning: Provisioning, root: Path
) -> None:
    """It would keep the server's own version as what was there before."""
    provisioning.serve({CONF: b"one"})
    (root / "etc/slurm").mkdir()
    (root / CONF[1:]).write_bytes(b"own")
    pull(filesync, provisioning)
    (root / "var/lib/sms/filesync.json").write_bytes(b"")
    provisioning.serve({CONF: b"two"})
    with pytest.raises(ValueError, match=r"^/var/lib/sms/filesync\.json cannot be read: restore it"):
        pull(filesync, provisioning)
    assert (root / CONF[1:]).read_bytes() == b"one"


@needs_root
def test_filesync_restores_the_own_file_after_a_power_failure_in_the_middle(
    filesync: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written, its record is not: it is not mistaken for somebody's own."""
    (root / "etc/slurm").mkdir()
    (root / CONF[1:]).write_bytes(b"own")
    smskept = filesync.smskept
    whole = smskept.Kept._save

    def save(self: object) -> None:
        if (root / CONF[1:]).read_bytes() == b"one":
            raise RuntimeError("the power is gone")
        whole(self)

    with monkeypatch.context() as patch:
        patch.setattr(smskept.Kept, "_save", save)
        with pytest.raises(RuntimeError):
            smskept.Kept().apply({"path": CONF, "sha256": hashlib.sha256(b"one").hexdigest()}, b"one")
    kept = smskept.Kept()
    assert kept.apply({"path": CONF, "sha256": hashlib.sha256(b"two").hexdigest()}, b"two")
    assert kept.remove(CONF)
    assert (root / CONF[1:]).read_bytes() == b"own"


@needs_root
def test_failed_removal_does_not_block_other_files(
    filesync: ModuleType, provisioning: Provisioning, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that has become a folder is reported; the others are removed, and the report is sent."""
    kept = filesync.smskept.Kept()
    for path in ("/etc/one", "/etc/two"):
        kept.apply({"path": path, "sha256": hashlib.sha256(b"x").hexdigest()}, b"x")
    (root / "etc/two").unlink()
    (root / "etc/two").mkdir()
    reported: list[dict[str, str]] = []
    monkeypatch.setattr(filesync, "send_report", lambda link, push, kept, wanted, failed: reported.append(failed))
    manifest = {"files": [], "generation": 2, "push": 3}
    provisioning.handler.table["/manifest.json"] = json.dumps(manifest).encode()
    with pytest.raises(IsADirectoryError):
        pull(filesync, provisioning)
    assert not (root / "etc/one").exists() and (root / "etc/two").is_dir()
    assert list(reported[0]) == ["/etc/two"]


def test_filesync_presents_its_certificate(filesync: ModuleType, provisioning: Provisioning, root: Path) -> None:
    provisioning.serve({CONF: b"x"})
    (root / "etc/sms/tls/cert.pem").unlink()
    with pytest.raises(OSError):
        pull(filesync, provisioning)
    assert not (root / "etc/slurm").exists()


@pytest.mark.parametrize(("status", "renewals"), [(401, 1), (403, 1), (400, 1), (404, 0), (503, 0)])
def test_filesync_of_a_node_enrols_again_when_its_certificate_is_refused(
    status: int, renewals: int, filesync: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when it is time to renew it."""
    started: list[list[str]] = []

    def refuse(*_: object) -> list[str]:
        raise filesync.smslink.Said(status, "no")

    monkeypatch.setattr(filesync, "run_quietly", lambda argv: started.append(argv) or "")
    monkeypatch.setattr(filesync, "pull", refuse)
    (root / "run/sms/tls").mkdir(parents=True)
    (root / "run/sms/tls/renew").write_text(str(int(time.time()) + 10000))
    filesync.renew(False)
    assert started == []
    assert filesync.look({"server": "https://vm", "node": True}, [])[0] != "synced"
    filesync.renew(filesync.pull.refused)
    assert [argv[-1] for argv in started] == ["--renew"] * renewals


def test_filesync_trusts_only_the_ca_of_the_site(
    filesync: ModuleType, provisioning: Provisioning, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Provisioning(tmp_path_factory.mktemp("other"))
    try:
        other.serve({CONF: b"evil"})
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED") as caught:
            pull(filesync, other)
        assert not filesync.is_away(caught.value), "an impostor is not a server that is away"
    finally:
        other.close()


@contextmanager
def running_filesync(root: Path, server: str, interval_s: float = 0.1) -> Iterator[subprocess.Popen[bytes]]:
    (root / "etc/sms/filesync.json").write_text(json.dumps({"server": server, "interval_s": interval_s}))
    environment = {**os.environ, "SMS_ROOT": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, str(RUNTIME / "sms-filesync")], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_state(root: Path, wanted: str, since: float = 0) -> dict[str, Any]:
    path = root / "run/sms/filesync.json"
    for _ in range(500):
        if path.exists():
            status: dict[str, Any] = json.loads(path.read_text())
            if status["state"] == wanted and status["at"] > since:
                return status
        time.sleep(0.02)
    pytest.fail(f"never {wanted}: {path.read_text() if path.exists() else 'no status'}")


@needs_root
def test_filesync_retries_quietly(filesync: ModuleType, provisioning: Provisioning, root: Path) -> None:
    with running_filesync(root, f"https://127.0.0.1:{free_port()}") as process:
        first = wait_state(root, "waiting")
        wait_state(root, "waiting", since=first["at"] + 0.5)
        process.terminate()
        said, errors = process.communicate(timeout=5)
    assert said.count(b"\n") == 1, "said once, not every time"
    assert b"waiting" in said
    assert not errors
    provisioning.serve({"/etc/passwd": ALICE.encode()})
    with running_filesync(root, provisioning.url) as process:
        status = wait_state(root, "synced")
        assert status["until"] > time.time() + 50
        process.send_signal(signal.SIGKILL)
    assert (root / "etc/passwd").read_text() == OWN_PASSWD + ALICE + "\n"


@needs_root
def test_filesync_without_a_server(filesync: ModuleType, root: Path) -> None:
    with running_filesync(root, ""):
        assert wait_state(root, "waiting")["detail"] == "no provisioning node is configured"


@needs_root
@pytest.mark.parametrize(
    "manifest", [b"[" * 100000, b"{}", b"[]", b'{"files": [{}]}', b'{"files": [{"path": []}]}', b"\xff"]
)
def test_filesync_survives_any_manifest(
    filesync: ModuleType, provisioning: Provisioning, root: Path, manifest: bytes
) -> None:
    provisioning.handler.table = {"/manifest.json": manifest}
    with running_filesync(root, provisioning.url) as process:
        first = wait_state(root, "failed")
        wait_state(root, "failed", since=first["at"])
        assert process.poll() is None


@needs_root
def test_filesync_runs_at_once_when_signalled(filesync: ModuleType, provisioning: Provisioning, root: Path) -> None:
    provisioning.serve({"/etc/passwd": ALICE.encode()})
    with running_filesync(root, provisioning.url, interval_s=3600) as process:
        first = wait_state(root, "synced")
        process.send_signal(signal.SIGHUP)
        wait_state(root, "synced", since=first["at"])


@needs_root
def test_filesync_notifies_slurmctld_until_it_succeeds(
    filesync: ModuleType, provisioning: Provisioning, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two files was fetched while slurmctld was not up: slurmctld is notified of it later."""
    other = "/etc/slurm/topology.conf"
    write_services(root, slurmctld={"sync": [CONF, other]})
    scontrol = root / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $1 >>{root}/notified\n[ -e {root}/up ] || {{ echo away >&2; exit 1; }}\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    files = {CONF: b"ClusterName=x\n", other: b"x"}
    provisioning.serve(files, digests={other: "0" * 64})
    with running_filesync(root, provisioning.url):
        wait_state(root, "failed")
        assert (root / "notified").read_text().startswith("reconfigure\n")
        provisioning.serve({CONF: files[CONF]})
        assert wait_state(root, "waiting")["detail"] == "slurmctld has not taken its new files: away"
        (root / "up").touch()
        reported = (root / "notified").stat().st_size
        first = wait_state(root, "synced")
        assert (root / "notified").stat().st_size > reported
        reported = (root / "notified").stat().st_size
        wait_state(root, "synced", since=first["at"] + 0.3)
        assert (root / "notified").stat().st_size == reported, "once it has listened, it is left alone"


NODE_PATHS = [
    ("/etc/motd", True),
    ("/etc/slurm/slurm.conf", True),
    ("/opt/site/tool", True),
    ("/", False),
    ("", False),
    ("etc/motd", False),
    ("//etc/motd", False),
    ("/etc/../proc/sysrq-trigger", False),
    ("/etc/motd/", False),
    ("/etc/./motd", False),
    ("/etc/mo td", False),
    ("/etc/motd\n", False),
    ("/proc/sysrq-trigger", False),
    ("/sys/power/state", False),
    ("/dev/sda", False),
    ("/run/x", False),
    ("/var/run/x", False),
    ("/etc/sms/tls/ca.pem", False),
    ("/opt/sms/bin/sms-run", False),
    ("/var/lib/sms/filesync/x", False),
    ("/var/lib/sms/filesync.json", False),
    ("/etc/link/x", False),
    ("/" + "x" * 1000, False),
]


@pytest.mark.parametrize(("path", "allowed"), NODE_PATHS, ids=lambda value: ascii(value)[:30])
def test_paths_that_a_node_allows(filesync: ModuleType, root: Path, path: str, allowed: bool) -> None:
    (root / "proc").mkdir()
    (root / "etc/link").symlink_to(root / "proc")
    assert (path in filesync.smskept.NodePaths()) is allowed
    assert path not in filesync.smskept.NodePaths(["/srv"])
    assert 7 not in filesync.smskept.NodePaths()


@needs_root
def test_owner_and_mode_of_the_master(filesync: ModuleType, provisioning: Provisioning, root: Path) -> None:
    provisioning.serve({CONF: b"x", "/etc/passwd": ALICE.encode()})
    manifest = json.loads(provisioning.handler.table["/manifest.json"])
    manifest["files"][0].update(mode="0640", owner="nobody", group="root")
    provisioning.handler.table["/manifest.json"] = json.dumps(manifest).encode()
    pull(filesync, provisioning)
    state = (root / CONF[1:]).stat()
    assert (stat.S_IMODE(state.st_mode), state.st_uid, state.st_gid) == (0o640, pwd.getpwnam("nobody").pw_uid, 0)
    for wrong in ({"owner": "no-such-user"}, {"mode": "04755"}, {"mode": "x"}):
        manifest["files"][0].update({"mode": "0640", "owner": "root", **wrong})
        provisioning.handler.table["/manifest.json"] = json.dumps(manifest).encode()
        with pytest.raises(ValueError):
            pull(filesync, provisioning)
        assert stat.S_IMODE((root / CONF[1:]).stat().st_mode) == 0o640


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
