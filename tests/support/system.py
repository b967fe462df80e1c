"""An agent's own host in tests: files are real, in folders of the test; programs, ports and time are this object's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from appliance.agent.instance import Instance
from appliance.agent.system import System
from tests.support.env import NOW, Serial

BridgeChange = dict[str, str | None]


class NoSessions:
    """Stands for the sessions of log senders: there are none."""

    def close(self) -> None:
        pass

    reopen = close

    def wait_until_noticed(self, patience_s: float) -> bool:
        return True

    wait_until_read = wait_until_noticed


class NoDatagrams:
    """Stands for the counter of datagrams: none comes in."""

    def count(self) -> int:
        return 0


class FakeInstance(Instance):
    """An instance whose services and ports are lists of its system."""

    system: FakeSystem

    @property
    def root(self) -> str:
        return self.system.root or super().root

    def stop_services(self, names: Sequence[str], patience_s: float) -> None:
        self.system.did.append(("stop", *names))

    def start_services(self, names: Sequence[str]) -> None:
        self.system.did.append(("start", *names))

    def ports(self, interfaces: Sequence[str]) -> dict[str, str]:
        return {name: self.system.port_names[name] for name in interfaces}

    def replace_interfaces(self, interfaces: Any) -> None:
        self.system.did.append(("replace", len(interfaces)))

    def announce(self, addresses: dict[str, str]) -> None:
        self.system.did.append(("announce", *addresses.values()))


class FakeSystem(System):
    """A host on which an instance runs or not.

    Attributes:
        pid: the first process of the instance that runs; 0 without one.
        port_names: the port of each interface of an instance.
        attached: the bridge of each port that is on one.
        answers: the MAC address that answers for an address, by address.
        root: the folder that is the root of an instance.
        outputs: what a program prints, by its first words, or a function of its argv; others print nothing.
        did: what was done, in order: argv of programs, changes of bridges, orders to services.
        now: seconds since the boot, also of the monotonic clock; they pass when somebody sleeps.
    """

    def __init__(self, pid: int = 0) -> None:
        self.pid = pid
        self.port_names = {"eth0": "veth0", "eth1": "veth1"}
        self.attached: dict[str, str] = {}
        self.answers: dict[str, str] = {}
        self.root = ""
        self.outputs: dict[tuple[str, ...], bytes | Callable[..., bytes]] = {}
        self.did: list[tuple[Any, ...]] = []
        self.now = 1000.0
        self.notes: list[str] = []

    @property
    def changes(self) -> list[BridgeChange]:
        """The changes of bridges, in order."""
        return [done[1] for done in self.did if done[0] == "bridges"]

    def time(self) -> float:
        return NOW + self.now

    def monotonic(self) -> float:
        return self.now

    boot_time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def pool(self, workers: int) -> Executor:
        return Serial()

    def step(self, name: str) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextmanager
    def locked(self, path: str) -> Iterator[None]:
        yield

    @contextmanager
    def ports_locked(self, lock: str) -> Iterator[None]:
        yield

    def private_mounts(self) -> None:
        pass

    def run(self, *argv: str, stdin: bytes = b"", ok: Sequence[int] = (0,), timeout: float = 60) -> bytes:
        self.did.append(argv)
        known = [words for words in self.outputs if argv[: len(words)] == words]
        output = self.outputs[max(known, key=len)] if known else b""
        return output if isinstance(output, bytes) else output(*argv)

    def start(self, *argv: str) -> None:
        self.did.append(argv)

    def instance(self, pid: int) -> Instance:
        return FakeInstance(pid, self)

    def find_instance(self, name: str) -> Instance | None:
        return self.instance(self.pid) if self.pid else None

    def open_sessions(self, pid: int, ports: Sequence[int], reset_ports: Sequence[int]) -> Any:
        return NoSessions()

    def count_datagrams(self, bridge: str, port: str, mac: str) -> Any:
        return NoDatagrams()

    def wait_until_unused(self, overlay: str, patience_s: float) -> None:
        self.did.append(("unused", overlay))

    def set_bridges(self, ports: BridgeChange, *, timeout: float = 60) -> None:
        self.did.append(("bridges", dict(ports)))
        for port, bridge in ports.items():
            self.attached.pop(port, None)
            if bridge:
                self.attached[port] = bridge

    def is_attached(self, port: str, bridge: str) -> bool:
        return self.attached.get(port) == bridge

    def find_mac(self, bridge: str, address: str) -> str:
        self.now += 1  # as arping takes
        return self.answers.get(address, "")

    def find_macs(self, interface: str, addresses: Sequence[str]) -> dict[str, str]:
        self.now += 1
        return {address: self.answers[address] for address in addresses if address in self.answers}

    def read_connections(self, instance: Instance) -> list[str]:
        return []

    def read_neighbours(self, instance: Instance) -> list[str]:
        return []

    def load_connections(self, instance: Instance, lines: Sequence[str]) -> str:
        return ""

    def load_neighbours(self, instance: Instance, lines: Sequence[str]) -> None:
        pass
