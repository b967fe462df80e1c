"""The source of a migration once the target serves: its instance ends, and its state is removed, if need be later."""

from __future__ import annotations

import errno
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.agent.host_state import HostState, read_mark
from appliance.agent.instance import Instance
from appliance.agent.migration_resume import resume
from appliance.agent.migration_source import MigrationSource
from appliance.agent.protocol import Problem, read_request
from appliance.agent.system import System
from appliance.shared.lease import Lease
from appliance.shared.locks import hold_lock, ports_lock
from appliance.shared.migration import SourceRequest
from tests.support.system import FakeInstance, FakeSystem
from tests.unit.migration.requests import SOURCE

STOP = tuple(SOURCE["stop_argv"])


class OwnHost(FakeSystem):
    """The host of an instance, which the command for it ends."""

    fault: Exception | None = None
    """Of the supervisor."""
    wait_until_unused = System.wait_until_unused

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        self.outputs[STOP] = self.end

    def end(self, *argv: str) -> bytes:
        self.pid = 0
        return b""

    def instance(self, pid: int) -> Instance:
        return Supervised(pid, self)


class Supervised(FakeInstance):
    """An instance whose supervisor may fail."""

    system: OwnHost

    def stop_services(self, names: Sequence[str], patience_s: float) -> None:
        super().stop_services(names, patience_s)
        if self.system.fault:
            raise self.system.fault


@dataclass
class Source:
    """A host whose migration was killed in state ``given``."""

    folder: Path
    loops: list[str] = field(default_factory=list)
    """Those that losetup lists."""
    system: OwnHost = field(default_factory=lambda: OwnHost(77))

    def __post_init__(self) -> None:
        names = ("overlay", "lease", "history", "mark", "lock")
        paths = {name: str(self.folder / name) for name in names}
        self.state = HostState(read_request(SourceRequest, {**SOURCE, **paths}), "leave", self.system)
        self.state.save_state("given")
        self.path("overlay").write_bytes(b"stale")

    def path(self, name: str) -> Path:
        return self.folder / name

    def resume(self) -> dict[str, str]:
        """Do what the next verb does there."""
        return resume({"mark": str(self.path("mark")), "lock": str(self.path("lock"))}, self.system)

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.path("history").read_text().splitlines()]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    made = Source(tmp_path)
    monkeypatch.setattr(subprocess, "check_output", lambda argv: "\n".join(made.loops).encode())
    return made


def check_ended(source: Source) -> None:
    assert not source.path("mark").exists() and not source.path("overlay").exists()
    assert source.path("overlay.moved").read_bytes() == b"stale"
    assert (source.state.holder(), source.state.generation()) == ("b", 5)
    assert source.resume() == {"found": ""}


def test_the_instance_ends(source: Source) -> None:
    assert source.resume() == {"found": "given", "side": "leave", "state": "gone"}
    assert source.system.did == [("stop", "rsyslog"), STOP]
    assert source.events() == ["gone"]
    check_ended(source)


@pytest.mark.parametrize("fault", [TimeoutError(), Problem("rsyslog did not end within 90 s")])
def test_it_ends_although_its_supervisor_does_not_answer(source: Source, fault: Exception) -> None:
    source.system.fault = fault
    assert source.resume()["state"] == "gone"
    assert source.system.did == [("stop", "rsyslog"), STOP]
    assert source.events() == ["trouble", "gone"]
    check_ended(source)


@pytest.mark.parametrize("state", ["given", "released"])
def test_a_target_that_has_served_and_was_stopped_since_keeps_the_newest_state(source: Source, state: str) -> None:
    """Nobody answers for the addresses then: its release in the own lease file shows it, and stays there."""
    source.state.save_state(state)
    free = Lease("c", 5, None, 2.0, "a", last="b").text()
    source.path("lease").write_bytes(free)
    assert source.resume() == {"found": state, "side": "leave", "state": "gone"}
    assert source.path("overlay.moved").exists() and not source.path("overlay").exists()
    assert source.path("lease").read_bytes() == free
    assert not source.system.pid


def test_a_state_that_cannot_be_removed_does_not_hide_the_outcome(source: Source) -> None:
    """The disk has become read-only. The next verb does the same once more, and removes it."""

    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    remove, source.system.remove = source.system.remove, refuse
    assert source.resume() == {"found": "given", "side": "leave", "state": "gone"}
    assert source.path("mark").exists() and [str(source.path("mark")) in note for note in source.system.notes] == [True]
    source.system.remove = remove
    assert source.resume()["state"] == "gone" and not source.path("mark").exists()
    assert source.path("overlay.moved").read_bytes() == b"stale"


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
    source.system.pid, source.loops = 0, ["/dev/loop7"]
    assert source.resume()["state"] == "gone"
    check_ended(source)


def test_its_own_instance_does_not_count_as_the_target(source: Source) -> None:
    """Killed before the ports were detached, or after they were attached again: its own instance answers."""
    system = source.system
    source.state.save_state("released", ports={"eth0": "veth0"})
    system.answers = {SOURCE["addresses"]["eth0"]: SOURCE["macs"][0]}
    system.attached = {"veth0": "br-prov"}
    assert source.resume() == {"found": "released", "side": "leave", "state": "gone"}
    assert system.pid and source.path("overlay").exists()
    back = ("announce", "10.1.0.1"), ("start", "slurmctld", "rsyslog")
    assert system.did == [("bridges", {"veth0": "br-prov"}), *back]
    assert source.events() == ["back"]


class LockedPorts(OwnHost):
    """A host with the lock of its ports."""

    ports_locked = System.ports_locked


def test_no_port_is_moved_while_another_process_moves_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard reads the stored state under the lock of the ports, and then attaches one."""
    system = LockedPorts(77)
    source = Source(tmp_path, system=system)
    waited: list[float] = []
    begin = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: begin + sum(waited))
    monkeypatch.setattr(time, "sleep", waited.append)
    sent: list[str] = []
    channel: Any = SimpleNamespace(send=lambda kind, *_, **__: sent.append(kind))
    one = MigrationSource(source.state.request, channel, system)  # type: ignore[arg-type]
    one.state, one.ports = "stopping", {"eth0": "veth0"}
    one.host_state.save_state("stopping", ports=one.ports)
    with hold_lock(ports_lock(str(source.path("lock")))):
        with pytest.raises(Problem, match="another process moves the ports"):
            one.release({})
        mark = read_mark(system, str(source.path("mark")))
        assert mark and mark.state == "stopping" and not mark.moves_ports and system.changes == [] and sent == []
        one.state = "released"
        one.restore_service("")
        assert system.changes == [{"veth0": "br-prov"}], "the services must be on the network again"
    assert source.events() == ["trouble", "back"]
    one.host_state.save_state("stopping", ports=one.ports)
    one.release({})
    mark = read_mark(system, str(source.path("mark")))
    assert mark and mark.moves_ports and system.changes[1:] == [{"veth0": None}] and sent == ["released"]
