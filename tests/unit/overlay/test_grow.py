"""The new size of an overlay, and growing it on a host."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.agent import grow as agent_grow
from appliance.agent.protocol import Problem
from appliance.errors import ConfigError, Refused, SmsError
from appliance.operations.overlay import grow as flow_grow
from appliance.plan.machine import instance_name
from appliance.plan.overlay.grow import MIB, SizeSpec, grown, new_size, parse_size
from appliance.plan.overlay.mirror import Member, Mirror, read_mirror
from appliance.shared.records import to_json
from appliance.tools import ext3
from appliance.tools.apptainer import Instance
from tests.sites import open_debian
from tests.support.env import FakeAgents, fake_env
from tests.support.fake import Answer, Fake
from tests.support.instances import LIST, lists

GIB = 1 << 30


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("4096M", SizeSpec(4 * GIB)),
        ("4G", SizeSpec(4 * GIB)),
        ("4g", SizeSpec(4 * GIB)),
        ("4GiB", SizeSpec(4 * GIB)),
        ("1.5G", SizeSpec(1536 * MIB)),
        ("+1G", SizeSpec(GIB, relative=True)),
        ("0.0015G", SizeSpec(MIB)),
        ("1T", SizeSpec(1 << 40)),
    ],
)
def test_sizes(text: str, wanted: SizeSpec) -> None:
    assert parse_size(text) == wanted


@pytest.mark.parametrize("text", ["", "4", "4K", "-1G", "G", "1e9G", "0M", "+0G", "0.1M", "17T", "4 G", "4G\n", "٤G"])
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


@pytest.mark.parametrize(
    "text, file, system, size",
    [
        ("4G", 2 * GIB, 2 * GIB, 4 * GIB),
        ("2G", 2 * GIB, 2 * GIB, 2 * GIB),  # it is so already
        ("+1G", 2 * GIB, 2 * GIB, 3 * GIB),
        ("+1G", 3 * GIB, 2 * GIB, 3 * GIB),  # the same, interrupted: finished, not done twice
        ("3G", 3 * GIB, 2 * GIB, 3 * GIB),
        ("+1G", 4 * GIB, 2 * GIB, 4 * GIB),  # another, interrupted, to a larger size
        ("+1G", 2 * GIB, 2 * GIB - 4096, 3 * GIB),  # ext3 left a last, small group out
    ],
)
def test_new_sizes(text: str, file: int, system: int, size: int) -> None:
    assert new_size(parse_size(text), file=file, system=system) == size


def test_an_overlay_cannot_shrink() -> None:
    with pytest.raises(Refused, match="has 2048 MiB already, and cannot shrink"):
        new_size(parse_size("1G"), file=2 * GIB, system=2 * GIB)
    with pytest.raises(ConfigError, match="1T at most"):
        new_size(parse_size("+1T"), file=GIB, system=GIB)


def test_overlays_that_have_the_size_already() -> None:
    assert grown(2 * GIB, 2 * GIB, 2 * GIB)
    assert grown(2 * GIB, 2 * GIB - 4096, 2 * GIB)
    assert not grown(2 * GIB, GIB, 2 * GIB)
    assert not grown(GIB, GIB, 2 * GIB)


def test_the_sizes_of_an_image() -> None:
    said = "OS type: Linux\nBlock count:              65536\nBlock size:               4096"
    answers: dict[tuple[str, ...], Answer]
    answers = {("test",): (0, ""), ("losetup",): (0, "/dev/loop0"), ("stat",): (0, "1073741824 2048 512")}
    assert ext3.sizes_of(Fake({**answers, ("dumpe2fs", "-h", "/dev/loop0"): (0, said)}), "x") == (GIB, GIB // 4, MIB)
    with pytest.raises(SmsError, match="is not an ext3"):
        ext3.sizes_of(Fake({**answers, ("dumpe2fs",): (1, "")}), "x")


def test_the_agent_reads_a_superblock(tmp_path: Path) -> None:
    image = bytearray(4096)
    struct.pack_into("<I", image, 1024 + 4, 1000)
    struct.pack_into("<I", image, 1024 + 24, 2)
    (tmp_path / "x").write_bytes(image)
    with pytest.raises(Problem, match="is not an ext3"):
        agent_grow.system_size(str(tmp_path / "x"))
    struct.pack_into("<H", image, 1024 + 56, 0xEF53)
    (tmp_path / "x").write_bytes(image)
    assert agent_grow.system_size(str(tmp_path / "x")) == 4096000


def test_a_file_only_becomes_longer(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    agent_grow.lengthen(str(path), 8)
    agent_grow.lengthen(str(path), 2)
    assert path.read_bytes() == b"abc\0\0\0\0\0"


class Held(Fake):
    """A host on which another run changes something just before the lock is taken."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        answers: dict[tuple[str, ...], Answer] = {
            ("stat",): (0, "1"),
            ("stat", "--dereference"): (0, "1073741824 2048 512"),
            ("dumpe2fs",): (0, f"Block count: {GIB // 4096}\nBlock size: 4096"),
            ("df",): (0, f"size avail\n{1 << 40} {1 << 40}"),
            ("findmnt",): (0, "/dev/sda1 8:1"),
            ("btrfs",): (0, json.dumps({"device-stats": [{"device": "/dev/loop0", "devid": "1"}]})),
            ("btrfs", "filesystem", "resize"): self.enlarge,
            ("truncate",): (0, ""),
            ("sh",): (0, ""),
            ("sync",): (0, ""),
            ("test",): (0, ""),
            ("losetup",): (0, ""),
        }
        super().__init__(answers, name="host-a")
        self.meanwhile = meanwhile
        self.held: list[str] = []
        self.enlarged: list[list[str]] = []
        """The locks that were held when the file system of the mirror was enlarged."""

    def enlarge(self, *_: object) -> tuple[int, str]:
        self.enlarged.append(list(self.held))
        return 0, ""

    @contextmanager
    def hold(self, *argv: str, timeout: float = 30) -> Iterator[str]:
        self.meanwhile()
        self.held.append(argv[4])
        yield "held"
        self.held.pop()


@pytest.mark.parametrize("stopped", [False, True])
def test_the_mirror_grows_with_the_host_locked(tmp_path: Path, stopped: bool) -> None:
    """A concurrent scrub or stop has changed the note meanwhile: its changes are kept."""
    agents = FakeAgents(answers={"grow": lambda host, request: {}})
    cluster = replace(open_debian(tmp_path), env=fake_env(agents=agents))
    name, note = cluster.site.cluster, str(cluster.places.mirror_note)
    members = (Member(1, "/a", 1, "u1"), Member(2, "/b", 2, "u2"))
    before = Mirror(name, "btrfs", 5 << 30, members, "whole", mounted_on="host-a")
    running = [Instance(instance_name(cluster.site), 7, "/i.sif")]

    def meanwhile() -> None:
        if stopped:
            running.clear()
        host.files[note] = to_json(replace(before, mounted_on=None if stopped else "host-a", scrubbed=7.0))

    host = Held(meanwhile)
    host.files[note] = to_json(before)
    host.answers[LIST] = lists(running)
    with pytest.raises(Refused, match="stopped meanwhile") if stopped else nullcontext():
        flow_grow._grow(cluster, host, parse_size("8G"), running=True, dry_run=False)
    left = read_mirror(host.files[note], name)
    assert left and (left.scrubbed, left.mounted_on) == (7.0, None if stopped else "host-a")
    assert (left.size > before.size) is not stopped
    assert host.enlarged == ([] if stopped else [[str(cluster.places.lock)]])
