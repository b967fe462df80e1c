"""Images copied between hosts: whole, resumed, or refused."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import Busy, Refused, SmsError
from appliance.host.base import Result
from appliance.host.local import Local
from appliance.host.stream import Stream
from appliance.operations.env import Env
from appliance.operations.image.copy import HostFile, copy_file

FOLDER = "/images-of-this-host"
IMAGE = f"{FOLDER}/a.sif"
DATA = bytes(range(256)) * 8_000
SHA256 = hashlib.sha256(DATA).hexdigest()


class InFolder(Local):
    """A host whose image folder is a folder of this test."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.name)
        self.image = folder / "a.sif"
        self.part = folder / f"a.sif.{SHA256[:16]}.part"

    def _here(self, argv: tuple[str, ...]) -> list[str]:
        return [word.replace(FOLDER, str(self.image.parent)) for word in argv]

    def run(self, *argv: str, **more: Any) -> Result:
        return super().run(*self._here(argv), **more)

    @contextmanager
    def stream(self, *argv: str, **more: Any) -> Iterator[Stream]:
        with super().stream(*self._here(argv), **more) as opened:
            yield opened


@pytest.mark.parametrize("part", [None, b"", DATA[:1_000_001], DATA, DATA + b"more"])
def test_a_partial_copy_is_resumed(tmp_path: Path, part: bytes | None) -> None:
    source, target = InFolder(tmp_path / "a"), InFolder(tmp_path / "b")
    source.image.parent.mkdir()
    source.image.write_bytes(DATA)
    if part is not None:
        target.part.parent.mkdir()
        target.part.write_bytes(part)
        target.part.chmod(0o600)
    assert copy_file(Env(), HostFile(source, IMAGE, SHA256), target, IMAGE, "the image")
    assert target.image.read_bytes() == DATA and target.image.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in target.image.parent.iterdir()] == ["a.sif"]
    assert not copy_file(Env(), HostFile(source, IMAGE, SHA256), target, IMAGE, "the image")


def test_a_corrupt_copy_is_removed(tmp_path: Path) -> None:
    source, target = InFolder(tmp_path / "a"), InFolder(tmp_path / "b")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    source.image.write_bytes(DATA)
    target.part.write_bytes(b"x" * 1000)
    with pytest.raises(SmsError, match="is corrupt"):
        copy_file(Env(), HostFile(source, IMAGE, SHA256), target, IMAGE, "the image")
    assert list(target.image.parent.iterdir()) == []


class Lies(InFolder):
    """A host whose file has another size than it says."""

    size = len(DATA)

    def run(self, *argv: str, **more: Any) -> Result:
        done = super().run(*argv, **more)
        return replace(done, stdout=b"%d" % self.size) if argv[0] == "stat" else done


@pytest.mark.parametrize(
    ("size", "message"),
    [(len(DATA) - 1, f"a sends more than the {len(DATA) - 1} bytes"), (1 << 60, "MiB free, the image may need")],
)
def test_a_copy_is_as_large_as_the_source_said(tmp_path: Path, size: int, message: str) -> None:
    """It needs that space before it begins."""
    source, target = Lies(tmp_path / "a"), InFolder(tmp_path / "b")
    source.image.parent.mkdir()
    source.image.write_bytes(DATA)
    source.size = size
    with pytest.raises(SmsError, match=message):
        copy_file(Env(), HostFile(source, IMAGE, SHA256), target, IMAGE, "the image")
    assert list(target.image.parent.iterdir()) == []


def test_nothing_stays_of_a_copy_that_is_refused(tmp_path: Path) -> None:
    source, target = InFolder(tmp_path / "a"), InFolder(tmp_path / "b")
    source.image.parent.mkdir()
    source.image.write_bytes(DATA)

    def refuse(part: str) -> None:
        assert target.part.read_bytes() == DATA and part == f"{FOLDER}/{target.part.name}"
        raise Refused("it is not signed")

    with pytest.raises(Refused):
        copy_file(Env(), HostFile(source, IMAGE, SHA256), target, IMAGE, "the image", check=refuse)
    assert list(target.image.parent.iterdir()) == []


def test_what_is_left_of_another_version_is_removed(tmp_path: Path) -> None:
    source, target = InFolder(tmp_path / "a"), InFolder(tmp_path / "b")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    source.image.write_bytes(DATA)
    for name in ("a.sif.part", "a.sif.0123456789abcdef.part", "aa.sif.part"):
        (tmp_path / "b" / name).write_bytes(DATA[:1000])
    assert copy_file(Env(), HostFile(source, IMAGE, SHA256), target, IMAGE, "the image")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["a.sif", "aa.sif.part"]


def test_the_copy_of_another_version_goes_on(tmp_path: Path) -> None:
    source, target = InFolder(tmp_path / "a"), InFolder(tmp_path / "b")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    source.image.write_bytes(DATA)
    other = tmp_path / "b" / "a.sif.0123456789abcdef.part"
    other.write_bytes(DATA[:1000])
    with other.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert copy_file(Env(), HostFile(source, IMAGE, SHA256), target, IMAGE, "the image")
    assert other.read_bytes() == DATA[:1000]
    assert target.image.read_bytes() == DATA


def test_two_copies_at_once(tmp_path: Path) -> None:
    source, target = InFolder(tmp_path / "a"), InFolder(tmp_path / "b")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    source.image.write_bytes(DATA)
    target.part.write_bytes(DATA[:1000])
    with target.part.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Busy):
            copy_file(Env(), HostFile(source, IMAGE, SHA256), target, IMAGE, "the image")
    assert target.part.read_bytes() == DATA[:1000]


def test_copies_that_begin_at_once_end_well(tmp_path: Path) -> None:
    """One copies, the others find it there: none continues or truncates what another one has begun."""
    source, target = InFolder(tmp_path / "a"), InFolder(tmp_path / "b")
    source.image.parent.mkdir()
    source.image.write_bytes(DATA)

    def copy(_: int) -> bool:
        return copy_file(Env(), HostFile(source, IMAGE, SHA256), target, IMAGE, "the image")

    with ThreadPoolExecutor(4) as pool:
        sent = list(pool.map(copy, range(4)))
    assert sorted(sent) == [False, False, False, True]
    assert target.image.read_bytes() == DATA
    assert [path.name for path in target.image.parent.iterdir()] == ["a.sif"]
