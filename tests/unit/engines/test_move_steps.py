"""The steps of a move when one of them fails: the status, who serves afterwards, who has the lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from appliance.errors import Busy, Refused, RolledBack, SmsError, Unverified
from appliance.host.base import CommandError, Result, Unreachable
from appliance.host.local import Local
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.engines import move as module
from appliance.operations.engines import transfer as pump
from appliance.operations.engines.move import rehearse_move
from appliance.operations.engines.move_checks import _answers, _refuse_elsewhere
from appliance.operations.engines.move_lock import lock_moves
from appliance.operations.engines.move_run import Move, record_path
from appliance.operations.engines.owners import Command, Owner, script_argv
from appliance.operations.engines.transfer import transfer
from appliance.operations.lease import Leases, hand_over, query_lease
from appliance.operations.preflight import lock_host
from appliance.plan.migration.state import (
    COMMITTING,
    COPYING,
    DONE,
    RETURNED,
    STARTING,
    STOPPING,
    MoveResult,
    StateMove,
    Tree,
    Versions,
    read_state_move,
)
from appliance.progress import Silent
from appliance.shared.lease import Lease
from tests.sites import GOOD
from tests.support.env import FakeHosts, Impatient, Reports, with_env
from tests.support.nomad import on_nomad

PATH = "/var/spool/slurmctld"
OLD = 7
"""Generation of the source's lease."""


class Volume(Owner):
    """State in a folder of this machine. ``serves``: whether its services run; ``faults``: what a call raises."""

    def __init__(self, cluster: Cluster, name: str, folder: Path, *, serves: bool) -> None:
        super().__init__(cluster, (PATH,))
        self.name, self.where = name, name
        self.host = Local(name)
        self.folder = folder
        self.serves = serves
        self.moved = ""
        self.calls: list[str] = []
        self.faults: dict[str, BaseException] = {}
        self.image: Versions | None = None
        """Versions of the image; None: those of this machine."""
        self.started: Callable[[], None] = lambda: None
        """Called after a start."""
        (folder / PATH[1:]).mkdir(parents=True)
        (folder / PATH[1:] / "job_state").write_text(name)

    @property
    def text(self) -> str:
        return (self.folder / PATH[1:] / "job_state").read_text()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.faults:
            raise self.faults[name]

    def check(self) -> None:
        self._call("check")

    def runs(self) -> bool:
        return self.serves

    def open(self) -> None:
        self._call("open")

    def versions(self) -> Versions:
        return self.image or super().versions()

    def free_bytes(self) -> int:
        return -1

    def inside(self, argv: Sequence[str], *, state: bool = True, copy: bool = False, input: bool = False) -> Command:
        return Command(self.host, tuple(argv))

    def place(self, path: str, *, copy: bool = False) -> str:
        return f"{self.folder}{'/.moving' if copy else ''}{path}"

    def tree_argv(self, command: str, *, copy: bool = False) -> tuple[str, ...]:
        self._call(command)
        return super().tree_argv(command, copy=copy)

    def stop(self) -> None:
        if not isinstance(self.faults.get("stop"), Refused):
            self.serves = False
        self._call("stop")

    def start(self) -> None:
        self._call("start")
        assert not self.moved, "no task starts with a state that was moved"
        self.serves = True
        self.started()

    def control(self, *argv: str) -> Result:
        return self.host.run("false", ok=None)

    def prepare(self) -> None:
        self._call("prepare")
        self.host.run(*script_argv("prepare", str(self.folder)))

    def lock(self, where: str, *, copy: bool = False) -> None:
        self._call("lock")
        self.moved = where

    def check_locked(self) -> None:
        self._call("check_locked")

    def release(self, generation: int) -> None:
        self._call("release")
        self.moved = ""

    def generation(self) -> int:
        return 0

    def accept(self, generation: int, tree: Tree) -> None:
        self._call("accept")
        self.host.run(*script_argv("accept", f".before-{generation}", f"{self.folder}={PATH}"))

    def discard(self) -> None:
        self._call("discard")
        self.host.run(*script_argv("discard", str(self.folder)))

    def close(self) -> None:
        self._call("close")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    path = tmp_path / "sms.yaml"
    path.write_text(GOOD + f"state: {tmp_path}/state\n")
    found = open_cluster(path, None, Silent())
    one = found.site.model_copy(update={"admin_hosts": found.site.admin_hosts[:1], "cluster": f"m{id(found) % 9999}"})
    return replace(found, site=one)


@pytest.fixture
def host(cluster: Cluster) -> Local:
    return Local(cluster.site.admin_hosts[0].name)


def make_move(cluster: Cluster, host: Local, folder: Path, source: str, target: str) -> Move:
    """A move whose checks have passed."""
    holder = host.name if source == "container" else f"engine:{source}"
    lease = Lease(cluster.site.cluster, OLD, holder, 1.0, host.name)
    host.write(str(cluster.places.lease), lease.text())
    leases = Leases(host, cluster)
    leases.query()
    owners = [Volume(cluster, name, folder / name, serves=name == source) for name in (source, target)]
    record = StateMove(cluster.site.cluster, STOPPING, source, target, 1.0)
    return Move(cluster, host, owners[0], owners[1], leases, record, ran=True)


def holder(current: Move) -> str:
    lease = query_lease(current.host, current.cluster)
    return lease.engine or "container"


def phase(current: Move) -> str:
    found = read_state_move(current.host.read(record_path(current.cluster)), current.cluster.site.cluster)
    return found.phase if found else ""


@pytest.fixture(params=[("nomad", "container"), ("container", "kubernetes")])
def current(
    request: pytest.FixtureRequest, cluster: Cluster, host: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Move:
    monkeypatch.setattr(module, "keep_stopped", lambda *_: nullcontext())  # it needs an overlay
    return make_move(cluster, host, tmp_path, *request.param)


def test_all_steps(current: Move) -> None:
    module._copy_and_commit(current)
    source, target = current.source, current.target
    assert isinstance(source, Volume) and isinstance(target, Volume)
    assert (holder(current), target.text, source.serves) == (target.name, source.name, False)
    assert source.moved == target.name and "start" not in source.calls
    assert current.generation > OLD and phase(current) == COMMITTING


def test_the_generation_is_that_with_which_the_target_serves(current: Move, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start of the services container takes one more."""
    plan = MagicMock(source=current.source.name, target=current.target.name, resumes=False, left={}, files=0, bytes=0)
    monkeypatch.setattr(module, "inspected", lambda *_, **__: nullcontext((plan, current)))
    assert isinstance(current.target, Volume)

    def take() -> None:
        lease = query_lease(current.host, current.cluster)
        current.host.write(str(current.cluster.places.lease), replace(lease, generation=lease.generation + 1).text())

    current.target.started = take
    done = module.move(current.cluster, current.host, current.target.name)
    assert done.generation == current.generation + 1 == query_lease(current.host, current.cluster).generation


def test_a_source_that_is_gone_after_the_commit_does_not_keep_the_target_from_starting(current: Move) -> None:
    source, target = current.source, current.target
    assert isinstance(source, Volume) and isinstance(target, Volume)
    source.faults["close"] = Unreachable("it is gone")
    module._copy_and_commit(current)
    module._start(current, MoveResult(source.name, target.name, current.generation))
    assert target.serves and not source.serves and phase(current) == STARTING


def test_a_record_that_cannot_be_written_names_who_has_the_state(current: Move) -> None:
    """After the commit: the next run starts the target."""

    class Full(Local):
        def write(self, path: str, data: bytes, *, mode: int = 0o644) -> bool:
            raise SmsError("no space left")

    module._copy_and_commit(current)
    current.host = Full(current.host.name)
    with pytest.raises(Unverified, match=r"has the state .* does not serve: no space left") as caught:
        module._start(current, MoveResult(current.source.name, current.target.name, current.generation))
    assert "run this again" in caught.value.hint


@pytest.mark.parametrize("newer", [False, True])
def test_an_image_that_could_not_be_checked_is_checked_before_the_stop(current: Move, *, newer: bool) -> None:
    current.unread = Tree(slurm=0x2700 if newer else 0x2600)
    assert isinstance(current.target, Volume)
    current.target.image = Versions("22.05", "")
    with pytest.raises(Refused, match="wrote the state") if newer else nullcontext():
        module._copy_and_commit(current)
    source, target = current.source, current.target
    assert isinstance(source, Volume) and isinstance(target, Volume)
    assert target.calls[0] == "open" and source.serves == newer
    assert phase(current) == ("" if newer else COMMITTING)


FAILED, HELD = SmsError("it fails"), Refused("somebody has it")
FAULTS = {
    "stop": ("source", "stop", FAILED),
    "lock": ("source", "lock", HELD),
    "no room": ("target", "prepare", FAILED),
    "source cannot be read": ("source", "list", FAILED),
    "copy, source": ("source", "read", Unreachable("it is gone")),
    "copy, target": ("target", "write", Unreachable("it is gone")),
    "compare": ("target", "list", FAILED),
    "accept": ("target", "accept", FAILED),
    "in place": ("target", "brief", FAILED),
    "lease of a folder": ("source", "check_locked", HELD),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_fails(current: Move, fault: str) -> None:
    """The source serves again with its state; the target does not even answer to remove the copy."""
    end, call, error = FAULTS[fault]
    source, target = current.source, current.target
    assert isinstance(source, Volume) and isinstance(target, Volume)
    getattr(current, end).faults[call] = error
    target.faults["discard"] = Unreachable("it is gone")
    with pytest.raises(RolledBack, match=str(error)) as caught:
        module._copy_and_commit(current)
    assert caught.value.status == 5
    assert (source.serves, target.serves, source.moved, source.text) == (True, False, "", source.name)
    assert (holder(current), phase(current)) == (source.name, RETURNED)


def test_a_stopped_source_stays_stopped(current: Move) -> None:
    current.ran = False
    current.target.faults["prepare"] = FAILED  # type: ignore[attr-defined]
    with pytest.raises(RolledBack, match="is stopped as before"):
        module._copy_and_commit(current)
    assert not current.source.runs() and holder(current) == current.source.name
    current.interrupted, current.stopped = True, False
    with pytest.raises(RolledBack, match="has the services as before"):
        module._copy_and_commit(current)
    assert current.source.runs(), "a run that was killed had stopped it"


def test_an_interruption_after_the_commit_names_what_goes_on(current: Move) -> None:
    module._copy_and_commit(current)
    current.target.faults["start"] = KeyboardInterrupt()  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt, match=rf"has the state .*`sms migrate --to {current.target.name}` goes on"):
        module._start(current, MoveResult(current.source.name, current.target.name, current.generation, 1, 1))


def test_a_refusal_before_the_stop_is_one(current: Move) -> None:
    current.source.faults["stop"] = Busy("another sms is at work")  # type: ignore[attr-defined]
    with pytest.raises(Busy, match=r"^another sms is at work$"):
        module._copy_and_commit(current)
    source = current.source
    assert isinstance(source, Volume) and source.serves and not {"start", "release"} & {*source.calls}
    assert phase(current) == RETURNED


@pytest.mark.parametrize("source", ["nomad", "kubernetes"])
def test_who_works_on_the_overlay_keeps_a_move_from_stopping_an_engine(
    cluster: Cluster, host: Local, tmp_path: Path, source: str
) -> None:
    current = make_move(with_env(cluster, locks=Impatient()), host, tmp_path, source, "container")
    with lock_host(cluster, host), pytest.raises(Busy):
        module._copy_and_commit(current)
    owners = current.source, current.target
    assert [one.calls for one in owners if isinstance(one, Volume)] == [[], []] and phase(current) == ""


def test_an_interruption(current: Move) -> None:
    current.target.faults["prepare"] = KeyboardInterrupt()  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        module._copy_and_commit(current)
    assert current.source.runs() and holder(current) == current.source.name


def test_a_source_that_does_not_start_again(current: Move) -> None:
    current.target.faults["accept"] = FAILED  # type: ignore[attr-defined]
    current.source.faults["start"] = SmsError("no such image")  # type: ignore[attr-defined]
    with pytest.raises(SmsError, match="could not be started again: no such image") as caught:
        module._copy_and_commit(current)
    assert caught.value.status == 1 and phase(current) == COMMITTING
    command = "sms start" if current.source.name == "container" else f"sms migrate --to {current.source.name}"
    assert command in str(caught.value.hint)


@pytest.mark.parametrize("written", [True, False])
def test_a_lease_of_which_no_reply_came(current: Move, monkeypatch: pytest.MonkeyPatch, written: bool) -> None:
    """Once it is the target's, nobody starts the source."""

    def without_reply(*words: Any, **named: Any) -> Lease:
        if written:
            hand_over(*words, **named)
        raise Unreachable("no reply")

    monkeypatch.setattr(module, "hand_over", without_reply)
    with pytest.raises(Unreachable if written else RolledBack):
        module._copy_and_commit(current)
    assert current.source.runs() is not written
    assert holder(current) == (current.target if written else current.source).name


def test_another_run_has_taken_the_lease(current: Move) -> None:
    lease = Lease(current.cluster.site.cluster, OLD + 1, "host-z", 2.0, current.host.name)
    current.host.write(str(current.cluster.places.lease), lease.text())
    with pytest.raises(RolledBack, match="another run has taken the lease"):
        module._copy_and_commit(current)
    assert isinstance(current.target, Volume) and set(current.target.calls) == {"discard"}


# An engine that does not answer


def test_it_is_left_out_only_with_force(current: Move) -> None:
    """With it, where the state can be reached; what cannot run is not started again after a failed step."""
    engine = current.target if current.source.name == "container" else current.source
    container = current.source if engine is current.target else current.target
    for one in (engine, container):
        one.faults["check"] = Unreachable("no route")  # type: ignore[attr-defined]
    with pytest.raises(Refused, match="cannot be queried: no route") as caught:
        _answers(engine, force=False)
    assert "--force" in str(caught.value.hint)
    assert not _answers(engine, force=True)
    with pytest.raises(Refused, match="does not answer"):
        engine.check_lost()
    with pytest.raises(Unreachable):
        _answers(container, force=True)


def test_a_lost_engine_is_not_started_again(current: Move) -> None:
    current.source.lost = True
    current.target.faults["accept"] = FAILED  # type: ignore[attr-defined]
    with pytest.raises(RolledBack, match="has the state as before, and is stopped as before"):
        module._copy_and_commit(current)
    assert isinstance(current.source, Volume) and "start" not in current.source.calls
    assert holder(current) == current.source.name and not current.source.moved


# One at a time


def test_there_is_one_move(cluster: Cluster, host: Local, tmp_path: Path) -> None:
    """The second one, also a rehearsal, ends before it looks at anything."""
    progress = Reports()
    cluster = with_env(on_nomad(cluster, tmp_path), locks=Impatient())
    with lock_moves(cluster, host), pytest.raises(Busy, match="another `sms migrate --to`"):
        rehearse_move(cluster.showing(progress), host, "nomad")
    assert not progress.steps, "it has not begun"


def test_the_lock_is_on_every_admin_host(cluster: Cluster, host: Local) -> None:
    """Two admin hosts start a move at once; one of them that cannot be reached refuses it."""
    opened = []

    class Gone(Local):
        @contextmanager
        def lock(self, path: str, *, wait_s: float = 0) -> Iterator[None]:
            opened.append(path)
            raise Unreachable("no route")
            yield

    two = [cluster.site.admin_hosts[0], cluster.site.admin_hosts[0].model_copy(update={"name": "other"})]
    both = replace(cluster, site=cluster.site.model_copy(update={"admin_hosts": two}))
    both = with_env(both, hosts=FakeHosts({"other": Gone("other")}), locks=Impatient())
    with pytest.raises(Refused, match="other cannot be reached"), lock_moves(both, host):
        pytest.fail("it has begun")
    assert len(opened) == 1
    with lock_moves(both, host, tolerant=True):  # a deployment, which the lock of this host keeps from a move
        assert len(opened) == 2
        with pytest.raises(Busy), lock_moves(both, host, tolerant=True):
            pytest.fail("it has begun")
    with lock_moves(cluster, host):
        pass


MOVED = StateMove("lab", STARTING, "nomad", "container", 1.0, 8)


@pytest.mark.parametrize("at", [COMMITTING, STARTING, DONE])
@pytest.mark.parametrize(("held", "generation"), [("host-a", 8), (None, 8), ("host-a", 9)])
def test_a_move_to_the_container_goes_on(at: str, held: str | None, generation: int) -> None:
    lease = Lease("lab", generation, held, 1.0, "host-a", last="host-a")
    assert _refuse_elsewhere(lease, "host-a", MOVED.at(at)) == "nomad"


@pytest.mark.parametrize(
    ("lease", "record", "message"),
    [
        (Lease("lab", 9, "host-b", 1.0, "host-a"), MOVED.at(DONE), "container on host-b has the services"),
        (Lease("lab", 9, None, 1.0, "host-a", last="host-b"), MOVED, "container on host-b has the services"),
        (Lease("lab", 7, "host-a", 1.0, "host-a"), MOVED, "has the services already"),
        (Lease("lab", 9, "host-a", 1.0, "host-a"), MOVED.at(RETURNED), "has the services already"),
        (Lease("lab", 9, "host-a", 1.0, "host-a"), MOVED.at(COPYING), "has the services already"),
        (Lease("lab", 9, "host-a", 1.0, "host-a"), replace(MOVED, target="nomad"), "has the services already"),
        (Lease("lab", 9, "host-a", 1.0, "host-a"), None, "has the services already"),
    ],
)
def test_a_move_to_the_container_that_has_nothing_to_do(lease: Lease, record: StateMove | None, message: str) -> None:
    with pytest.raises(Refused, match=message):
        _refuse_elsewhere(lease, "host-a", record)


# The copy


def on(host: Local, script: str) -> Command:
    return Command(host, ("sh", "-c", script))


def test_everything_is_copied(tmp_path: Path) -> None:
    one, seen = Local("one"), list[int]()
    data = tmp_path / "data"
    data.write_bytes(b"x" * 3_000_001)
    transfer(on(one, f"cat {data}"), on(Local("two"), f"cat >{tmp_path}/copy"), seen.append)
    assert (tmp_path / "copy").read_bytes() == data.read_bytes() and seen[-1] == 3_000_001


@pytest.mark.parametrize(
    ("reads", "writes"),
    [
        ("echo x; exec sleep 600", "cat >/dev/null"),
        ("head -c 9000000 /dev/zero", "exec sleep 600"),
        ("echo x", "cat >/dev/null; exec sleep 600"),
    ],
    ids=["reader", "writer", "writer at the end"],
)
def test_a_copy_that_hangs_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reads: str, writes: str) -> None:
    monkeypatch.setattr(pump, "SILENT_S", 2)
    monkeypatch.setattr(pump, "END_S", 2)
    pids = [tmp_path / "reader", tmp_path / "writer"]
    reader, writer = (
        on(Local("one"), f"echo $$ >{pid}; {each}") for pid, each in zip(pids, (reads, writes), strict=True)
    )
    with pytest.raises(SmsError, match="made no progress for 2 s"):
        transfer(reader, writer, lambda _: None)
    assert not [pid for pid in pids if Path("/proc", pid.read_text().strip()).exists()]


@pytest.mark.parametrize(
    ("reads", "writes"), [("echo x; exit 9", "cat >/dev/null"), ("yes | head -c 9000000", "exit 9")]
)
def test_a_copy_that_fails(reads: str, writes: str) -> None:
    with pytest.raises(CommandError, match="status 9"):
        transfer(on(Local("one"), reads), on(Local("two"), writes), lambda _: None)
