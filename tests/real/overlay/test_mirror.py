"""The mirror on real Btrfs, loop devices and file systems of their own; without a lab: nothing runs on the overlay."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex

import pytest

from appliance.errors import Refused, SmsError
from appliance.host.local import Local
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.overlay import mirror
from appliance.operations.overlay.grow import grow
from appliance.operations.overlay.mirrored import close_mirror, find_mirror, open_mirror, query_mirror, write_note
from appliance.operations.overlay.overlay import check_overlay
from appliance.plan.overlay.grow import parse_size
from appliance.progress import Silent
from appliance.tools import ext3
from tests.places import DEBIAN_SITE

pytestmark = pytest.mark.real

QUIET = Silent()
MIB = 1 << 20


class Heard(Silent):
    """Keeps what is said to stay."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def report(self, text: str) -> None:
        self.lines.append(text)


@dataclass
class Bench:
    """A host with four disks and an overlay of 96 MiB with a file of noise in it."""

    cluster: Cluster
    host: Local
    folder: Path
    digest: str

    def disk(self, number: int) -> str:
        return str(self.folder / f"disk{number}")

    @property
    def overlay(self) -> str:
        return str(self.cluster.places.overlay)

    def create(self, **more: bool) -> mirror.MirrorChange:
        return mirror.create(self.cluster, self.host, mirror.MirrorOptions([self.disk(1), self.disk(2)]), **more)

    def member(self, number: int) -> Path:
        found = find_mirror(self.cluster, self.host)
        assert found
        return Path(next(found.path(member) for member in found.members if member.number == number))

    def files(self) -> list[str]:
        """All members there are."""
        return sorted(path.name for path in self.folder.glob("disk*/*.img"))

    def kept(self) -> bool:
        """Whether the overlay is whole, and holds what was written, with the mirror closed before and after."""
        open_mirror(self.cluster, self.host)
        try:
            subprocess.run(["e2fsck", "-fn", self.overlay], check=True, capture_output=True)
            return (
                hashlib.sha256(ext3.read_inside(self.host, self.overlay, "/upper/noise", limit=1 << 30)).hexdigest()
                == self.digest
            )
        finally:
            close_mirror(self.cluster, self.host)

    def problems(self) -> str:
        state = query_mirror(self.cluster, self.host)
        assert state
        return "\n".join(state.problems)

    def clean(self) -> bool:
        """No loop device on anything here, nothing mounted at the mirror's folder."""
        said = subprocess.run(["losetup", "-l"], capture_output=True, text=True, check=True).stdout
        return str(self.folder) not in said and not os.path.ismount(str(self.cluster.places.mirror))


@pytest.fixture
def bench(tmp_path: Path, need: Callable[[str], str]) -> Iterator[Bench]:
    need("mkfs.btrfs")
    cluster = open_cluster(DEBIAN_SITE, tmp_path / "state", QUIET)
    site = cluster.site.model_copy(update={"cluster": f"t-mirror-{token_hex(4)}"})
    bench = Bench(replace(cluster, site=site), Local("host-a"), tmp_path, "")
    for number in (1, 2, 3, 4):
        Path(bench.disk(number)).mkdir()
        size = "8G" if number < 4 else "64M"
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", f"t{number}", bench.disk(number)], check=True)
    tree, noise = tmp_path / "tree", os.urandom(20 * MIB)
    (tree / "upper").mkdir(parents=True)
    (tree / "work").mkdir()
    (tree / "upper" / "noise").write_bytes(noise)
    bench.digest = hashlib.sha256(noise).hexdigest()
    Path(bench.overlay).parent.mkdir(parents=True)
    subprocess.run(["mke2fs", "-q", "-t", "ext3", "-d", str(tree), bench.overlay, "96M"], check=True)
    try:
        yield bench
        assert bench.clean()
    finally:
        subprocess.run(["umount", str(bench.cluster.places.mirror)], check=False, stderr=subprocess.DEVNULL)
        for path in tmp_path.rglob("*.img"):
            for loop in ext3.users_of(bench.host, str(path)):
                subprocess.run(["losetup", "-d", loop], check=False)
        for number in (1, 2, 3, 4):
            subprocess.run(["umount", bench.disk(number)], check=True)


def noise_over(path: Path) -> None:
    """Overwrite all of a file."""
    count = path.stat().st_size // MIB
    argv = ["dd", "if=/dev/urandom", f"of={path}", "bs=1M", f"count={count}", "conv=notrunc,fsync"]
    subprocess.run(argv, check=True, capture_output=True)


def test_a_mirror_and_back(bench: Bench) -> None:
    planned = bench.create(dry_run=True)
    assert planned.changed and find_mirror(bench.cluster, bench.host) is None and bench.files() == []
    assert bench.create().steps == planned.steps
    assert Path(bench.overlay).is_symlink() and bench.clean()
    assert bench.kept() and bench.problems() == ""
    assert check_overlay(bench.cluster, bench.host)  # closed, it is there all the same
    # Sparse: 20 MiB of noise are not 96, and the members not 1216.
    assert bench.member(1).stat().st_blocks * 512 < 60 * MIB < bench.member(1).stat().st_size
    assert not bench.create().changed
    with pytest.raises(Refused, match="mirrored already"):
        mirror.create(bench.cluster, bench.host, mirror.MirrorOptions([bench.disk(1), bench.disk(3)]))
    assert mirror.remove(bench.cluster, bench.host).changed
    assert not Path(bench.overlay).is_symlink() and bench.kept() and bench.files() == []
    assert Path(bench.overlay).stat().st_blocks * 512 < 40 * MIB
    assert not mirror.remove(bench.cluster, bench.host).changed
    left = sorted(path.name for path in Path(bench.overlay).parent.iterdir())
    assert [name for name in left if "lease" not in name] == [Path(bench.overlay).name]


@pytest.mark.parametrize(
    "first, second, words",
    [
        (1, 1, "one folder"),
        (1, 9, "there is no folder"),
        (1, 4, "MiB free"),
    ],
)
def test_folders_that_cannot_carry_one(bench: Bench, first: int, second: int, words: str) -> None:
    with pytest.raises(Refused, match=words):
        mirror.create(bench.cluster, bench.host, mirror.MirrorOptions([bench.disk(first), bench.disk(second)]))
    assert find_mirror(bench.cluster, bench.host) is None and not Path(bench.overlay).is_symlink()


@pytest.mark.full
def test_two_folders_on_one_disk_are_for_trying_out_only(bench: Bench) -> None:
    folders = [bench.disk(1), bench.disk(1) + "/below"]
    Path(folders[1]).mkdir()
    with pytest.raises(Refused, match="one file system"):
        mirror.create(bench.cluster, bench.host, mirror.MirrorOptions(folders))
    mirror.create(bench.cluster, bench.host, mirror.MirrorOptions(folders, same_fs=True))
    assert bench.kept()


@pytest.mark.parametrize("sick, other", [(1, 2), pytest.param(2, 1, marks=pytest.mark.full)])
def test_noise_over_a_member_in_use_is_repaired_by_a_rebuild(bench: Bench, sick: int, other: int) -> None:
    bench.create()
    open_mirror(bench.cluster, bench.host)
    noise_over(bench.member(sick))
    Path("/proc/sys/vm/drop_caches").write_text("3")
    assert (
        hashlib.sha256(ext3.read_inside(bench.host, bench.overlay, "/upper/noise", limit=1 << 30)).hexdigest()
        == bench.digest
    )
    subprocess.run(["cat", bench.overlay], check=True, stdout=subprocess.DEVNULL)
    # Which copy is read goes by the reader's pid.
    for _ in range(8):
        if "errors were found" in bench.problems():
            break
        Path("/proc/sys/vm/drop_caches").write_text("3")
        subprocess.run(["cat", bench.overlay], check=True, stdout=subprocess.DEVNULL)
    assert f"member-{sick}.img: errors were found" in bench.problems()
    assert f"member-{other}.img" not in bench.problems()
    done = mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions())
    assert done.changed and done.mended > 0 and len(bench.files()) == 2
    assert mirror.scrub(bench.cluster, bench.host).mended == 0
    assert not mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions()).changed
    assert bench.problems() == ""
    bench.member(other).unlink()
    assert bench.kept()


@pytest.mark.parametrize("sick, other", [(2, 1), pytest.param(1, 2, marks=pytest.mark.full)])
def test_a_member_lost_while_closed_is_recreated_elsewhere(bench: Bench, sick: int, other: int) -> None:
    bench.create()
    away = bench.member(sick).rename(f"{bench.member(sick)}.away")
    planned = mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions(bench.disk(3)), dry_run=True)
    assert planned.changed and bench.disk(3) in planned.steps[0] and bench.clean()
    # Nothing was changed: it may still come back.
    away.rename(bench.member(sick))
    assert bench.problems() == ""
    bench.member(sick).unlink()
    assert "its file is missing" in bench.problems()
    heard = Heard()
    open_mirror(bench.cluster.showing(heard), bench.host)
    assert "WARNING: the mirror has lost" in heard.lines[0] and "on one disk only" in heard.lines[0]
    close_mirror(bench.cluster, bench.host)
    with pytest.raises(Refused, match="no copy to repair from"):
        mirror.scrub(bench.cluster, bench.host)
    with pytest.raises(Refused, match="MiB free"):
        mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions(bench.disk(4)))
    with pytest.raises(Refused, match=r"one disk|other member is in"):
        mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions(bench.disk(other)))
    assert mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions(bench.disk(3))).changed
    assert bench.problems() == "" and not mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions()).changed
    bench.member(other).unlink()
    assert bench.kept()


def test_noise_over_a_member_while_closed_is_a_member_lost(bench: Bench) -> None:
    bench.create()
    noise_over(bench.member(2))
    assert "its file has other contents" in bench.problems()
    assert mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions()).changed
    assert bench.problems() == "" and bench.files() == [f"{bench.cluster.site.cluster}.member-{n}.img" for n in (1, 3)]
    bench.member(1).unlink()
    assert bench.kept()


def test_a_member_that_missed_writes_never_counts_again(bench: Bench) -> None:
    """It was missing at one start: its content is complete, and stale."""
    bench.create()
    path = bench.member(2)
    path.rename(f"{path}.away")
    assert bench.kept()
    Path(f"{path}.away").rename(path)
    assert "its file is missing" in bench.problems()
    bench.member(1).rename(f"{bench.member(1)}.away")
    with pytest.raises(Refused, match="no member of the mirror is intact"):
        open_mirror(bench.cluster, bench.host)
    Path(f"{bench.member(1)}.away").rename(bench.member(1))
    mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions())
    assert bench.kept() and bench.problems() == ""


@pytest.mark.parametrize("closed", [False, True])
def test_a_file_removed_while_in_use_is_detected_and_recreated(bench: Bench, closed: bool) -> None:
    bench.create()
    open_mirror(bench.cluster, bench.host)
    bench.member(1).unlink()
    assert "removed while in use" in bench.problems()
    if closed:
        close_mirror(bench.cluster, bench.host)
    mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions())
    assert bench.problems() == ""
    bench.member(2).unlink()
    assert bench.kept()


@pytest.mark.full
def test_a_member_whose_disk_was_full_of_what_one_had_alone(bench: Bench) -> None:
    """Degraded, Btrfs writes on the one left what must come to lie on both: a rebuild needs room on that one."""
    bench.create()
    bench.member(2).unlink()
    open_mirror(bench.cluster, bench.host)
    fill = f"{bench.cluster.places.mirror}/fill"
    subprocess.run(["dd", "if=/dev/urandom", f"of={fill}", "bs=1M", "status=none"], check=False, capture_output=True)
    os.truncate(fill, 600 * MIB)
    close_mirror(bench.cluster, bench.host)
    mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions())
    bench.member(1).unlink()
    assert bench.kept()


def test_the_folder_of_the_overlay_is_lost_with_one_member(bench: Bench) -> None:
    bench.create()
    for path in Path(bench.overlay).parent.glob(f"{bench.cluster.site.cluster}*"):
        path.rmdir() if path.is_dir() else path.unlink()
    for path in Path(bench.disk(1)).iterdir():
        path.unlink()
    with pytest.raises(Refused, match=r"there is no .*mirror.json"):
        mirror.adopt(bench.cluster, bench.host, bench.disk(1))
    planned = mirror.adopt(bench.cluster, bench.host, bench.disk(2), dry_run=True)
    member = f"{bench.disk(2)}/{bench.cluster.site.cluster}.member-2.img"
    assert planned.changed and planned.steps[-1] == f"open it with {member}"
    assert not list(Path(bench.overlay).parent.glob(f"{bench.cluster.site.cluster}*img*")) and bench.clean()
    assert mirror.adopt(bench.cluster, bench.host, bench.disk(2)).changed
    assert bench.kept() and "has lost" in bench.problems()
    assert not mirror.adopt(bench.cluster, bench.host, bench.disk(2)).changed
    mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions())
    assert bench.problems() == ""


@pytest.mark.full
def test_both_members_are_lost(bench: Bench) -> None:
    bench.create()
    with pytest.raises(SmsError, match="is intact"):
        mirror.abandon(bench.cluster, bench.host)
    for number in (1, 2):
        bench.member(number).unlink()
    with pytest.raises(Refused, match="no member of the mirror is intact"):
        open_mirror(bench.cluster, bench.host)
    assert "no member" in bench.problems()
    assert mirror.abandon(bench.cluster, bench.host).changed
    assert not Path(bench.overlay).is_symlink() and find_mirror(bench.cluster, bench.host) is None


def test_what_is_lost_on_both_is_said(bench: Bench) -> None:
    bench.create()
    for number in (1, 2):
        data = bytearray(bench.member(number).read_bytes())
        at = data.find(Path(bench.folder / "tree/upper/noise").read_bytes()[: 1 << 13])
        assert at > 0
        data[at : at + 4096] = os.urandom(4096)
        bench.member(number).write_bytes(data)
    with pytest.raises(SmsError, match="cannot be repaired"):
        mirror.scrub(bench.cluster, bench.host)
    assert "corrupt on both members" in bench.problems()


def test_another_host_that_has_it_open_is_not_joined(bench: Bench) -> None:
    bench.create()
    found = find_mirror(bench.cluster, bench.host)
    assert found
    write_note(bench.cluster, bench.host, replace(found, mounted_on="host-b"))
    with pytest.raises(Refused, match="left open on host-b"):
        open_mirror(bench.cluster, bench.host)
    assert "host-b has the mirror open" in bench.problems()
    close_mirror(bench.cluster, bench.host)
    write_note(bench.cluster, bench.host, found)


@pytest.mark.full
def test_a_member_moves_while_both_are_whole(bench: Bench) -> None:
    bench.create()
    with pytest.raises(Refused, match="unclear which one to move"):
        mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions(bench.disk(3)))
    mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions(bench.disk(3), number=1))
    assert list(Path(bench.disk(1)).iterdir()) == [] and bench.problems() == ""
    bench.member(2).unlink()
    assert bench.kept()


def test_a_rehearsed_scrub_reads_nothing(bench: Bench) -> None:
    with pytest.raises(Refused, match="is not mirrored"):
        mirror.scrub(bench.cluster, bench.host, dry_run=True)
    bench.create()
    before = Path(str(bench.cluster.places.mirror_note)).read_bytes()
    planned = mirror.scrub(bench.cluster, bench.host, dry_run=True)
    files = [str(bench.member(number)) for number in (1, 2)]
    assert planned.steps == (
        "open the mirror",
        *(f"read {file}" for file in files),
        "repair corrupt blocks from the other member",
        "close it",
    )
    assert Path(str(bench.cluster.places.mirror_note)).read_bytes() == before and bench.clean()
    bench.member(2).unlink()
    with pytest.raises(Refused, match="no copy to repair from"):
        mirror.scrub(bench.cluster, bench.host, dry_run=True)


def test_a_mirrored_overlay_grows(bench: Bench) -> None:
    bench.create()
    before = bench.member(1).stat().st_size
    done = grow(bench.cluster, bench.host, parse_size("1G"))
    assert done.changed and bench.member(1).stat().st_size == before + 2 * (1024 - 96) * MIB
    assert ext3_bytes(bench) == 1 << 30 and bench.kept() and bench.problems() == ""
    assert not grow(bench.cluster, bench.host, parse_size("1G")).changed
    with pytest.raises(Refused, match="MiB free"):
        grow(bench.cluster, bench.host, parse_size("20G"))


def ext3_bytes(bench: Bench) -> int:
    open_mirror(bench.cluster, bench.host)
    try:
        return ext3.sizes_of(bench.host, bench.overlay)[1]
    finally:
        close_mirror(bench.cluster, bench.host)


CODE = """
import sys
from dataclasses import replace
from pathlib import Path
from appliance.operations.overlay import mirror
from appliance.operations.context import open_cluster
from appliance.host.local import Local
from appliance.progress import Silent
site, state, name, verb, *rest = sys.argv[1:]
cluster = open_cluster(Path(site), Path(state), Silent())
cluster = replace(cluster, site=cluster.site.model_copy(update={"cluster": name}))
host = Local("host-a")
count = 0
left = int(rest.pop(0))
run = host.run
def counted(*argv, **more):
    global count
    done = run(*argv, **more)
    count += 1
    if count == left:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    return done
host.run = counted
{"create": lambda: mirror.create(cluster, host, mirror.MirrorOptions(rest)),
 "rebuild": lambda: mirror.rebuild(cluster, host, mirror.RebuildOptions(rest[0])),
 "remove": lambda: mirror.remove(cluster, host)}[verb]()
"""
"""Runs a verb and kills itself after so many commands."""
STRIDES = pytest.mark.parametrize("stride", [16, pytest.param(1, marks=pytest.mark.full)])
"""One command in so many is died after, from a random one on."""


def killed_after(bench: Bench, verb: str, count: int, *rest: str) -> bool:
    """Run a verb that dies after its command number ``count``; whether it came to die."""
    name = bench.cluster.site.cluster
    argv = [sys.executable, "-c", CODE, str(DEBIAN_SITE), str(bench.folder / "state"), name, verb, str(count), *rest]
    done = subprocess.run(argv, check=False, capture_output=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


@STRIDES
def test_a_create_killed_anywhere_is_finished_by_the_next(bench: Bench, stride: int) -> None:
    count = random.randint(1, stride)
    while killed_after(bench, "create", count, bench.disk(1), bench.disk(2)):
        assert bench.kept(), count
        bench.create()
        assert bench.kept() and bench.problems() == "", count
        mirror.remove(bench.cluster, bench.host)
        count += stride
    assert count > 30


@STRIDES
def test_a_remove_killed_anywhere_is_finished_by_the_next(bench: Bench, stride: int) -> None:
    bench.create()
    count = random.randint(1, stride)
    while killed_after(bench, "remove", count):
        count += stride
        mirror.remove(bench.cluster, bench.host)
        assert bench.kept() and bench.files() == [], count
        bench.create()
    assert count > 20


@STRIDES
def test_a_rebuild_killed_anywhere_is_finished_by_the_next(bench: Bench, stride: int) -> None:
    bench.create()
    count, disk = random.randint(1, stride), 2
    bench.member(2).unlink()
    while killed_after(bench, "rebuild", count, bench.disk(disk)):
        count += stride
        assert bench.kept(), count
        mirror.rebuild(bench.cluster, bench.host, mirror.RebuildOptions())
        assert bench.problems() == "", count
        found = find_mirror(bench.cluster, bench.host)
        assert found and found.pending is None
        Path(found.path(found.members[0])).unlink()
        disk = 3 if disk == 2 else 2
        if found.members[1].folder == bench.disk(disk):
            disk = 1
    assert count > 20
