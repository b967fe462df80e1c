"""The target of a migration that fails: its lease, its copy and its state."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.agent import host_state
from appliance.agent.adopt_arrive import AdoptArrive
from appliance.agent.migration_resume import recover_saved
from appliance.agent.migration_target import MigrationTarget
from appliance.agent.protocol import Problem, read_request
from appliance.agent.system import shown
from appliance.plan.overlay.generation import read_mark
from appliance.shared.lease import Lease, peek
from appliance.shared.migration import MoveMark, TargetRequest
from tests.support.system import FakeSystem
from tests.unit.migration.requests import TARGET

CONFINED = ["apptainer", "exec", "--no-privs", "instance://sms-c"]

COMMITTED = [
    pytest.param(5, "a", 5, id="as it has taken the lease"),
    pytest.param(1005, "a", 1005, id="taken over from a failed source, and resumed"),
    pytest.param(9, "b", 5, id="superseded"),
]


@pytest.mark.parametrize(("generation", "holder", "mark"), COMMITTED)
def test_the_overlay_is_marked_at_the_end(tmp_path: Path, generation: int, holder: str, mark: int) -> None:
    paths = {name: str(tmp_path / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    target = MigrationTarget(read_request(TargetRequest, {**TARGET, **paths}), None, FakeSystem())
    Path(paths["overlay"]).write_bytes(b"")
    Path(paths["lease"]).write_bytes(Lease("c", generation, holder, 1.0, "a").text())
    target.state = "up"
    target.abandon("the connection was lost")
    assert read_mark((tmp_path / "overlay.generation").read_bytes(), "c") == mark


CASES = [
    pytest.param("started", 3, "a", (3, "a"), id="stale: another host has served since"),
    pytest.param("started", 4, "b", (4, "b"), id="as at the beginning"),
    pytest.param("started", 5, "a", (5, "b"), id="written by this migration"),
    pytest.param("started", 6, "b", (6, "b"), id="written by the source since"),
    pytest.param("copy", 5, "a", (5, "a"), id="written by another run: this one had not come so far"),
    pytest.param("placed", 5, "a", (5, "a"), id="written by another run, the copy was in place"),
]


@pytest.mark.parametrize(("state", "generation", "holder", "after"), CASES)
def test_lease_after_a_rollback(
    tmp_path: Path, state: str, generation: int, holder: str, after: tuple[int, str]
) -> None:
    paths = {name: str(tmp_path / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    target = MigrationTarget(read_request(TargetRequest, {**TARGET, **paths}), None, FakeSystem())
    target.host_state.save_state(state)
    target.state = state
    before = Lease("c", generation, holder, 1.0, "a").text()
    Path(paths["lease"]).write_bytes(before)
    target.abandon("no space left on device")
    found = Path(paths["lease"]).read_bytes()
    assert peek(found) == after
    assert (found == before) == (after == (generation, holder)), "a full disk may refuse a needless write"
    assert not Path(paths["mark"]).exists()
    assert "backed out" in Path(paths["history"]).read_text()


def test_an_adoption_that_is_rolled_back_leaves_a_free_lease(tmp_path: Path) -> None:
    """The old node is not an admin host: one that held the lease would keep it for ever."""
    paths = {name: str(tmp_path / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    request = {**TARGET, **paths, "prepared": str(tmp_path / "prepared")}
    target = MigrationTarget(read_request(TargetRequest, request), None, FakeSystem())
    target.state = "started"
    Path(paths["lease"]).write_bytes(Lease("c", 5, "a", 1.0, "a").text())
    target.abandon("the request to take over came too late")
    assert peek(Path(paths["lease"]).read_bytes()) == (5, "")


MACS = {"mac": "02:00:00:00:00:01", "spare_mac": "06:00:00:00:00:01"}
MOVED = {"moves": ["10.0.0.1/24"], "keeps": ["10.0.0.5/24"], "witnesses": ["10.0.0.9"]}
OLD = {"name": "eno1", "inside": "eth0", **MACS, **MOVED}
NOBODY: dict[str, str] = {}
AWAY, SERVES = ({"10.0.0.5": MACS[mac], "10.0.0.9": "aa"} for mac in ("spare_mac", "mac"))
OFF = {"10.0.0.9": "aa"}


class Looks(FakeSystem):
    """A host with the port ``p0``, on which each look at the network has other answers."""

    def __init__(self, answers: list[dict[str, str]], pid: int = 0) -> None:
        super().__init__(pid)
        self.port_names = {"eth0": "p0"}
        self.pending = list(answers)

    def find_macs(self, interface: str, addresses: Sequence[str]) -> dict[str, str]:
        return self.pending.pop(0)


@pytest.mark.parametrize(
    ("waits", "answers", "served"),
    [
        pytest.param(True, [AWAY, AWAY], True, id="the old node stays away"),
        pytest.param(True, [OFF, OFF], True, id="it is off"),
        pytest.param(True, [SERVES], False, id="it has taken its addresses back"),
        pytest.param(True, [AWAY, SERVES], False, id="it takes them meanwhile"),
        pytest.param(True, [NOBODY] * 5 + [AWAY, AWAY], True, id="the own network was down"),
        pytest.param(True, [NOBODY] * 5 + [SERVES], False, id="meanwhile the old node has taken them back"),
        pytest.param(True, [AWAY, NOBODY, SERVES], False, id="it fails between two looks"),
        pytest.param(False, [NOBODY, AWAY, AWAY], True, id="a run waits"),
        pytest.param(False, [SERVES], False, id="a run waits, and the old node serves"),
        pytest.param(False, [NOBODY] * 3, None, id="a run waits, and the network is down"),
    ],
)
def test_an_adoption_without_its_coordinator_asks_for_the_old_node(
    tmp_path: Path, *, waits: bool, answers: list[dict[str, str]], served: bool | None
) -> None:
    """It knows no lease: what it serves, nobody else may."""
    paths = {name: str(tmp_path / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    request = {**TARGET, **paths, "prepared": str(tmp_path / "prepared"), "gives": [OLD]}
    channel = Commands("") if waits else None
    system = Looks(answers)
    target = AdoptArrive(read_request(TargetRequest, request), channel, system)  # type: ignore[arg-type]
    Path(paths["overlay"]).write_bytes(b"")
    Path(paths["lease"]).write_bytes(Lease("c", 5, "a", 1.0, "a").text())
    target.state, target.instance, target.ports = "up", system.instance(7), {"eth0": "p0"}
    with nullcontext() if served is not None else pytest.raises(Problem, match="nobody answers"):
        target.abandon("the connection was lost")
    assert system.pending == []
    bridge = TARGET["bridges"]["eth0"]
    isolated = [None] * (answers[:2] == [NOBODY, NOBODY])  # while nobody answered
    ports = {True: [*isolated, bridge] if isolated else [], False: [None], None: [None]}[served]
    assert [one["p0"] for one in system.changes] == ports
    if served is None:
        return
    assert peek(Path(paths["lease"]).read_bytes()) == (5, "a" if served else "")


@pytest.mark.parametrize(("answers", "served"), [([AWAY, AWAY], True), ([SERVES], False)])
def test_an_isolated_instance_of_a_killed_run_goes_on(
    tmp_path: Path, *, answers: list[dict[str, str]], served: bool
) -> None:
    """It may have served before its network failed: it is not ended unless the old node serves."""
    paths = {name: str(tmp_path / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    request = {**TARGET, **paths, "prepared": str(tmp_path / "prepared"), "gives": [OLD]}
    system = Looks(answers, pid=7)
    Path(paths["overlay"]).write_bytes(b"")
    Path(paths["lease"]).write_bytes(Lease("c", 5, "a", 1.0, "a").text())
    found = recover_saved(MoveMark("arrive", "up", 7, request), system)
    assert (system.pending, found["state"]) == ([], "done")
    assert system.changes == ([{"p0": TARGET["bridges"]["eth0"]}] if served else [])
    assert peek(Path(paths["lease"]).read_bytes()) == (5, "a" if served else "")


PLANNED = [
    pytest.param(4, "b", False, True, id="as planned"),
    pytest.param(1, "a", False, True, id="an old one of this host, which another has superseded"),
    pytest.param(5, "a", False, False, id="another run has migrated to here"),
    pytest.param(5, "b", False, False, id="started again"),
    pytest.param(4, "b", True, False, id="a run was killed since"),
]


@pytest.mark.parametrize(("generation", "holder", "mark", "ready"), PLANNED)
def test_agent_begins_only_as_planned(tmp_path: Path, generation: int, holder: str, mark: bool, ready: bool) -> None:
    """It waits for its lock while another run may migrate; what was planned before must not be done then."""
    paths = {name: str(tmp_path / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    channel = Commands("build")
    target = MigrationTarget(read_request(TargetRequest, {**TARGET, **paths}), channel)  # type: ignore[arg-type]
    Path(paths["lease"]).write_bytes(Lease("c", generation, holder, 1.0, "a").text())
    if mark:
        target.host_state.save_state("copy")
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    with nullcontext() if ready else pytest.raises(Problem, match=host_state.CHANGED):
        target.begin()
    assert channel.replies == (["ready"] if ready else [])
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before


class Commands:
    """The coordinator: its only message, and the replies."""

    def __init__(self, message: str) -> None:
        self.messages = [{"do": message}]
        self.replies: list[str] = []

    def receive(self, patience_s: float) -> dict[str, str]:
        return self.messages.pop()

    def send(self, kind: str, **_: object) -> None:
        self.replies.append(kind)


def test_the_switch_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    """A slow one is waited for before, while the source serves; what the switch requests is answered at once."""
    paths = {name: str(tmp_path / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    channel = Commands("flush")
    channel.read_body = lambda message: b""  # type: ignore[attr-defined]
    system = FakeSystem()
    target = MigrationTarget(read_request(TargetRequest, {**TARGET, **paths}), channel, system)  # type: ignore[arg-type]
    target.instance = system.instance(7)
    target.flushed = Future()
    threading.Timer(1, target.flushed.set_result, [None]).start()
    with pytest.raises(Problem, match="the disk of a has not written the copy"):
        target._do({"do": "arm"})
    assert not target.flushed.done()
    target._do({"do": "flush"})
    target._do({"do": "arm"})
    assert channel.replies == ["flushed", "armed"]


@pytest.mark.parametrize("shared", [False, True])
def test_target_that_serves_is_aborted_only_on_a_shared_overlay(tmp_path: Path, shared: bool) -> None:
    """Otherwise what it has acknowledged since the switch would be lost."""
    paths = {name: str(tmp_path / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    channel, system = Commands("abort"), FakeSystem()
    request = read_request(TargetRequest, {**TARGET, **paths, "shared": shared})
    target = MigrationTarget(request, channel, system)  # type: ignore[arg-type]
    target.host_state.save_state("up")
    target.host_state.write_lease("b", 5)
    Path(paths["overlay"]).write_bytes(b"newest")
    target.state = "up"
    if shared:
        assert target.run() == {"state": "done"}
        assert channel.replies == ["aborted"] and tuple(TARGET["stop_argv"]) in system.did
    else:
        with pytest.raises(Problem, match="the services container serves on a"):
            target.run()
        assert channel.replies == [] and "instance" not in [argv[1] for argv in system.did]
        assert "arrived" in Path(paths["history"]).read_text()
    assert Path(paths["overlay"]).read_bytes() == b"newest"


RETURNED = [
    pytest.param("started", (5, "a"), False, (5, "a"), id="it has the lease: it is started here"),
    pytest.param("up", (5, "a"), False, (5, "a"), id="it may have served"),
    pytest.param("started", (5, "a"), True, (6, "b"), id="its agent was killed: the source gets the lease back"),
    pytest.param("started", (4, "b"), False, (6, "b"), id="it had not taken the lease yet"),
    pytest.param("started", (1005, "b"), False, (1005, "b"), id="the source has taken over since"),
]


@pytest.mark.parametrize(("state", "lease", "runs", "after"), RETURNED)
def test_a_crashed_target_keeps_the_lease_of_a_shared_overlay(
    tmp_path: Path, state: str, lease: tuple[int, str], runs: bool, after: tuple[int, str]
) -> None:
    """The source waits for it for a time only; then no host would start."""
    paths = {name: str(tmp_path / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    request = {**TARGET, **paths, "shared": True, "bridges": {"eth0": "br0"}}
    target = MigrationTarget(read_request(TargetRequest, request), None, FakeSystem(7 if runs else 0))
    target.host_state.save_state(state)
    saved = host_state.read_mark(target.system, paths["mark"])
    assert saved
    Path(paths["overlay"]).write_bytes(b"")
    Path(paths["lease"]).write_bytes(Lease("c", *lease, 1.0, lease[1]).text())
    target.recover(saved)
    assert peek(Path(paths["lease"]).read_bytes()) == after
    assert not Path(paths["mark"]).exists()


@pytest.mark.parametrize("state", ["copy", "placed"])
def test_a_stale_overlay_set_aside_earlier_stays_set_aside(tmp_path: Path, state: str) -> None:
    """A guard or a start named it by the generation that the lease still has at the next migration to this host."""
    paths = {name: str(tmp_path / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    target = MigrationTarget(read_request(TargetRequest, {**TARGET, **paths}), None, FakeSystem())
    stale = tmp_path / "overlay.past-4"
    stale.write_bytes(b"stale")
    if state == "placed":
        (tmp_path / "overlay").write_bytes(b"copy")
        target.state, target.inode = state, (tmp_path / "overlay").stat().st_ino
    target.abandon("no space left on device")
    assert stale.read_bytes() == b"stale" and not (tmp_path / "overlay").exists()


def test_commands_are_shown_without_the_way_into_the_instance() -> None:
    instance = FakeSystem().instance(7)
    assert shown((*CONFINED, "/opt/sms/bin/sms-probe", "--wait")) == "/opt/sms/bin/sms-probe --wait"
    assert shown(instance.network("conntrack", "-R", "-")) == "conntrack -R -"
    assert shown(("ip", "-force", "-batch", "-", "x")) == "ip -force -batch -"


def test_an_interrupted_rollback_is_completed(tmp_path: Path) -> None:
    """The host crashed after the copy was renamed back, before the overlay that it had replaced was."""
    paths = {name: str(tmp_path / name) for name in ("overlay", "lease", "history", "mark", "lock")}
    copy, replaced = tmp_path / "overlay.partial", tmp_path / "overlay.past-4-replaced"
    copy.write_bytes(b"copy")
    replaced.write_bytes(b"before")
    Path(paths["lease"]).write_bytes(Lease("c", 5, "b", 1.0, "a").text())
    target = MigrationTarget(read_request(TargetRequest, {**TARGET, **paths}), None, FakeSystem())
    target.host_state.save_state("up", inode=copy.stat().st_ino)
    saved = host_state.read_mark(target.system, paths["mark"])
    assert saved
    target.recover(saved)
    assert (tmp_path / "overlay").read_bytes() == b"before" and copy.read_bytes() == b"copy"
    assert not Path(paths["mark"]).exists()


def test_programs_of_the_container_run_confined() -> None:
    """They are those of the overlay, which an intruder may have replaced; nsenter gave them all capabilities."""
    sent: list[str] = []
    channel = SimpleNamespace(
        send=lambda kind, *body, **more: sent.append(kind), read_body=lambda message: b"line", close=lambda: None
    )
    request, system = read_request(TargetRequest, {**TARGET, "inside": CONFINED}), FakeSystem()
    target = MigrationTarget(request, channel, system)  # type: ignore[arg-type]
    target.instance = system.instance(77)
    target.probe({"do": "probe", "argv": ["sms-probe"], "limit_s": 9})
    target.run_command({"do": "ask", "argv": ["squeue"]})
    target.append_logs({"do": "tails", "files": [{"path": "/var/log/messages", "bytes": 4}]})
    assert sent == ["probed", "told", "appended"]
    assert [list(argv[: len(CONFINED)]) for argv in system.did] == [CONFINED] * 3
    assert [argv[len(CONFINED)] for argv in system.did] == ["sms-probe", "squeue", "dd"]
