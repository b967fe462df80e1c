"""Restore single files and folders of a snapshot: into the overlay, or into a folder of the host."""

import errno
import os
import stat
import time
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, List, Set, Tuple

from appliance.agent import ext, protocol
from appliance.agent.check import run_e2fsck
from appliance.agent.clone import copy_into
from appliance.agent.copier import COPIED_FLAGS, Copier, Counts, make_writable, remove, set_flags
from appliance.agent.diff import OPAQUE, State, descend, has_xattr, lstat
from appliance.agent.freeze import find_loops, private_mounts, sync_file_system
from appliance.agent.loops import image_mounted
from appliance.agent.names import DirCursor, Names, kind_of, outermost, show, split_path
from appliance.agent.protocol import Problem, field
from appliance.agent.store import Snapshot, Store, disk_error
from appliance.agent.trees import SnapshotTree, open_root, open_snapshot_tree
from appliance.shared.files import free_bytes, sync_folder

BESIDE = ".with-paths"
PARTIAL = ".sms-partial"
LINKS = b".sms-links"
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
    prepare_process()
    with store.reading():
        snapshot = store.find(str(request["snapshot"]))
        os.makedirs(store.temporary, 0o700, exist_ok=True)
        try:
            was = _copy_overlay(overlay, beside)
            _e2fsck(
                beside,
                "-p",
                store,
                "the overlay is damaged",
                "`sms overlay restore` without --path restores a whole snapshot",
            )
            protocol.step("restore", "restore paths of snapshot %d" % snapshot.number)
            restored = _restore_into(store, snapshot, beside, paths)
            protocol.step("check", "check the copy")
            _e2fsck(beside, "-n", store, "the copy is damaged", "the overlay is unchanged; run it again")
        except BaseException as error:
            if os.path.lexists(beside):
                os.unlink(beside)
            if isinstance(error, ext.Unknown):
                raise Problem(
                    "its file system is damaged: %s" % error, "`sms overlay verify` shows which are undamaged"
                )
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
    if find_loops(overlay) or _identity(os.stat(overlay)) != field(request, "was", list):
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
    prepare_process()
    with store.reading(), ExitStack() as stack:
        snapshot = store.find(str(request["snapshot"]))
        top = stack.enter_context(_opened(parent))
        if field(request, "rehearse", bool, False):
            tree = stack.enter_context(open_snapshot_tree(store, snapshot))
            found = PathRestore(tree, top, top, outside=True).rehearse(paths)
            return dict(found, number=snapshot.number, folder=folder)
        beside = stack.enter_context(DirCursor(top))
        remove(beside, partial.encode())
        protocol.step("restore", "copy paths of snapshot %d" % snapshot.number)
        try:
            os.mkdir(partial, 0o700, dir_fd=top)
            beside.down(partial.encode())
            tree = stack.enter_context(open_snapshot_tree(store, snapshot))
            restored = PathRestore(tree, beside.here, beside.here, outside=True).all(paths)
            sync_file_system(beside.here)
            protocol.step("rename", "")
            os.rename(partial, name, src_dir_fd=top, dst_dir_fd=top)
            os.fsync(top)
        except BaseException as error:
            with DirCursor(top) as again:
                remove(again, partial.encode())
            if isinstance(error, ext.Unknown):
                raise Problem(
                    "its file system is damaged: %s" % error, "`sms overlay verify` shows which are undamaged"
                )
            raise disk_error(error, folder) if isinstance(error, OSError) else error
    return dict(restored, number=snapshot.number, folder=folder, seconds=time.monotonic() - began)


def prepare_process() -> None:
    """Make mounts private, and clear the umask so that modes are set exactly."""
    private_mounts()
    os.umask(0)


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
    if os.path.lexists(beside):
        os.unlink(beside)
    try:
        source = os.open(overlay, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Problem("there is no overlay %s" % overlay, "`sms overlay restore` without --path creates it", 3)
    try:
        if find_loops(overlay):
            raise Problem("%s is in use" % overlay, "`sms stop`, or copy the paths to a folder with --to DIR", 3)
        state = os.fstat(source)
        target = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            protocol.detail("its blocks are shared" if copy_into(source, target, beside) else "")
            os.fchown(target, state.st_uid, state.st_gid)
            os.fchmod(target, stat.S_IMODE(state.st_mode))
        finally:
            os.close(target)
    finally:
        os.close(source)
    return _identity(state)


def _identity(state: os.stat_result) -> List[int]:
    return [state.st_ino, state.st_size, state.st_mtime_ns]


def _e2fsck(path: str, mode: str, store: Store, what: str, hint: str) -> None:
    status, output = run_e2fsck(path, mode, store.temporary)
    if status & (~1 if mode == "-p" else ~0):
        raise Problem("%s: %s" % (what, output), hint)


def _restore_into(store: Store, snapshot: Snapshot, beside: str, paths: List[Names]) -> Dict[str, Any]:
    file = os.open(beside, os.O_RDWR | os.O_CLOEXEC)
    try:
        with open_snapshot_tree(store, snapshot) as tree, image_mounted(file, read_only=False) as folder:
            with open_root(folder) as upper, _opened(folder) as top:
                restored = PathRestore(tree, upper, top, outside=False).all(paths)
                _flush(top, beside)
        os.fsync(file)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Problem("the overlay is too small for it", "`sms overlay grow` enlarges it; nothing was changed")
        raise
    finally:
        os.close(file)
    return restored


def _flush(top: int, beside: str) -> None:
    """Flush the copy. A full file system below it loses writes without an error here, so check its free space."""
    sync_file_system(top)
    if free_bytes(os.path.dirname(beside)) < MIN_FREE:
        raise disk_error(OSError(errno.ENOSPC, "full"), beside)


@contextmanager
def _opened(folder: str) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class PathRestore:
    """Copies paths of a snapshot into a target tree.

    Args:
        root: the target tree's root.
        scratch: a folder of its file system for temporary entries.
        outside: the target tree is not an overlay: a path that the snapshot does not have is an error.
    """

    def __init__(self, tree: SnapshotTree, root: int, scratch: int, *, outside: bool) -> None:
        self.tree = tree
        self.root = root
        self.scratch = scratch
        self.outside = outside
        self.made: Set[Names] = set()
        self.links_name = LINKS
        self.notes: List[str] = []

    def all(self, paths: List[Names]) -> Dict[str, Any]:
        """Restore every path; return the result of each."""
        results = []
        with self._links() as links:
            copier = Copier(self.tree, links, outside=self.outside)
            for path in paths:
                protocol.detail(show(path))
                entries, size = copier.counts.entries, copier.counts.bytes
                kind, removed = self._restore_one(copier, path)
                new, more = copier.counts.entries - entries, copier.counts.bytes - size
                results.append({"path": show(path), "kind": kind, "entries": new, "bytes": more, "removed": removed})
            unlinked = copier.finish()
        if unlinked:
            self.notes.append(
                "%d files have further hard links outside of the restored paths; these are separate files now"
                % unlinked
            )
        self._add_notes(copier.counts)
        return {"paths": results, "notes": self.notes}

    def rehearse(self, paths: List[Names]) -> Dict[str, Any]:
        """Return what the paths are in the snapshot, without copying anything."""
        results = []
        copier = Copier(self.tree, self.scratch, outside=self.outside)
        for path in paths:
            with self.tree.cursor() as source, DirCursor(self.root) as target:
                cursor = PathCursor(self, copier, source, target, path)
                cursor.locate()
                results.append({"path": show(path), "kind": kind_of(cursor.entry) if cursor.entry else "image"})
        return {"paths": results, "notes": self.notes}

    @contextmanager
    def _links(self) -> Iterator[int]:
        if self.outside:  # restored files may have any name
            self.links_name = LINKS + b"-" + os.urandom(8).hex().encode()
        with DirCursor(self.scratch) as cursor:
            remove(cursor, self.links_name)
            os.mkdir(self.links_name, 0o700, dir_fd=self.scratch)
            cursor.down(self.links_name)
            yield cursor.here
        os.rmdir(self.links_name, dir_fd=self.scratch)

    def _add_notes(self, counts: Counts) -> None:
        for paths, text in (
            (counts.whiteouts, "removed from the image, so not created"),
            (counts.hollow, "only its attributes were changed, its contents are in the image"),
        ):
            self.notes += ["%s: %s" % (text, one) for one in paths[:MAX_NOTED]]
            if len(paths) > MAX_NOTED:
                self.notes.append("%s: %d more" % (text, len(paths) - MAX_NOTED))
        if counts.unset:
            self.notes.append(
                "%d attributes were not set: the target's file system does not support them" % counts.unset
            )

    def _restore_one(self, copier: Copier, path: Names) -> Tuple[str, int]:
        """Restore one path; return its kind in the snapshot, and the number of entries removed in the target."""
        with self.tree.cursor() as source, DirCursor(self.root) as target:
            cursor = PathCursor(self, copier, source, target, path)
            cursor.locate()
            found, entry, name = cursor.enter_target(), cursor.entry, path[-1]
            removed = 0
            if found:
                cursor.make_writable()
                removed = remove(target, name)
            if entry:
                copier.copy(source, target, name, list(path))
                self._set_opaque(cursor, name, entry)
            elif cursor.hidden_in_snapshot and not cursor.hidden_in_target:
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=target.here)
            elif cursor.hidden_in_target and not cursor.hidden_in_snapshot:
                self.notes.append("%s of the image stays hidden: a folder above it hides the image's" % show(path))
            cursor.leave_target()
            return kind_of(entry) if entry else "image", removed

    def _set_opaque(self, cursor: "PathCursor", name: bytes, entry: os.stat_result) -> None:
        """Hide the image's contents of a folder if they were hidden in the snapshot; note if they cannot be shown."""
        target = cursor.target
        if self.outside or kind_of(entry) != "folder" or has_xattr(target, name, OPAQUE):
            return
        if cursor.hidden_in_snapshot and not cursor.hidden_in_target:
            path = b"/proc/self/fd/%d/%s" % (target.here, name)
            os.setxattr(path, OPAQUE, b"y", follow_symlinks=False)
        elif cursor.hidden_in_target and not cursor.hidden_in_snapshot:
            shown = show(cursor.path)
            self.notes.append("%s lacks the image's contents: a folder above it hides the image's" % shown)


class PathCursor:
    """Walks the folders of a path in the snapshot and in the target tree."""

    def __init__(self, restore: PathRestore, copier: Copier, source: DirCursor, target: DirCursor, path: Names) -> None:
        self.restore = restore
        self.copier = copier
        self.source = source
        self.target = target
        self.path = path
        self.number: int = restore.tree.reader.snapshot.number
        self.entry: State = None
        """The snapshot's entry at the path; None if it is the image's, or there is none."""
        self.hidden_in_snapshot = False
        """Whether a folder above the path hides the image's entry, in the snapshot and in the target."""
        self.hidden_in_target = False
        self.states: List[os.stat_result] = []
        self.hides: List[bool] = []
        self.flags: Dict[int, int] = {}

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
        self.states.append(state)
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
            self.hidden_in_target = self.hidden_in_target or has_xattr(self.target, part[-1], OPAQUE)
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
        self.make_writable()
        if now:
            remove(self.target, part[-1])
            what = "removed" if kind_of(now) == "removed" else "a " + kind_of(now)
            self.restore.notes.append("%s was %s, and is a folder again" % (show(part), what))
        os.mkdir(part[-1], 0o700, dir_fd=self.target.here)
        self.hidden_in_target = self.hidden_in_target or self.hides[len(part) - 1]
        self.restore.made.add(part)

    def make_writable(self) -> None:
        """Clear the flags that prevent changes to the current folder of the target."""
        if self.target.depth not in self.flags:
            self.flags[self.target.depth] = make_writable(self.target.here)

    def leave_target(self) -> None:
        """Walk back to the root; set the metadata of created folders, and restore the flags of the others."""
        for depth in range(self.target.depth, -1, -1):
            part = self.path[:depth]
            made = part in self.restore.made
            if made:
                make_writable(self.target.here)
            elif self.flags.get(depth, 0) & COPIED_FLAGS:
                set_flags(self.target.here, self.flags[depth] & COPIED_FLAGS)
            if not depth:
                return
            self.target.up()
            if self.source.depth == depth:
                self.source.up()
            if made:
                self.copier.path = list(part)
                self.copier.apply_metadata(self.source.here, self.target.here, part[-1], self.states[depth - 1])
