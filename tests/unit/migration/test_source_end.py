"""The source of a migration once the target serves: its instance ends, and its state is removed, if need be later."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.agent import endpoint, migration_source
from appliance.agent.endpoint import HostState, Instance, read_mark
from appliance.agent.migration_resume import resume
from appliance.agent.migration_source import MigrationSource
from appliance.agent.protocol import Problem, read_request
from appliance.shared.lease import Lease
from appliance.shared.locks import hold_lock, ports_lock
from appliance.shared.migration import SourceRequest
from tests.unit.migration.requests import SOURCE


@dataclass
class Source:
    """A host whose migration was killed in state ``given``."""

    folder: Path
    runs: bool = True
    loops: list[str] = field(default_factory=list)
    """Those that losetup lists."""
    fault: Exception | None = None
    """Of the supervisor."""
    ran: list[tuple[str, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = ("overlay", "lease", "history", "mark", "lock")
        paths = {name: str(self.folder / name) for name in names}
        self.state = HostState(read_request(SourceRequest, {**SOURCE, **paths}), "leave")
        self.state.save_state("given")
        self.path("overlay").write_bytes(b"stale")

    def path(self, name: str) -> Path:
        return self.folder / name

    def resume(self) -> dict[str, str]:
        """Do what the next verb does there."""
        return resume({"mark": str(self.path("mark")), "lock": str(self.path("lock"))})

    def run(self, *argv: str, ok: object = None, timeout: float = 0) -> bytes:
        self.ran.append(argv)
        self.runs = False
        return b""

    def stop_services(self, names: tuple[str, ...], patience_s: float) -> None:
        if self.fault:
            raise self.fault

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.path("history").read_text().splitlines()]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    made = Source(tmp_path)
    monkeypatch.setattr(endpoint, "find_instance", lambda name: Instance(77) if made.runs else None)
    monkeypatch.setattr(endpoint, "run", made.run)
    monkeypatch.setattr(Instance, "stop_services", lambda _, names, patience_s: made.stop_services(names, patience_s))
    monkeypatch.setattr(subprocess, "check_output", lambda argv: "\n".join(made.loops).encode())
    monkeypatch.setattr(migration_source, "private_mounts", lambda: None)
    wait = endpoint.wait_until_unused
    monkeypatch.setattr(endpoint, "wait_until_unused", lambda path, patience_s: wait(path, 0))
    return made


def check_ended(source: Source) -> None:
    assert not source.path("mark").exists() and not source.path("overlay").exists()
    assert source.path("overlay.moved").read_bytes() == b"stale"
    assert (source.state.holder(), source.state.generation()) == ("b", 5)
    assert source.resume() == {"found": ""}


def test_the_instance_ends(source: Source) -> None:
    assert source.resume() == {"found": "given", "side": "leave", "state": "gone"}
    assert source.ran == [tuple(SOURCE["stop_argv"])]
    assert source.events() == ["gone"]
    check_ended(source)


@pytest.mark.parametrize("fault", [TimeoutError(), Problem("rsyslog did not end within 90 s")])
def test_it_ends_although_its_supervisor_does_not_answer(source: Source, fault: Exception) -> None:
    source.fault = fault
    assert source.resume()["state"] == "gone"
    assert source.ran == [tuple(SOURCE["stop_argv"])]
    assert source.events() == ["trouble", "gone"]
    check_ended(source)


@pytest.mark.parametrize("state", ["given", "released"])
def test_a_target_that_has_served_and_was_stopped_since_keeps_the_newest_state(
    source: Source, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Nobody answers for the addresses then: its release in the own lease file shows it, and stays there."""
    monkeypatch.setattr(endpoint, "find_mac", lambda bridge, address: "")
    source.state.save_state(state)
    free = Lease("c", 5, None, 2.0, "a", last="b").text()
    source.path("lease").write_bytes(free)
    assert source.resume() == {"found": state, "side": "leave", "state": "gone"}
    assert source.path("overlay.moved").exists() and not source.path("overlay").exists()
    assert source.path("lease").read_bytes() == free
    assert not source.runs


def test_an_overlay_that_is_still_open_is_renamed_later(source: Source) -> None:
    source.loops = ["/dev/loop7"]
    with pytest.raises(Problem, match=r"/dev/loop7 still has .*overlay open"):
        source.resume()
    assert source.path("mark").exists() and source.path("overlay").exists()
    source.loops = []
    assert source.resume()["state"] == "gone"
    check_ended(source)


def test_an_overlay_of_the_same_name_on_another_host_of_a_lab_is_not_waited_for(source: Source) -> None:
    """Killed between the last two steps: losetup then compares names, and the target uses one of the same name."""
    source.path("overlay").rename(source.path("overlay.moved"))
    source.runs, source.loops = False, ["/dev/loop7"]
    assert source.resume()["state"] == "gone"
    check_ended(source)


def test_its_own_instance_does_not_count_as_the_target(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the ports were detached, or after they were attached again: its own instance answers."""
    attached = set[str]()
    source.state.save_state("released", ports={"eth0": "veth0"})
    monkeypatch.setattr(endpoint, "find_mac", lambda bridge, address: SOURCE["macs"][0])
    monkeypatch.setattr(endpoint, "is_attached", lambda port, bridge: (port, bridge) == ("veth0", "br-prov"))
    monkeypatch.setattr(endpoint, "set_bridges", lambda ports: attached.update(ports))
    monkeypatch.setattr(Instance, "start_services", lambda _, names: source.ran.append(tuple(names)))
    monkeypatch.setattr(Instance, "announce", lambda _, addresses: None)
    assert source.resume() == {"found": "released", "side": "leave", "state": "gone"}
    assert source.runs and source.path("overlay").exists() and attached == {"veth0"}
    assert source.ran == [("slurmctld", "rsyslog")] and source.events() == ["back"]


def test_no_port_is_moved_while_another_process_moves_them(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard reads the stored state under the lock of the ports, and then attaches one."""
    monkeypatch.setattr(endpoint, "PORTS_WAIT_S", 0.1)
    moved: list[object] = []
    monkeypatch.setattr(endpoint, "set_bridges", moved.append)
    monkeypatch.setattr(migration_source, "DatagramCounter", lambda *_: None)
    monkeypatch.setattr(endpoint, "read_connections", lambda _: [])
    monkeypatch.setattr(Instance, "start_services", lambda *_: None)
    monkeypatch.setattr(Instance, "announce", lambda *_: None)
    sent: list[str] = []
    channel: Any = SimpleNamespace(send=lambda kind, *_, **__: sent.append(kind))
    one = MigrationSource(source.state.request, channel)  # type: ignore[arg-type]
    monkeypatch.setattr(one, "_close_sessions", lambda: None)
    one.state, one.ports = "stopping", {"eth0": "veth0"}
    one.host_state.save_state("stopping", ports=one.ports)
    with hold_lock(ports_lock(str(source.path("lock")))):
        with pytest.raises(Problem, match="another process moves the ports"):
            one.release({})
        mark = read_mark(str(source.path("mark")))
        assert mark and mark.state == "stopping" and not mark.moves_ports and moved == [] and sent == []
        one.state = "released"
        one.restore_service("")
        assert moved == [{"veth0": "br-prov"}], "the services must be on the network again"
    assert source.events() == ["trouble", "back"]
    one.host_state.save_state("stopping", ports=one.ports)
    one.release({})
    mark = read_mark(str(source.path("mark")))
    assert mark and mark.moves_ports and moved[1:] == [{"veth0": None}] and sent == ["released"]
