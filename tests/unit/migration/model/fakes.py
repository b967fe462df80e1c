"""What real code gets instead of hosts, agents and clocks: everything becomes an effect of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

from appliance.agent.migration_resume import resume
from appliance.agent.protocol import Problem
from appliance.errors import Busy, SmsError
from appliance.host.base import Result
from appliance.shared.identity import Identity
from appliance.shared.lease import SwapLease
from appliance.shared.overlay import MarkOverlay
from tests.unit.migration.model import engine
from tests.unit.migration.model.engine import effect

CLUSTER = "lab"
SIGN = "/alive"
"""Where the guard of another host leaves a sign of life; only messages depend on it."""
SLEEP_S = 1000.0
"""What a clock moves on when a process sleeps: longer than any patience."""


class Serial:
    """Stands for ThreadPoolExecutor: the work is done at once."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Serial:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **options))
        except Exception as error:
            done.set_exception(error)
        return done

    def map(self, work: Callable[..., Any], *many: Any) -> list[Any]:
        return [work(*one) for one in zip(*many, strict=False)]


class Clock:
    """Stands for the module ``time`` in verbs: the time of day is that of the host, which may be wrong."""

    def monotonic(self) -> float:
        return engine.current.slept * SLEEP_S

    def time(self) -> float:
        now: float = effect("now")
        return now

    def sleep(self, seconds: float) -> None:
        engine.current.slept += 1


class AgentClock:
    """Stands for the module ``time`` in agents, whose waits order source and target."""

    POLLS = 3
    """How often a loop looks before its time is over."""

    def monotonic(self) -> float:
        ticks: float = effect("clock")
        return 10.0 * ticks + (SLEEP_S if engine.current.slept >= self.POLLS else 0)

    def time(self) -> float:
        now: float = effect("now")
        return now

    def sleep(self, seconds: float) -> None:
        if seconds < 0.1:  # until RECLAIM_S have passed
            effect("wait", effect("clock"))
        else:
            engine.current.slept += 1
            effect("pause")


class PollClock:
    """Stands for the module ``time`` in the target, which asks for some seconds who answers: twice."""

    def monotonic(self) -> float:
        engine.current.slept += 1
        effect("settle")
        return 3.0 * engine.current.slept


def split(path: str) -> tuple[str, str]:
    """Return the host of a path, which only those of agents have, and the short name: a:/img.moved, /img."""
    name, _, last = path.rpartition("/")
    return name.removesuffix(":"), last.removeprefix("img.")


class FakeHost:
    """An admin host, as verbs see it."""

    remote = False

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *argv: str, **_: Any) -> Any:
        if "query" in argv:
            return SimpleNamespace(stdout=effect("query", self.name, bool(argv[argv.index("query") + 2])))
        if "query-overlay" in argv:
            return SimpleNamespace(stdout=effect("query_overlay", self.name))
        if argv[:2] == ("stat", "-L"):
            inode = effect("exists", self.name, split(argv[-1])[1])
            return Result(self.name, argv, 0 if inode else 1, str(inode).encode(), b"")
        if argv[0] == "stop-instance":
            effect("stop_instance", self.name)
        elif argv[0] == "true":
            effect("read_mark", self.name)
        else:
            assert argv[0] in ("mkdir", "logger", "probe", "stat"), argv
        return Result(self.name, argv, 0 if argv[0] != "probe" else effect("serves", self.name), b"", b"")

    def accepts_connections(self) -> bool:
        return False  # called for a host that did not answer: in this model it is off, or its network is cut

    def works(self, *argv: str) -> bool:
        path = argv[-1]
        if path.endswith(".move"):
            return effect("read_mark", self.name) is not None
        return bool(effect("exists", self.name, split(path)[1]))

    def read(self, path: str) -> bytes | None:
        if path == SIGN:
            return None
        if path.endswith(".move"):
            mark: bytes | None = effect("read_mark", self.name)
            return mark
        assert path.endswith(".lease"), path
        found: bytes | None = effect("read_lease", self.name)
        return found

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
        effect("remove", self.name, split(path)[1])


class OwnPath:
    """Stands for ``Path`` in the guard, which reads its own lease file directly."""

    host = ""

    def __init__(self, _: object) -> None:
        pass

    def exists(self) -> bool:
        self.data = effect("read_lease", self.host)
        return self.data is not None

    def read_bytes(self) -> Any:
        return self.data


FENCE = SimpleNamespace(command=("fence",), redfish=None, ipmi=None)
ADMINS = tuple(SimpleNamespace(name=name, fence=FENCE) for name in "ab")


def make_cluster() -> Any:
    """Return the cluster."""
    places = SimpleNamespace(
        lease=PurePosixPath("/lab.lease"),
        lock="/lab.lock",
        snapshots="/snapshots",
        overlay=PurePosixPath("/img"),
        journal="/journal",
        start_note="/note",
        sign=SIGN,
        images="/images",
        public_keys="/keys",
    )
    site = SimpleNamespace(cluster=CLUSTER, admin_hosts=ADMINS, overlay=SimpleNamespace(size_mb=1))
    site.snapshots = SimpleNamespace(borg=None)
    cluster = SimpleNamespace(site=site, places=places, services=(), path=None, is_gateway=False)
    cluster.host = FakeHost
    cluster.find_role = lambda role: None
    return cluster


def perform(host: FakeHost, request: Any, **_: Any) -> Any:
    """Stands for the agent that performs a request on a host."""
    if isinstance(request, MarkOverlay):
        return effect("mark_overlay", host.name, request.generation)
    assert isinstance(request, SwapLease)
    return effect("swap", host.name, request)


def find_instance(cluster: Any, host: FakeHost) -> Any:
    """Stands for a query of Apptainer."""
    found = effect("find_instance", host.name)
    return found and SimpleNamespace(pid=pid_of(host.name, found[0]), image="image")


def pid_of(name: str, serial: int) -> int:
    """Return the process of an instance: another one after each start."""
    return 10 * "ab".index(name) + serial + 1


def note(cluster: Any, host: FakeHost, verb: str, event: str, **facts: Any) -> None:
    """Append a line to the history, if it is one of those that open or end a failover."""
    if event in RUN_EVENTS:
        effect("note", host.name, None)
    elif verb == "failover" and event in ("begun", "restored"):
        keys = ("old", "shared", "snapshot", "generation", "taken", "overlay")
        kept = {key: facts[key] for key in keys if key in facts}
        effect("note", host.name, (("verb", verb), ("event", event), *sorted(kept.items())))


RUN_EVENTS = ("started", "done", "up", "arrived")


class Steps:
    """Stands for Progress."""

    @contextmanager
    def step(self, *_: Any) -> Iterator[Any]:
        yield SimpleNamespace(detail=lambda text: None, moved=lambda done, total: None)

    def report(self, text: str) -> None:
        pass


class FakeEndpoint:
    """An agent of a migration, as its coordinator sees it."""

    KEPT = ("leap", "sure", "digests")

    def __init__(self, host: FakeHost, agent: str) -> None:
        self.host = host
        self.name = host.name
        self.agent = agent

    def send(self, do: str, data: Any = b"", **facts: Any) -> None:
        kept = {key: facts[key] for key in self.KEPT if key in facts}
        if do == "start":
            kept["argv"] = ("start-isolated", f"{self.name}:")
        effect("send", self.agent, (do, *sorted(kept.items())))

    def receive(self, *kinds: str, patience_s: float = 0) -> tuple[Mapping[str, Any], bytes]:
        kind, *facts = effect("receive", self.agent)
        if kind not in kinds:
            raise SmsError(f"unexpected {kind}")
        return {"kind": kind, **REPLY_FACTS, **dict(facts)}, dict(facts).get("body", b"")

    @property
    def ended_itself(self) -> bool:
        return bool(effect("ended", self.agent))

    def close(self) -> None:
        effect("close", self.agent)

    def wait(self) -> None:
        effect("await_end", self.agent)


REPLY_FACTS: dict[str, Any] = {
    "sent_bytes": 0,
    "chunks": 0,
    "stop_s": 0.0,
    "frozen_s": 0.0,
    "found_by": "",
    "neighbours": [],
    "connections": 0,
    "lost": 0,
    "files": [],
    "trouble": "",
    "mac": "",
}


class FakeChannel:
    """The agent's side."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self.message = message

    def send(self, kind: str, data: Any = b"", **facts: Any) -> None:
        kept: dict[str, Any] = {key: facts[key] for key in ("digests", "mac") if key in facts}
        if kind == "probed":
            kept["body"] = data
        effect("reply", (kind, *sorted(kept.items())))

    def read_body(self, message: Any) -> bytes:
        return b""


class AgentFiles:
    """Stands for the module ``os`` in agents: paths begin with their host."""

    O_RDONLY = O_CLOEXEC = 0

    def __init__(self) -> None:
        self.path = SimpleNamespace(exists=self._exists, dirname=lambda path: path, normpath=lambda path: path)
        self.path.isdir = lambda path: True

    def _exists(self, path: str) -> bool:
        return bool(effect("exists", *split(path)))

    def stat(self, path: str) -> Any:
        found = effect("exists", *split(path))
        if not found:
            raise FileNotFoundError(path)
        return SimpleNamespace(st_ino=found)

    def fstat(self, descriptor: Any) -> Any:
        return self.stat(descriptor)

    def rename(self, source: str, target: str) -> None:
        name, slot = split(source)
        effect("rename", name, slot, split(target)[1])

    def unlink(self, path: str) -> None:
        effect("remove", *split(path))

    def open(self, path: str, *_: Any) -> str:
        return path

    def fsync(self, _: Any) -> None:
        pass

    close = fsync


def as_problem(name: str, *args: Any) -> Any:
    """Return the result of an effect on an agent's own host, whose errors are problems there."""
    try:
        return effect(name, *args)
    except SmsError as error:
        raise Problem(error.message) from None


def run_command(*argv: str, **_: Any) -> bytes:
    """Stands for a program that an agent runs."""
    name = argv[-1].partition(":")[0]
    if argv[0] in ("stop-instance", "apptainer"):
        as_problem("stop_instance", name)
    elif argv[0] in ("start-instance", "start-isolated"):
        as_problem("start_instance", name, argv[0] == "start-instance", 1 if argv[0] == "start-instance" else 2)
    elif argv[0] == "probe":
        return b"" if effect("works") else b'{"ok": false, "name": "db", "detail": "it does not"}'
    return b""


def call_agent(host: FakeHost, command: str, request: dict[str, Any], **_: Any) -> dict[str, Any]:
    """Stands for the agent that resumes a migration on a host, or tells the generations of its snapshots."""
    if command == "brief":
        generations = effect("brief", host.name)
        unnamed = max(generations, default=0)
        return {"generations": generations, "identity": Identity().to_dict(), "unnamed": unnamed}
    assert command == "resume"
    effect("read_mark", host.name)
    try:
        return resume({"mark": f"{host.name}:mark", "lock": f"{host.name}:lock"})
    except Problem as problem:
        kind = Busy if problem.status == 3 else SmsError
        raise kind(problem.message) from None
