"""Takes single files and folders back out of a snapshot: into a copy of the overlay, or into a folder of the host."""

import errno
import os
import stat
import time
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, List, Set, Tuple

from appliance.agent import ext, words
from appliance.agent.check import run_e2fsck
from appliance.agent.clone import copy_into
from appliance.agent.copier import CARRIED, Copier, Counts, free_folder, remove, set_flags
from appliance.agent.freeze import find_loops, private_mounts, sync_file_system
from appliance.agent.loops import image_mounted
from appliance.agent.names import Ladder, Names, kind_of, outermost, show, split_path
from appliance.agent.sides import Past, open_past, open_root
from appliance.agent.store import Snapshot, Store, full
from appliance.agent.tree import OPAQUE, State, descend, has, look
from appliance.agent.words import Problem, field
from appliance.shared.files import free_bytes, sync_folder

BESIDE = ".with-paths"
PARTIAL = ".sms-partial"
LINKS = b".sms-links"
ROOM_LEFT = 4 << 20
"""Where less is free, a write may have been lost."""
TOLD = 10
"""Paths of one kind that are named."""


def restore_paths(request: Dict[str, Any]) -> Dict[str, Any]:
    """Make a copy of a stopped appliance's overlay, beside it, that has ``paths`` as a snapshot has them.

    ``place_paths`` puts it in the overlay's place, given what this gives. Whoever asks holds the host's lock.

    Raises:
        Problem: a path cannot be brought back on its own, or something is damaged; nothing was changed.
    """
    store = Store(field(request, "store", str))
    overlay = field(request, "overlay", str)
    paths = wanted_paths(request, "without --path all of it is restored")
    beside, began = overlay + BESIDE, time.monotonic()
    begin()
    with store.reading():
        snapshot = store.find(str(request["snapshot"]))
        os.makedirs(store.temporary, 0o700, exist_ok=True)
        try:
            was = _copy_overlay(overlay, beside)
            _e2fsck(beside, "-p", store, "the overlay is damaged", "`sms overlay restore` puts all of a snapshot back")
            words.step("bring back", "bring back what snapshot %d has" % snapshot.number)
            told = _bring_back(store, snapshot, beside, paths)
            words.step("check", "check the copy")
            _e2fsck(beside, "-n", store, "the copy is damaged", "the overlay is as it was; run it again")
        except BaseException as error:
            if os.path.lexists(beside):
                os.unlink(beside)
            if isinstance(error, ext.Unknown):
                raise Problem("its file system is damaged: %s" % error, "`sms overlay verify` tells which are whole")
            raise
    return dict(told, number=snapshot.number, staged=beside, was=was, seconds=time.monotonic() - began)


def place_paths(request: Dict[str, Any]) -> Dict[str, Any]:
    """Put the copy in the overlay's place.

    Raises:
        Problem: the overlay is in use, or is not the one that was copied.
    """
    overlay = field(request, "overlay", str)
    beside = overlay + BESIDE
    words.step("rename", "")
    if find_loops(overlay) or _identity(os.stat(overlay)) != field(request, "was", list):
        os.unlink(beside)
        raise Problem("the overlay was used meanwhile", "it is as it was; stop the appliance, then run this again", 3)
    os.rename(beside, overlay)
    sync_folder(os.path.dirname(overlay))
    return {}


def extract_paths(request: Dict[str, Any]) -> Dict[str, Any]:
    """Bring ``paths`` of a snapshot into a new folder of the host.

    With ``rehearse`` nothing is brought.

    Raises:
        Problem: the folder is there already, or a path is not in the snapshot; nothing was changed.
    """
    store = Store(field(request, "store", str))
    folder = os.path.normpath(field(request, "folder", str))
    paths = wanted_paths(request, "name what is wanted, or restore all with --as")
    parent, name = os.path.split(folder)
    if not os.path.isabs(folder) or not name:
        raise Problem("%s is no path of a new folder" % folder, "give a whole path such as /root/before", 2)
    if os.path.lexists(folder):
        raise Problem("%s is there already" % folder, "name a new folder", 3)
    if not os.path.isdir(parent):
        raise Problem("there is no folder %s" % parent, "`mkdir -p %s` makes it" % parent, 3)
    partial, began = "." + name + PARTIAL, time.monotonic()
    begin()
    with store.reading(), ExitStack() as stack:
        snapshot = store.find(str(request["snapshot"]))
        top = stack.enter_context(_opened(parent))
        if field(request, "rehearse", bool, False):
            past = stack.enter_context(open_past(store, snapshot))
            return dict(Bringing(past, top, top, outside=True).rehearse(paths), number=snapshot.number, folder=folder)
        beside = stack.enter_context(Ladder(top))
        remove(beside, partial.encode())
        words.step("bring back", "take it out of snapshot %d" % snapshot.number)
        try:
            os.mkdir(partial, 0o700, dir_fd=top)
            beside.down(partial.encode())
            past = stack.enter_context(open_past(store, snapshot))
            told = Bringing(past, beside.here, beside.here, outside=True).all(paths)
            sync_file_system(beside.here)
            words.step("rename", "")
            os.rename(partial, name, src_dir_fd=top, dst_dir_fd=top)
            os.fsync(top)
        except BaseException as error:
            with Ladder(top) as again:
                remove(again, partial.encode())
            if isinstance(error, ext.Unknown):
                raise Problem("its file system is damaged: %s" % error, "`sms overlay verify` tells which are whole")
            raise full(error, folder) if isinstance(error, OSError) else error
    return dict(told, number=snapshot.number, folder=folder, seconds=time.monotonic() - began)


def begin() -> None:
    """Mounts are ours alone; modes are as they are given."""
    private_mounts()
    os.umask(0)


def wanted_paths(request: Dict[str, Any], hint: str) -> List[Names]:
    """The paths of a request, those below another one left out.

    Raises:
        Problem: there is none, or one is none, or is everything.
    """
    paths = outermost(split_path(one) for one in field(request, "paths", list))
    if not paths:
        raise Problem("no path is given", "--path /var/spool/slurmctld", 2)
    if not paths[0]:
        raise Problem("/ is all of it", hint, 2)
    return paths


def _copy_overlay(overlay: str, beside: str) -> List[int]:
    """A copy of the overlay; give what tells whether it has changed since."""
    words.step("copy", "copy the overlay")
    if os.path.lexists(beside):
        os.unlink(beside)
    try:
        source = os.open(overlay, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Problem("there is no overlay %s" % overlay, "`sms overlay restore` without --path makes it", 3)
    try:
        if find_loops(overlay):
            raise Problem("%s is in use" % overlay, "`sms stop`, or take it out with --to DIR", 3)
        state = os.fstat(source)
        target = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            words.detail("its blocks are shared" if copy_into(source, target, beside) else "")
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
    status, said = run_e2fsck(path, mode, store.temporary)
    if status & (~1 if mode == "-p" else ~0):
        raise Problem("%s: %s" % (what, said), hint)


def _bring_back(store: Store, snapshot: Snapshot, beside: str, paths: List[Names]) -> Dict[str, Any]:
    file = os.open(beside, os.O_RDWR | os.O_CLOEXEC)
    try:
        with open_past(store, snapshot) as past, image_mounted(file, read_only=False) as folder:
            with open_root(folder) as upper, _opened(folder) as top:
                told = Bringing(past, upper, top, outside=False).all(paths)
                _settle(top, beside)
        os.fsync(file)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Problem("the overlay has no room for it", "`sms overlay grow` makes it larger; nothing was changed")
        raise
    finally:
        os.close(file)
    return told


def _settle(top: int, beside: str) -> None:
    """All of it goes into the file. A file system below that is full loses writes, and says so to nobody here."""
    sync_file_system(top)
    if free_bytes(os.path.dirname(beside)) < ROOM_LEFT:
        raise full(OSError(errno.ENOSPC, "full"), beside)


@contextmanager
def _opened(folder: str) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Bringing:
    """Paths of a snapshot on their way into another tree.

    Args:
        root: the other tree's root.
        spare: a folder of its file system for what is needed on the way.
        outside: the other tree is no overlay: what is not in the snapshot cannot be brought.
    """

    def __init__(self, past: Past, root: int, spare: int, *, outside: bool) -> None:
        self.past = past
        self.root = root
        self.spare = spare
        self.outside = outside
        self.made: Set[Names] = set()
        self.links_name = LINKS
        self.notes: List[str] = []

    def all(self, paths: List[Names]) -> Dict[str, Any]:
        """Bring every path; tell what became of each."""
        told = []
        with self._links() as links:
            copier = Copier(self.past, links, outside=self.outside)
            for path in paths:
                words.detail(show(path))
                entries, size = copier.made.entries, copier.made.bytes
                kind, gone = self._one(copier, path)
                new, more = copier.made.entries - entries, copier.made.bytes - size
                told.append({"path": show(path), "kind": kind, "entries": new, "bytes": more, "removed": gone})
            parted = copier.finish()
        if parted:
            self.notes.append(
                "%d files had more names outside of what was brought back, and share nothing now" % parted
            )
        self._tell(copier.made)
        return {"paths": told, "notes": self.notes}

    def rehearse(self, paths: List[Names]) -> Dict[str, Any]:
        """Say what the paths are in the snapshot, and bring nothing."""
        told = []
        copier = Copier(self.past, self.spare, outside=self.outside)
        for path in paths:
            with self.past.ladder() as source, Ladder(self.root) as target:
                way = Way(self, copier, source, target, path)
                way.look_back()
                told.append({"path": show(path), "kind": kind_of(way.there) if way.there else "image"})
        return {"paths": told, "notes": self.notes}

    @contextmanager
    def _links(self) -> Iterator[int]:
        if self.outside:  # what the container has may bear any name
            self.links_name = LINKS + b"-" + os.urandom(8).hex().encode()
        with Ladder(self.spare) as ladder:
            remove(ladder, self.links_name)
            os.mkdir(self.links_name, 0o700, dir_fd=self.spare)
            ladder.down(self.links_name)
            yield ladder.here
        os.rmdir(self.links_name, dir_fd=self.spare)

    def _tell(self, made: Counts) -> None:
        for told, text in (
            (made.whiteouts, "removed from the image, so not made"),
            (made.hollow, "changed in its attributes only, its contents are in the image"),
        ):
            self.notes += ["%s: %s" % (text, one) for one in told[:TOLD]]
            if len(told) > TOLD:
                self.notes.append("%s: %d more" % (text, len(told) - TOLD))
        if made.unset:
            self.notes.append("%d attributes could not be set: the file system there does not take them" % made.unset)

    def _one(self, copier: Copier, path: Names) -> Tuple[str, int]:
        """Bring one; give what it was in the snapshot, and how many entries gave way."""
        with self.past.ladder() as source, Ladder(self.root) as target:
            way = Way(self, copier, source, target, path)
            way.look_back()
            found, there, name = way.go(), way.there, path[-1]
            gone = 0
            if found:
                way.free()
                gone = remove(target, name)
            if there:
                copier.copy(source, target, name, list(path))
                self._open_or_hide(way, name, there)
            elif way.hidden_then and not way.hidden_now:
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=target.here)
            elif way.hidden_now and not way.hidden_then:
                self.notes.append("%s of the image stays hidden: a folder above it hides the image's" % show(path))
            way.back()
            return kind_of(there) if there else "image", gone

    def _open_or_hide(self, way: "Way", name: bytes, there: os.stat_result) -> None:
        """A folder shows what the image has in it, as far as no folder above it hides that."""
        target = way.target
        if self.outside or kind_of(there) != "folder" or has(target, name, OPAQUE):
            return
        if way.hidden_then and not way.hidden_now:
            path = b"/proc/self/fd/%d/%s" % (target.here, name)
            os.setxattr(path, OPAQUE, b"y", follow_symlinks=False)
        elif way.hidden_now and not way.hidden_then:
            self.notes.append("%s lacks what the image has in it: a folder above it hides the image's" % show(way.path))


class Way:
    """The folders that lead to a path, in the snapshot and in the other tree at once."""

    def __init__(self, bringing: Bringing, copier: Copier, source: Ladder, target: Ladder, path: Names) -> None:
        self.bringing = bringing
        self.copier = copier
        self.source = source
        self.target = target
        self.path = path
        self.number: int = bringing.past.reader.snapshot.number
        self.there: State = None
        """What the snapshot has at the path; None where it is the image's, or nothing."""
        self.hidden_then = False
        """Whether a folder above the path hid the image's, in the snapshot and in the other tree."""
        self.hidden_now = False
        self.states: List[os.stat_result] = []
        self.hides: List[bool] = []
        self.flags: Dict[int, int] = {}

    def look_back(self) -> None:
        """Go there in the snapshot.

        Raises:
            Problem: it cannot be brought back on its own, or, outside of an overlay, at all.
        """
        if all(self._then(self.path[:depth]) for depth in range(1, len(self.path))):
            self.there = look(self.source, self.path[-1])
        if self.bringing.outside and (self.there is None or kind_of(self.there) == "removed"):
            why = "had removed it" if self.there else "has nothing of it: it was the image's, or nothing"
            message = "%s: snapshot %d %s" % (show(self.path), self.number, why)
            raise Problem(message, "`sms overlay diff` tells what it has", 3)

    def go(self) -> bool:
        """Go there in the other tree, making what is missing; False where nothing of the path is there now.

        Raises:
            Problem: it cannot be brought back on its own.
        """
        wanted = self.there is not None or self.hidden_then
        return all(self._now(self.path[:depth], wanted) for depth in range(1, len(self.path)))

    def _then(self, part: Names) -> bool:
        """A step in the snapshot; False where from here on all is the image's."""
        name = part[-1]
        state = look(self.source, name)
        if not state:
            if self.hidden_then:
                raise self._alone(part, "there was none")
            return False
        hides = has(self.source, name, OPAQUE)
        if not descend(self.source, part, "in snapshot %d" % self.number):
            raise self._alone(part, "it was removed" if kind_of(state) == "removed" else "it was a " + kind_of(state))
        self.hidden_then = self.hidden_then or hides
        self.states.append(state)
        self.hides.append(hides)
        return True

    def _alone(self, part: Names, what: str) -> Problem:
        return Problem(
            "%s cannot be taken back alone: in snapshot %d %s at %s" % (show(self.path), self.number, what, show(part)),
            "--path %s takes that back" % show(part),
            3,
        )

    def _now(self, part: Names, wanted: bool) -> bool:
        """A step in the other tree; False where the image's shows, as in the snapshot."""
        now = look(self.target, part[-1])
        if now and stat.S_ISDIR(now.st_mode):
            self.hidden_now = self.hidden_now or has(self.target, part[-1], OPAQUE)
        elif wanted:
            self._make(part, now)
        elif now:
            raise Problem(
                "%s was a folder in snapshot %d, and the image's were in it" % (show(part), self.number),
                "--path %s takes that back, and with it %s" % (show(part), show(self.path)),
                3,
            )
        else:
            return False
        self.target.down(part[-1])
        return True

    def _make(self, part: Names, now: State) -> None:
        self.free()
        if now:
            remove(self.target, part[-1])
            what = "removed" if kind_of(now) == "removed" else "a " + kind_of(now)
            self.bringing.notes.append("%s was %s, and is a folder again" % (show(part), what))
        os.mkdir(part[-1], 0o700, dir_fd=self.target.here)
        self.hidden_now = self.hidden_now or self.hides[len(part) - 1]
        self.bringing.made.add(part)

    def free(self) -> None:
        """Let the folder where we stand be changed."""
        if self.target.depth not in self.flags:
            self.flags[self.target.depth] = free_folder(self.target.here)

    def back(self) -> None:
        """Back to the root; folders that were made get what they have in the snapshot."""
        for depth in range(self.target.depth, -1, -1):
            part = self.path[:depth]
            made = part in self.bringing.made
            if made:
                free_folder(self.target.here)
            elif self.flags.get(depth, 0) & CARRIED:
                set_flags(self.target.here, self.flags[depth] & CARRIED)
            if not depth:
                return
            self.target.up()
            if self.source.depth == depth:
                self.source.up()
            if made:
                self.copier.path = list(part)
                self.copier.dress(self.source.here, self.target.here, part[-1], self.states[depth - 1])
