"""Management controllers that are small, quick, and as broken as is wished: real servers with TLS on the loopback."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.servers import accepting

USER, PASSWORD = "root", "a secret: with a colon"
LOGIN = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
ROOT = "/redfish/v1"


@dataclass(frozen=True)
class Request:
    """A request: method, path, headers in lower case, body."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


Answer = Callable[["Request", ssl.SSLSocket], bytes | None]
"""Gives the bytes of an answer; None ends the connection."""


def answer(status: int, body: Any = None, headers: str = "") -> bytes:
    """A whole HTTP answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
    return f"HTTP/1.1 {status} Words\r\nContent-Length: {len(data)}\r\n{headers}\r\n".encode() + data


@dataclass
class Machine:
    """A controller that behaves, with one system or more; ``tree`` is what it has, by path."""

    tree: dict[str, Any]
    asked: list[tuple[str, str]] = field(default_factory=list)
    hanging: tuple[str, ...] = ()
    basic: bool = True
    etag: bool = False
    sessions: list[str] = field(default_factory=list)

    def __call__(self, request: Request, link: ssl.SSLSocket) -> bytes | None:
        self.asked.append((request.method, request.path))
        path = request.path.rstrip("/")
        if path in self.hanging:
            return hangs(request, link)
        if path == f"{ROOT}/SessionService/Sessions" and request.method == "POST":
            return self._log_in(request)
        token = request.headers.get("x-auth-token")
        if path != ROOT and not (token in self.sessions if token else self.basic and self._knows(request)):
            way = "Basic realm=x" if self.basic else "Redfish"
            return answer(401, {}, f"WWW-Authenticate: {way}\r\n")
        if request.method == "DELETE" and token:
            self.sessions.remove(token)
            return answer(204)
        if request.method == "POST" and path.endswith("ComputerSystem.Reset"):
            return self._reset(path, json.loads(request.body)["ResetType"])
        if path not in self.tree:
            return answer(404, {"error": {"message": "there is no such thing"}})
        if request.method == "PATCH":
            if self.etag and request.headers.get("if-match") != '"1"':
                return answer(428, {})
            for key, value in json.loads(request.body).items():
                self.tree[path] = {**self.tree[path], key: {**self.tree[path].get(key, {}), **value}}
            return answer(204)
        found = self.tree[path]
        return answer(200, {**found, "@odata.etag": '"1"'} if isinstance(found, dict) else found)

    def _knows(self, request: Request) -> bool:
        return request.headers.get("authorization") == LOGIN

    def _log_in(self, request: Request) -> bytes:
        if json.loads(request.body) != {"UserName": USER, "Password": PASSWORD}:
            return answer(401, {})
        self.sessions.append(f"token-{len(self.asked)}")
        place = f"{ROOT}/SessionService/Sessions/1"
        return answer(201, {}, f"X-Auth-Token: {self.sessions[-1]}\r\nLocation: {place}\r\n")

    def _reset(self, path: str, kind: str) -> bytes:
        system = path.partition("/Actions/")[0]
        action = self.tree[system]["Actions"]["#ComputerSystem.Reset"]
        if kind not in action.get("ResetType@Redfish.AllowableValues", [kind]):
            said = {"error": {"@Message.ExtendedInfo": [{"Message": f"{kind} is not taken"}]}}
            return answer(400, said)
        off = kind in ("ForceOff", "GracefulShutdown")
        self.tree[system]["PowerState"] = "Off" if off else "On"
        return answer(204)

    def power(self, system: str = "1") -> str:
        """What it says of the power now."""
        return str(self.tree[f"{ROOT}/Systems/{system}"]["PowerState"])


RESETS = ("On", "ForceOff", "GracefulShutdown", "ForceRestart")


def tree(systems: Mapping[str, Sequence[str]], *, power: str = "On", resets: Sequence[str] = RESETS) -> dict[str, Any]:
    """What a controller has, with systems by their MAC addresses."""

    def link(path: str) -> dict[str, str]:
        return {"@odata.id": f"{ROOT}{path}"}

    found: dict[str, Any] = {
        ROOT: {"RedfishVersion": "1.6.0", "Systems": link("/Systems"), "Managers": link("/Managers")},
        f"{ROOT}/Systems": {"Members": [link(f"/Systems/{name}") for name in systems]},
        f"{ROOT}/Managers": {"Members": [link("/Managers/bmc")]},
        f"{ROOT}/Managers/bmc": {"ManagerType": "BMC", "FirmwareVersion": "2.61", "Model": "B1"},
    }
    for name, macs in systems.items():
        path = f"/Systems/{name}"
        found[f"{ROOT}{path}"] = {
            "Id": name,
            "UUID": f"0000-{name}",
            "PowerState": power,
            "Manufacturer": "Maker",
            "Model": "Node",
            "SerialNumber": f"S{name}",
            "BiosVersion": "1.1",
            "MemorySummary": {"TotalSystemMemoryGiB": 64},
            "ProcessorSummary": {"Count": 2, "Model": "CPU"},
            "Boot": {"BootSourceOverrideTarget@Redfish.AllowableValues": ["None", "Pxe", "Hdd"]},
            "EthernetInterfaces": link(f"{path}/EthernetInterfaces"),
            "Actions": {
                "#ComputerSystem.Reset": {
                    "target": f"{ROOT}{path}/Actions/ComputerSystem.Reset",
                    "ResetType@Redfish.AllowableValues": list(resets),
                }
            },
        }
        nics = f"{path}/EthernetInterfaces"
        found[f"{ROOT}{nics}"] = {"Members": [link(f"{nics}/{number}") for number in range(len(macs))]}
        for number, mac in enumerate(macs):
            found[f"{ROOT}{nics}/{number}"] = {"Id": f"NIC{number}", "MACAddress": mac.upper(), "LinkStatus": "LinkUp"}
    return found


def hangs(request: Request, link: ssl.SSLSocket) -> bytes | None:
    """Says nothing until the other side has gone."""
    with suppress(OSError):
        link.recv(1)
    return None


def drips(request: Request, link: ssl.SSLSocket) -> bytes | None:
    """Sends a byte now and then, forever."""
    with suppress(OSError):
        link.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while True:
            link.sendall(b"x")
            time.sleep(0.05)
    return None


def never_ends(request: Request, link: ssl.SSLSocket) -> bytes | None:
    """A body without an end."""
    with suppress(OSError):
        link.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            link.sendall(b" " * 65536)
    return None


def says(data: bytes) -> Answer:
    """The same bytes to everybody, and then nothing more."""

    def speak(request: Request, link: ssl.SSLSocket) -> bytes | None:
        with suppress(OSError):
            link.sendall(data)
        return None

    return speak


@contextmanager
def serve(address: str, port: int, context: ssl.SSLContext | None, behave: Answer) -> Iterator[None]:
    """Behave so at an address for as long as the context lasts. Without TLS, nothing is ever said."""
    listening = socket.create_server((address, port), backlog=64)
    held: list[socket.socket] = []

    def hold(link: socket.socket) -> None:
        held.append(link)
        if context:
            _talk(link, context, behave)

    try:
        with accepting(listening, hold):
            yield
    finally:
        for link in held:
            with suppress(OSError):
                link.close()


def _talk(link: socket.socket, context: ssl.SSLContext, behave: Answer) -> None:
    with suppress(OSError, ValueError):
        safe = context.wrap_socket(link, server_side=True)
        with safe:
            reader = safe.makefile("rb")
            while request := _request(reader):
                said = behave(request, safe)
                if said is None:
                    return
                safe.sendall(said)


def _request(reader: Any) -> Request | None:
    first = reader.readline().decode().split()
    if len(first) != 3:
        return None
    headers = {}
    while line := reader.readline().strip().decode():
        key, _, value = line.partition(":")
        headers[key.lower()] = value.strip()
    return Request(first[0], first[1], headers, reader.read(int(headers.get("content-length", 0))))
