"""sms-provd as a process: its socket, errors at its start, and Debian 12's own packages under it."""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from appliance.errors import ConfigError
from appliance.provision.__main__ import main
from appliance.provision.config import parse_config
from appliance.provision.store import Store
from tests.places import ROOT
from tests.provd import Provd, make_document
from tests.waiting import wait_until

SYSTEM = "/usr/bin/python3"


def write_config(folder: Path, **more: Any) -> Path:
    path = folder / "provision.json"
    path.write_text(json.dumps(make_document(folder, **more)))
    return path


@contextmanager
def process(config: Path, *options: str, python: str = sys.executable) -> Iterator[subprocess.Popen[bytes]]:
    argv = [python, "-m", "appliance.provision", "--config", str(config), *options]
    started = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE)
    try:
        yield started
    finally:
        started.terminate()
        started.communicate(timeout=30)


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


class Unix(HTTPConnection):
    """HTTP over a socket in the file system."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self.path))


@pytest.mark.slow
def test_only_its_group_reaches_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with process(write_config(tmp_path, socket=str(path))):
        wait_until(lambda: listens(path), f"something listens at {path}", 30)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        client = Unix(path)
        client.request("GET", "/hsm/v2/service/ready")
        assert client.getresponse().status == 200
        client.close()


@pytest.mark.slow
def test_debians_own_packages(tmp_path: Path) -> None:
    argv = [SYSTEM, "-c", "import starlette, uvicorn, sqlalchemy, alembic"]
    if subprocess.run(argv, capture_output=True).returncode:
        pytest.skip("python3-starlette, python3-uvicorn and python3-alembic are not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--listen", f"127.0.0.1:{port}", "--trust-headers")
    with process(write_config(tmp_path), *options, python=SYSTEM):
        provd = Provd(None, port)  # type: ignore[arg-type]
        for _ in range(300):
            try:
                provd.good("GET", "/sms/v1/health")
                break
            except ConnectionError:
                time.sleep(0.1)
        rows = [{"name": f"n{number}", "address": f"10.77.0.{number + 10}", "groups": ["g"]} for number in range(100)]
        assert provd.good("POST", "/sms/v1/import", {"nodes": rows}) == {"nodes": 100}
        document = provd.good("GET", "/sms/v1/export")
        assert provd.good("POST", "/sms/v1/import?mode=replace", document) == {"nodes": 100}
        assert provd.good("GET", "/sms/v1/export") == document
        assert provd.good("PUT", "/sms/v1/nodes/n1", {"macs": ["02:00:0a:4d:00:97"]})["name"] == "n1"
        assert provd.ask("PUT", "/sms/v1/nodes/n2", {"macs": ["02:00:0a:4d:00:97"]}).status == 409
        assert provd.ask("PUT", "/sms/v1/nodes/n2", {"nid": "x"}).json["title"] == "Bad Request"
        assert provd.ask("GET", "/nowhere").status == 404
        assert provd.ask("PUT", "/sms/v1/nodes").status == 405
        provd.good("PUT", "/boot/v1/bootparameters", {"groups": ["g"], "kernel": "http://s/k"})
        assert "http://s/k" in provd.ask("GET", "/boot/v1/bootscript?name=n5", headers={}).text
        component = {"ID": "x0c0s0b0n0", "State": "On", "NID": 5}
        assert provd.ask("POST", "/hsm/v2/State/Components", {"Components": [component]}).status == 204
        assert len(provd.good("GET", "/hsm/v2/State/Components?type=Node")["Components"]) == 101


def test_why_it_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(config: Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["sms-provd", "--config", str(config)])
        return main(), capsys.readouterr().err

    def start_with(folder: Path, **more: Any) -> tuple[int, str]:
        return start(write_config(folder, **more))

    status, words = start_with(tmp_path, socket=str(tmp_path / "no" / "folder"))
    assert status == 1 and "cannot create" in words and "Traceback" not in words
    status, words = start_with(tmp_path, address="nowhere", unknown="perhaps", pool=["10.0.0.1"])
    assert status == 2 and all(key in words for key in ("address", "unknown", "pool"))
    store = Store(f"sqlite:///{tmp_path}/newer.db")
    with store.write() as connection:
        connection.execute(sa.text("UPDATE sms_schema SET version = 99"))
    store.close()
    status, words = start_with(tmp_path, database=f"sqlite:///{tmp_path}/newer.db")
    assert status == 3 and "version 99" in words and "Traceback" not in words
    status, words = start(tmp_path / "nothing")
    assert status == 2 and "cannot read" in words


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"address": "10.0.0"}, "address"),
        ({"prefix": 40}, "address"),
        ({"unknown": "yes"}, "unknown"),
        ({"pool": ["a", "b"]}, "pool"),
        ({"pool": "10.0.0.1"}, "pool"),
        ({"token_s": "long"}, "token_s"),
        ({"database": 5}, "database"),
    ],
)
def test_invalid_configurations(more: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        parse_config({"address": "10.77.0.2", "prefix": 24, **more})
