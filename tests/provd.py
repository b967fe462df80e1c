"""sms-provd on a loopback port, in a thread: the real service with a real database; and a real PostgreSQL."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn

from appliance.provision.app import make_app
from appliance.provision.certificates import Certificate
from appliance.provision.config import Config, parse_config
from appliance.provision.images import Images
from appliance.provision.peers import UnknownMachines
from appliance.provision.world import World

ADMIN = {"X-SMS-Scheme": "https", "X-SMS-Verify": "SUCCESS", "X-SMS-Subject": "CN=tester,OU=admin"}
SERVICES = {**ADMIN, "X-SMS-Subject": "CN=services,OU=services"}


def make_config(folder: Path, **more: Any) -> Config:
    """A VM's configuration, its state in a folder. The table of neighbours is a file."""
    return parse_config(make_document(folder, **more))


def make_document(folder: Path, **more: Any) -> dict[str, Any]:
    """The file of ``make_config``."""
    arp = folder / "arp"
    if not arp.exists():
        write_neighbours(arp, {})
    return {
        "cluster": "test",
        "hostname": "sms-provision",
        "address": "10.77.0.2",
        "prefix": 24,
        "gateway": "10.77.0.1",
        "services": {"address": "10.77.0.3", "hostname": "sms-services"},
        "pool": ["10.77.0.200", "10.77.0.250"],
        "database": f"sqlite:///{folder}/inventory.db",
        "state": str(folder),
        "tls": str(folder / "tls"),
        "socket": str(folder / "api.sock"),
        "neighbours": str(arp),
        "busy_s": 0.3,
        **more,
    }


def write_neighbours(path: Path, known: dict[str, str]) -> None:
    """The kernel's table of neighbours, with these addresses and MAC addresses in it."""
    lines = ["IP address       HW type     Flags       HW address            Mask     Device"]
    lines += [f"{address:16} 0x1         0x2         {mac}     *        eth0" for address, mac in known.items()]
    path.write_text("\n".join(lines) + "\n")


@dataclass
class Answer:
    """What came back."""

    status: int
    data: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def text(self) -> str:
        return self.data.decode()

    @property
    def detail(self) -> str:
        return str(self.json["detail"])


@dataclass
class Provd:
    """A running service."""

    world: World
    port: int

    @property
    def folder(self) -> Path:
        """Where its state is: the database, the table of neighbours."""
        return self.world.config.state

    def reset(self) -> None:
        """As if it had just been started with an empty inventory."""
        with self.world.edit() as draft:
            for each in (draft.components, draft.interfaces, draft.groups, draft.endpoints, draft.boot):
                each.clear()
        self.world.images, self.world.unknown_machines = Images(self.folder / "no images"), UnknownMachines()
        write_neighbours(self.folder / "arp", {})

    def as_node(self, name: str, address: str = "") -> dict[str, str]:
        """The headers of a node of the inventory, with a new certificate, at its own address if no other is given."""
        node = self.world.inventory().find_node(name)
        assert node is not None
        made = hashlib.sha1(os.urandom(8)).hexdigest().upper()
        known = self.world.certificates
        now, address_of = time.time(), node.address or ""
        known.add(Certificate(made.lower(), made, node.uuid, name, address_of, "", now, now + 1000))
        subject = f"serialNumber={node.uuid},CN={name},OU=node"
        return {
            **ADMIN,
            "X-SMS-Subject": subject,
            "X-SMS-Fingerprint": made,
            "X-Real-IP": address or address_of,
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None, address: str = ""
    ) -> Answer:
        """One request, by the admin if no other client is named; ``address``: the client that nginx saw."""
        given = dict(ADMIN if headers is None else headers)
        if address:
            given["X-Real-IP"] = address
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if data is not None:
            given.setdefault("Content-Type", "application/json")
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, quote(path, safe="/?&=:!%"), body=data, headers=given)
            response = connection.getresponse()
            said = response.read()
            return Answer(response.status, said, {key.lower(): value for key, value in response.getheaders()})
        finally:
            connection.close()

    def good(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """What a request gives that must succeed: its JSON, or nothing."""
        answer = self.ask(method, path, body, **options)
        assert answer.status < 300, f"{method} {path}: {answer.status} {answer.data!r}"
        return answer.json if answer.data else None


@contextmanager
def running(config: Config, *, trust: bool = True) -> Iterator[Provd]:
    """The service, as long as the block."""
    world = World(config)
    server = uvicorn.Server(uvicorn.Config(make_app(world, trust=trust), log_level="warning", lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield Provd(world, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        world.store.close()


def find_postgresql() -> Path | None:
    """Where its programs are."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


@contextmanager
def postgresql(programs: Path) -> Iterator[str]:
    """A PostgreSQL of our own on a socket in a folder: its URL, but for the name of the database."""
    # The path of a socket has an end after 107 bytes, and root may not run the server.
    folder = Path(tempfile.mkdtemp(prefix="sms-pg-", dir="/tmp"))
    user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    become = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    if become:
        shutil.chown(folder, user)

    def run(*argv: str) -> None:
        subprocess.run([*become, *argv], check=True, capture_output=True, cwd="/", timeout=120)

    data = str(folder / "data")
    try:
        run(
            str(programs / "initdb"), "-D", data, "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-sync", "--locale=C"
        )
        options = f"-k {folder} -c listen_addresses= -c fsync=off -c shared_buffers=16MB"
        run(str(programs / "pg_ctl"), "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start")
        try:
            yield f"postgresql://tester@/{{}}?host={folder}"
        finally:
            run(str(programs / "pg_ctl"), "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
