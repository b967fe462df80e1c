"""Transfer of snapshots between stores: what is sent, what is committed, what is left when either side is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.agent import transfer
from appliance.agent.protocol import Problem
from appliance.agent.store import CHUNK, Snapshot, Store, chunk_path
from appliance.errors import Busy, Refused, SmsError
from appliance.host.base import OnLine
from appliance.host.local import Local
from appliance.host.stream import Stream
from appliance.operations.snapshots.transfer import relay_snapshot
from appliance.tools import agent
from appliance.tools.agent import Agents
from tests import stores
from tests.stores import keep_image, make_image, read_all

pytestmark = pytest.mark.slow  # each starts agents, and kills them

HOOKED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from appliance.agent import transfer
left = [int(sys.argv[2])]
def step():
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
def hook(event, arguments):
    if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
        step()
sys.addaudithook(hook)
send = transfer._send
def counted(data):
    step()
    send(data)
transfer._send = counted
{extra}
from appliance.agent.main import main
sys.exit(main(sys.argv[3:]))
"""
"""Ends the agent, as kill -9 does, at its N-th change of the file system or block of data."""


class Altered(Local):
    """This machine; its agent is killed at a moment, or behaves wrongly."""

    def __init__(self, moment: int = 1 << 30, extra: str = "") -> None:
        super().__init__("altered")
        self.moment = moment
        self.extra = extra

    @contextmanager
    def stream(self, *argv: str, on_line: OnLine | None = None) -> Iterator[Stream]:
        words = ("-c", HOOKED.replace("{extra}", self.extra), argv[2], str(self.moment), *argv[3:])
        with super().stream(sys.executable, *words, on_line=on_line) as opened:
            yield opened


def agents(store: Store) -> Agents:
    """Return the agents of this machine, in a folder beside a store of the test."""
    return Agents(str(Path(store.root).parent / "run"))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Store, Store]:
    """A store with one snapshot, and an empty one."""
    source = Store(str(tmp_path / "a"))
    keep_image(source, make_image(tmp_path / "ov.img"))
    return source, Store(str(tmp_path / "b"))


def send(
    source: Store, number: int, target: Store, *, giver: Local | None = None, taker: Local | None = None, **more: Any
) -> dict[str, Any]:
    """Send a snapshot as operations/snapshots/transfer.py does."""
    request = {"store": source.root, "snapshot": number, "compress": more.pop("compress", False)}
    into = {"store": target.root, "origin": "host-a", **more}
    with (
        agents(source).open_session(giver or Local(), "export", request) as exporter,
        agents(source).open_session(taker or Local(), "import", into) as importer,
    ):
        return relay_snapshot(exporter, importer)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("method", ["delta", "full"])
def test_a_snapshot_arrives_as_it_is(tmp_path: Path, method: str, compress: bool) -> None:
    source, target = Store(str(tmp_path / "a")), Store(str(tmp_path / "b"))
    image = make_image(tmp_path / "ov.img")
    one = keep_image(source, image, method=method, reason="scheduled")
    said = send(source, 1, target, compress=compress)
    assert (said["snapshot"]["number"], said["present"]) == (1, False)
    stores.assert_whole(target)
    assert read_all(target, 1) == image.read_bytes()
    there = target.find("1")
    changed: dict[str, Any] = {"method": "delta", "new_bytes": there.manifest.new_bytes, "came": there.manifest.came}
    assert there.manifest == replace(one.manifest, **changed)
    assert there.manifest.new_bytes == said["bytes"] > 0
    assert there.verified
    assert (Path(target.root).stat().st_mode & 0o777, Path(there.folder).stat().st_mode & 0o777) == (0o700, 0o700)
    assert {path.stat().st_mode & 0o777 for path in Path(target.root).rglob("*") if path.is_file()} == {0o600}


def test_only_missing_chunks_are_sent(two: tuple[Store, Store], tmp_path: Path) -> None:
    source, target = two
    first = send(source, 1, target)
    assert send(source, 1, target)["present"] is True
    assert stores.numbers(target) == [1]
    image = tmp_path / "ov.img"
    with image.open("r+b") as stream:  # in the middle of a file's contents
        data = image.read_bytes()
        stream.seek(data.index(b"the same again") + 1_000)
        stream.write(b"changed")
    keep_image(source, image)
    again = send(source, 2, target)
    assert again["bytes"] == CHUNK
    assert first["bytes"] > 10 * CHUNK
    stores.assert_whole(target)
    assert read_all(target, 2) == image.read_bytes()


def test_a_used_number_is_replaced_by_the_next(two: tuple[Store, Store]) -> None:
    source, target = two
    stores.add_snapshot(target, [b"x" * CHUNK])
    said = send(source, 1, target)["snapshot"]
    assert said["number"] == 2
    assert said["notes"] == ["it is snapshot 1 of host-a"]
    assert said["came"]["number"] == 1
    assert send(source, 1, target)["present"] is True


def test_an_old_number_does_not_lower_the_counter(two: tuple[Store, Store]) -> None:
    source, target = two
    for _ in range(3):
        stores.add_snapshot(target, [b"x" * CHUNK])
    with target.removing():
        target.remove(1)
        target.remove(3)
    send(source, 1, target)
    assert sorted(stores.numbers(target)) == [1, 2]
    assert stores.add_snapshot(target, [b"y" * CHUNK]).number == 4


def test_an_estimate_changes_nothing(two: tuple[Store, Store]) -> None:
    source, target = two
    from appliance.operations.snapshots.transfer import EMPTY_REQUEST, _relay_offer

    def estimate() -> dict[str, Any]:
        with (
            agents(source).open_session(Local(), "export", {"store": source.root, "snapshot": 1}) as exporter,
            agents(source).open_session(Local(), "estimate", {"store": target.root}) as estimating,
        ):
            _relay_offer(exporter, estimating)
            exporter.write(EMPTY_REQUEST)
            exporter.end()
            exporter.outcome()
            estimating.end()
            return estimating.outcome()

    before = estimate()
    assert not Path(target.root).exists()
    assert send(source, 1, target)["bytes"] == before["bytes"]
    assert (before["present"], estimate()["present"], estimate()["bytes"]) == (0, 1, 0)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.full)])
def test_killed_at_the_target_at_every_change_the_next_run_resumes(every: int, tmp_path: Path) -> None:
    source = Store(str(tmp_path / "a"))
    image = make_image(tmp_path / "ov.img", files=1, size_mb=4)
    keep_image(source, image)
    whole = send(source, 1, Store(str(tmp_path / "whole")))["bytes"]
    least = whole
    for moment in range(0, 200, every):
        target = Store(str(tmp_path / f"t{moment}"))
        try:
            said = send(source, 1, target, taker=Altered(moment))
        except SmsError:
            said = None
        counted = stores.numbers(target)
        assert counted in ([], [1])
        stores.assert_whole(target)
        again = send(source, 1, target)
        assert again["present"] is bool(counted), "a committed snapshot is complete, any other is sent again"
        least = min(least, again["bytes"])
        assert stores.numbers(target) == [1]
        assert read_all(target, 1) == image.read_bytes()
        assert not list(Path(target.root).glob("*.partial"))
        assert stores.add_snapshot(target, [b"x" * CHUNK]).number == 2
        if said:
            break
    else:
        raise AssertionError("it never ended")
    assert moment > 15
    assert least == 0, "received chunks were kept"


@pytest.mark.parametrize("moment", [0, 1, 4, 9])
def test_killed_at_the_source_nothing_is_committed_and_chunks_are_kept(two: tuple[Store, Store], moment: int) -> None:
    source, target = two
    whole = send(source, 1, Store(target.root + "-whole"))["bytes"]
    with pytest.raises(SmsError):
        send(source, 1, target, giver=Altered(moment))
    assert stores.numbers(target) == []
    assert not list(Path(target.root).glob("*.partial"))
    again = send(source, 1, target)
    assert again["bytes"] == whole - CHUNK * max(0, moment - 1)
    stores.assert_whole(target)


def test_unused_chunks_are_swept(two: tuple[Store, Store]) -> None:
    source, target = two
    with pytest.raises(SmsError):
        send(source, 1, target, giver=Altered(9))
    assert len(stores.stored_chunks(Path(target.root))) == 8
    with target.removing():
        assert target.sweep()[0] == 8


def test_chunks_left_by_a_power_failure_are_verified(two: tuple[Store, Store]) -> None:
    """Chunks of the right name and size with other bytes: their run never flushed them."""
    source, target = two
    with pytest.raises(SmsError):
        send(source, 1, target, giver=Altered(9))
    left = [path for path in Path(target.root, "chunks").rglob("*") if path.is_file()]
    for path, data in zip(left, (b"", bytes(CHUNK), b"x" * CHUNK), strict=False):
        path.write_bytes(data)
    send(source, 1, target)
    stores.assert_whole(target)


def test_damage_at_the_source_is_never_sent(two: tuple[Store, Store]) -> None:
    source, target = two
    digest = next(data for data in _digests(source.find("1")) if data != bytes(32))
    path = Path(chunk_path(source.root, digest))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(SmsError, match=r"snapshot 1 is damaged: chunk .* has changed"):
        send(source, 1, target)
    assert stores.numbers(target) == []
    assert source.find("1").health["ok"] is False, "recorded: `latest` is another snapshot from now on"
    with pytest.raises(SmsError, match="it is not sent"):
        send(source, 1, target)


def _digests(one: Snapshot) -> Iterator[bytes]:
    data = one.digests()
    return (data[at : at + 32] for at in range(0, len(data), 32))


IN_TRANSIT = {
    "a chunk": "pack = struct.pack\ntransfer._send = lambda data: send(data[:-1] + bytes([data[-1] ^ 1]))",
    "the digests": """
def other(data, seen=[]):
    seen.append(1)
    send(data[:-1] + bytes([data[-1] ^ 1]) if len(seen) == 1 else data)
transfer._send = other""",
    "the manifest": """
def other(data, seen=[]):
    seen.append(1)
    send(bytes(data).replace(b'"generation"', b'"generat!on"') if len(seen) == 1 else data)
transfer._send = other""",
    "the packing": """
def other(data, seen=[]):
    seen.append(1)
    send(b"\\x01" + bytes(data)[1:] if len(seen) == 3 else data)
transfer._send = other""",
    "its length": """
def other(data, seen=[]):
    seen.append(1)
    send(bytes(data)[:1] + b"\\xff" + bytes(data)[2:] if len(seen) == 3 else data)
transfer._send = other""",
}


@pytest.mark.parametrize("what", IN_TRANSIT)
def test_damage_in_transit_is_detected(two: tuple[Store, Store], what: str) -> None:
    source, target = two
    with pytest.raises(SmsError) as caught:
        send(source, 1, target, giver=Altered(extra="import struct\n" + IN_TRANSIT[what]))
    assert "damaged in transit" in caught.value.message or "not a snapshot of a known format" in caught.value.message
    assert stores.numbers(target) == []
    send(source, 1, target)
    stores.assert_whole(target)


def test_a_second_run_is_refused(two: tuple[Store, Store]) -> None:
    source, target = two
    with target.writing(), pytest.raises(Busy, match="another run is at work"):
        send(source, 1, target)
    with source.removing(), pytest.raises(Busy, match="are being removed"):
        send(source, 1, target)
    assert stores.numbers(target) == []


def test_too_little_space_is_reported_before_anything_is_sent(two: tuple[Store, Store]) -> None:
    source, target = two
    little = "from appliance.agent.store import Store\nStore.free_bytes = lambda self: 1 << 20"
    with pytest.raises(Refused, match="1 MiB free") as caught:
        send(source, 1, target, taker=Altered(extra=little))
    assert "prune" in caught.value.hint
    assert stores.stored_chunks(Path(target.root)) == set()


def test_a_damaged_file_system_is_not_committed(tmp_path: Path) -> None:
    """Its digests are right, but its file system is not."""
    source, target = Store(str(tmp_path / "a")), Store(str(tmp_path / "b"))
    stores.add_snapshot(source, [os.urandom(CHUNK) for _ in range(4)], uuid=str(uuid.uuid4()))
    with pytest.raises(SmsError, match="snapshot 1 of host-a cannot be kept: its file system cannot be read"):
        send(source, 1, target)
    assert stores.numbers(target) == []


def test_a_silent_sender(two: tuple[Store, Store]) -> None:
    """A broken network does not close the connection; the lock must not be held forever."""
    source, target = two
    soon = Altered(extra="transfer.PATIENCE_S = 0.5")
    with (
        agents(source).open_session(Local(), "export", {"store": source.root, "snapshot": 1}) as exporter,
        agents(source).open_session(soon, "import", {"store": target.root, "origin": "x"}) as importer,
    ):
        importer.write(exporter.read_exactly(100))
        assert importer.read() == b""
        with pytest.raises(SmsError, match="nothing was received for"):
            importer.outcome()
    with target.writing():
        pass


def test_compression_stops_when_it_saves_little(monkeypatch: pytest.MonkeyPatch) -> None:
    compressor, text = transfer.Compressor(), (b"the same again and again\n" * 2700)[:CHUNK]
    assert [compressor.encode(text)[0] for _ in range(40)] == [transfer.COMPRESSED] * 40
    tried: list[int] = []
    real = zlib.compress

    def counted(data: bytes, level: int) -> bytes:
        tried.append(level)
        return real(data, level)

    monkeypatch.setattr(zlib, "compress", counted)
    compressor = transfer.Compressor()
    for _ in range(1000):
        kind, data = compressor.encode(os.urandom(5000))
        assert (kind, len(data)) == (transfer.PLAIN, 5000)
    assert len(tried) == 4 * transfer.SAMPLE, "16 of each 272 are tried"
    assert transfer.decompress(*transfer.Compressor().encode(text)) == text
    for bad in (b"", b"x", real(text, 1)[:-3], real(bytes(CHUNK + 1), 1), real(text, 1) + b"x"):
        with pytest.raises(Problem, match="in transit"):
            transfer.decompress(transfer.COMPRESSED, bad)


@pytest.fixture
def image_argv(two: tuple[Store, Store]) -> Callable[..., list[str]]:
    def argv(**more: Any) -> list[str]:
        path = agents(two[0]).install(Local())
        return list(agent.argv(path, "image", {"store": two[0].root, "snapshot": 1, **more}))

    return argv


def receive(target: Store, manifest: dict[str, Any], argv: list[str], **more: Any) -> dict[str, Any]:
    request = {"store": target.root, "manifest": manifest, "argv": argv, "program": "x", "origin": "there", **more}
    with agents(target).open_session(Local(), "import_image", request) as talk:
        talk.end()
        return talk.outcome()


def test_an_exported_image_can_be_imported(
    two: tuple[Store, Store], tmp_path: Path, image_argv: Callable[..., list[str]]
) -> None:
    source, target = two
    done = subprocess.run(image_argv(), capture_output=True, check=True)
    assert done.stdout == (tmp_path / "ov.img").read_bytes()
    assert json.loads(done.stderr.splitlines()[-1])["kind"] == "result"
    manifest = source.find("1").manifest.to_dict()
    assert receive(target, manifest, image_argv())["present"] is False
    stores.assert_whole(target)
    assert read_all(target, 1) == done.stdout
    assert receive(target, manifest, ["false"])["present"] is True


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("cat {img}; exit 2", "x ended with status 2"),
        ("head -c 100000 {img}", "damaged in transit"),
        ("cat {img}; echo more", "damaged in transit"),
        ("tr a b <{img}", "damaged in transit"),
    ],
)
def test_a_changed_image_is_not_committed(two: tuple[Store, Store], tmp_path: Path, script: str, words: str) -> None:
    source, target = two
    argv = ["sh", "-c", script.format(img=tmp_path / "ov.img")]
    with pytest.raises(SmsError, match=words):
        receive(target, source.find("1").manifest.to_dict(), argv)
    assert stores.numbers(target) == []
    assert not list(Path(target.root).glob("*.partial"))


def test_a_reader_that_closes_the_image(image_argv: Callable[..., list[str]]) -> None:
    done = subprocess.run(["sh", "-c", '"$@" | head -c 10 >/dev/null', "x", *image_argv()], capture_output=True)
    assert b"Traceback" not in done.stderr
    assert b"the receiver closed the connection" in done.stderr


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"taken": 1e15}, "invalid taken"),
        ({"generation": 10**10}, "invalid generation"),
        ({"host": "a\x1b[2J"}, "invalid host"),
        ({"cluster": "other"}, "of cluster other, not of lab"),
    ],
)
def test_invalid_manifests_of_a_peer_are_refused(tmp_path: Path, facts: dict[str, Any], words: str) -> None:
    source, target = Store(str(tmp_path / "a")), Store(str(tmp_path / "b"))
    one = keep_image(source, make_image(tmp_path / "ov.img", size_mb=4, files=1), **facts)
    with pytest.raises(SmsError, match=words):
        send(source, 1, target, cluster="lab")
    path = agents(source).install(Local())
    argv = list(agent.argv(path, "image", {"store": source.root, "snapshot": 1}))
    with pytest.raises(SmsError, match=words):
        receive(target, one.manifest.to_dict(), argv, cluster="lab")
    assert stores.numbers(target) == []
    assert stores.stored_chunks(Path(target.root)) == set()
