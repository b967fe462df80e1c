"""`sms-probe --serve` and `--live`: what engines get over HTTP and as an exit status, and what hostile clients get."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.unit.services.conftest import RUNTIME, run_program
from tests.unit.services.tasks import Node, end, later, node_in

CONNECTIONS, REQUEST_BYTES, REQUEST_S = 32, 4096, 5  # smsserve.py


@pytest.fixture
def node(root: Path) -> Iterator[Node]:
    """Services `up`, `down` and `slow`; each probe leaves a line in the file `probes`."""
    with node_in(root) as node:
        for name, script in (("up", "true"), ("down", "echo no answer >&2; false"), ("slow", "sleep 1")):
            node.add(name)
            node.services[name]["probe"]["exec"] = [["sh", "-c", f"echo {name} >>{root}/probes; {script}"]]
        node.add("main", needs=["up"])
        yield node


@pytest.fixture
def port(node: Node) -> Iterator[int]:
    """The port of a server, as it prints it."""
    process = subprocess.Popen(
        [sys.executable, str(RUNTIME / "sms-probe"), "--serve", "127.0.0.1:0"],
        env={**os.environ, "SMS_ROOT": str(node.root), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
    )
    assert process.stdout
    words = process.stdout.readline().decode().split()
    assert words[:4] == ["sms-probe:", "serves", "on", "port"]
    yield int(words[4])
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    process.stdout.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 20)


def send(port: int, data: bytes) -> bytes:
    """Send bytes; all that is answered."""
    with connect(port) as sock:
        with suppress(OSError):  # it has answered before all of it arrived
            sock.sendall(data)
        answer = b""
        with suppress(ConnectionResetError):
            while part := sock.recv(65536):
                answer += part
        return answer


def get(port: int, path: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON object of a GET."""
    head, _, body = send(port, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()).partition(b"\r\n\r\n")
    assert b"Content-Type: application/json" in head and f"Content-Length: {len(body)}".encode() in head
    return int(head.split()[1]), json.loads(body)


def probes(node: Node) -> list[str]:
    path = node.root / "probes"
    return path.read_text().split() if path.exists() else []


def test_readiness(node: Node, port: int) -> None:
    status, answer = get(port, "/ready/up")
    assert (status, answer["name"], answer["ok"]) == (200, "up", True)
    status, answer = get(port, "/ready/down")
    assert (status, answer["name"], answer["ok"]) == (503, "down", False)
    assert "no answer" in answer["detail"]


def test_liveness(node: Node, port: int) -> None:
    """It starts no probe, neither its own nor one of what it needs."""
    status, answer = get(port, "/live/main")
    assert (status, answer["ok"], answer["state"]) == (503, False, None)
    node.services["up"]["probe"]["exec"] = [["false"]]
    node.add("another")
    task = node.start("main")
    later(lambda: node.record("main").get("waits_for") == ["up"])
    status, answer = get(port, "/live/main")
    assert (status, answer["ok"], answer["state"]) == (200, True, "deploy")
    assert answer["detail"].startswith("waits for up")
    assert run_program("sms-probe", node.root, "--live", "main").returncode == 0
    assert end(task) == 0
    assert get(port, "/live/main")[0] == 503
    done = run_program("sms-probe", node.root, "--live", "main")
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (4, False)
    assert probes(node) == []


REFUSED = [
    ("post", b"POST /ready/up HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    ("head", b"HEAD /ready/up HTTP/1.1\r\n\r\n", 405),
    ("unknown service", b"GET /ready/nosuch HTTP/1.1\r\n\r\n", 404),
    ("unknown question", b"GET /metrics/up HTTP/1.1\r\n\r\n", 404),
    ("root", b"GET / HTTP/1.1\r\n\r\n", 404),
    ("query", b"GET /ready/up?x=1 HTTP/1.1\r\n\r\n", 404),
    ("parent folder", b"GET /ready/../ready/up HTTP/1.1\r\n\r\n", 404),
    ("percent", b"GET /ready/%75p HTTP/1.1\r\n\r\n", 404),
    ("newline", b"GET /ready/up%0a HTTP/1.1\r\n\r\n", 404),
    ("proxy", b"GET http://x/ready/up HTTP/1.1\r\n\r\n", 404),
    ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\n", 400),
    ("HTTP/0.9", b"GET /ready/up\r\n\r\n", 400),
    ("lower case", b"get /ready/up HTTP/1.1\r\n\r\n", 400),
    ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n", 400),
    ("no text", b"\xff\xfe\x00 /ready/up HTTP/1.1\r\n\r\n", 400),
    ("long path", b"GET /ready/" + b"a" * 2000 + b" HTTP/1.1\r\n\r\n", 400),
    ("long header", b"GET /ready/up HTTP/1.1\r\nX: " + b"a" * 20000 + b"\r\n\r\n", 431),
    ("many headers", b"GET /ready/up HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n", 431),
    ("endless", b"a" * 1_000_000, 431),
]


@pytest.mark.parametrize(("data", "status"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(node: Node, port: int, data: bytes, status: int) -> None:
    """With its status where the client reads; no probe is started, and the next client is served."""
    answer = send(port, data)
    if len(data) < 100_000:
        assert int(answer.split()[1]) == status, answer[:200]
        assert (b"\r\nAllow: GET\r\n" in answer) == (status == 405)
    assert probes(node) == []
    assert get(port, "/ready/up")[0] == 200


def test_slow_request_is_ended(node: Node, port: int) -> None:
    """A byte now and then does not extend the time."""
    began = time.monotonic()
    with connect(port) as sock, suppress(ConnectionResetError, BrokenPipeError):
        for _ in range(100):
            sock.sendall(b"G")
            sock.settimeout(0.3)
            try:
                answer = sock.recv(100)
            except TimeoutError:
                continue
            assert not answer or int(answer.split()[1]) == 408
            break
    assert REQUEST_S - 1 < time.monotonic() - began < REQUEST_S + 20


def test_silent_connections_keep_nobody_out(node: Node, port: int) -> None:
    """Of too many, the one that has been silent longest is closed."""
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(port)) for _ in range(2 * CONNECTIONS)]
        assert get(port, "/ready/up")[0] == 200
        silent[0].settimeout(20)
        with suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""
        silent[-1].sendall(b"GET /ready/up HTTP/1.1\r\n\r\n")
        assert silent[-1].recv(100).startswith(b"HTTP/1.1 200 OK\r\n")


def test_client_that_does_not_read(node: Node, port: int) -> None:
    with ExitStack() as stack:
        for _ in range(CONNECTIONS - 1):
            stack.enter_context(connect(port)).sendall(b"GET /ready/up HTTP/1.1\r\n\r\n")
        assert get(port, "/ready/up")[0] == 200


def test_many_requests_cost_one_probe(node: Node, port: int) -> None:
    with ExitStack() as stack:
        socks = [stack.enter_context(connect(port)) for _ in range(CONNECTIONS - 2)]
        for sock in socks:
            sock.sendall(b"GET /ready/slow HTTP/1.1\r\n\r\n")
        assert get(port, "/ready/up")[0] == 200, "others are not kept waiting"
        assert {sock.recv(15) for sock in socks} == {b"HTTP/1.1 200 OK"}
    assert probes(node).count("slow") <= 2, "an answer is kept for a second"


@pytest.mark.parametrize(
    ("where", "status"),
    [
        *(("127.0.0.1", 2), ("127.0.0.1:x", 2), ("127.0.0.1:65536", 2), ("localhost:80", 2), (":80", 2), ("::1", 2)),
        ("192.0.2.1:8080", 1),
    ],
)
def test_addresses_that_it_cannot_serve(node: Node, where: str, status: int) -> None:
    assert run_program("sms-probe", node.root, "--serve", where).returncode == status


def test_address_of_ipv6(node: Node) -> None:
    if not Path("/proc/net/if_inet6").read_text().strip():
        pytest.skip("this machine has no IPv6 address")
    process = subprocess.Popen(
        [sys.executable, str(RUNTIME / "sms-probe"), "--serve", "[::1]:0"],
        env={**os.environ, "SMS_ROOT": str(node.root), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
    )
    assert process.stdout and b" of ::1\n" in process.stdout.readline()
    process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()
