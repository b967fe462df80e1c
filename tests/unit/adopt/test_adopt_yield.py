"""The container when an adoption is undone: its services stop, its overlay stays, and no admin host has the lease."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.agent.adopt_yield import AdoptYield
from appliance.agent.channel import Disconnected
from appliance.agent.host_state import read_mark
from appliance.agent.migration_resume import resume
from appliance.agent.protocol import Problem, read_request
from appliance.shared.lease import Lease, parse_lease
from appliance.shared.migration import SourceRequest
from tests.support.system import FakeSystem
from tests.unit.adopt.requests import INTERFACE
from tests.unit.migration.requests import SOURCE

STOP = tuple(SOURCE["stop_argv"])
ADDRESS = SOURCE["addresses"]["eth0"]


class Host(FakeSystem):
    """A host on which the services container runs.

    Attributes:
        network: whether another machine answers, at each look: the last one lasts.
        returns: what answers for the addresses as soon as the network works.
    """

    def __init__(self) -> None:
        super().__init__(77)
        self.network: list[bool] = []
        self.returns = ""
        self.outputs[STOP] = self.end

    def end(self, *argv: str) -> bytes:
        self.pid = 0
        return b""

    def find_macs(self, interface: str, addresses: Sequence[str]) -> dict[str, str]:
        works = not self.network or self.network.pop(0)
        if works and self.returns:
            self.answers.setdefault(ADDRESS, self.returns)
        return dict.fromkeys(INTERFACE["witnesses"], "aa") if works else {}

    def wait_until_unused(self, overlay: str, patience_s: float) -> None:
        pass


class Container:
    """The agent of the container, and what it did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.system = Host()
        self.did: list[Any] = self.system.did
        names = ("overlay", "lease", "history", "mark", "lock")
        paths = {name: str(self.folder / name) for name in names}
        request = {**SOURCE, **paths, "peer": "old", "stop": [["slurmctld"], ["slurmdbd"]], "stream_ports": []}
        request["gives"] = [INTERFACE]
        self.path("overlay").write_bytes(b"newest")
        self.path("lease").write_bytes(Lease("c", 4, "a", 1.0, "a").text())
        self.one = AdoptYield(read_request(SourceRequest, request), None, self.system)

    @property
    def runs(self) -> bool:
        return bool(self.system.pid)

    def path(self, name: str) -> Path:
        return self.folder / name

    def follow(self, *messages: dict[str, Any]) -> dict[str, Any]:
        """Send it these messages, then close the connection."""
        left = list(messages)

        def receive(patience_s: float) -> dict[str, Any]:
            if not left:
                raise Disconnected
            return left.pop(0)

        def send(kind: str, *_: Any, **__: Any) -> None:
            self.did.append(kind)

        self.one.channel = SimpleNamespace(receive=receive, send=send)  # type: ignore[assignment]
        self.one.begin()
        return self.one.run()

    def resume(self) -> dict[str, Any]:
        return resume({"mark": str(self.path("mark")), "lock": str(self.path("lock"))}, self.system)

    def lease(self) -> Lease:
        return parse_lease(self.path("lease").read_bytes())

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.path("history").read_text().splitlines()]


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


HALT: list[dict[str, Any]] = [{"do": "halt", "names": ["slurmctld"]}, {"do": "halt", "names": ["slurmdbd"]}]
SWITCH: list[dict[str, Any]] = [*HALT, {"do": "connections"}, {"do": "release"}]
BACK = ("start", "slurmdbd", "slurmctld", "rsyslog")
TAKEN: list[Any] = ["released", ("bridges", {"veth0": "br-prov"}), ("announce", ADDRESS), BACK]


def test_it_yields(container: Container) -> None:
    assert container.follow(*SWITCH, {"do": "given"}, {"do": "finish"}) == {"state": "gone"}
    assert container.did == [
        *("ready", ("stop", "slurmctld"), "halted", ("stop", "slurmdbd"), "halted", "connections"),
        *(("bridges", {"veth0": None}), "released", "given", ("stop", "rsyslog"), STOP, "finished"),
    ]
    assert container.path("overlay").read_bytes() == b"newest" and not container.path("mark").exists()
    lease = container.lease()
    assert (lease.holder, lease.generation, lease.last) == (None, 5, "a")


def test_its_state_is_copied_while_it_runs(container: Container) -> None:
    """The folder inside; what has changed until its controller has stopped comes last."""
    root = container.path("root")
    (root / "state").mkdir(parents=True)
    container.system.root = str(root)
    container.follow({"do": "note", "folder": "/state"}, {"do": "round"}, *HALT, {"do": "round"})
    assert container.did[:8] == [
        *("ready", "noted", "delta", ("stop", "slurmctld"), "halted", ("stop", "slurmdbd"), "halted", "delta"),
    ]


@pytest.mark.parametrize(
    ("messages", "end"),
    [
        (HALT[:1], ["halted", BACK]),
        (SWITCH, TAKEN),
        ([*SWITCH, {"do": "abort", "sure": True}], [*TAKEN, "back"]),
    ],
)
def test_it_takes_back_what_nobody_else_has(container: Container, messages: list[Any], end: list[Any]) -> None:
    assert container.follow(*messages) == {"state": "gone"}
    assert container.did[-len(end) :] == end
    assert container.lease().holder == "a" and container.runs and not container.path("mark").exists()


def test_before_anything_stops_nothing_is_done(container: Container) -> None:
    assert container.follow() == {"state": "read"}
    assert container.did == ["ready"] and not container.path("mark").exists()


@pytest.mark.parametrize("end", [[], [{"do": "abort"}]])
def test_it_ends_if_the_old_node_serves(container: Container, end: list[Any]) -> None:
    container.system.answers[ADDRESS] = SOURCE["macs"][0]
    if end:
        with pytest.raises(Problem, match="run on old"):
            container.follow(*SWITCH, *end)
    else:
        container.follow(*SWITCH)
    assert not container.runs and container.lease().holder is None
    assert container.path("overlay").exists()


@pytest.mark.parametrize("serves", [True, False])
def test_it_waits_while_its_own_network_is_down(container: Container, serves: bool) -> None:
    """The old node may serve then, and it would not see that this host has the lease."""
    container.system.network = [False, False, False, True]
    container.system.returns = SOURCE["macs"][0] * serves
    container.follow(*SWITCH)
    assert container.system.network == []
    assert container.did[-1] == (STOP if serves else BACK)
    assert container.lease().holder == (None if serves else "a")


def test_an_order_to_take_them_back_waits_too(container: Container) -> None:
    """The coordinator may run on this host: it shows nothing of its network."""
    container.system.network = [False] * 5 + [True]
    with pytest.raises(Problem, match="nobody answers"):
        container.follow(*SWITCH, {"do": "abort", "sure": False})
    assert container.system.network == [] and container.did[-1] == BACK


def test_what_was_given_is_not_taken_back(container: Container) -> None:
    with pytest.raises(Problem, match="the services run on old"):
        container.follow(*SWITCH, {"do": "given"}, {"do": "abort", "sure": True})
    assert not container.runs and container.lease().holder is None


STATES: dict[str, Callable[[Container], object]] = {
    "stopping": lambda container: container.one._enter("stopping", "", ports={"eth0": "veth0"}),
    "released": lambda container: container.one._enter("released", "", ports={"eth0": "veth0"}),
    "given": lambda container: container.one._enter("given", "", ports={"eth0": "veth0"}),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("answers", [False, True])
def test_a_killed_one_is_recovered(container: Container, state: str, answers: bool) -> None:
    container.system.answers[ADDRESS] = SOURCE["macs"][0] if answers else ""
    STATES[state](container)
    mark = read_mark(container.system, str(container.path("mark")))
    assert mark and mark.moves_ports == (state != "stopping")
    gone = state == "given" or (state == "released" and answers)
    assert container.resume() == {"found": state, "side": "adopt_yield", "state": "gone"}
    assert container.runs != gone and (container.lease().holder is None) == gone
    assert container.path("overlay").read_bytes() == b"newest"
    if not gone:
        assert container.did[-1] == BACK


@pytest.mark.parametrize(
    "messages",
    [
        [{"do": "halt", "names": ["rsyslog"]}],
        [{"do": "release"}],
        [*HALT, {"do": "given"}],
        [{"do": "offer"}],
    ],
)
def test_what_does_not_belong_is_refused(container: Container, messages: list[Any]) -> None:
    with pytest.raises(Problem, match="received"):
        container.follow(*messages)
    assert container.runs and container.lease().holder == "a"
