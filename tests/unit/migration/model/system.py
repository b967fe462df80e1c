"""What the agents of the model do to their own host: effects. Paths, instances and ports begin with the host's name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from appliance.agent.instance import Instance
from appliance.agent.protocol import Busy as AgentBusy
from appliance.agent.protocol import Problem
from appliance.agent.system import System
from appliance.errors import Busy, SmsError
from appliance.shared.history import AppendLine
from appliance.shared.lease import SwapLease
from appliance.shared.overlay import MarkOverlay
from tests.support.env import Serial
from tests.support.system import NoDatagrams, NoSessions
from tests.unit.migration.model import engine
from tests.unit.migration.model.engine import effect

RUN_EVENTS = ("started", "done", "up", "arrived")
"""Events after which no failover is open."""
SLEEP_S = 1000.0
"""What a clock moves on when a process sleeps: longer than any patience."""
POLLS = 3
"""How often a loop of the source looks before its time is over."""


def split(path: str) -> tuple[str, str]:
    """Return the host of a path, which only those of agents have, and the short name: a:/img.moved, /img."""
    name, _, last = path.rpartition("/")
    return name.removesuffix(":"), last.removeprefix("img.")


def host_in(path: str) -> str:
    """Return the host that a path, a port or an instance begins with."""
    return path.partition(":")[0]


def pid_of(name: str, serial: int) -> int:
    """Return the process of an instance: another one after each start."""
    return 10 * "ab".index(name) + serial + 1


def as_problem(name: str, *args: Any) -> Any:
    """Return the result of an effect on an agent's own host, whose errors are problems there."""
    try:
        return effect(name, *args)
    except SmsError as error:
        raise Problem(error.message) from None


class ModelInstance(Instance):
    """An instance: only whether its services run, and its ports, are known."""

    @property
    def host(self) -> str:
        return "ab"[self.pid // 10]

    def ports(self, interfaces: Any) -> dict[str, str]:
        if not effect("find_instance", self.host):
            raise Problem("the other end of eth0 is not on this host")
        return {"eth0": f"{self.host}:p0"}

    def announce(self, addresses: Any) -> None:
        pass

    def replace_interfaces(self, interfaces: Any) -> None:
        pass

    def stop_services(self, names: Any, patience_s: float) -> None:
        if "db" in names:
            effect("services", self.host, False)

    def start_services(self, names: Any) -> None:
        if "db" in names:
            effect("services", self.host, True)


class ModelSystem(System):
    """That of a source, whose waits order source and target."""

    def time(self) -> float:
        now: float = effect("now")
        return now

    def monotonic(self) -> float:
        ticks: float = effect("clock")
        return 10.0 * ticks + (SLEEP_S if engine.current.slept >= POLLS else 0)

    def boot_time(self) -> float:
        return 10.0 * float(effect("clock"))

    def sleep(self, seconds: float) -> None:
        if seconds < 0.1:  # until RECLAIM_S have passed
            effect("wait", effect("clock"))
        else:
            engine.current.slept += 1
            effect("pause")

    def pool(self, workers: int) -> Executor:
        return Serial()

    def step(self, name: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    # Files

    def read(self, path: str) -> bytes | None:
        found: bytes | None = effect("read_mark" if path.endswith(":mark") else "read_lease", host_in(path))
        return found

    def replace(self, path: str, data: bytes) -> None:
        effect("mark", host_in(path), data)

    def remove(self, path: str) -> None:
        effect("mark", host_in(path), None)

    def perform(self, request: Any) -> Any:
        if isinstance(request, MarkOverlay):
            return effect("mark_overlay", host_in(request.path), request.generation)
        if isinstance(request, SwapLease):
            return effect("swap", host_in(request.path), request)
        assert isinstance(request, AppendLine), request
        if json.loads(request.line)["event"] in RUN_EVENTS:
            effect("note", host_in(request.path), None)
        return None

    def exists(self, path: str) -> bool:
        return bool(effect("exists", *split(path)))

    def inode(self, file: Any) -> int:
        found: int = effect("exists", *split(file))
        if not found:
            raise FileNotFoundError(file)
        return found

    def rename(self, path: str, to: str) -> None:
        name, slot = split(path)
        effect("rename", name, slot, split(to)[1])

    def unlink(self, path: str) -> None:
        effect("remove", *split(path))

    def flush(self, path: str) -> None:
        pass

    flush_folder = flush

    @contextmanager
    def locked(self, path: str) -> Iterator[None]:
        try:
            effect("lock", host_in(path), "lock")
        except Busy:
            raise AgentBusy("another sms is at work on this host") from None
        try:
            yield
        finally:
            effect("unlock", host_in(path), "lock")

    @contextmanager
    def ports_locked(self, lock: str) -> Iterator[None]:
        yield  # the model promises the same without it

    def private_mounts(self) -> None:
        pass

    # Instances and their ports

    def run(self, *argv: str, stdin: bytes = b"", ok: Sequence[int] = (0,), timeout: float = 60) -> bytes:
        name = host_in(argv[-1])
        if argv[0] in ("stop-instance", "apptainer"):
            as_problem("stop_instance", name)
        elif argv[0] in ("start-instance", "start-isolated"):
            attached = argv[0] == "start-instance"
            as_problem("start_instance", name, attached, 1 if attached else 2)
        elif argv[0] == "probe":
            return b"" if effect("works") else b'{"ok": false, "name": "db", "detail": "it does not"}'
        return b""

    def instance(self, pid: int) -> Instance:
        return ModelInstance(pid, self)

    def find_instance(self, name: str) -> Instance | None:
        found = effect("find_instance", host_in(name))
        return self.instance(pid_of(host_in(name), found[0])) if found else None

    def open_sessions(self, pid: int, ports: Any, reset_ports: Any) -> Any:
        return NoSessions()

    def count_datagrams(self, bridge: str, port: str, mac: str) -> Any:
        return NoDatagrams()

    def set_bridges(self, ports: dict[str, str | None], *, timeout: float = 60) -> None:
        for port, bridge in ports.items():
            as_problem("attach", host_in(port), bridge is not None, effect("clock") if timeout == 1 else None)

    def is_attached(self, port: str, bridge: str) -> bool:
        found = effect("find_instance", host_in(port))
        return bool(found and found[1])

    def wait_until_unused(self, overlay: str, patience_s: float) -> None:
        if effect("in_use", *split(overlay)):
            raise Problem("it is still open")

    def find_mac(self, bridge: str, address: str) -> str:
        return "mac" if effect("arp", host_in(bridge)) else ""

    def read_connections(self, instance: Any) -> list[str]:
        return []

    read_neighbours = read_connections

    def load_connections(self, instance: Any, lines: Any) -> str:
        return ""

    def load_neighbours(self, instance: Any, lines: Any) -> None:
        pass


class TargetSystem(ModelSystem):
    """That of a target, which asks for some seconds who answers: twice."""

    def monotonic(self) -> float:
        engine.current.slept += 1
        effect("settle")
        return 3.0 * engine.current.slept


class ModelChannel:
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
