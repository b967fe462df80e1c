"""Probes: what counts as an answer of a service."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from appliance.share import share
from tests.servers import free_port
from tests.unit.services.conftest import probe_of, run_program, write_services
from tests.waiting import soon


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


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Ports of servers of this test, by those that a probe connects to."""
    ports: dict[int, int] = {}
    connect = socket.socket.connect

    def connect_there(sock: socket.socket, address: Any) -> None:
        connect(sock, (address[0], ports.get(address[1], address[1])) if isinstance(address, tuple) else address)

    monkeypatch.setattr(socket.socket, "connect", connect_there)
    return ports


@pytest.mark.parametrize(("mode", "stratum", "cookie", "fine", "words"), NTP)
def test_probe_ntp(
    smsrt: ModuleType, mode: int, stratum: int, cookie: bool, fine: bool, words: str, moved: dict[int, int]
) -> None:
    def answer(sock: socket.socket) -> None:
        question, peer = sock.recvfrom(512)
        seconds = int(time.time()) + smsrt.NTP_DELTA
        reply = struct.pack(
            "!BB22x8sQII", 4 << 3 | mode, stratum, question[40:48] if cookie else b"x" * 8, 0, seconds, 0
        )
        sock.sendto(reply, peer)

    server = udp_server()
    moved[smsrt.NTP_PORT] = server.getsockname()[1]
    with served(server, answer):
        ok, detail = ask(smsrt, "ntp", ntp="127.0.0.1")
    assert (ok, words in detail) == (fine, True), detail


def test_probe_ntp_without_server(smsrt: ModuleType, moved: dict[int, int]) -> None:
    moved[smsrt.NTP_PORT] = free_port(kind=socket.SOCK_DGRAM)
    ok, detail = ask(smsrt, "ntp", ntp="127.0.0.1")
    assert not ok
    assert "refused" in detail


@pytest.mark.parametrize(
    ("greeting", "fine"),
    [(b"220 host ESMTP\r\n", True), (b"421 too busy\r\n", False), (b"", False), (b"SSH-2.0\r\n", False)],
)
def test_probe_smtp(smsrt: ModuleType, greeting: bytes, fine: bool, moved: dict[int, int]) -> None:
    heard: list[bytes] = []

    def greet(sock: socket.socket) -> None:
        peer, _ = sock.accept()
        with peer:
            peer.sendall(greeting)
            peer.shutdown(socket.SHUT_WR)
            heard.append(peer.recv(100))

    server = socket.create_server(("127.0.0.1", 0))
    moved[smsrt.SMTP_PORT] = server.getsockname()[1]
    with served(server, greet):
        ok, detail = ask(smsrt, "smtp", smtp="127.0.0.1")
    assert ok is fine, detail
    assert heard == [b"QUIT\r\n"]


@pytest.mark.parametrize("there", [True, False])
def test_probe_syslog(smsrt: ModuleType, root: Path, there: bool, moved: dict[int, int]) -> None:
    log = root / "messages"
    log.write_text("sms-probe: an old line\n")

    def receive(sock: socket.socket) -> None:
        line = sock.recv(1000)
        if there:
            with log.open("ab") as stream:
                stream.write(line + b"\n")

    server = udp_server()
    moved[smsrt.SYSLOG_PORT] = server.getsockname()[1]
    with served(server, receive):
        ok, detail = ask(smsrt, "syslog", syslog="127.0.0.1", file="/messages", timeout_s=5 if there else 0.3)
    assert ok is there, detail


def test_probe_syslog_finds_its_line_after_rotation(smsrt: ModuleType, root: Path, moved: dict[int, int]) -> None:
    log = root / "messages"
    log.write_text("x" * 10000)

    def receive(sock: socket.socket) -> None:
        log.write_bytes(sock.recv(1000))

    server = udp_server()
    moved[smsrt.SYSLOG_PORT] = server.getsockname()[1]
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


@pytest.mark.parametrize(("answer", "fine"), [(b"HTTP/1.1 401 No\r\n\r\n", True), (b"HTTP/1.1 200 OK\r\n\r\n", False)])
def test_a_status_that_a_probe_expects(smsrt: ModuleType, answer: bytes, fine: bool) -> None:
    """That it refuses whom it does not know, such as the probe."""

    def reply(sock: socket.socket) -> None:
        peer, _ = sock.accept()
        with peer:
            peer.recv(1000)
            peer.sendall(answer)

    server = socket.create_server(("127.0.0.1", 0))
    with served(server, reply):
        ok, detail = ask(smsrt, "http", http=f"http://127.0.0.1:{server.getsockname()[1]}/", status=401)
    assert ok is fine, detail


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


PING = "Slurmctld(primary) at host-a is %s\\nSlurmctld(backup) at slurmctld-0 is %s\\n"
PROBE = yaml.safe_load(share("definitions", "services", "slurmctld.yaml").read_text())["probe"]
CONTROLLER = PROBE["expect"]
EXEC: list[tuple[list[list[str]], str | None, bool, str]] = [
    ([["true"]], None, True, "ok"),
    ([["echo", "STATUS:   Success"]], "STATUS: +Success", True, "STATUS: Success"),
    ([["echo", "down"]], "UP", False, "unexpected answer: down"),
    ([["echo", "one two"], ["tr", "a-z", "A-Z"]], "ONE", True, "ONE"),
    ([["false"], ["echo", "UP"]], "UP", False, "false: status 1"),
    ([["sh", "-c", "echo first >&2; echo why it failed >&2; exit 3"]], None, False, "sh: why it failed"),
    ([["printf", PING % ("UP", "DOWN")]], CONTROLLER, True, "Slurmctld(primary) at host-a is UP"),
    ([["printf", PING % ("DOWN", "UP")]], CONTROLLER, False, "unexpected answer"),
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


def test_packets_of_the_routed_probe(smsrt: ModuleType) -> None:
    packet = smsrt.echo_request("192.0.2.1", 77, b"c" * 16)
    assert smsrt.checksum(packet[:20]) == smsrt.checksum(packet[20:]) == 0, "valid: it sums up to ones"
    assert (packet[12:16], packet[16:20]) == (socket.inet_aton("169.254.77.2"), socket.inet_aton("192.0.2.1"))
    reply = packet[:12] + packet[16:20] + packet[12:16] + b"\0" + packet[21:]
    assert smsrt.is_reply(reply, "192.0.2.1", 77, b"c" * 16)
    others = [packet, reply[:40], b"", reply[:12] + packet[12:20] + reply[20:], reply[:20] + b"\3" + reply[21:]]
    assert not any(smsrt.is_reply(other, "192.0.2.1", 77, b"c" * 16) for other in others)
    assert not smsrt.is_reply(reply, "192.0.2.1", 78, b"c" * 16)


def test_the_controller_is_asked_only_itself(tmp_path: Path) -> None:
    """Another place may have one that runs; from one that is off no answer comes."""
    hosts = "SlurmctldHost=own(10.0.0.1)\nSlurmctldPort=6817\n slurmctldhost = b(10.0.0.2)\nSlurmctldHost=c\n"
    (tmp_path / "slurm.conf").write_text(f"{hosts}Include x.conf\ninclude /y.conf\n")
    (tmp_path / "scontrol").write_text('#!/bin/sh\ncat "$SLURM_CONF"\necho "$@"\n')
    (tmp_path / "scontrol").chmod(0o755)
    (argv,) = PROBE["exec"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CONF": f"{tmp_path}/slurm.conf", "TMPDIR": str(tmp_path)}
    printed = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    first, port, *rest = printed
    assert (first, port) == ("SlurmctldHost=own(10.0.0.1)", "SlurmctldPort=6817")
    assert rest == ["Include /etc/slurm/x.conf", "include /y.conf", "ping"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scontrol", "slurm.conf"]
