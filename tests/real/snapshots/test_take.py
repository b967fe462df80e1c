"""The agent's snapshots of a mounted overlay: equal to what the writers had written, whatever finds the changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from appliance.agent.trace import pid_namespace
from tests.cases import sample
from tests.real.overlays import (
    FACTS,
    Bed,
    Writer,
    bed,
    differing_chunks,
    file_system,
    is_prefix,
    sh,
)
from tests.waiting import soon

pytestmark = pytest.mark.real

TRUTH = """
import subprocess
from appliance.agent import take
freeze = take.SnapshotRun._freeze
def with_truth(self, loop, work):
    def both():
        held = work()
        subprocess.check_call(["cp", "--sparse=always", "--reflink=never", self.overlay, self.overlay + ".truth"])
        return held
    return freeze(self, loop, both)
take.SnapshotRun._freeze = with_truth
"""
"""While writers are held, the whole overlay is copied besides: what a snapshot must be equal to."""

NO_TRACE = """
from appliance.agent import trace
def start(self):
    raise trace.Untraceable("left out by a test")
trace.Trace.start = start
"""
NOTHING = (
    NO_TRACE
    + """
from appliance.agent import ext
def forget(self, image, since):
    raise ext.Unknown("left out by a test")
ext.InodeState.__init__ = forget
"""
)
WAYS = {"trace": "", "inodes": NO_TRACE, "all": NOTHING}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("way", ["trace", "inodes", "all"])
def test_equal_to_what_was_written(way: str, seed: int, overlay: Bed) -> None:
    with Writer(overlay.upper / "w", seed=seed + len(way)) as writer:
        for _ in range(4):
            time.sleep(0.3)
            before = writer.count()
            manifest = overlay.take(before=WAYS[way] + TRUTH, freeze_limit_s=20)
            assert (manifest["found_by"], manifest["method"]) == (way, "delta")
            back = overlay.restore(manifest["number"])
            if manifest["checks"]["e2fsck"] == "clean":
                truth = Path(f"{overlay.overlay}.truth")
                assert differing_chunks(back, truth, used_alone=way == "inodes") == []
            assert subprocess.run(["e2fsck", "-fn", back], capture_output=True, check=False).returncode == 0
            lines = sh("debugfs", "-R", "cat /upper/w/lines", back)
            assert is_prefix(lines) >= before
    overlay.assert_clean()


def test_files_that_live_while_the_overlay_is_read(overlay: Bed) -> None:
    """Inodes of the beginning and of the end do not tell of them; what was read of their inodes would be damage."""
    short_lived = f"""
import os, subprocess
from appliance.agent import take
read = take.Source.read_chunks
def with_files(self, numbers, sink, **more):
    take.Source.read_chunks = read
    names = [os.path.join({str(overlay.upper)!r}, "short-lived%d" % number) for number in range(1000)]
    for name in names:
        with open(name, "wb") as stream:
            stream.write(os.urandom(100))
    for word in ("--freeze", "--unfreeze"):  # which has the journal's content put where it is read
        subprocess.check_call(["fsfreeze", word, {str(overlay.tree)!r}])
    read(self, self.data_chunks(), sink, **more)
    for name in names:
        os.unlink(name)
take.Source.read_chunks = with_files
"""
    manifest = overlay.take(before=short_lived + NO_TRACE + TRUTH, freeze_limit_s=20)
    assert manifest["found_by"] == "inodes"
    back = overlay.restore(manifest["number"])
    assert differing_chunks(back, Path(f"{overlay.overlay}.truth"), used_alone=True) == []


@pytest.mark.parametrize("kind", sample(("xfs", "btrfs"), "xfs"))
def test_reflink(kind: str, tmp_path: Path) -> None:
    with file_system(tmp_path, kind, 400) as folder, bed(folder / "bed") as overlay:
        with Writer(overlay.upper / "w") as writer:
            time.sleep(0.5)
            before = writer.count()
            manifest = overlay.take(before=TRUTH, freeze_limit_s=20)
        assert (manifest["method"], manifest["found_by"]) == ("reflink", "clone")
        back = overlay.restore(manifest["number"])
        if manifest["checks"]["e2fsck"] == "clean":
            assert differing_chunks(back, Path(f"{overlay.overlay}.truth")) == []
        assert is_prefix(sh("debugfs", "-R", "cat /upper/w/lines", back)) >= before
        overlay.assert_clean()


@pytest.mark.parametrize("method", sample(("reflink", "delta", "full"), "full"))
def test_each_way_comes_back_on_xfs(method: str, tmp_path: Path) -> None:
    with file_system(tmp_path, "xfs", 400) as folder, bed(folder / "bed") as overlay:
        (overlay.upper / "file").write_bytes(os.urandom(1 << 20))
        manifest = overlay.take(method=method, before=TRUTH, freeze_limit_s=20)
        back = overlay.restore(manifest["number"])
        assert back.stat().st_size == overlay.overlay.stat().st_size
        assert differing_chunks(back, Path(f"{overlay.overlay}.truth")) == []


def test_more_is_written_than_the_trace_can_note(overlay: Bed) -> None:
    """Then the inodes are not known either, and everything is compared."""
    flood = """
import os
from appliance.agent import take, trace
trace.BUFFER_KB = 4
trace.PAUSE_S = 3600
read = take.Source.read_chunks
def flooded(self, numbers, sink, **more):
    read(self, numbers, sink, **more)
    f = os.open({path!r}, os.O_WRONLY | os.O_CREAT)
    for at in range(0, 16 << 20, 8192):
        os.pwrite(f, os.urandom(4096), at)
    os.fsync(f)
take.Source.read_chunks = flooded
take.Changes.collect = lambda self: None
""".format(path=str(overlay.upper / "scattered"))
    (overlay.upper / "scattered").write_bytes(bytes(16 << 20))
    manifest = overlay.take(before=flood + TRUTH, freeze_limit_s=20)
    assert manifest["found_by"] == "all"
    assert differing_chunks(overlay.restore(manifest["number"]), Path(f"{overlay.overlay}.truth")) == []


def test_a_trace_that_is_in_use_stays(overlay: Bed, tmp_path: Path) -> None:
    """The kernel keeps one that is read, even if its process is not seen from here."""
    traces = tmp_path / "traces"
    traces.mkdir()
    sh("mount", "-t", "tracefs", "none", traces)
    try:
        other = traces / "instances" / f"sms-{pid_namespace()}-4194304"
        other.mkdir()
        with (other / "trace_pipe").open("rb"):
            assert overlay.take()["found_by"] == "trace"
            assert other.exists()
        overlay.take()
        assert not other.exists()
    finally:
        sh("umount", traces)


def test_stopped_meanwhile(overlay: Bed) -> None:
    """Its loop device is gone: where hosts share the folder, it may run elsewhere by now."""
    stop = """
from appliance.agent import take
def gone(self):
    take.find_loops = lambda path: []
take.Changes.collect = gone
"""
    said = overlay.ask("take", before=stop)
    assert (said.status, "was stopped meanwhile" in said.last["message"]) == (3, True)
    assert overlay.numbers() == []


def test_started_meanwhile(overlay: Bed) -> None:
    """The holder of our lock was killed, and another run has started the services container."""
    overlay.unmount()
    start = f"""
import subprocess
from appliance.agent import take
read = take.Source.read_chunks
def started(self, numbers, sink, **more):
    read(self, numbers, sink, **more)
    with open({str(overlay.overlay)!r}, "r+b") as stream:
        stream.write(stream.read(1))
take.Source.read_chunks = started
"""
    said = overlay.ask("take", before=start)
    assert (said.status, "came into use" in said.last["message"]) == (3, True)


def test_full_is_an_image_of_its_own(overlay: Bed) -> None:
    (overlay.upper / "file").write_bytes(os.urandom(3 << 20))
    manifest = overlay.take(method="full", before=TRUTH, freeze_limit_s=20)
    image = overlay.store / "000001" / "image"
    assert differing_chunks(image, Path(f"{overlay.overlay}.truth")) == []
    assert image.stat().st_blocks * 512 < manifest["used_bytes"] * 1.2
    assert not [path for path in (overlay.store / "chunks").rglob("*") if path.is_file()]


def test_only_what_changed_is_written(overlay: Bed) -> None:
    (overlay.upper / "large").write_bytes(os.urandom(20 << 20))
    first = overlay.take()
    (overlay.upper / "small").write_bytes(os.urandom(1 << 20))
    second = overlay.take()
    third = overlay.take()
    assert first["new_bytes"] > 20 << 20
    assert 1 << 20 <= second["new_bytes"] < 3 << 20
    assert third["new_bytes"] < 1 << 20


def test_a_file_deleted_while_open_is_let_go(overlay: Bed) -> None:
    with (overlay.upper / "gone").open("wb") as stream:
        stream.write(os.urandom(1 << 20))
        stream.flush()
        os.fsync(stream.fileno())
        (overlay.upper / "gone").unlink()
        manifest = overlay.take()
        assert manifest["checks"]["e2fsck"] == "deleted files let go"
        back = overlay.restore(manifest["number"])
    assert subprocess.run(["e2fsck", "-fn", back], capture_output=True, check=False).returncode == 0


def test_a_stopped_overlay(overlay: Bed) -> None:
    (overlay.upper / "file").write_bytes(b"text")
    overlay.unmount()
    manifest = overlay.take()
    assert (manifest["found_by"], manifest["running"], manifest["frozen_ms"]) == ("stopped", False, 0)
    assert differing_chunks(overlay.restore(manifest["number"]), overlay.overlay) == []


def test_an_overlay_of_a_host_that_lost_its_power(overlay: Bed) -> None:
    """Its journal holds what its blocks do not."""
    with Writer(overlay.upper / "w"):
        time.sleep(0.5)
        copy = overlay.folder / "crashed.img"
        sh("cp", "--sparse=always", overlay.overlay, copy)
    overlay.unmount()
    copy.replace(overlay.overlay)
    assert "needs_recovery" in sh("dumpe2fs", "-h", overlay.overlay)
    manifest = overlay.take()
    assert manifest["checks"]["e2fsck"] == "journal replayed"
    back = overlay.restore(manifest["number"])
    assert subprocess.run(["e2fsck", "-fn", back], capture_output=True, check=False).returncode == 0


def test_a_damaged_overlay_does_not_count(overlay: Bed) -> None:
    overlay.unmount()
    layout = sh("dumpe2fs", overlay.overlay)
    table = int(layout.split("Inode table at ")[1].split("-")[0])
    block = int(layout.split("Block size:")[1].split()[0])
    size = int(layout.split("Inode size:")[1].split()[0])
    with overlay.overlay.open("r+b") as stream:
        stream.seek(table * block + size)  # the root folder
        stream.write(os.urandom(128))
    said = overlay.ask("take")
    assert said.status == 1
    assert "file system" in said.last["message"]
    assert overlay.numbers() == []
    overlay.assert_clean()


def test_state_that_is_torn_does_not_count(overlay: Bed) -> None:
    (overlay.upper / "var/spool/slurmctld/job_state").write_bytes(b"")
    said = overlay.ask("take")
    assert (said.status, "job_state in it does not have" in said.last["message"]) == (1, True)
    assert overlay.numbers() == []


def test_two_writers_are_refused(overlay: Bed) -> None:
    other = sh("losetup", "--find", "--show", overlay.overlay).strip()
    try:
        said = overlay.ask("take")
        assert said.status == 3
        assert overlay.loop in said.last["message"]
        assert other in said.last["message"]
    finally:
        sh("losetup", "--detach", other)


STEPS_WHILE_RUNNING = ("read", "freeze", "frozen", "thawed", "store", "check", "commit")
KILL = """
import os, signal
from appliance.agent import protocol
say = protocol.send
def kill_at(kind, **fields):
    say(kind, **fields)
    if kind == "step" and fields["name"] == {step!r}:
        os.kill(os.getpid(), signal.SIGKILL)
protocol.send = kill_at
"""


def test_the_steps_are_these(overlay: Bed) -> None:
    assert tuple(overlay.ask("take").steps) == STEPS_WHILE_RUNNING


@pytest.mark.parametrize("step", sample(STEPS_WHILE_RUNNING, "read", "frozen", "commit"))
def test_killed(step: str, overlay: Bed) -> None:
    """The services container keeps running, nothing partial is committed, the next run removes it and resumes."""
    first = overlay.take()
    (overlay.upper / "more").write_bytes(os.urandom(1 << 20))
    said = overlay.ask("take", before=KILL.format(step=step))
    assert said.status == -9
    assert overlay.writes()
    assert overlay.numbers() == [first["number"]]
    second = overlay.take()
    assert second["number"] > first["number"]
    assert overlay.ask("verify", numbers=[]).last["snapshots"] == [
        {"number": one["number"], "ok": True, "damage": []} for one in (first, second)
    ]
    overlay.assert_clean()


def test_a_second_run_is_refused(overlay: Bed) -> None:
    overlay.take()
    argv = ["flock", str(overlay.store / "write.lock"), "sh", "-c", "echo held; sleep 60"]
    held = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE)
    try:
        assert held.stdout and held.stdout.readline() == b"held\n"
        said = overlay.ask("take")
        assert (said.status, "another run is at work" in said.last["message"]) == (3, True)
    finally:
        held.terminate()
        os.killpg(held.pid, 9)
        held.wait()


def test_a_full_disk(tmp_path: Path) -> None:
    """The error says so, what had counted counts, and the room is given back."""
    with file_system(tmp_path, "ext4", 40) as small, bed(tmp_path / "bed", store_folder=small / "store") as overlay:
        (overlay.upper / "a").write_bytes(os.urandom(10 << 20))
        first = overlay.take()
        free = os.statvfs(small).f_bavail
        (overlay.upper / "b").write_bytes(os.urandom(40 << 20))
        said = overlay.ask("take")
        assert said.status == 1
        assert "is full" in said.last["message"]
        assert "prune" in said.last["hint"]
        assert os.statvfs(small).f_bavail > free - 300
        assert overlay.numbers() == [first["number"]]
        assert overlay.writes()
        (overlay.upper / "b").unlink()
        overlay.take()


def test_a_clock_that_jumps_back(overlay: Bed) -> None:
    """Numbers tell what is newer; ctimes are not believed."""
    first = overlay.take()
    jump = (
        NO_TRACE
        + """
import time
real = time.time
from appliance.agent import take
read = take.Changes.start
def jumped(self):
    read(self)
    time.time = lambda: real() - 7200
take.Changes.start = jumped
"""
    )
    second = overlay.take(before=jump)
    assert second["found_by"] == "all"
    assert second["taken"] < first["taken"]
    assert overlay.numbers() == [1, 2]
    assert json.loads((overlay.store / "000002" / "health.json").read_text())["ok"]


STEPS_OF_RESTORE = ("write", "check", "rename")


@pytest.mark.parametrize("step", sample(STEPS_OF_RESTORE, "rename"))
def test_restore_killed(step: str, overlay: Bed) -> None:
    """There is the file of before, whole, and the next run puts the snapshot in its place."""
    (overlay.upper / "file").write_bytes(os.urandom(1 << 20))
    overlay.take()
    target = overlay.folder / "target.img"
    target.write_bytes(b"of before")
    request: dict[str, Any] = {"snapshot": "1", "target": str(target), "replace": True}
    said = overlay.ask("restore", before=KILL.format(step=step), **request)
    assert said.status == -9
    assert target.read_bytes() == b"of before"
    said = overlay.ask("restore", **request)
    assert said.status == 0
    assert tuple(said.steps) == STEPS_OF_RESTORE
    assert subprocess.run(["e2fsck", "-fn", target], capture_output=True, check=False).returncode == 0
    assert sorted(path.name for path in overlay.folder.glob("target*")) == ["target.img"]


def test_an_overlay_in_use_is_not_replaced(overlay: Bed) -> None:
    overlay.take()
    said = overlay.ask("restore", snapshot="1", target=str(overlay.overlay), replace=True)
    assert (said.status, "came into use" in said.last["message"]) == (3, True)
    assert not list(overlay.folder.glob("*.restoring"))


def test_latest_is_not_what_a_restore_has_kept(overlay: Bed) -> None:
    overlay.take()
    (overlay.upper / "bad").write_bytes(b"state")
    overlay.take(reason="before restore of 1")
    said = overlay.ask("restore", snapshot="latest", target=str(overlay.folder / "back.img"))
    assert said.last["number"] == 1


def test_a_verify_at_work_keeps_its_files(overlay: Bed) -> None:
    overlay.take()
    mine = overlay.store / "tmp" / f"check-{os.getpid()}.img"
    left = overlay.store / "tmp" / "check-4194304.img"
    for path in (mine, left):
        path.write_bytes(b"x")
    overlay.take()
    assert (mine.exists(), left.exists()) == (True, False)
    mine.unlink()


def test_a_full_disk_beside_a_broken_manifest(tmp_path: Path) -> None:
    with file_system(tmp_path, "ext4", 40) as small, bed(tmp_path / "bed", store_folder=small / "store") as overlay:
        overlay.take()
        (overlay.store / "000001" / "manifest.json").write_text("{}")
        (overlay.upper / "b").write_bytes(os.urandom(40 << 20))
        said = overlay.ask("take")
        assert "is full" in said.last["message"]
        assert not list(overlay.store.glob("*.partial"))


def test_a_write_that_does_not_end(overlay: Bed) -> None:
    """It holds the freeze up, and with it every writer; past the limit nothing counts, and nothing stays held."""
    splice = """\
import os, sys
reader, writer = os.pipe()
f = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
print("ready", flush=True)
os.splice(reader, f, 100)
"""
    stuck = subprocess.Popen(["/usr/bin/python3", "-c", splice, str(overlay.upper / "stuck")], stdout=subprocess.PIPE)
    assert stuck.stdout
    stuck.stdout.readline()
    killer = subprocess.Popen(["sh", "-c", "sleep 3; kill -9 $1", "k", str(stuck.pid)])
    said = overlay.ask("take", freeze_limit_s=1)
    killer.wait()
    stuck.wait()
    assert (said.status, "writers waited longer" in said.last["message"]) == (1, True)
    assert overlay.writes()
    assert overlay.numbers() == []


def test_a_grown_overlay_stays_as_large(overlay: Bed) -> None:
    # As it is once it has been mounted a second after its last check.
    sh("tune2fs", "-T", "20200101", overlay.loop)
    (overlay.upper / "file").write_bytes(b"text")
    overlay.take()
    target = overlay.folder / "target.img"
    with target.open("wb") as stream:
        stream.truncate(96 << 20)
    said = overlay.ask("restore", snapshot="1", target=str(target), replace=True)
    assert said.status == 0, said.last
    assert target.stat().st_size == 96 << 20
    assert subprocess.run(["e2fsck", "-fn", target], capture_output=True, check=False).returncode == 0
    blocks = sh("dumpe2fs", "-h", target)
    assert int(blocks.split("Block count:")[1].split()[0]) * int(blocks.split("Block size:")[1].split()[0]) == 96 << 20
    assert sh("debugfs", "-R", "cat /upper/file", target) == "text"


def test_the_newest_is_read_again_once_a_day(overlay: Bed) -> None:
    overlay.take()
    once: dict[str, Any] = {"every_s": 86400}
    assert overlay.ask("reread", **once).last["number"] == 1
    victim = chunk_files(overlay)[0]
    data = bytearray(victim.read_bytes())
    data[0] ^= 1
    victim.write_bytes(data)
    assert overlay.ask("reread", **once).last["number"] == 0
    os.utime(overlay.store / "reread", (1, 1))
    assert "has changed" in overlay.ask("reread", **once).last["damage"][0]
    overlay.take()
    assert [one["ok"] for one in overlay.ask("verify", numbers=[]).last["snapshots"]] == [True, True]


CALLER = """
import json, sys
from appliance.host.local import Local
from appliance.tools.agent import Agents
Agents().call(Local(), "take", json.loads(sys.argv[1]))
"""


def test_the_caller_is_killed(overlay: Bed) -> None:
    """The locks that it held are gone with it, so the agent ends; nothing of it counts."""
    lock = overlay.folder / "lock"
    request = {"store": str(overlay.store), "overlay": str(overlay.overlay), "lock": str(lock), "facts": FACTS}
    overlay.unmount()
    with subprocess.Popen(["flock", str(lock), "sleep", "30"], start_new_session=True) as holder:
        time.sleep(0.2)
        caller = subprocess.Popen([sys.executable, "-c", CALLER, json.dumps(request)])
        mark = f'"store": "{overlay.store}"'
        soon(lambda: list(overlay.store.glob("*.partial")))
        assert len(processes(mark)) == 1
        caller.kill()
        caller.wait()
        soon(lambda: not processes(mark))
        os.killpg(holder.pid, 9)
    assert overlay.numbers() == []
    assert not list(overlay.store.glob("*.partial"))


def processes(words: str) -> list[int]:
    """Agents whose request holds these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text(errors="replace")
        except OSError:
            continue
        if words in line and "agent-" in line:
            found.append(int(path.parent.name))
    return found


def chunk_files(overlay: Bed) -> list[Path]:
    return sorted(path for path in (overlay.store / "chunks").rglob("*") if path.is_file())


@pytest.mark.parametrize("harm", sample(("flip", "remove", "cut"), "flip", "remove"))
def test_damage_is_found_and_healed(harm: str, overlay: Bed) -> None:
    written = os.urandom(2 << 20)
    (overlay.upper / "file").write_bytes(written)
    overlay.take()
    # Not one of the file system's own: the next snapshot may have that changed.
    victim = next(path for path in chunk_files(overlay) if path.read_bytes() in written)
    data = bytearray(victim.read_bytes())
    if harm == "remove":
        victim.unlink()
    else:
        data[100] ^= 1
        victim.write_bytes(data if harm == "flip" else data[:1000])
    said = overlay.ask("restore", snapshot="1", target=str(overlay.folder / "back.img"))
    assert said.status == 1
    assert "snapshot 1 is damaged" in said.last["message"]
    assert not list(overlay.folder.glob("back.img*"))
    (reported,) = overlay.ask("verify", numbers=[1]).last["snapshots"]
    assert not reported["ok"]
    assert [line.startswith("chunk ") for line in reported["damage"]] == [True]
    assert overlay.ask("restore", snapshot="latest", target=str(overlay.folder / "back.img")).status == 3
    # The next snapshot has the same contents, and stores them again.
    overlay.take()
    assert [one["ok"] for one in overlay.ask("verify", numbers=[]).last["snapshots"]] == [True, True]


def test_grown_meanwhile(overlay: Bed) -> None:
    grow = """
import os
from appliance.agent import take
remember = take.Changes.start
def grown(self):
    remember(self)
    os.truncate(self.source.path, self.source.size + (1 << 20))
take.Changes.start = grown
"""
    said = overlay.ask("take", before=grow)
    assert (said.status, "was grown meanwhile" in said.last["message"]) == (1, True)
    assert overlay.writes()
