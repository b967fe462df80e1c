"""Read the structures of an ext3 file system: which blocks are metadata, and which belong to which file.

Offsets and sizes are those of ext4(5) and of Documentation/filesystems/ext4 in the kernel's sources.
"""

import stat
import struct
from itertools import groupby
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

Read = Callable[[int, int], bytes]
"""(offset, size) in bytes -> ``size`` bytes."""

MAGIC = 0xEF53
FILETYPE, RECOVER = 0x2, 0x4
SPARSE_SUPER, LARGE_FILE, BTREE_DIR = 0x1, 0x2, 0x4
ROOT_INODE, RESIZE_INODE = 2, 7
IMMEDIATE_LINK = 60
"""The target of a symbolic link shorter than this is stored in the inode."""
CTIME, DTIME, FILE_ACL = 12, 20, 104
DIRECT = 12
"""An inode's pointers to blocks of data; those after them lead to lists of pointers."""
MOST_GROUPS = 1 << 19
"""Groups of the largest ext3 with blocks of 1 KiB, as mke2fs makes it."""
PANIC = 3
"""s_errors: the kernel panics when it finds damage."""
ACL_AND_XATTR = 0xC
"""Mount options in the superblock that mke2fs.conf has; others would be in force wherever it is mounted."""


class Unknown(Exception):
    """The image is not an ext3 of a supported format, or is damaged."""


def read_whole(read: Read, offset: int, size: int) -> bytes:
    """Read ``size`` bytes.

    Raises:
        Unknown: the image ends before.
    """
    data = read(offset, size)
    if len(data) != size:
        raise Unknown("it ends where it should have data")
    return data


class Group(NamedTuple):
    """Blocks of a group's bitmaps and of its inode table."""

    block_bitmap: int
    inode_bitmap: int
    inode_table: int


class Layout(NamedTuple):
    """Contents of the superblock and the group descriptors."""

    block: int
    blocks: int
    first: int
    blocks_per_group: int
    inodes_per_group: int
    inode_size: int
    inodes: int
    journal: int
    recover: bool
    orphans: bool
    reserved: int
    groups: Tuple[Group, ...]

    @property
    def table_blocks(self) -> int:
        """Number of blocks of a group's inode table."""
        return -(-self.inodes_per_group * self.inode_size // self.block)

    @property
    def descriptor_blocks(self) -> int:
        """Number of blocks of the group descriptors."""
        return -(-len(self.groups) * 32 // self.block)


def read_layout(read: Read) -> Layout:
    """Read the layout of an image.

    Raises:
        Unknown: it is not ext3, or has features that ext3 does not have.
    """
    data = read_whole(read, 1024, 1024)
    if struct.unpack_from("<H", data, 56)[0] != MAGIC:
        raise Unknown("it has no ext3 superblock")
    inodes, blocks = struct.unpack_from("<II", data, 0)
    first, log_block = struct.unpack_from("<II", data, 20)
    (blocks_per_group,) = struct.unpack_from("<I", data, 32)
    (inodes_per_group,) = struct.unpack_from("<I", data, 40)
    (errors,) = struct.unpack_from("<H", data, 60)
    inode_size, _, _, incompat, ro_compat = struct.unpack_from("<HHIII", data, 88)
    (reserved,) = struct.unpack_from("<H", data, 206)
    (journal,) = struct.unpack_from("<I", data, 224)
    (orphan,) = struct.unpack_from("<I", data, 232)
    (options,) = struct.unpack_from("<I", data, 256)
    if incompat & ~(FILETYPE | RECOVER) or ro_compat & ~(SPARSE_SUPER | LARGE_FILE | BTREE_DIR):
        raise Unknown("it has features that ext3 does not have")
    if errors == PANIC or options & ~ACL_AND_XATTR or any(data[512:576]):
        raise Unknown("its superblock has mount options, such as errors=panic")
    damaged = Unknown("its superblock is damaged")
    if log_block > 6 or inode_size not in (128, 256, 512, 1024):
        raise damaged
    block = 1024 << log_block
    if not 0 < inodes_per_group <= block * 8 or not 0 < blocks_per_group <= block * 8:
        raise damaged
    if first != (block == 1024) or not first < blocks or journal > inodes:
        raise damaged
    count = -(-(blocks - first) // blocks_per_group)
    if count > MOST_GROUPS or count * inodes_per_group != inodes:
        raise damaged
    raw = read_whole(read, (first + 1) * block, count * 32)
    groups: List[Group] = []
    table = -(-inodes_per_group * inode_size // block)
    for at in range(count):
        group = Group(*struct.unpack_from("<III", raw, at * 32))
        # As the kernel demands without flex_bg. Groups that share a table would multiply the work.
        begin = first + at * blocks_per_group
        end = min(begin + blocks_per_group, blocks)
        if min(group) < begin or max(group) >= end or group.inode_table + table > end:
            raise Unknown("its group descriptors are damaged")
        groups.append(group)
    recover = bool(incompat & RECOVER)
    return Layout(
        block, blocks, first, blocks_per_group, inodes_per_group, inode_size, inodes, journal,
        recover, bool(orphan), reserved, tuple(groups),
    )  # fmt: skip


class File(NamedTuple):
    """Blocks of an inode: its data as (index in the file, block), without holes; and its pointer and ACL blocks."""

    data: List[Tuple[int, int]]
    lists: List[int]


class Image:
    """An ext3 image, read by a function."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.layout = read_layout(read)
        self._pointers = struct.Struct("<%dI" % (self.layout.block // 4))

    def blocks(self, number: int, count: int = 1) -> bytes:
        """Read blocks."""
        return read_whole(self.read, number * self.layout.block, count * self.layout.block)

    def inode(self, number: int) -> bytes:
        """Return the raw inode of a number.

        Raises:
            Unknown: there is none.
        """
        if not 0 < number <= self.layout.inodes:
            raise Unknown("it refers to inode %d, which does not exist" % number)
        group, at = divmod(number - 1, self.layout.inodes_per_group)
        offset = self.layout.groups[group].inode_table * self.layout.block + at * self.layout.inode_size
        return read_whole(self.read, offset, self.layout.inode_size)

    def used_table_blocks(self) -> Iterator[Tuple[int, List[int]]]:
        """Yield the blocks of inode tables with used inodes, each with the numbers of these inodes."""
        layout = self.layout
        each = layout.block // layout.inode_size
        for index, group in enumerate(layout.groups):
            bitmap = self.blocks(group.inode_bitmap)[: -(-layout.inodes_per_group // 8)]
            used = (at * 8 + bit for at, bits in enumerate(bitmap) if bits for bit in range(8) if bits >> bit & 1)
            for block, places in groupby(used, key=lambda place: place // each):
                yield group.inode_table + block, [index * layout.inodes_per_group + 1 + place for place in places]

    def unused_table_blocks(self) -> Set[int]:
        """Return the blocks of inode tables without a used inode."""
        tables = (
            range(group.inode_table, group.inode_table + self.layout.table_blocks) for group in self.layout.groups
        )
        return {block for table in tables for block in table} - {block for block, _ in self.used_table_blocks()}

    def used_inodes(self) -> Iterator[Tuple[int, bytes]]:
        """Yield the number and the raw bytes of every used inode."""
        for block, numbers in self.used_table_blocks():
            yield from self.split_table(self.blocks(block), numbers)

    def split_table(self, data: bytes, numbers: List[int]) -> Iterator[Tuple[int, bytes]]:
        """Yield the number and the raw bytes of inodes in a block of an inode table."""
        layout = self.layout
        each = layout.block // layout.inode_size
        for number in numbers:
            at = (number - 1) % layout.inodes_per_group % each * layout.inode_size
            yield number, data[at : at + layout.inode_size]

    def file(self, raw: bytes, *, contents: bool = True) -> File:
        """Return the blocks of an inode; without ``contents``, leave out the data blocks of regular files.

        Raises:
            Unknown: it refers to a block beyond the image, or has features that ext3 does not have.
        """
        found = File([], [])
        mode = struct.unpack_from("<H", raw, 0)[0]
        if struct.unpack_from("<I", raw, 32)[0] & 0x80000:  # EXT4_EXTENTS_FL
            raise Unknown("it has files with extents")
        acl = struct.unpack_from("<I", raw, FILE_ACL)[0]
        if acl:
            found.lists.append(self._check_block(acl))
        size = size_of(raw)
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            return found
        if stat.S_ISLNK(mode) and size < IMMEDIATE_LINK:
            return found
        pointers = struct.unpack_from("<15I", raw, 40)
        wanted = contents or not stat.S_ISREG(mode)
        # Pointers beyond the end of the file are ignored.
        count = -(-size // self.layout.block)
        if wanted:
            found.data.extend(
                (at, self._check_block(one)) for at, one in enumerate(pointers[: min(DIRECT, count)]) if one
            )
        first = DIRECT
        for depth, pointer in enumerate(pointers[DIRECT:], 1):
            self._walk(pointer, depth, wanted, found, first, count)
            first += (self.layout.block // 4) ** depth
        return found

    def _walk(self, pointer: int, depth: int, wanted: bool, found: File, first: int, count: int) -> None:
        if not pointer:
            return
        found.lists.append(self._check_block(pointer))
        if depth == 1 and not wanted:
            return
        below = self._pointers.unpack(self.blocks(pointer))
        if depth == 1:
            found.data.extend(
                (first + at, self._check_block(one)) for at, one in enumerate(below) if one and first + at < count
            )
            return
        each = (self.layout.block // 4) ** (depth - 1)
        for at, one in enumerate(below):
            if first + at * each >= count:
                break
            if len(found.lists) + len(found.data) > self.layout.blocks:
                raise Unknown("a file has more blocks than there are")
            self._walk(one, depth - 1, wanted, found, first + at * each, count)

    def _check_block(self, pointer: int) -> int:
        if pointer >= self.layout.blocks:
            raise Unknown("it refers to block %d, which does not exist" % pointer)
        return pointer

    def journal_blocks(self) -> List[int]:
        """Return the blocks of the journal's log, without its first one, the journal's superblock."""
        if not self.layout.journal:
            return []
        return [block for at, block in self.file(self.inode(self.layout.journal)).data if at]

    def journal_head(self) -> int:
        """Return the block of the journal's superblock."""
        data = self.file(self.inode(self.layout.journal)).data
        if not data:
            raise Unknown("its journal has no blocks")
        return data[0][1]

    def metadata(self) -> Iterator[Tuple[int, int]]:
        """Yield the blocks that e2fsck reads except the journal's log, as (first block, count)."""
        layout = self.layout
        head = 1 + layout.descriptor_blocks
        for index, group in enumerate(layout.groups):
            if has_superblock(index):
                yield layout.first + index * layout.blocks_per_group, head
            yield group.block_bitmap, 1
            yield group.inode_bitmap, 1
        for block, _ in self.used_table_blocks():
            yield block, 1
        journal = set(self.journal_blocks())
        # Each block belongs to one file, except for attributes, of which an inode has one block.
        left = layout.blocks + layout.inodes
        for number, raw in self.used_inodes():
            found = self.file(raw, contents=number == RESIZE_INODE)
            left -= len(found.lists) + len(found.data)
            if left < 0:
                raise Unknown("its files have more blocks than there are")
            for block in found.lists:
                yield block, 1
            for _, block in found.data:
                if block not in journal:
                    yield block, 1
        if layout.journal:
            yield self.journal_head(), 1

    def entries(self, raw: bytes) -> Dict[bytes, int]:
        """Return the names in a directory with their inodes, without . and .. themselves."""
        found: Dict[bytes, int] = {}
        for _, block in self.file(raw).data:
            data, at = self.blocks(block), 0
            while at + 8 <= len(data):
                inode, length, size, _ = struct.unpack_from("<IHBB", data, at)
                if length < 8:
                    raise Unknown("a directory is damaged")
                name = data[at + 8 : at + 8 + size]
                if inode and name not in (b".", b".."):
                    found[name] = inode
                at += length
        return found

    def lookup(self, path: str) -> Optional[bytes]:
        """Return the raw inode at an absolute path, without following links; None if there is none."""
        raw = self.inode(ROOT_INODE)
        for name in path.encode().split(b"/"):
            if not name:
                continue
            if not stat.S_ISDIR(mode_of(raw)):
                return None
            number = self.entries(raw).get(name)
            if not number:
                return None
            raw = self.inode(number)
        return raw

    def files_below(self, raw: bytes) -> Iterator[bytes]:
        """Yield the raw inodes of the regular files at or below an inode."""
        todo, seen = [raw], set()  # type: List[bytes], Set[int]
        while todo:
            one = todo.pop()
            mode = mode_of(one)
            if stat.S_ISREG(mode):
                yield one
            elif stat.S_ISDIR(mode):
                for number in self.entries(one).values():
                    if number not in seen:
                        seen.add(number)
                        todo.append(self.inode(number))

    def contents(self, raw: bytes, limit: int) -> bytes:
        """Return the first ``limit`` bytes of a file."""
        size = min(size_of(raw), limit)
        found = bytearray(size)
        for at, block in self.file(raw).data:
            if at * self.layout.block < size:
                data = self.blocks(block)[: size - at * self.layout.block]
                found[at * self.layout.block : at * self.layout.block + len(data)] = data
        return bytes(found)


def mode_of(raw: bytes) -> int:
    """Return st_mode of a raw inode."""
    mode: int = struct.unpack_from("<H", raw, 0)[0]
    return mode


def size_of(raw: bytes) -> int:
    """Return st_size of a raw inode."""
    low, high = struct.unpack_from("<I", raw, 4)[0], struct.unpack_from("<I", raw, 108)[0]
    return int(low | (high << 32 if stat.S_ISREG(mode_of(raw)) else 0))


def has_superblock(group: int) -> bool:
    """Whether a group has a copy of the superblock (sparse_super: 0, 1 and powers of 3, 5 and 7)."""
    if group < 2:
        return True
    for base in (3, 5, 7):
        power = base
        while power < group:
            power *= base
        if power == group:
            return True
    return False


class InodeState:
    """The used inodes at one moment; finds the blocks that may have changed since.

    Every change to a file changes its inode, at least the ctime. Inodes whose ctime was ``since`` or later are the
    exception, as ctimes are coarse: they always count as changed.
    """

    def __init__(self, image: Image, since: float) -> None:
        self.layout = image.layout
        self.unused = image.unused_table_blocks()
        """Blocks of inode tables that had no used inode in any query so far."""
        self.tables: Dict[int, bytes] = {}
        self.young: List[int] = []
        for block, numbers in image.used_table_blocks():
            data = self.tables[block] = image.blocks(block)
            found = image.split_table(data, numbers)
            self.young += [number for number, raw in found if struct.unpack_from("<I", raw, CTIME)[0] >= since]

    def changed(self, image: Image) -> Optional[Set[int]]:
        """Return the blocks that may differ; None if the file system has another layout now. Needs a freeze."""
        now = image.layout
        if now._replace(recover=False, orphans=False) != self.layout._replace(recover=False, orphans=False):
            return None
        blocks = set(range(now.first, now.first + 1 + now.descriptor_blocks))
        for group in now.groups:
            blocks.update((group.block_bitmap, group.inode_bitmap))
        tables = dict(image.used_table_blocks())
        self.unused.difference_update(tables)
        raws: List[bytes] = []
        for block in set(tables) | set(self.tables):
            before, after = self.tables.get(block, b""), image.blocks(block)
            if before == after:
                continue
            blocks.add(block)
            for at in range(0, now.block, now.inode_size):
                old, new = before[at : at + now.inode_size], after[at : at + now.inode_size]
                if old != new:
                    raws.append(new)
                    # A former attribute block has one user less now; other former blocks do not belong to it any more.
                    given_up = struct.unpack_from("<I", old, FILE_ACL)[0] if old else 0
                    blocks.update([given_up] if 0 < given_up < now.blocks else [])
        raws += [image.inode(number) for number in self.young]
        if now.journal:
            blocks.add(image.journal_head())
        journal = image.inode(now.journal) if now.journal else b""
        for raw in raws:
            if raw == journal:
                continue
            if not struct.unpack_from("<I", raw, DTIME)[0] and mode_of(raw):
                found = image.file(raw)
                blocks.update(found.lists)
                blocks.update(block for _, block in found.data)
        return blocks
