"""A hostile engine: an API server of Kubernetes, and an agent of Nomad, which root there has replaced.

``Engine`` speaks as much of both APIs as `kubectl` and `nomad` need for the verbs of sms: an honest one, in which
services run and answer, so that each attack is an answer that a verb had reason to read. It is for
``tests.bmcs.serve``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from appliance.shared.state_lease import LEASE_FILE, StateLease
from tests.bmcs import Request, answer
from tests.bmcs import _request as read_request
from tests.hostile.vm import HOSTILE
from tests.servers import accepting

Raw = Callable[[Request, ssl.SSLSocket], bytes | None]
Change = Callable[[Any], Any]

KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "api/v1": (
        "v1",
        {
            "ConfigMap": "configmaps",
            "Namespace": "namespaces",
            "Node": "nodes",
            "PersistentVolumeClaim": "persistentvolumeclaims",
            "Pod": "pods",
            "Secret": "secrets",
            "Service": "services",
            "ServiceAccount": "serviceaccounts",
        },
    ),
    "apis/apps/v1": ("apps/v1", {"StatefulSet": "statefulsets"}),
    "apis/networking.k8s.io/v1": ("networking.k8s.io/v1", {"NetworkPolicy": "networkpolicies"}),
    "apis/policy/v1": ("policy/v1", {"PodDisruptionBudget": "poddisruptionbudgets"}),
}
"""Kinds of Kubernetes that an export has, by the path of their version, and their names in paths."""
PLACE = re.compile(r"/(api/v1|apis/[^/]+/v1)(?:/namespaces/([^/]+))?/([a-z]+)(?:/([^/]+))?(?:/([a-z]+))?$")
"""Of an object, or of all of a kind: version, namespace, kind, name, and what of it."""
NUMBER = re.compile(r'(?<!\\)"@(-?(?:[0-9][0-9e]*|NaN|Infinity))"')
"""A number in ``tests.hostile.vm.CHANGES``, with its quotes."""
KEY = hashlib.sha512(b"a key of Munge").digest() * 2
TOKEN = "4d3c2b1a-token-of-an-account-0123456789"
UUID = "0a1b2c3d-0000-4000-8000-%012d"
NOMAD_NODES = ("c1", "node1")


class Engine:
    """Both APIs, with what they were given.

    Attributes:
        attack: answers instead, to what ``aim`` matches; None: ``_answer``.
        change: changes each answer that is JSON, to what ``aim`` matches.
        aim: method and path that are attacked, a regular expression.
        exec_reply: standard output, standard error and status of a command in a container, by its words.
        tried: requests that were attacked.
        asked: method and path of all requests.
        tokens: what came as the account's token.
        bodies: all bodies that were sent here.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.variables: dict[str, dict[str, str]] = {}
        self.attack: Raw | None = None
        self.change: Change | None = None
        self.aim = ""
        self.exec_reply: Callable[[list[str]], tuple[bytes, bytes, int]] = answer_inside
        self.tried: list[str] = []
        self.asked: list[str] = []
        self.tokens: set[str] = set()
        self.bodies: list[bytes] = []
        self._lock = threading.Lock()
        self._put("nodes", "", "worker1", {"kind": "Node", "apiVersion": "v1"})

    def honest(self) -> None:
        """Attack no longer; what was deployed stays."""
        self.attack, self.change, self.aim, self.exec_reply = None, None, "", answer_inside
        self.tried.clear()

    def __call__(self, request: Request, link: ssl.SSLSocket) -> bytes | None:
        """Answer a request."""
        what = f"{request.method} {request.path}"
        given = request.headers.get("authorization", "") or request.headers.get("x-nomad-token", "")
        with self._lock:
            self.asked.append(what)
            self.bodies.append(request.body)
            self.tokens |= {given} - {""}
            hit = bool((self.attack or self.change) and re.search(self.aim, what))
            self.tried += [what] if hit else []
        try:
            if hit and self.attack:
                return self.attack(request, link)
            if request.headers.get("upgrade", "").lower() == "websocket":
                self._talk(request, link)
                return None
            status, found = self._answer(request)
        except OSError:
            return None  # the client has ended it
        except (AttributeError, LookupError, TypeError, ValueError):
            return answer(500)  # what it was asked for are names that it has made up itself
        if hit and self.change and isinstance(found, dict | list):
            # json writes no numbers that Python cannot read again.
            found = NUMBER.sub(r"\1", json.dumps(self.change(found))).encode()
        return answer(status, found, "Content-Type: application/json\r\n")

    def _answer(self, request: Request) -> tuple[int, Any]:
        path = urlsplit(request.path).path
        if path.startswith("/v1/"):
            return self._nomad(request.method, path[4:], request.body, parse_qs(urlsplit(request.path).query))
        return self._kubernetes(request, path)

    # Kubernetes

    def _kubernetes(self, request: Request, path: str) -> tuple[int, Any]:
        if path == "/version":
            return 200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": list(map(_group, list(KINDS)[1:]))}
        if path == "/openapi/v3":
            return 200, {"paths": {each: {"serverRelativeURL": f"/openapi/v3/{each}"} for each in KINDS}}
        if path.removeprefix("/openapi/v3/") in KINDS and path.startswith("/openapi"):
            return 200, _schema(path.removeprefix("/openapi/v3/"))
        if path.strip("/") in KINDS:
            return 200, _resources(path.strip("/"))
        found = PLACE.match(path)
        if not found:
            return 404, _status(404, "NotFound", f"{path} is not there")
        version, space, kind, name, part = (unquote(each or "") for each in found.groups())
        return self._object(request, (version, kind, space, name, part))

    def _object(self, request: Request, place: tuple[str, str, str, str, str]) -> tuple[int, Any]:
        version, kind, space, name, part = place
        query = parse_qs(urlsplit(request.path).query)
        here = self.objects.get((kind, space, name))
        if request.method == "PATCH" and not part:
            body = yaml.safe_load(request.body)
            if "dryRun" in query:
                return 200, _merged(here or _new(kind, space, name), body)
            self._put(kind, space, name, body)
            return 200, self.objects[kind, space, name]
        if not name:
            named = [one for (each, where, _), one in self.objects.items() if each == kind and where == space]
            items = [one for one in named if _is_selected(one, query.get("labelSelector", [""])[0])]
            group = KINDS[version][0]
            return 200, {"kind": "List", "apiVersion": group, "metadata": {"resourceVersion": "1"}, "items": items}
        if here is None:
            return 404, _status(404, "NotFound", f'{kind} "{name}" not found', {"kind": kind, "name": name})
        if request.method == "DELETE":
            if kind == "pods":  # its StatefulSet has another one at once
                self.objects[kind, space, name] = _merged(here, {"metadata": {"uid": UUID % len(self.asked)}})
            else:
                del self.objects[kind, space, name]
            return 200, here
        if part == "log":
            return 200, b"a line of a log\n"
        if part == "scale":
            if request.method in ("PUT", "PATCH"):
                here["spec"]["replicas"] = json.loads(request.body)["spec"]["replicas"]
            wanted = here["spec"]["replicas"]
            if not wanted:
                self.objects.pop(("pods", space, f"{name}-0"), None)
            scale = {"metadata": here["metadata"], "spec": {"replicas": wanted}, "status": {"replicas": wanted}}
            return 200, {"kind": "Scale", "apiVersion": "autoscaling/v1", **scale}
        return 200, here

    def _put(self, kind: str, space: str, name: str, body: dict[str, Any]) -> None:
        found = _merged(self.objects.get((kind, space, name)) or _new(kind, space, name), body)
        self.objects[kind, space, name] = found
        if kind == "nodes":
            found["status"] = {"conditions": [{"type": "Ready", "status": "True"}], "images": []}
        if kind != "statefulsets":
            return
        revision = f"{name}-1"
        found["status"] = {"readyReplicas": 1, "currentRevision": revision, "updateRevision": revision}
        found["status"] |= {"observedGeneration": 1}
        spec = found["spec"]["template"]["spec"]
        names = [one["name"] for one in (*spec.get("initContainers", ()), *spec["containers"])]
        running = {"ready": True, "restartCount": 0, "state": {"running": {}}, "image": "i", "imageID": "i"}
        labels = {**found["metadata"].get("labels", {}), "controller-revision-hash": revision}
        pod = {
            **_new("pods", space, f"{name}-0"),
            "kind": "Pod",
            "apiVersion": "v1",
            "spec": {"nodeName": "worker1", "containers": [{"name": each, "image": "i"} for each in names]},
            "status": {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{"name": each, **running} for each in names],
            },
        }
        pod["metadata"] |= {"labels": labels, "ownerReferences": [{"name": name}]}
        self.objects["pods", space, f"{name}-0"] = pod

    # Nomad

    def _nomad(self, method: str, path: str, body: bytes, query: dict[str, list[str]]) -> tuple[int, Any]:
        kind, _, rest = path.partition("/")
        given = json.loads(body) if body else {}
        rest = unquote(rest)
        if method == "GET":
            return self._read(kind, rest, query)
        if kind == "var":
            self.variables[rest] = given["Items"]
            return 200, {**given, "Path": rest, "Namespace": "default", "CreateIndex": 1, "ModifyIndex": 1}
        if kind == "jobs" and given:
            self.jobs[given["Job"]["ID"]] = {**given["Job"], "Status": "running", "Stop": False, "Version": 0}
            return 200, {"EvalID": UUID % 9, "JobModifyIndex": 1}
        if kind == "job" and rest.endswith("/plan"):
            name = rest.removesuffix("/plan")
            change = "None" if name in self.jobs and not self.jobs[name]["Stop"] else "Added"
            diff = {"Type": change, "ID": name, "TaskGroups": []}
            return 200, {"Diff": diff, "JobModifyIndex": 1, "Annotations": {"DesiredTGUpdates": {}}}
        if kind == "job" and method == "DELETE":
            self.jobs[rest]["Stop"] = True
            return 200, {"EvalID": UUID % 9, "JobModifyIndex": 1}
        return 200, {}

    def _read(self, kind: str, rest: str, query: dict[str, list[str]]) -> tuple[int, Any]:
        if kind == "nodes":
            return 200, [self._client(number) for number in range(len(NOMAD_NODES))]
        if kind == "node":
            driver = {"raw_exec": {"Healthy": True, "Detected": True}}
            volumes: dict[str, Any] = {"sms-lab": {}}
            return 200, {**self._client(int(rest[-12:])), "Drivers": driver, "HostVolumes": volumes}
        if kind == "namespace":
            return 200, {"Name": rest, "Description": ""}
        if kind == "var":
            items = self.variables.get(rest)
            return (200, {"Path": rest, "Items": items}) if items else (404, b"variable not found")
        if kind == "job":
            return self._read_job(*rest.partition("/")[::2])
        if kind == "allocation":
            return 200, self._allocation(list(self.jobs)[int(rest[-12:])])
        if kind == "allocations":
            listed = [self._allocation(name) for name in self.jobs]
            return 200, [one for one in listed if one["ID"].startswith(query.get("prefix", [""])[0])]
        if kind == "jobs":
            return 200, [{"ID": name, "Name": name, "Status": "running"} for name in self.jobs]
        if kind == "client" and rest.endswith("/checks"):
            ready = {"Status": "success", "Output": ""}
            units = [f"{one} is ready" for one in ("slurmctld", "munge", "slurmdbd")]
            return 200, {str(number): {"Check": name, **ready} for number, name in enumerate(units)}
        if kind == "client":
            return 200, json.dumps({"Data": base64.b64encode(b"a line\n").decode(), "Offset": 7}).encode()
        return 200, {}

    def _read_job(self, name: str, part: str) -> tuple[int, Any]:
        if name not in self.jobs:
            return (200, []) if part else (404, b"job not found")
        if part == "allocations":
            return 200, [] if self.jobs[name]["Stop"] else [self._allocation(name)]
        if part == "deployment":
            return 200, {"Status": "successful", "JobVersion": 0}
        return 200, self.jobs[name]

    def _client(self, number: int) -> dict[str, Any]:
        name = NOMAD_NODES[number]
        pool = "compute" if name == "node1" else "default"
        what = {"Status": "ready", "SchedulingEligibility": "eligible", "Drain": False, "Address": "127.0.0.1"}
        return {"ID": UUID % number, "Name": name, "NodePool": pool, **what}

    def _allocation(self, name: str) -> dict[str, Any]:
        job = self.jobs[name]
        node = job["Type"] == "system"
        tasks = [one["Name"] for one in job["TaskGroups"][0]["Tasks"]]
        states = {one: {"State": "running", "Failed": False, "Restarts": 0, "Events": []} for one in tasks}
        where = {
            "NodeID": UUID % node,
            "NodeName": NOMAD_NODES[node],
            "ClientStatus": "running",
            "DesiredStatus": "run",
        }
        made = {"ID": UUID % list(self.jobs).index(name), "JobID": name, "JobVersion": 0, "TaskStates": states}
        return {**made, **where, "TaskGroup": job["TaskGroups"][0]["Name"], "Job": job}

    # Commands in containers

    def _talk(self, request: Request, link: ssl.SSLSocket) -> None:
        """Be the other end of a WebSocket: the output of a command, and its status."""
        query = parse_qs(urlsplit(request.path).query)
        nomad = request.path.startswith("/v1/")
        words = json.loads(query["command"][0]) if nomad else query["command"]
        mark = request.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accepted = base64.b64encode(hashlib.sha1(mark.encode()).digest()).decode()
        chosen = "" if nomad else "Sec-WebSocket-Protocol: v5.channel.k8s.io\r\n"
        head = f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accepted}\r\n{chosen}"
        link.sendall(f"HTTP/1.1 101 Switching Protocols\r\n{head}\r\n".encode())
        held = words[4].encode() if words[:2] == ["sh", "-c"] and words[3:4] == ["hold"] else b""
        out, errors, status = self.exec_reply(words[5:] if held else words)
        *printed, ended = (
            _nomad_frames(out + held, errors, status) if nomad else _pod_frames(out + held, errors, status)
        )
        link.sendall(b"".join(printed))
        if held:  # its shell reads to the end of its input
            end = b'"close":true' if nomad else b"\xff\0"
            while end not in (said := _read_frame(link)) and said:
                pass
        link.sendall(ended)
        link.sendall(websocket(struct.pack(">H", 1000), 8))
        link.settimeout(5)
        with suppress(OSError):
            while link.recv(65536):
                pass


@contextmanager
def serve_plain(address: str, port: int, behave: Raw) -> Iterator[None]:
    """Behave so at an address, without TLS."""
    listening = socket.create_server((address, port), backlog=64)

    def talk(link: socket.socket) -> None:
        with suppress(OSError, ValueError), link, link.makefile("rb") as reader:
            while request := read_request(reader):
                said = behave(request, cast(ssl.SSLSocket, link))
                if said is None:
                    return
                link.sendall(said)

    with accepting(listening, talk):
        yield


def answer_inside(words: list[str]) -> tuple[bytes, bytes, int]:
    """What an honest container prints: probes answer, the state has a lease."""
    command = " ".join(words)
    if "sms-probe" in command:
        names = re.findall(r"[a-z]+", command.rpartition("sms-probe")[2])
        return b"".join(json.dumps({"name": each, "ok": True}).encode() + b"\n" for each in names), b"", 0
    if LEASE_FILE in command:
        return StateLease(3, "slurmctld-0", 1.0).text(), b"", 0
    return b"", b"", 0


def quoting(request: Request, _: ssl.SSLSocket) -> bytes:
    """Deny a request, and quote it in the message: as it is, in base64, in a URL, in text of C, in hexadecimal."""
    body = request.body
    inner = json.loads(body) if body[:1] == b"{" else yaml.safe_load(body) if body else {}
    values = [str(one) for each in ("data", "Items") for one in (inner.get(each) or {}).values()]
    forms = [body.decode(errors="replace"), base64.b64encode(body).decode(), repr(body)]
    for value in values:
        data = base64.b64decode(value + "==") if re.fullmatch(r"[A-Za-z0-9+/=]{16,}", value) else value.encode()
        forms += [value, value[5:90], base64.b64encode(value.encode()).decode(), value.replace("+", "%2B")]
        forms += [data.hex(), repr(data), "".join(f"\\{each:03o}" for each in data), str(list(data))]
    text = f"admission webhook denied the request: {' ... '.join(reversed(forms))} {HOSTILE}"
    if request.path.startswith("/v1/"):
        return answer(500, text.encode())
    return answer(500, _status(500, "InternalError", text), "Content-Type: application/json\r\n")


def websocket(data: bytes, kind: int = 2) -> bytes:
    """Return a frame of RFC 6455 from a server; kind 1 is text, 2 binary, 8 the end."""
    size = len(data)
    long = struct.pack(">BQ", 127, size) if size > 65535 else struct.pack(">BH", 126, size)
    return bytes([0x80 | kind]) + (bytes([size]) if size < 126 else long) + data


def _read_frame(link: ssl.SSLSocket) -> bytes:
    """Return what a client's frame has; empty at the end of the connection."""

    def read(size: int) -> bytes:
        data = b""
        while len(data) < size and (block := link.recv(size - len(data))):
            data += block
        return data

    head = read(2)
    if len(head) < 2:
        return b""
    size = head[1] & 0x7F
    if size > 125:
        size = int.from_bytes(read(2 if size == 126 else 8), "big")
    key = read(4)
    return bytes(one ^ key[at % 4] for at, one in enumerate(read(size))) or b" "


def _pod_frames(out: bytes, errors: bytes, status: int) -> Iterator[bytes]:
    if out:
        yield websocket(b"\1" + out)
    if errors:
        yield websocket(b"\2" + errors)
    causes = {"causes": [{"reason": "ExitCode", "message": str(status)}]}
    failed = {"status": "Failure", "reason": "NonZeroExitCode", "message": "ended", "details": causes}
    yield websocket(b"\3" + json.dumps({"metadata": {}, **(failed if status else {"status": "Success"})}).encode())


def _nomad_frames(out: bytes, errors: bytes, status: int) -> Iterator[bytes]:
    for name, data in (("stdout", out), ("stderr", errors)):
        if data:
            yield websocket(json.dumps({name: {"data": base64.b64encode(data).decode()}}).encode(), 1)
        yield websocket(json.dumps({name: {"close": True}}).encode(), 1)
    yield websocket(json.dumps({"exited": True, "result": {"exit_code": status}}).encode(), 1)


def _new(kind: str, space: str, name: str) -> dict[str, Any]:
    meta = {"name": name, "uid": UUID % (len(name) + len(kind)), "resourceVersion": "1", "generation": 1}
    return {"metadata": {**meta, **({"namespace": space} if space else {})}}


def _merged(base: Any, change: Any) -> Any:
    if isinstance(base, dict) and isinstance(change, dict):
        return {**base, **{key: _merged(base.get(key), one) for key, one in change.items()}}
    return change


def _is_selected(one: dict[str, Any], selector: str) -> bool:
    labels = one["metadata"].get("labels") or {}
    return all(
        labels.get(key) == value for key, _, value in (each.partition("=") for each in selector.split(",") if each)
    )


def _status(code: int, reason: str, message: str, details: Any = None) -> dict[str, Any]:
    found = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
    return {**found, "message": message, "details": details or {}}


def _group(path: str) -> dict[str, Any]:
    name, version = path.split("/")[1:]
    chosen = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [chosen], "preferredVersion": chosen}


def _resources(path: str) -> dict[str, Any]:
    version, kinds = KINDS[path]
    verbs = ["get", "list", "patch", "delete", "create", "update", "watch"]
    whole = [
        {
            "name": name,
            "singularName": kind.lower(),
            "namespaced": kind not in ("Namespace", "Node"),
            "kind": kind,
            "verbs": verbs,
        }
        for kind, name in kinds.items()
    ]
    if "StatefulSet" in kinds:
        scale = {"group": "autoscaling", "version": "v1", "kind": "Scale", "namespaced": True, "verbs": verbs}
        whole.append({"name": "statefulsets/scale", "singularName": "", **scale})
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": whole}


def _schema(path: str) -> dict[str, Any]:
    version, kinds = KINDS[path]
    group = version.rpartition("/")[0]
    parameters = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
    parameters += [{"name": "dryRun", "in": "query", "schema": {"type": "string"}}]
    paths = {
        f"/{path}/{name}/{{name}}": {
            "patch": {
                "parameters": parameters,
                "responses": {},
                "x-kubernetes-group-version-kind": {"group": group, "version": "v1", "kind": kind},
            }
        }
        for kind, name in kinds.items()
    }
    return {"openapi": "3.0.0", "info": {"title": "x", "version": "1"}, "paths": paths}
