"""A mounted image whose writing is ended at once, as a stale host's is on an overlay that another host has now."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.errors import SmsError
from appliance.host.local import Local
from appliance.tools import ext3

pytestmark = pytest.mark.real


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Path]:
    """An ext3 image with a mount beside it."""
    path, mount = tmp_path / "x.img", tmp_path / "mnt"
    with path.open("wb") as file:
        file.truncate(32 << 20)
    mount.mkdir()
    for argv in (["mkfs.ext3", "-q", str(path)], ["mount", "-o", "loop", str(path), str(mount)]):
        subprocess.run(argv, check=True)
    for name in ("upper", "work"):
        (mount / name).mkdir()
    yield path
    subprocess.run(["umount", str(mount)], check=True)


def digest(path: Path) -> str:
    # Not all of them: others on this machine may be frozen.
    subprocess.run(["sync", "--file-system", str(path.parent / "mnt")], check=False, capture_output=True)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_nothing_is_written_any_more(image: Path) -> None:
    mount = image.parent / "mnt"
    with (mount / "log").open("wb", 0) as log:
        log.write(b"before\n")
        os.fsync(log.fileno())
        ext3.shut_down(Local("here"), str(image), python=sys.executable)
        before = digest(image)
        with pytest.raises(OSError) as caught:
            log.write(b"after\n" * 4096)
            os.fsync(log.fileno())
        assert caught.value.errno in (errno.EIO, errno.EROFS)
        with pytest.raises(OSError):
            (mount / "new").write_bytes(b"after")
        assert digest(image) == before
    assert not list(Path("/run/sms").glob("cut.*"))
    # What was there is there: the journal brings it back.
    copy = str(shutil.copy(image, image.with_suffix(".copy")))
    ext3.check(Local("here"), copy)
    assert ext3.read_inside(Local("here"), copy, "/log") == b"before\n"


def test_one_with_two_users_is_not_ended(image: Path) -> None:
    """One of them may be the other host's, in a lab on one machine."""
    loop = subprocess.run(["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=True)
    try:
        with pytest.raises(SmsError, match="all have"):
            ext3.shut_down(Local("here"), str(image), python=sys.executable)
        (image.parent / "mnt" / "goes-on").write_bytes(b"x")
    finally:
        subprocess.run(["losetup", "--detach", loop.stdout.strip()], check=True)


def test_an_unused_image_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.img"
    path.write_bytes(bytes(1 << 20))
    ext3.shut_down(Local("here"), str(path))
    assert path.read_bytes() == bytes(1 << 20)
