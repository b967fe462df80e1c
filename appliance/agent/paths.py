"""Restore single files and folders of a snapshot: into the overlay, or into a folder of the host.

What leads to a path is handled here: folders, and what overlayfs hides there. rsync copies what is at it and below.
"""

import errno
import os
import stat
import time
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, List, Set, Tuple

from appliance.agent import protocol
from appliance.agent.check import run_e2fsck
from appliance.agent.clone import copy_into
from appliance.agent.diff import OPAQUE, OVERLAY, descend, has_xattr
from appliance.agent.freeze import find_loops, private_mounts, sync_file_system
from appliance.agent.loops import image_mounted
from appliance.agent.names import DirCursor, Names, State, kind_of, lstat, outermost, show, split_path, walk
from appliance.agent.protocol import Problem, field
from appliance.agent.rsync import copy, make_removable, remove
from appliance.agent.store import Snapshot, Store, disk_error
from appliance.agent.take import file_identity
from appliance.agent.trees import SnapshotTree, open_root, open_snapshot_tree
from appliance.shared.files import create_file, free_bytes, remove_file, sync_folder
from appliance.shared.results import PathResult, PathResults

BESIDE = ".with-paths"
PARTIAL = ".sms-partial"
METACOPY = OVERLAY + "metacopy"
"""Attribute of a file whose contents are in the image."""
MAX_HOLES = 1 << 30
"""Bytes of a file without data that rsync may read."""
MIN_FREE = 4 << 20
"""Bytes; with less free, a write may have been lost."""
MAX_NOTED = 10
"""Paths listed per kind of note."""


def restore_paths(request: Dict[str, Any]) -> Dict[str, Any]:
    """Copy the overlay of a stopped container, and restore ``paths`` of a snapshot in the copy.

    ``place_paths`` then replaces the overlay by the copy. The caller holds the host's lock.

    Raises:
        Problem: a path cannot be restored on its own, or something is damaged; nothing was changed.
    """
    store = Store(field(request, "store", str))
    overlay = field(request, "overlay", str)
    paths = requested_paths(request, "without --path the whole snapshot is restored")
    beside, began = overlay + BESIDE, time.monotonic()
    private_mounts()
    with store.reading():
        snapshot = store.find(str(request["snapshot"]))
        os.makedirs(store.temporary, 0o700, exist_ok=True)
        try:
            was = _copy_overlay(overlay, beside)
            whole = "`sms overlay restore` without --path restores a whole snapshot"
            _e2fsck(beside, "-p", store, "the overlay is damaged", whole)
            protocol.step("restore", "restore paths of snapshot %d" % snapshot.number)
            restored = _restore_into(store, snapshot, beside, paths)
            protocol.step("check", "check the copy")
            _e2fsck(beside, "-n", store, "the copy is damaged", "the overlay is unchanged; run it again")
        except BaseException:
            remove_file(beside)
            raise
    return dict(restored, number=snapshot.number, staged=beside, was=was, seconds=time.monotonic() - began)


def place_paths(request: Dict[str, Any]) -> Dict[str, Any]:
    """Replace the overlay by the copy.

    Raises:
        Problem: the overlay is in use, or was changed since it was copied.
    """
    overlay = field(request, "overlay", str)
    beside = overlay + BESIDE
    protocol.step("rename", "")
    if find_loops(overlay) or file_identity(os.stat(overlay)) != field(request, "was", list):
        os.unlink(beside)
        raise Problem("the overlay was used meanwhile", "it is unchanged; `sms stop`, then run this again", 3)
    os.rename(beside, overlay)
    sync_folder(os.path.dirname(overlay))
    return {}


def extract_paths(request: Dict[str, Any]) -> Dict[str, Any]:
    """Copy ``paths`` of a snapshot into a new folder of the host.

    With ``rehearse`` nothing is copied.

    Raises:
        Problem: the folder exists already, or a path is not in the snapshot; nothing was changed.
    """
    store = Store(field(request, "store", str))
    folder = os.path.normpath(field(request, "folder", str))
    paths = requested_paths(request, "give single paths, or restore the whole snapshot with --as")
    parent, name = os.path.split(folder)
    if not os.path.isabs(folder) or not name:
        raise Problem("%s is not a path of a new folder" % folder, "give an absolute path such as /root/before", 2)
    if os.path.lexists(folder):
        raise Problem("%s already exists" % folder, "give a new folder", 3)
    if not os.path.isdir(parent):
        raise Problem("there is no folder %s" % parent, "`mkdir -p %s` creates it" % parent, 3)
    partial, began = "." + name + PARTIAL, time.monotonic()
    private_mounts()
    with store.reading(), ExitStack() as stack:
        snapshot = store.find(str(request["snapshot"]))
        top = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, top)
        if field(request, "rehearse", bool, False):
            tree = stack.enter_context(open_snapshot_tree(store, snapshot))
            found = PathRestore(tree, top, outside=True).rehearse(paths)
            return dict(found, number=snapshot.number, folder=folder)
        beside = stack.enter_context(DirCursor(top))
        remove(beside, partial.encode())
        protocol.step("restore", "copy paths of snapshot %d" % snapshot.number)
        try:
            os.mkdir(partial, 0o700, dir_fd=top)
            beside.down(partial.encode())
            tree = stack.enter_context(open_snapshot_tree(store, snapshot))
            restored = PathRestore(tree, beside.here, outside=True).all(paths)
            sync_file_system(beside.here)
            protocol.step("rename", "")
            os.rename(partial, name, src_dir_fd=top, dst_dir_fd=top)
            os.fsync(top)
        except BaseException as error:
            with DirCursor(top) as again:
                remove(again, partial.encode())
            raise disk_error(error, folder) if isinstance(error, OSError) else error
    return dict(restored, number=snapshot.number, folder=folder, seconds=time.monotonic() - began)


def requested_paths(request: Dict[str, Any], hint: str) -> List[Names]:
    """Return the paths of a request, without those below another one of them.

    Raises:
        Problem: there is none, or one is invalid or is /.
    """
    paths = outermost(split_path(one) for one in field(request, "paths", list))
    if not paths:
        raise Problem("no path is given", "--path /var/spool/slurmctld", 2)
    if not paths[0]:
        raise Problem("/ is the whole overlay", hint, 2)
    return paths


def _copy_overlay(overlay: str, beside: str) -> List[int]:
    """Copy the overlay; return values that change when the original is written."""
    protocol.step("copy", "copy the overlay")
    try:
        source = open(overlay, "rb", 0)
    except FileNotFoundError:
        raise Problem("there is no overlay %s" % overlay, "`sms overlay restore` without --path creates it", 3)
    with source:
        if find_loops(overlay):
            raise Problem("%s is in use" % overlay, "`sms stop`, or copy the paths to a folder with --to DIR", 3)
        state = os.fstat(source.fileno())
        with create_file(beside) as target:
            protocol.detail("its blocks are shared" if copy_into(source.fileno(), target.fileno(), beside) else "")
            os.fchown(target.fileno(), state.st_uid, state.st_gid)
            os.fchmod(target.fileno(), stat.S_IMODE(state.st_mode))
    return file_identity(state)


def _e2fsck(path: str, mode: str, store: Store, what: str, hint: str) -> None:
    status, output = run_e2fsck(path, mode, store.temporary)
    if status & (~1 if mode == "-p" else ~0):
        raise Problem("%s: %s" % (what, output), hint)


def _restore_into(store: Store, snapshot: Snapshot, beside: str, paths: List[Names]) -> PathResults:
    try:
        with open(beside, "r+b", 0) as file:
            with open_snapshot_tree(store, snapshot) as tree, image_mounted(file.fileno(), read_only=False) as folder:
                with open_root(folder) as upper:
                    restored = PathRestore(tree, upper, outside=False).all(paths)
                    _flush(upper, beside)
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Problem("the overlay is too small for it", "`sms overlay grow` enlarges it; nothing was changed")
        raise
    return restored


def _flush(upper: int, beside: str) -> None:
    """Flush the copy. A full file system below it loses writes without an error here, so check its free space."""
    sync_file_system(upper)
    if free_bytes(os.path.dirname(beside)) < MIN_FREE:
        raise disk_error(OSError(errno.ENOSPC, "full"), beside)


@contextmanager
def creating(path: Names) -> Iterator[None]:
    """Name the path of an entry that cannot be created; a full file system is left to the caller.

    Raises:
        Problem: it is not permitted.
    """
    try:
        yield
    except PermissionError as error:
        raise disk_error(error, show(path))


class PathRestore:
    """Copies paths of a snapshot into a target tree.

    Args:
        root: the target tree's root.
        outside: the target tree is not an overlay: a path that the snapshot does not have is an error, whiteouts are
            listed instead of created, and attributes that it does not support are counted.
    """

    def __init__(self, tree: SnapshotTree, root: int, *, outside: bool) -> None:
        self.tree = tree
        self.root = root
        self.outside = outside
        self.copied: List[Names] = []
        self.files: Set[int] = set()
        """Inodes of regular files."""
        self.holes: Dict[int, List[Names]] = {}
        """Names by inode of files with many holes: rsync reads them, and a terabyte costs an attacker nothing."""
        self.links: Dict[int, int] = {}
        """Inodes with several names: how many of them are not copied."""
        self.made: Dict[Names, bool] = {}
        """Folders created above the paths: whether they hide the image's."""
        self.opaque: List[Names] = []
        """Folders that must hide the image's, other than in the snapshot."""
        self.whiteouts: List[str] = []
        self.hollow: List[str] = []
        self.notes: List[str] = []

    def all(self, paths: List[Names]) -> PathResults:
        """Restore every path; return the result of each."""
        results = [self._prepare(path) for path in paths]
        self.tree.lay_out(self.files)
        protocol.detail("%d entries" % len(self.copied))
        later = {name for names in self.holes.values() for name in names}
        now = [one for one in self.copied if one not in later]
        unset = copy(self.tree.root, self.root, now, outside=self.outside)
        for first, *_ in self.holes.values():
            self._copy_data(first)
        if later:  # what has its size and time, rsync does not read, but sets all else; folders get their times again
            unset = copy(self.tree.root, self.root, self.copied, outside=self.outside)
        for path in self.opaque:
            self._hide_image(path)
        self._add_notes(unset)
        return {"paths": results, "notes": self.notes}

    def rehearse(self, paths: List[Names]) -> PathResults:
        """Return what the paths are in the snapshot, without copying anything."""
        results: List[PathResult] = []
        for path in paths:
            with self.tree.cursor() as source, DirCursor(self.root) as target:
                cursor = PathCursor(self, source, target, path)
                cursor.locate()
                results.append({"path": show(path), "kind": kind_of(cursor.entry) if cursor.entry else "image"})
        return {"paths": results, "notes": self.notes}

    def _add_notes(self, unset: int) -> None:
        unlinked = sum(count > 0 for count in self.links.values())
        if unlinked:
            self.notes.append(
                "%d files have further hard links outside of the restored paths; these are separate files now"
                % unlinked
            )
        for paths, text in (
            (self.whiteouts, "removed from the image, so not created"),
            (self.hollow, "only its attributes were changed, its contents are in the image"),
        ):
            self.notes += ["%s: %s" % (text, one) for one in paths[:MAX_NOTED]]
            if len(paths) > MAX_NOTED:
                self.notes.append("%s: %d more" % (text, len(paths) - MAX_NOTED))
        if unset:
            self.notes.append("%d attributes were not set: the target's file system does not support them" % unset)

    def _prepare(self, path: Names) -> PathResult:
        """Remove what is at a path in the target, create the folders above it, and note what is to be copied."""
        with self.tree.cursor() as source, DirCursor(self.root) as target:
            cursor = PathCursor(self, source, target, path)
            cursor.locate()
            found, entry, name = cursor.enter_target(), cursor.entry, path[-1]
            entries = size = removed = 0
            if found:
                removed = self.remove(target, name)
            if entry:
                entries, size = self._add(source, path)
                self._check_opaque(cursor, entry)
            elif cursor.hidden_in_snapshot and not cursor.hidden_in_target:
                with creating(path):
                    os.mknod(name, stat.S_IFCHR, 0, dir_fd=target.here)
            elif cursor.hidden_in_target and not cursor.hidden_in_snapshot:
                self.notes.append("%s of the image stays hidden: a folder above it hides the image's" % show(path))
            kind = kind_of(entry) if entry else "image"
            return {"path": show(path), "kind": kind, "entries": entries, "bytes": size, "removed": removed}

    def remove(self, target: DirCursor, name: bytes) -> int:
        """Remove an entry in the target; return the number of entries removed."""
        if not self.outside:
            make_removable(target, name)
        return remove(target, name)

    def _add(self, source: DirCursor, path: Names) -> Tuple[int, int]:
        """Note an entry and all below it for copying; return the number of entries, and the bytes of files."""
        entries = size = 0
        for below, state in walk(source, path[-1]):
            names, kind = (*path[:-1], *below), kind_of(state)
            if kind == "removed" and self.outside:
                self.whiteouts.append(show(names))
                continue
            self.copied.append(names)
            entries += 1
            if kind == "file" and state.st_ino not in self.files:
                self.files.add(state.st_ino)
                size += min(state.st_size, state.st_blocks * 512)
                if self.outside and has_xattr(source, names[-1], METACOPY):
                    self.hollow.append(show(names))
            if kind == "file" and state.st_size - state.st_blocks * 512 > MAX_HOLES:
                self.holes.setdefault(state.st_ino, []).append(names)
            if kind != "folder" and state.st_nlink > 1:
                self.links[state.st_ino] = self.links.get(state.st_ino, state.st_nlink) - 1
        return entries, size

    def _copy_data(self, path: Names) -> None:
        """Create a file with its data, size and time, in a folder that exists."""
        with self.tree.cursor() as source, DirCursor(self.root) as target, ExitStack() as stack:
            for name in path[:-1]:
                source.down(name)
                target.down(name)
            read = os.open(path[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source.here)
            stack.callback(os.close, read)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            write = os.open(path[-1], flags, 0o600, dir_fd=target.here)
            stack.callback(os.close, write)
            copy_into(read, write, show(path))
            state = os.fstat(read)
            os.utime(write, ns=(state.st_atime_ns, state.st_mtime_ns))

    def _check_opaque(self, cursor: "PathCursor", entry: os.stat_result) -> None:
        """Note whether a folder must hide the image's contents, as they were hidden in the snapshot."""
        if self.outside or kind_of(entry) != "folder" or has_xattr(cursor.source, cursor.path[-1], OPAQUE):
            return
        if cursor.hidden_in_snapshot and not cursor.hidden_in_target:
            self.opaque.append(cursor.path)
        elif cursor.hidden_in_target and not cursor.hidden_in_snapshot:
            shown = show(cursor.path)
            self.notes.append("%s lacks the image's contents: a folder above it hides the image's" % shown)

    def _hide_image(self, path: Names) -> None:
        with DirCursor(self.root) as target:
            for name in path:
                target.down(name)
            os.setxattr(target.here, OPAQUE, b"y")


class PathCursor:
    """Walks the folders of a path in the snapshot and in the target tree."""

    def __init__(self, restore: PathRestore, source: DirCursor, target: DirCursor, path: Names) -> None:
        self.restore = restore
        self.source = source
        self.target = target
        self.path = path
        self.number: int = restore.tree.reader.snapshot.number
        self.entry: State = None
        """The snapshot's entry at the path; None if it is the image's, or there is none."""
        self.hidden_in_snapshot = False
        """Whether a folder above the path hides the image's entry, in the snapshot and in the target."""
        self.hidden_in_target = False
        self.hides: List[bool] = []

    def locate(self) -> None:
        """Walk to the path in the snapshot.

        Raises:
            Problem: it cannot be restored on its own, or, outside of an overlay, at all.
        """
        if all(self._step_in_snapshot(self.path[:depth]) for depth in range(1, len(self.path))):
            self.entry = lstat(self.source, self.path[-1])
        if self.restore.outside and (self.entry is None or kind_of(self.entry) == "removed"):
            why = "has it as removed" if self.entry else "does not have it: it was as in the image, if at all"
            message = "%s: snapshot %d %s" % (show(self.path), self.number, why)
            raise Problem(message, "`sms overlay diff` shows what it has", 3)

    def enter_target(self) -> bool:
        """Walk to the path in the target, creating missing folders; return False if they are neither there nor needed.

        Raises:
            Problem: it cannot be restored on its own.
        """
        wanted = self.entry is not None or self.hidden_in_snapshot
        return all(self._step_in_target(self.path[:depth], wanted) for depth in range(1, len(self.path)))

    def _step_in_snapshot(self, part: Names) -> bool:
        """Enter a folder in the snapshot; return False where the rest of the path is the image's."""
        name = part[-1]
        state = lstat(self.source, name)
        if not state:
            if self.hidden_in_snapshot:
                raise self._parent_needed(part, "there was none")
            return False
        hides = has_xattr(self.source, name, OPAQUE)
        if not descend(self.source, part, "in snapshot %d" % self.number):
            raise self._parent_needed(
                part, "it was removed" if kind_of(state) == "removed" else "it was a " + kind_of(state)
            )
        self.hidden_in_snapshot = self.hidden_in_snapshot or hides
        self.hides.append(hides)
        return True

    def _parent_needed(self, part: Names, what: str) -> Problem:
        return Problem(
            "%s cannot be restored alone: in snapshot %d %s at %s" % (show(self.path), self.number, what, show(part)),
            "--path %s restores that" % show(part),
            3,
        )

    def _step_in_target(self, part: Names, wanted: bool) -> bool:
        """Enter a folder in the target; return False where the image's shows, as in the snapshot."""
        now = lstat(self.target, part[-1])
        if now and stat.S_ISDIR(now.st_mode):
            hides = self.restore.made.get(part, has_xattr(self.target, part[-1], OPAQUE))
            self.hidden_in_target = self.hidden_in_target or hides
        elif wanted:
            self._create(part, now)
        elif now:
            raise Problem(
                "%s was a folder in snapshot %d, with the image's entries in it" % (show(part), self.number),
                "--path %s restores that, and with it %s" % (show(part), show(self.path)),
                3,
            )
        else:
            return False
        self.target.down(part[-1])
        return True

    def _create(self, part: Names, now: State) -> None:
        if now:
            self.restore.remove(self.target, part[-1])
            what = "removed" if kind_of(now) == "removed" else "a " + kind_of(now)
            self.restore.notes.append("%s was %s, and is a folder again" % (show(part), what))
        with creating(part):
            os.mkdir(part[-1], 0o700, dir_fd=self.target.here)
        hides = self.restore.made[part] = self.hides[len(part) - 1]
        self.hidden_in_target = self.hidden_in_target or hides
        self.restore.copied.append(part)
