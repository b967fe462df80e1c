"""A snapshot whose file system is meant to cost the admin host memory or time, before e2fsck reads it."""

from __future__ import annotations

import os
import random
import resource
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from appliance.agent import check, ext
from appliance.agent.store import CHUNK, ChunkList, Damage

SIZE = 4 << 20
SEED = 37
CASES = 100
SUPERBLOCK, GROUPS = 1024, 2048
FIELDS = {"inodes": 0, "blocks": 4, "first": 20, "log_block": 24, "blocks_per_group": 32, "inodes_per_group": 40}
MORE = {"inode_size": 88, "incompat": 96, "ro_compat": 100, "reserved": 206, "journal": 224, "orphan": 232}
VALUES = (0, 1, 2, 3, 7, 8, 128, 256, 1024, 4096, 8192, 1 << 16, 1 << 20, 1 << 31, 0xFFFFFFF0, 0xFFFFFFFF)
MEMORY = 192 << 20
"""Bytes that reading the structures of a small image may take at most."""
READS = 2048
"""Chunks that are read of one at most, from the cache or not: it has 64."""


class Offered(ChunkList):
    """A snapshot in memory, which counts what is read of it."""

    def __init__(self, data: bytes, size: int = SIZE) -> None:
        self.data, self.size, self.reads = data, size, 0

    def read(self, number: int) -> bytes:
        self.reads += 1
        return self.data[number * CHUNK : (number + 1) * CHUNK].ljust(self.length(number), b"\0")


def read_all(offered: Offered) -> int:
    """What is read of a snapshot before e2fsck; return how many chunks have metadata."""
    image = check.open_image(offered)  # type: ignore[arg-type]
    check._check_layers(image)
    return len(check.metadata_chunks(image))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("image") / "one.img"
    path.touch()
    os.truncate(path, SIZE)
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext3", "-b", "1024", "-g", "1024", path], check=True)
    commands = "mkdir upper\nmkdir work\n"
    subprocess.run(["debugfs", "-w", "-f", "-", path], input=commands, text=True, check=True, capture_output=True)
    return path.read_bytes()


def changed(data: bytes, **fields: int) -> bytes:
    image = bytearray(data)
    for name, value in fields.items():
        struct.pack_into("<I", image, SUPERBLOCK + {**FIELDS, **MORE}[name], value)
    return bytes(image)


@contextmanager
def limited_memory() -> Iterator[None]:
    """More than ``MEMORY`` ends in a MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_sound_one_is_read(sound: bytes) -> None:
    assert 1 < read_all(Offered(sound)) <= SIZE // CHUNK


BOMBS = {
    "billions of groups": {"blocks": 0xFFFFFFF0, "blocks_per_group": 1, "inodes_per_group": 1, "inodes": 0xFFFFFFEF},
    "millions of groups": {"blocks": 8 << 20, "blocks_per_group": 1, "inodes_per_group": 1, "inodes": (8 << 20) - 1},
    "more blocks than it has": {
        "blocks": 0xFFFFFFF0,
        "blocks_per_group": 8192,
        "inodes_per_group": 8,
        "inodes": 1 << 22,
    },
}


@pytest.mark.parametrize("size", [SIZE, 64 << 20, 1 << 40])
@pytest.mark.parametrize("name", BOMBS)
def test_counts_of_the_superblock_cost_no_memory(sound: bytes, name: str, size: int) -> None:
    offered = Offered(changed(sound, **BOMBS[name]), size)
    with limited_memory(), pytest.raises(Damage):
        read_all(offered)
    assert offered.reads <= READS


def test_groups_do_not_share_their_tables(sound: bytes) -> None:
    """Else each inode would be read as often as there are groups."""
    image = bytearray(sound)
    for at in range(GROUPS + 32, GROUPS + 4 * 32, 32):
        image[at : at + 12] = image[GROUPS : GROUPS + 12]
    with pytest.raises(Damage, match="group descriptors"):
        read_all(Offered(bytes(image)))


@pytest.mark.parametrize(("inodes", "depth"), [(1, 3), (40, 2)])
def test_lists_that_contain_themselves_are_followed_as_often_as_there_are_blocks(
    sound: bytes, inodes: int, depth: int
) -> None:
    """A list of pointers to itself would be a thousand million blocks, in each file."""
    image = bytearray(sound)
    layout = ext.Image(lambda offset, size: sound[offset : offset + size]).layout
    block, group = 3000, layout.groups[0]
    image[block * 1024 : block * 1024 + 1024] = struct.pack("<256I", *[block] * 256)
    image[group.inode_bitmap * 1024 : group.inode_bitmap * 1024 + 16] = b"\xff" * 16
    for number in range(20, 20 + inodes):
        at = group.inode_table * 1024 + (number - 1) * layout.inode_size
        image[at : at + layout.inode_size] = bytes(layout.inode_size)
        struct.pack_into("<HHI", image, at, 0o100644, 0, 0xFFFFFFFF)
        struct.pack_into("<I", image, at + 40 + 4 * (ext.DIRECT + depth - 1), block)
        struct.pack_into("<I", image, at + 108, 0xFFFF)
    found = 0
    with pytest.raises(ext.Unknown, match="more blocks than there are"):
        for _ in ext.Image(lambda offset, size: bytes(image[offset : offset + size])).metadata():
            found += 1
    assert found <= layout.blocks + layout.inodes


def test_no_combination_of_fields_costs_memory_or_ends_in_another_error(sound: bytes) -> None:
    """Several fields of the superblock and the group descriptors at once, also such as fit together."""
    choose = random.Random(SEED)
    outcomes = set()
    with limited_memory():
        for _ in range(CASES):
            fields = {name: choose.choice(VALUES) for name in choose.sample([*FIELDS, *MORE], choose.randint(1, 4))}
            image = bytearray(changed(sound, **fields))
            values = struct.unpack_from("<11I", image, SUPERBLOCK)
            if choose.random() < 0.5 and values[8]:
                groups = -(-(values[1] - values[5]) // values[8])
                struct.pack_into("<I", image, SUPERBLOCK, max(0, groups * values[10]) & 0xFFFFFFFF)
            for _ in range(choose.choice((0, 0, 1, 3))):
                struct.pack_into("<I", image, GROUPS + 4 * choose.randrange(32), choose.choice(VALUES))
            offered = Offered(bytes(image), choose.choice((SIZE, SIZE, 64 << 20)))
            try:
                assert read_all(offered) <= offered.count
                outcomes.add("read")
            except Damage as error:
                outcomes.add(error.message)
            assert offered.reads <= READS, fields
    assert "read" in outcomes and len(outcomes) > 4
