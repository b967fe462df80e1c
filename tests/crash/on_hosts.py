"""What verbs and agents write on admin hosts."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from appliance.agent import copy_file, paths, snapshots, transfer
from appliance.agent.adopt_place import place_state
from appliance.agent.host_state import HostState, read_mark
from appliance.agent.migration_source import MigrationSource
from appliance.agent.migration_target import MigrationTarget
from appliance.agent.protocol import Problem, read_request
from appliance.agent.remove import remove
from appliance.agent.store import CHUNK, Reader, Store, chunk_path, digest_of
from appliance.agent.system import System
from appliance.agent.transfer import PLAIN, put_expected
from appliance.host.local import ENVIRONMENT, Local
from appliance.shared.files import write_at
from appliance.shared.history import AppendLine
from appliance.shared.lease import WRITTEN, Lease, SwapLease, parse_lease, read_file
from appliance.shared.migration import Second, SourceRequest, TargetRequest
from appliance.tools import files
from tests.crash.workload import Mark, Marks, Workload, chunk, nothing
from tests.stores import add_snapshot, make_manifest
from tests.support.system import FakeSystem
from tests.unit.migration.requests import SOURCE, TARGET

# The lease: appliance/shared/lease.py


def write_lease(root: Path, generation: int) -> str:
    text = Lease("c", generation, "a", 1.0, "a").text().decode()
    return SwapLease(str(root / "lib" / "leases" / "c"), text).perform()


def run_lease(root: Path, mark: Mark) -> None:
    for generation in (5, 6):
        assert write_lease(root, generation) == WRITTEN
        mark(str(generation))


def check_lease(root: Path, marks: Marks) -> None:
    data = read_file(str(root / "lib" / "leases" / "c"))
    if data is None:
        assert not marks and not (root / "lib" / "leases" / "was").exists()
    else:
        least = max([4 if (root / "lib" / "leases" / "was").exists() else 0, *map(int, marks)])
        assert least <= parse_lease(data).generation <= 6
    assert write_lease(root, 7) == WRITTEN


def prepare_lease(root: Path) -> None:
    write_lease(root, 4)
    (root / "lib" / "leases" / "was").touch()


# The mark of a migration: appliance/agent/host_state.py


def host_state(root: Path) -> HostState:
    places = {name: str(root / "journal" / name) for name in ("lease", "history", "mark")}
    return HostState(read_request(TargetRequest, {**TARGET, **places}), "arrive", System())


def run_mark(root: Path, mark: Mark) -> None:
    state = host_state(root)
    for name in ("copy", "up"):
        state.save_state(name, ports={"eth0": "veth1"}, inode=5)
        mark(name)
    state.clear_state()
    mark("")


def check_mark(root: Path, marks: Marks) -> None:
    found = read_mark(System(), host_state(root).request.mark)
    order = ["none", "copy", "up", ""]
    now = order[len(marks)], order[min(len(marks) + 1, 3)]
    assert (found.state if found else "") in [name if name != "none" else "" for name in now]


# The history: appliance/shared/history.py


def run_history(root: Path, mark: Mark) -> None:
    for number in range(3):
        AppendLine(str(root / "journal" / "c.log"), json.dumps({"number": number})).perform()
        mark(str(number))


def check_history(root: Path, marks: Marks) -> None:
    path = root / "journal" / "c.log"
    AppendLine(str(path), json.dumps({"number": 9})).perform()
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            found.append(str(json.loads(line)["number"]))
        except (ValueError, TypeError):
            continue  # as read_history does
    assert found[-1] == "9" and set(marks) <= set(found)


# Snapshots: appliance/agent/store.py


def store_of(root: Path) -> Store:
    return Store(str(root / "store"))


def contents(store: Store) -> dict[int, list[bytes]]:
    """Read all verified snapshots."""
    found, _ = store.list()
    result = {}
    for one in found:
        if one.verified:
            with Reader(one) as reader:
                result[one.number] = [reader.read(number) for number in range(reader.count)]
    return result


def prepare_store(root: Path) -> None:
    add_snapshot(store_of(root), [chunk("a"), chunk("b")])


def take(root: Path, chunks: list[bytes]) -> None:
    """As the agent does: what a failed run has stored is removed."""
    store = store_of(root)
    try:
        add_snapshot(store, chunks)
    except BaseException:
        for folder in Path(store.root).glob("*.partial"):
            store.drop_new(str(folder))
        raise


def run_store(root: Path, mark: Mark) -> None:
    take(root, [chunk("a"), chunk("c")])
    mark("2")
    remove({"store": store_of(root).root, "numbers": [1]})
    mark("1 is removed")
    take(root, [chunk("b"), b"", chunk("c")])
    mark("3")


def check_store(root: Path, marks: Marks) -> None:
    store = store_of(root)
    expected = {1: ["a", "b"], 2: ["a", "c"], 3: ["b", "", "c"]}
    there = contents(store)
    assert ("2" not in marks or 2 in there) and ("3" not in marks or 3 in there)
    assert 1 in there or "2" in marks, "the only verified one"
    # All chunks once more: what the failure left of them is not relied upon.
    new = add_snapshot(store, [chunk(name) for name in "abc"]).number
    assert new > max([0, *there, *(int(mark) for mark in marks if mark.isdigit())])
    expected[new] = list("abc")
    for number, read in contents(store).items():
        assert read == [chunk(name) if name else bytes(CHUNK) for name in expected[number]]
    remove({"store": store.root, "numbers": []})
    assert new in contents(store)


def prepare_damaged(root: Path) -> None:
    prepare_store(root)
    for name in "ab":
        Path(chunk_path(store_of(root).root, digest_of(chunk(name)))).write_bytes(b"half of it")


def run_damaged(root: Path, mark: Mark) -> None:
    """A snapshot, and one that is received, replace damaged chunks of a verified one."""
    store = store_of(root)
    with store.writing():
        put_expected(store, (PLAIN, chunk("b")), digest_of(chunk("b")))
    add_snapshot(store_of(root), [chunk("a"), chunk("b")])
    mark("2")


def check_damaged(root: Path, marks: Marks) -> None:
    store = store_of(root)
    for number in ["2"] if "2" in marks else []:
        with Reader(store.find(number)) as reader:
            assert [reader.read(at) for at in range(2)] == [chunk("a"), chunk("b")]
    new = add_snapshot(store, [chunk("a"), chunk("b")])
    with Reader(new) as reader:
        assert [reader.read(at) for at in range(2)] == [chunk("a"), chunk("b")]


def prepare_restore(root: Path) -> None:
    prepare_store(root)
    (root / "overlays").mkdir()
    (root / "overlays" / "c.img").write_bytes(b"before")
    (root / "bin").mkdir()
    (root / "bin" / "e2fsck").write_text("#!/bin/sh\n")
    (root / "bin" / "e2fsck").chmod(0o755)


def run_restore(root: Path, mark: Mark) -> None:
    os.environ["PATH"] = f"{root / 'bin'}:{ENVIRONMENT['PATH']}"
    request = {"store": store_of(root).root, "snapshot": "1", "replace": True}
    snapshots.restore({**request, "target": str(root / "overlays" / "c.img")})
    mark("restored")


def check_restore(root: Path, marks: Marks) -> None:
    found = (root / "overlays" / "c.img").read_bytes()
    assert found == chunk("a") + chunk("b") or (found == b"before" and not marks)


# The overlay that a migration brings: appliance/agent/migration_target.py

OLD, NEW = b"old".ljust(CHUNK, b"-"), [chunk("a"), chunk("b")]


class StoppedHost(FakeSystem):
    """A host without an instance; its mirror is mounted, and it flushes in other threads."""

    def pool(self, workers: int) -> Executor:
        return ThreadPoolExecutor(workers)

    def is_mounted(self, folder: str) -> bool:
        return True


class Script:
    """The coordinator's side of a migration."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self.body = b""

    def read_body(self, message: dict[str, Any]) -> bytes:
        return self.body

    def send(self, kind: str, *_: Any, **more: Any) -> None:
        self.mark(kind)


def target_paths(root: Path) -> dict[str, str]:
    folders = {"overlay": "overlays/c.img", "lease": "leases/c", "history": "journal/c.log", "mark": "journal/c.move"}
    return {**{name: str(root / path) for name, path in folders.items()}, "store": str(root / "none")}


def target_of(root: Path, channel: Any = None) -> MigrationTarget:
    request = {**TARGET, **target_paths(root), "holds": [], "mirror": str(mirror_of(root)) if on_mirror(root) else ""}
    return MigrationTarget(read_request(TargetRequest, request), channel, StoppedHost())


def on_mirror(root: Path) -> bool:
    return mirror_of(root).exists()


def prepare_target(root: Path) -> None:
    where = target_paths(root)
    for name in ("overlay", "lease", "history"):
        Path(where[name]).parent.mkdir(exist_ok=True)
    Path(where["overlay"]).write_bytes(OLD)
    SwapLease(where["lease"], Lease("c", 4, "b", 1.0, "a").text().decode()).perform()


def prepare_standby(root: Path) -> None:
    """The host has a mirror with a stale copy."""
    prepare_target(root)
    overlay = Path(target_paths(root)["overlay"])
    mirror_of(root).mkdir()
    overlay.rename(mirror_of(root) / overlay.name)


def prepare_mirrored(root: Path) -> None:
    """The host has an overlay on a mirror."""
    prepare_standby(root)
    Path(target_paths(root)["overlay"]).symlink_to("c.mirror/c.img")


def mirror_of(root: Path) -> Path:
    return root / "overlays" / "c.mirror"


def run_target(root: Path, mark: Mark, *, late: bool = False) -> None:
    from appliance.agent.chunk_frames import FrameEncoder

    channel = Script(mark)
    target = target_of(root, channel)
    digests = b"".join(map(digest_of, NEW))
    try:
        channel.body = digests
        target.build({"size": len(NEW) * CHUNK})
        encoder = FrameEncoder(False)
        channel.body = encoder.encode(0, NEW[0], digests[:32])
        target.store_chunks({})
        target.verify = lambda message: os.fsync(target.descriptor)  # type: ignore[method-assign]
        target.verify({})
        channel.body = encoder.encode(1, NEW[1], digests[32:])
        target.store_chunks({})
        target.put_in_place({"digests": hashlib.sha256(digests).hexdigest()})
        target._save_state("started")
        target.state, target.instance = "started", SimpleNamespace(announce=lambda *_: None)  # type: ignore[assignment]
        channel.body = b""
        target.flush({})
        target.arm({})
        target.armed_at -= 60 if late else 0
        target.take_over({})
        target.instance = None
        target.commit({})
    except BaseException:
        target.instance = None
        target.abandon("it failed")
        raise


def run_late(root: Path, mark: Mark) -> None:
    """It is rolled back after it has written the lease."""
    try:
        run_target(root, mark, late=True)
    except Problem as problem:
        assert "came too late" in problem.message
        mark("rolled back")


def check_target(root: Path, marks: Marks, *, standby: bool = False) -> None:
    """A lease of this host names the new overlay; without one the old overlay is there, perhaps set aside."""
    where = target_paths(root)
    file = mirror_of(root) / "c.img" if on_mirror(root) else Path(where["overlay"])
    if saved := read_mark(System(), where["mark"]):
        # The copy of the state has other inode numbers.
        files = [Path(f"{file}{name}") for name in ("", ".incoming", ".partial")]
        inodes = [path.stat().st_ino for path in files if path.exists() and path.read_bytes() != OLD]
        target_of(root).recover(replace(saved, inode=inodes[0] if saved.inode and inodes else 0))
    lease = parse_lease(read_file(where["lease"]) or b"")
    ours = (lease.generation, lease.holder) == (5, TARGET["host"])
    assert ours or "up" not in marks
    overlay, aside = Path(where["overlay"]), Path(f"{file}.past-4-replaced")
    if ours:
        assert overlay.read_bytes() == b"".join(NEW)
    elif standby:
        assert not os.path.lexists(overlay)
    else:
        assert OLD in (overlay.read_bytes(), aside.read_bytes() if aside.exists() else b"")
    assert "rolled back" not in marks or standby or overlay.read_bytes() == OLD
    assert read_mark(System(), where["mark"]) is None


def check_standby(root: Path, marks: Marks) -> None:
    """As ``check_target``, but without a lease there is no overlay: the mirror has stale copies only."""
    check_target(root, marks, standby=True)


# The overlay that a migration leaves: appliance/agent/migration_source.py


def source_of(root: Path) -> MigrationSource:
    request = {**SOURCE, **target_paths(root), "mirror": str(mirror_of(root)) if on_mirror(root) else ""}
    return MigrationSource(read_request(SourceRequest, request), None, StoppedHost())


def prepare_source(root: Path) -> None:
    prepare_target(root)
    take_source_lease(root)


def prepare_mirrored_source(root: Path) -> None:
    prepare_mirrored(root)
    take_source_lease(root)


def take_source_lease(root: Path) -> None:
    SwapLease(target_paths(root)["lease"], Lease("c", 4, "a", 1.0, "a").text().decode()).perform()


def run_source(root: Path, mark: Mark) -> None:
    source = source_of(root)
    source._enter("given", "b serves")
    mark("given")
    source._finish()
    mark("gone")


def check_source(root: Path, marks: Marks) -> None:
    where = target_paths(root)
    if saved := read_mark(System(), where["mark"]):
        source_of(root).recover(saved)
    lease = parse_lease(read_file(where["lease"]) or b"")
    overlay, moved = Path(where["overlay"]), Path(where["overlay"] + ".moved")
    if on_mirror(root):
        moved = mirror_of(root) / overlay.name
    gone = (lease.generation, lease.holder) == (5, "b")
    assert gone or (not marks and (lease.generation, lease.holder) == (4, "a"))
    assert (moved if gone else overlay).read_bytes() == OLD and not (gone and overlay.exists())


def source_here(root: Path) -> MigrationSource:
    """A source whose target is the same host."""
    where = target_paths(root)
    second = Second("sms-c.5", where["overlay"] + ".second", where["mark"] + ".second", where["mark"] + ".lock")
    request = {**SOURCE, **where, "peer": SOURCE["host"], "second": asdict(second)}
    return MigrationSource(read_request(SourceRequest, request), None, StoppedHost())


def prepare_here(root: Path) -> None:
    prepare_source(root)
    Path(target_paths(root)["overlay"] + ".second").write_bytes(NEW[0])


def run_here(root: Path, mark: Mark) -> None:
    source = source_here(root)
    source._enter("given", "the second instance serves")
    mark("given")
    source._finish()
    mark("gone")


def check_here(root: Path, marks: Marks) -> None:
    """Until the state is stored nothing has happened; then the copy becomes the overlay, and the other one is gone."""
    where = target_paths(root)
    saved = read_mark(System(), where["mark"])
    if saved:
        source_here(root).recover(saved)
    overlay, second = Path(where["overlay"]), Path(where["overlay"] + ".second")
    given = bool(marks or saved) or not second.exists()
    lease = parse_lease(read_file(where["lease"]) or b"")
    assert lease.holder == "a" and lease.generation == (5 if given else 4)
    assert overlay.read_bytes() == (NEW[0] if given else OLD) and second.exists() != given
    assert read_mark(System(), where["mark"]) is None


# What verbs write on a host: WRITE_ATOMIC in appliance/host/base.py


def run_write(root: Path, mark: Mark) -> None:
    for number in (1, 2):
        Local().write(str(root / "var" / "journal" / "c.json"), b"%d" % number * 300, mode=0o600)
        mark(str(number))


def check_write(root: Path, marks: Marks) -> None:
    path = root / "var" / "journal" / "c.json"
    found = path.read_bytes() if path.exists() else b""
    assert found in [b"", b"1" * 300, b"2" * 300][len(marks) :]


# A snapshot from Borg: appliance/agent/transfer.py


RECEIVED = {
    "generation": 1,
    "taken": 1.0,
    "size": 2 * CHUNK,
    "used_bytes": 2 * CHUNK,
    "new_bytes": 0,
    "digests": hashlib.sha256(digest_of(chunk("a")) + digest_of(chunk("d"))).hexdigest(),
    "uuid": "00000000-0000-4000-8000-000000000007",
    "cluster_uuid": "00000000-0000-4000-8000-000000000001",
    "sequence": 7,
}


def run_receive(root: Path, mark: Mark) -> None:
    transfer.check = lambda *_: None  # type: ignore[attr-defined, assignment]
    manifest = make_manifest(7, RECEIVED).to_dict()
    (root / "image").write_bytes(chunk("a") + chunk("d"))
    request = {"store": store_of(root).root, "argv": ["cat", str(root / "image")], "program": "cat", "origin": "borg"}
    transfer.receive_image({**request, "manifest": manifest, "cluster": "lab"})
    mark("received")


def check_receive(root: Path, marks: Marks) -> None:
    store = store_of(root)
    there = contents(store)
    assert there[1] == [chunk("a"), chunk("b")] and (len(there) == 2 or not marks)
    assert all(read == [chunk("a"), chunk("d")] for number, read in there.items() if number > 1)
    new = add_snapshot(store, [chunk(name) for name in "abd"]).number
    assert contents(store)[new] == [chunk(name) for name in "abd"]


# An overlay in which paths of a snapshot were restored: appliance/agent/paths.py; and its copy on a mirror


def prepare_paths(root: Path) -> None:
    (root / "overlays").mkdir()
    (root / "overlays" / "c.img").write_bytes(OLD)


def run_paths(root: Path, mark: Mark) -> None:
    overlay = str(root / "overlays" / "c.img")
    was = paths._copy_overlay(overlay, overlay + paths.BESIDE)
    with open(overlay + paths.BESIDE, "r+b", 0) as file:  # noqa: PTH123 - as _restore_into does
        write_at(file.fileno(), b"new", 0)
        os.fsync(file.fileno())
    paths.place_paths({"overlay": overlay, "was": was})
    mark("restored")


def check_paths(root: Path, marks: Marks) -> None:
    found = (root / "overlays" / "c.img").read_bytes()
    assert found == b"new" + OLD[3:] or (found == OLD and not marks)


def run_carry(root: Path, mark: Mark) -> None:
    source, target = root / "overlays" / "c.img", root / "overlays" / "c.img.new"
    copy_file.copy_file({"source": str(source), "target": str(target)})
    files.rename(Local(), str(target), str(root / "overlays" / "copy.img"), replace=True)
    mark("copied")


def check_carry(root: Path, marks: Marks) -> None:
    copy = root / "overlays" / "copy.img"
    assert (root / "overlays" / "c.img").read_bytes() == OLD
    assert copy.read_bytes() == OLD if copy.exists() else not marks


# The state of the old node when an adoption is undone: appliance/agent/adopt_place.py


def prepare_return(root: Path) -> None:
    for name, text in (("state", "old"), ("state.sms-new", "new"), ("state.before-sms", "of an earlier undo")):
        (root / name).mkdir()
        (root / name / "job_state").write_text(text)


def run_return(root: Path, mark: Mark) -> None:
    place_state(str(root / "state"))
    mark("placed")


def check_return(root: Path, marks: Marks) -> None:
    assert not (marks and (root / "state.sms-new").exists())
    place_state(str(root / "state"))
    found = [(root / name / "job_state").read_text() for name in ("state", "state.before-sms", "state.before-sms.1")]
    assert found == ["new", "of an earlier undo", "old"] and not (root / "state.sms-new").exists()


HOSTS = {
    "lease": Workload(prepare_lease, run_lease, check_lease, again=False),
    "first lease": Workload(nothing, run_lease, check_lease, again=False),
    "move mark": Workload(nothing, run_mark, check_mark),
    "history": Workload(nothing, run_history, check_history),
    "store": Workload(prepare_store, run_store, check_store, again=False),
    "damaged store": Workload(prepare_damaged, run_damaged, check_damaged),
    "restore": Workload(prepare_restore, run_restore, check_restore),
    "migration target": Workload(prepare_target, run_target, check_target, again=False),
    "rollback on the target": Workload(prepare_target, run_late, check_target, again=False),
    "migration source": Workload(prepare_source, run_source, check_source, again=False),
    "migration target on a mirror": Workload(prepare_standby, run_target, check_standby, again=False),
    "rollback on a mirror": Workload(prepare_mirrored, run_late, check_target, again=False),
    "migration source on a mirror": Workload(prepare_mirrored_source, run_source, check_source, again=False),
    "switch on one host": Workload(prepare_here, run_here, check_here, again=False),
    "records of verbs": Workload(nothing, run_write, check_write),
    "received snapshot": Workload(prepare_store, run_receive, check_receive),
    "restored paths": Workload(prepare_paths, run_paths, check_paths),
    "overlay to a mirror": Workload(prepare_paths, run_carry, check_carry),
    "state of the old node": Workload(prepare_return, run_return, check_return),
}
