"""Growing an overlay for real: stopped, interrupted, and in use."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from appliance.agent.grow import CAP_SYS_RESOURCE, lengthen, system_size, widen
from appliance.errors import Busy, Refused
from appliance.host.base import Result
from appliance.host.local import Local
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.overlay.grow import _grow_stopped, grow
from appliance.plan.overlay.grow import MIB, parse_size
from appliance.progress import Silent
from appliance.tools.agent import Agents
from tests.places import DEBIAN_SITE

pytestmark = pytest.mark.real

GIB = 1 << 30


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """A site with an overlay of 96 MiB as Apptainer makes it, a file in it."""
    cluster = open_cluster(DEBIAN_SITE, tmp_path / "state", Silent())
    cluster = replace(cluster, site=cluster.site.model_copy(update={"cluster": f"t-grow-{token_hex(4)}"}))
    overlay = Path(cluster.places.overlay)
    overlay.parent.mkdir(parents=True)
    subprocess.run(["apptainer", "overlay", "create", "--size", "96", "--sparse", str(overlay)], check=True)
    subprocess.run(["debugfs", "-w", "-R", "symlink /upper/here /there", str(overlay)], check=True, capture_output=True)
    return cluster


@pytest.fixture
def mounted(cluster: Cluster, tmp_path: Path) -> Iterator[tuple[Cluster, str, Path]]:
    """The overlay in use, on a loop device with a limit, as Apptainer has it."""
    overlay, folder = str(cluster.places.overlay), tmp_path / "mounted"
    folder.mkdir()
    argv = ["losetup", "--find", "--show", "--sizelimit", str(96 * MIB), overlay]
    loop = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    try:
        subprocess.run(["mount", "-t", "ext3", loop, str(folder)], check=True)
        try:
            yield cluster, loop, folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    finally:
        subprocess.run(["losetup", "--detach", loop], check=True)
    subprocess.run(["e2fsck", "-fn", overlay], check=True, capture_output=True)


def whole(cluster: Cluster) -> None:
    """It passes e2fsck, holds what it held, and is sparse still."""
    overlay = str(cluster.places.overlay)
    subprocess.run(["e2fsck", "-fn", overlay], check=True, capture_output=True)
    said = subprocess.run(["debugfs", "-R", "stat /upper/here", overlay], check=True, capture_output=True, text=True)
    assert "/there" in said.stdout
    assert Path(overlay).stat().st_blocks * 512 < Path(overlay).stat().st_size // 8  # new inode tables, and no more


def test_a_stopped_one_grows_and_then_has_its_size(cluster: Cluster) -> None:
    host, overlay = Local("host-a"), str(cluster.places.overlay)
    planned = grow(cluster, host, parse_size("1G"), dry_run=True)
    assert planned.changed and Path(overlay).stat().st_size == 96 * MIB
    done = grow(cluster, host, parse_size("1G"))
    assert (done.before, done.size, done.running, done.changed) == (96 * MIB, GIB, False, True)
    assert Path(overlay).stat().st_size == system_size(overlay) == GIB
    whole(cluster)
    assert not grow(cluster, host, parse_size("1024M")).changed
    assert grow(cluster, host, parse_size("+64M")).size == GIB + 64 * MIB
    with pytest.raises(Refused, match="cannot shrink"):
        grow(cluster, host, parse_size("512M"))
    with pytest.raises(Refused, match="MiB free"):
        grow(cluster, host, parse_size("1T"))
    assert Path(overlay).stat().st_size == GIB + 64 * MIB


def test_an_interrupted_one_is_finished_not_done_twice(cluster: Cluster) -> None:
    overlay = str(cluster.places.overlay)
    lengthen(overlay, 96 * MIB + GIB)
    assert grow(cluster, Local("host-a"), parse_size("+1G")).size == 96 * MIB + GIB
    assert system_size(overlay) == 96 * MIB + GIB
    whole(cluster)


class Cutting(Local):
    """A host on which the power fails as soon as a command has run for a moment; what it left is there."""

    def __init__(self, at: str) -> None:
        super().__init__("host-a")
        self.at = at

    def run(self, *argv: str, **more: Any) -> Result:
        if argv[0] != self.at:
            return super().run(*argv, **more)
        child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(random.uniform(0, 0.1))
        child.kill()
        child.wait()
        raise Gone

    def remove(self, path: str) -> None:
        """After a power failure nothing is cleaned up."""


class Gone(BaseException):
    """The power failed."""


MORE = [pytest.param("resize2fs", marks=pytest.mark.full)] * 5
"""At other moments."""


@pytest.mark.parametrize("at", ["resize2fs", "truncate", "cp", *MORE])
def test_an_interrupted_one_leaves_the_overlay_unchanged(cluster: Cluster, at: str) -> None:
    overlay = Path(cluster.places.overlay)
    subprocess.run(["e2fsck", "-fp", overlay], check=True, capture_output=True)
    before = overlay.read_bytes()
    with pytest.raises(Gone):
        grow_until_gone(cluster, at)
    # e2fsck, which comes first, writes the time of its look into the superblock (bytes 1024 to 2047).
    now = overlay.read_bytes()
    assert now[:1024] == before[:1024] and now[2048:] == before[2048:]
    assert system_size(str(overlay)) == 96 * MIB
    subprocess.run(["e2fsck", "-fn", overlay], check=True, capture_output=True)
    assert grow(cluster, Local("host-a"), parse_size("2G")).changed
    assert system_size(str(overlay)) == 2 * GIB
    whole(cluster)
    assert not Path(f"{overlay}.new").exists()


def grow_until_gone(cluster: Cluster, at: str) -> None:
    """The part that changes something; its queries before that reach a host that works."""
    host = Cutting(at)
    _grow_stopped(host, str(cluster.places.overlay), 2 * GIB, Silent())


def test_a_loop_device_in_use_sees_its_longer_file(mounted: tuple[Cluster, str, Path]) -> None:
    """Apptainer limits it to the size at the start: rereading the capacity alone changes nothing."""
    cluster, loop, folder = mounted
    lengthen(str(cluster.places.overlay), GIB)
    subprocess.run(["losetup", "--set-capacity", loop], check=True)
    assert device_bytes(loop) == 96 * MIB
    (folder / "upper" / "file").write_bytes(b"x" * MIB)
    widen(loop)
    assert device_bytes(loop) == GIB
    assert (folder / "upper" / "file").read_bytes() == b"x" * MIB


def device_bytes(loop: str) -> int:
    return int(subprocess.run(["blockdev", "--getsize64", loop], check=True, capture_output=True, text=True).stdout)


def test_one_in_use_grows_or_is_left_alone(mounted: tuple[Cluster, str, Path]) -> None:
    cluster, loop, folder = mounted
    overlay = str(cluster.places.overlay)
    request = {"overlay": overlay, "size": GIB, "lock": str(cluster.places.lock)}
    capable = int(dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())["CapEff"], 16)
    if not capable >> CAP_SYS_RESOURCE & 1:
        with pytest.raises(Refused, match="no CAP_SYS_RESOURCE"):
            Agents().call(Local("host-a"), "grow", request)
        assert Path(overlay).stat().st_size == device_bytes(loop) == 96 * MIB
        return
    Agents().call(Local("host-a"), "grow", request)
    assert Path(overlay).stat().st_size == system_size(loop) == GIB
    assert os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize > 900 * MIB


def test_the_host_is_held_meanwhile(mounted: tuple[Cluster, str, Path]) -> None:
    cluster, loop, _ = mounted
    request = {"overlay": str(cluster.places.overlay), "size": GIB, "lock": str(cluster.places.lock)}
    with Local("host-a").lock(str(cluster.places.lock)), pytest.raises(Busy, match="another sms is at work"):
        Agents().call(Local("host-a"), "grow", request)
    assert device_bytes(loop) == Path(cluster.places.overlay).stat().st_size == 96 * MIB
