"""The environment of the model's verbs: admin hosts that answer commands, agents and a clock, all of them effects."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Never

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from appliance.agent.migration_resume import resume
from appliance.agent.protocol import Problem
from appliance.config.model import AdminHost, Fence, Site
from appliance.errors import Busy, SmsError
from appliance.host.base import Host, OnLine, Result
from appliance.host.stream import Stream
from appliance.operations.context import Cluster
from appliance.operations.env import Env, Hosts
from appliance.plan.machine import GATEWAY, PROBE, instance_name
from appliance.plan.services.confinement import Confinement, capabilities_for
from appliance.plan.services.runs import PRIVATE, shown
from appliance.progress import Progress
from appliance.shared.history import AppendLine
from appliance.shared.identity import Identity
from appliance.shared.lease import SwapLease
from appliance.shared.manifest import Checks, Manifest
from appliance.shared.outputs import MAX_OUTPUT
from appliance.shared.overlay import MarkOverlay
from appliance.tools.agent import Agents
from tests.confined import confined_output
from tests.sites import open_debian
from tests.support.env import Serial
from tests.support.instances import OPTIONS, list_layers
from tests.unit.migration.model import engine
from tests.unit.migration.model.engine import effect
from tests.unit.migration.model.system import RUN_EVENTS, SLEEP_S, ModelSystem, pid_of

CLUSTER = "lab"
STATE = "/state"
UUIDS = {letter: f"{letter * 8}-0000-4000-8000-{letter * 12}" for letter in "ab"}
IMAGE = f"{STATE}/images/key.sif"
CONFINED = Confinement(capabilities_for(()), f"{STATE}/seccomp.json", f"{STATE}/empty", ())
LABELS = {"sms.key": "key", "sms.services": "", "sms.confined": "1"}
KEPT = ("old", "shared", "snapshot", "generation", "taken", "overlay")
"""What the history of the model has of a failover."""


class Clock:
    """The time of day is that of the host, which may be wrong."""

    def monotonic(self) -> float:
        return engine.current.slept * SLEEP_S

    def time(self) -> float:
        now: float = effect("now")
        return now

    def sleep(self, seconds: float) -> None:
        engine.current.slept += 1


@cache
def constant(name: str) -> str:
    """Return what a command prints in every state."""
    if name == "trial":
        return confined_output(CONFINED, joined=False)
    if name == "inspect-confinement":
        return confined_output(CONFINED)
    if name == "bridge":
        return json.dumps([{"ifname": "br", "ifindex": 1, "flags": ["UP"], "linkinfo": {"info_kind": "bridge"}}])
    if name in ("port", "inside"):  # both ends of the pair of eth0
        port, link, inner = ("eth0", 2, 7) if name == "inside" else ("p0", 7, 2)
        return json.dumps([{"ifname": port, "ifindex": link, "link_index": inner}])
    if name == "labels":
        return json.dumps({"data": {"attributes": {"labels": LABELS}}})
    assert name == "site"
    return f"cluster: {cluster_of_model().site.cluster}\n"


@cache
def slot_of(path: str) -> str:
    """Return the model's name of a file beside the overlay."""
    found = path.removeprefix(str(cluster_of_model().places.overlay))
    return found.lstrip(".") or "img"


class Unexpected(BaseException):
    """A command that the model has no answer for: no code of the product may take it for an error of a host."""


class ModelHost(Host):
    """An admin host, as verbs see it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(
        self,
        *argv: str,
        input: bytes | None = None,
        ok: Container[int] | None = (0,),
        timeout: float | None = 60,
        on_line: OnLine | None = None,
        limit: int = MAX_OUTPUT,
    ) -> Result:
        found = self._answer(shown(argv) if argv[0] == PRIVATE[0] and "run-image" in argv else argv)
        status, output = found if isinstance(found, tuple) else (0, found)
        data = output if isinstance(output, bytes) else output.encode()
        if on_line:
            for line in data.decode().splitlines():
                on_line(line)
        return Result(self.name, argv, status, data, b"").expect(ok)

    def _answer(self, argv: tuple[str, ...]) -> Any:
        name = argv[3] if argv[0] == "sh" else argv[0]
        if name not in ANSWERS:
            raise Unexpected(argv)
        return ANSWERS[name](self, argv)

    def accepts_connections(self) -> bool:
        return False  # called for a host that did not answer: in this model it is off, or its network is cut

    def read(self, path: str) -> bytes | None:
        where = cluster_of_model().places
        if path.endswith(".move") and ".second" not in path:
            mark: bytes | None = effect("read_mark", self.name)
            return mark
        if path == str(where.lease):
            found: bytes | None = effect("read_lease", self.name)
            return found
        if path == str(where.history):
            return "".join(f"{json.dumps(dict(line))}\n" for line in effect("history", self.name)).encode()
        return constant("site").encode() if path == "/etc/sms/sms.yaml" else None

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> bool:
        return False

    @contextmanager
    def lock(self, path: str, *, wait_s: float = 0) -> Iterator[None]:
        if path.endswith(".ports"):  # the model promises the same without it
            yield
            return
        what = "lease_lock" if path.endswith(".lease.lock") else "lock"
        effect("lock", self.name, what)
        try:
            yield
        finally:
            effect("unlock", self.name, what)

    def remove(self, path: str) -> None:
        if "/" not in slot_of(path) and slot_of(path) != "new":
            effect("remove", self.name, slot_of(path))

    def hold(self, *argv: str, timeout: float = 30) -> Never:
        raise Unexpected(argv)

    def stream(self, *argv: str, on_line: OnLine | None = None) -> AbstractContextManager[Stream]:
        raise Unexpected(argv)

    def interact(self, *argv: str) -> Never:
        raise Unexpected(argv)


def _test(host: ModelHost, argv: tuple[str, ...]) -> Any:
    path = argv[-1] if "-o" not in argv else argv[2]
    if path.endswith(".move"):
        return int(effect("read_mark", host.name) is None), ""
    if argv[1] in ("-L", "-d") or GATEWAY in path:
        return 1, ""
    if path.startswith(f"{STATE}/images/"):
        return 0, ""
    if not path.startswith(str(cluster_of_model().places.overlay)):
        return 1, ""
    return int(not effect("exists", host.name, slot_of(path))), ""


def _stat(host: ModelHost, argv: tuple[str, ...]) -> Any:
    inode = effect("exists", host.name, slot_of(argv[-1]))
    return int(not inode), str(inode)


def _apptainer(host: ModelHost, argv: tuple[str, ...]) -> Any:
    words, mine = argv[1:3], instance_name(cluster_of_model().site)
    if words == ("instance", "list"):
        found = effect("find_instance", host.name) if argv[-1] == mine else None
        known = [{"instance": mine, "pid": pid_of(host.name, found[0]), "img": IMAGE}] if found else []
        return json.dumps({"instances": known})
    if words == ("instance", "start"):
        effect("start_instance", host.name, True, 0)
    elif words == ("instance", "stop"):
        effect("stop_instance", host.name)
    elif PROBE in argv:
        return effect("serves", host.name) if argv[argv.index(PROBE) + 2] == "20" else int(not effect("works")), ""
    elif "cat" in argv and "/proc/self/status" in argv:
        return constant("trial")
    elif words[0] == "exec" and IMAGE in argv:
        return '{"changed": [], "kept": []}'  # it seeds an overlay
    return ""


def _mv(host: ModelHost, argv: tuple[str, ...]) -> Any:
    source, target = (slot_of(path) for path in argv[-2:])
    if "/" in target:
        return ""  # the link to the image
    if source == "new":
        effect("create", host.name, target, (0, 0), "new")
    else:
        effect("rename", host.name, source, target)
    return ""


def _arping(host: ModelHost, argv: tuple[str, ...]) -> Any:
    network = cluster_of_model().site.networks.provisioning
    if argv[-1] == str(network.address.ip) and effect("arp", host.name):
        return 1, f"Unicast reply from {argv[-1]} [{network.mac}]\n"
    return ""


def _losetup(host: ModelHost, argv: tuple[str, ...]) -> Any:
    return "/dev/loop0" if effect("in_use", host.name, slot_of(argv[-1])) else ""


def _find(host: ModelHost, argv: tuple[str, ...]) -> Any:
    return "there" if "-name" in argv and effect("stale", host.name) else ""


def _unshare(host: ModelHost, argv: tuple[str, ...]) -> Any:
    effect("services", host.name, False)  # the file system of the overlay is shut down
    return ""


def _ip(host: ModelHost, argv: tuple[str, ...]) -> Any:
    if "-batch" in argv:
        effect("attach", host.name, False, None)
    return constant("port" if argv[-1] == "link" else "bridge")


def _does(name: str, *args: Any) -> Callable[[ModelHost, tuple[str, ...]], Any]:
    def do(host: ModelHost, argv: tuple[str, ...]) -> Any:
        effect(name, host.name, *args)
        return ""

    return do


def _prints(text: str) -> Callable[[ModelHost, tuple[str, ...]], Any]:
    return lambda host, argv: text


ANSWERS: dict[str, Callable[[ModelHost, tuple[str, ...]], Any]] = {
    **dict.fromkeys(("mkdir", "sync", "e2fsck", "env", "logger", "ln", "rm"), _prints("")),
    "dumpe2fs": _prints(OPTIONS),
    "debugfs": lambda host, argv: list_layers() if "ls -p /" in argv else "",
    "query": lambda host, argv: effect("query", host.name, bool(argv[5])),
    "query-overlay": lambda host, argv: effect("query_overlay", host.name),
    "find": lambda host, argv: "/usr/bin/sms" if argv[-1] == "sms" else "" if argv[0] == "sh" else _find(host, argv),
    "inspect-confinement": lambda host, argv: constant("inspect-confinement"),
    "image-metadata": lambda host, argv: constant("labels"),
    "start-daemon": _does("start_guard"),
    "stop-daemon": _does("stop_guard"),
    "true": _does("read_mark"),
    "fence": lambda host, argv: effect("fence", argv[-1]) or "",
    "df": _prints(f"{1 << 40} {1 << 40}"),
    "readlink": _prints(IMAGE),
    "python3": _prints("0" * 64),
    "test": _test,
    "stat": _stat,
    "apptainer": _apptainer,
    "mv": _mv,
    "arping": _arping,
    "losetup": _losetup,
    "unshare": _unshare,
    "ip": _ip,
    "nsenter": lambda host, argv: constant("inside"),
}


@dataclass
class ModelHosts(Hosts):
    """Both admin hosts; ``runs_on``: the one on which the verb or guard runs."""

    runs_on: str = ""

    def read_here(self, path: str) -> bytes | None:
        found: bytes | None = effect("read_lease", self.runs_on)
        return found

    def open(self, site: Site, admin: AdminHost) -> Host:
        return ModelHost(admin.name)

    def separate(self) -> Hosts:
        return self

    @property
    def this(self) -> Host:
        return ModelHost("")


def _line(event: Mapping[str, Any]) -> tuple[tuple[str, Any], ...] | None:
    """Return what the model keeps of an event of a failover that has not ended."""
    keys = [key for key in KEPT if key in event]
    facts = ((key, tuple(event[key]) if isinstance(event[key], list) else event[key]) for key in sorted(keys))
    return (("verb", event["verb"]), ("event", event["event"]), *facts)


def manifest_of(one: tuple[Any, ...]) -> dict[str, Any]:
    """Return the manifest of a snapshot of the model."""
    number, generation, sequence, taken, host, contents = one
    cluster = cluster_of_model().site.cluster
    size = hash(contents) & 0xFFFF
    found = Manifest(
        1, "", number, cluster, "", host, generation, {}, taken, True, 0.0, "full", "", size, 1, 1, repr(contents),
        Checks(), [], "", sequence=sequence,
    )  # fmt: skip
    return {**found.to_dict(), "health": {"ok": True}}


@dataclass(frozen=True)
class ModelAgents(Agents):
    """Agents on the hosts of the model: a request is one effect."""

    def install(self, host: Host, time_left: Any = None) -> tuple[str, ...]:
        return ()

    def perform(self, host: Host, request: Any, *, timeout: float = 60) -> Any:
        if isinstance(request, MarkOverlay):
            return effect("mark_overlay", host.name, request.generation)
        if isinstance(request, SwapLease):
            return effect("swap", host.name, request)
        assert isinstance(request, AppendLine), request
        event = json.loads(request.line)
        if event["event"] in RUN_EVENTS:
            effect("note", host.name, None, event["verb"] == "failover")
        elif event["verb"] == "failover" and event["event"] in ("begun", "restored"):
            effect("note", host.name, _line(event), False)
        return None

    def query(self, host: Host, command: str, request: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        return self.call(host, command, request)

    def call(self, host: Host, command: str, request: dict[str, Any], progress: Any = None, **_: Any) -> dict[str, Any]:
        if command == "brief":
            generations = effect("brief", host.name)
            unnamed = max(generations, default=0)
            return {"generations": generations, "identity": Identity().to_dict(), "unnamed": unnamed}
        if command == "list":
            found = [manifest_of(one) for one in effect("snapshots", host.name)]
            return {"snapshots": found, "broken": {}, "stored_bytes": 0, "free_bytes": 0, "identity": {}}
        if command == "take":
            return {"snapshot": manifest_of((0, 0, 0, 0.0, host.name, "kept"))}
        if command == "restore":
            effect("restore", host.name, int(request["snapshot"]))
            return {"bytes": 1, "seconds": 0.0}
        assert command == "resume", command
        effect("read_mark", host.name)
        try:
            return resume({"mark": f"{host.name}:mark", "lock": f"{host.name}:lock"}, ModelSystem())
        except Problem as problem:
            kind = Busy if problem.status == 3 else SmsError
            raise kind(problem.message) from None

    @contextmanager
    def open_endpoint(self, host: Host, command: str, request: Any, progress: Progress) -> Iterator[Any]:
        agent = {"leave": "source", "arrive": "target"}[command]
        effect("open", host.name, agent, (request.generation, getattr(request, "pid", 0), ()))
        endpoint = ModelEndpoint(host, agent)
        endpoint.send("begin")
        try:
            yield endpoint
        finally:
            endpoint.close()
            endpoint.wait()


SENT = ("leap", "sure", "digests")
"""What the model keeps of a message."""
COPIES = {"send": "sent", "round": "sent", "verify": "verified"}
"""Messages that are confirmed at once: nothing of the model depends on them."""


class ModelEndpoint:
    """An agent of a migration, as its coordinator sees it. Of the copy, it confirms all but its begin at once."""

    def __init__(self, host: Host, agent: str) -> None:
        self.host = host
        self.name = host.name
        self.agent = agent
        self.confirmed: list[str] = []

    def send(self, do: str, data: Any = b"", **facts: Any) -> None:
        if do in COPIES:
            self.confirmed.append(COPIES[do])
            return
        kept = {key: facts[key] for key in SENT if key in facts}
        if do == "start":
            kept["argv"] = ("start-isolated", f"{self.name}:")
        effect("send", self.agent, (do, *sorted(kept.items())))

    def receive(self, *kinds: str, patience_s: float = 0) -> tuple[Mapping[str, Any], bytes]:
        if self.confirmed:
            return {**FACTS, "kind": self.confirmed.pop(0)}, b""
        kind, *facts = effect("receive", self.agent)
        if kind not in kinds:
            raise SmsError(f"unexpected {kind}")
        return {**FACTS, "kind": kind, **dict(facts)}, dict(facts).get("body", b"")

    @property
    def ended_itself(self) -> bool:
        return bool(effect("ended", self.agent))

    def close(self) -> None:
        effect("close", self.agent)

    def wait(self) -> None:
        effect("await_end", self.agent)


FACTS: dict[str, Any] = {
    **dict.fromkeys(("sent_bytes", "chunks", "connections", "lost", "used", "size"), 0),
    **dict.fromkeys(("stop_s", "frozen_s"), 0.0),
    **dict.fromkeys(("found_by", "trouble", "mac"), ""),
    "neighbours": [],
    "files": [],
    "settled": True,
}
"""What replies have that no state of the model decides."""


@cache
def public_key() -> Path:
    """Return a public key, as `sms key create` writes it."""
    path = Path(TemporaryDirectory().name + ".pub")
    key = Ed25519PrivateKey.generate().public_key()
    path.write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    atexit.register(path.unlink)
    return path


@cache
def cluster_of_model(*, fenced: bool = True) -> Cluster:
    """Return the cluster, in an environment of the model; each run gets the same one, which keeps nothing."""
    opened = open_debian(Path(STATE))
    admins = tuple(
        opened.site.admin_hosts[0].model_copy(
            update={"name": name, "fence": Fence(command=("fence", name)) if fenced else None, "mirror": None}
        )
        for name in "ab"
    )
    signing = opened.site.signing.model_copy(update={"public_keys": (public_key(),), "pgp_fingerprint": None})
    snapshots = opened.site.snapshots.model_copy(update={"borg": None})
    slurm = opened.site.slurm.model_copy(update={"files": {}})
    changes = {
        "cluster": CLUSTER,
        "admin_hosts": admins,
        "signing": signing,
        "snapshots": snapshots,
        "slurm": slurm,
        "provisioning": None,
    }
    env = Env(clock=Clock(), pool=Serial, agents=ModelAgents(), hosts=ModelHosts())
    return replace(opened, site=opened.site.model_copy(update=changes), services=(), path=None, env=env)
