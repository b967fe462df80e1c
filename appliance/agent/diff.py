"""Compare two trees of an overlay: walk both in the same order, without holding either in memory."""

import errno
import os
import stat
from contextlib import ExitStack, closing
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from appliance.agent import protocol
from appliance.agent.freeze import private_mounts
from appliance.agent.names import (
    DirCursor,
    Names,
    State,
    enter,
    kind_of,
    lstat,
    outermost,
    path_fields,
    show,
    show_raw,
    split_path,
    walk,
)
from appliance.agent.protocol import Problem, field
from appliance.agent.store import Store
from appliance.agent.trees import Contents, Tree, open_current_tree, open_snapshot_tree

OVERLAY = "trusted.overlay."
OPAQUE, ORIGIN = OVERLAY + "opaque", OVERLAY + "origin"
INTERNAL = {OVERLAY + name for name in ("opaque", "origin", "impure", "nlink", "uuid")}
"""Attributes internal to overlayfs, which the container does not see."""
COARSE_S = 2
"""A ctime of whole seconds may hide a write up to so many seconds later."""
BATCH = 200
"""Differences per message."""

Row = Dict[str, Any]


def diff(request: Dict[str, Any]) -> Dict[str, Any]:
    """Report the differences between two snapshots, or between a snapshot and the current overlay.

    The request's ``a`` and ``b`` are numbers of snapshots, ``latest``, or None for the current overlay. ``paths``
    limits the comparison; ``limit`` is the number of reported differences (None: all, with new and removed folders
    file by file); ``lock`` is the host's lock, if the current overlay is compared and the caller does not hold it.

    Raises:
        Problem: one of them does not exist, or is damaged.
    """
    store = Store(field(request, "store", str))
    paths = outermost(split_path(one) for one in field(request, "paths", list, []) or ["/"])
    private_mounts()
    with ExitStack() as stack:
        stack.enter_context(store.reading())
        protocol.step("open", "open the trees")
        trees, numbers = [], []
        for key in ("a", "b"):
            wanted = request.get(key)
            if wanted is None:
                overlay, lock = field(request, "overlay", str), field(request, "lock", str, "")
                trees.append(stack.enter_context(open_current_tree(store, overlay, lock)))
            else:
                snapshot = store.find(str(wanted))
                trees.append(stack.enter_context(open_snapshot_tree(store, snapshot)))
            numbers.append(None if wanted is None else snapshot.number)
        protocol.step("compare", "compare")
        report = Report(field(request, "limit", (int, type(None)), None))  # type: ignore[arg-type]
        for path in paths:
            TreeDiff(trees[0], trees[1], report).run(path)
        report.flush()
    return dict(report.summary(), a=numbers[0], b=numbers[1])


class Report:
    """Sends differences as they are found, and counts them."""

    def __init__(self, limit: Optional[int]) -> None:
        self.limit = limit
        self.counts = {"added": 0, "changed": 0, "gone": 0}
        self.lines = 0
        self.rows: List[Row] = []

    @property
    def everything(self) -> bool:
        """Whether new and removed folders are reported file by file."""
        return self.limit is None

    def add(self, names: Sequence[bytes], change: str, **fields: Any) -> None:
        """Add a difference; fields without a value are left out."""
        self.counts[change] += 1 + fields.get("entries", 0)
        self.lines += 1
        if self.limit is not None and self.lines > self.limit:
            return
        row = dict(path_fields(names), change=change)
        row.update((name, value) for name, value in fields.items() if value not in (None, []))
        self.rows.append(row)
        if len(self.rows) >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Send the differences that were not sent yet."""
        if self.rows:
            protocol.send("rows", rows=self.rows)
        self.rows = []

    def summary(self) -> Dict[str, Any]:
        """Return the number of differences, and how many of them were sent."""
        sent = self.lines if self.limit is None else min(self.lines, self.limit)
        return {"counts": self.counts, "lines": self.lines, "told": sent}


class Frame(NamedTuple):
    """A folder being walked: its remaining names, and in which trees it is a folder."""

    names: Iterator[Tuple[bytes, bool, bool]]
    a: bool
    b: bool


class TreeDiff:
    """Compares two trees."""

    def __init__(self, a: Tree, b: Tree, report: Report) -> None:
        self.a = a
        self.b = b
        self.report = report
        self.path: List[bytes] = []
        times = [tree.taken for tree in (a, b) if tree.taken is not None]
        self.exact_before = min(times) - COARSE_S if times else 0.0

    def run(self, path: Names) -> None:
        """Report the differences at ``path`` and below.

        Raises:
            Problem: the path contains a symbolic link.
        """
        with self.a.cursor() as self.at_a, self.b.cursor() as self.at_b:
            if not path:
                self._compare_roots()
                self._walk(self._frame(True, True))
                return
            here_a, here_b = True, True
            for depth, name in enumerate(path[:-1], 1):
                here_a = here_a and descend(self.at_a, path[:depth], "before")
                here_b = here_b and descend(self.at_b, path[:depth], "after")
                self.path.append(name)
            one = Frame(iter([(path[-1], here_a, here_b)]), here_a, here_b)
            found = (here_a and lstat(self.at_a, path[-1])) or (here_b and lstat(self.at_b, path[-1]))
            if not found:
                protocol.note("note: %s is in neither overlay: it is as in the image" % show(path))
            self._walk(one)

    def _compare_roots(self) -> None:
        a, b = os.fstat(self.a.root), os.fstat(self.b.root)
        what = self._attributes(a, b)
        if what:
            self.report.add((), "changed", kind="folder", what=what, **attribute_values(a, b, what))

    def _frame(self, a: bool, b: bool) -> Frame:
        return Frame(merge(self.at_a.names() if a else [], self.at_b.names() if b else []), a, b)

    def _walk(self, first: Frame) -> None:
        stack = [first]
        while stack:
            frame = stack[-1]
            try:
                name, in_a, in_b = next(frame.names)
            except StopIteration:
                stack.pop()
                if stack:
                    self.path.pop()
                    if frame.a:
                        self.at_a.up()
                    if frame.b:
                        self.at_b.up()
                continue
            self.path.append(name)
            state_a = lstat(self.at_a, name) if in_a else None
            state_b = lstat(self.at_b, name) if in_b else None
            go_a, go_b = self._entry(name, state_a, state_b)
            go_a = go_a and enter(self.at_a, name)
            go_b = go_b and enter(self.at_b, name)
            if go_a or go_b:
                stack.append(self._frame(go_a, go_b))
            else:
                self.path.pop()

    def _entry(self, name: bytes, a: State, b: State) -> Tuple[bool, bool]:
        """Report the difference in one name; return for each tree whether to enter the folder of that name."""
        there_a, there_b = is_there(a), is_there(b)
        if a and b and there_a and there_b:
            return self._both(name, a, b)
        if a and there_a:
            return self._gone(name, a, b), False
        if b and there_b:
            return False, self._added(name, a, b)
        if a and not b:
            self.report.add(self.path, "added", kind="image", image="shows")
        elif b and not a:
            self.report.add(self.path, "gone", kind="image", image="removed")
        return False, False

    def _both(self, name: bytes, a: os.stat_result, b: os.stat_result) -> Tuple[bool, bool]:
        kind_a, kind_b = kind_of(a), kind_of(b)
        folder_a, folder_b = kind_a == "folder", kind_b == "folder"
        if kind_a != kind_b:
            below = {} if self.report.everything else self._below(name, a, b)
            self.report.add(self.path, "changed", kind=kind_b, was=kind_a, what=["type"], **below)
            return folder_a and self.report.everything, folder_b and self.report.everything
        what = self._what(name, a, b)
        image = None
        if folder_a and not self._same_inode(a, b):
            before, after = has_xattr(self.at_a, name, OPAQUE), has_xattr(self.at_b, name, OPAQUE)
            image = None if before == after else "hides" if after else "shows"
        if what or image:
            values = attribute_values(a, b, what)
            self.report.add(self.path, "changed", kind=kind_b, what=what, image=image, **values)
        return folder_a, folder_b

    def _below(self, name: bytes, a: State, b: State) -> Dict[str, int]:
        """Count what is below a folder that exists in one tree only."""
        entries = count = 0
        for cursor, state in ((self.at_a, a), (self.at_b, b)):
            if state and stat.S_ISDIR(state.st_mode):
                more, size = measure(cursor, name)
                entries, count = entries + more, count + size
        return {"entries": entries, "bytes": count}

    def _gone(self, name: bytes, a: os.stat_result, b: State) -> bool:
        kind, everything = kind_of(a), self.report.everything
        fields: Dict[str, Any] = {"kind": kind, "was_size": a.st_size if kind == "file" else None}
        if kind == "folder" and not everything:
            fields.update(self._below(name, a, None))
        if b:
            fields["image"] = "removed"
        elif has_xattr(self.at_a, name, ORIGIN):
            fields["image"] = "shows"
        if fields.get("image") == "shows":
            self.report.add(self.path, "changed", what=["the image's again"], **fields)
        else:
            self.report.add(self.path, "gone", **fields)
        return kind == "folder" and everything

    def _added(self, name: bytes, a: State, b: os.stat_result) -> bool:
        kind, everything = kind_of(b), self.report.everything
        fields: Dict[str, Any] = {"kind": kind, "size": b.st_size if kind == "file" else None}
        from_image = not a and has_xattr(self.at_b, name, ORIGIN)
        if kind == "folder":
            opaque = has_xattr(self.at_b, name, OPAQUE)
            if from_image and not opaque:
                return True  # the image's folder, in which something changed
            if opaque:
                fields["image"] = "hides"
            if not everything:
                fields.update(self._below(name, None, b))
        if from_image:
            self.report.add(self.path, "changed", what=["no longer the image's"], **dict(fields, image="copied"))
        else:
            self.report.add(self.path, "added", **fields)
        return kind == "folder" and everything

    def _same_inode(self, a: os.stat_result, b: os.stat_result) -> bool:
        """Whether an inode is unchanged: every change sets its ctime."""
        same = (
            a.st_ino == b.st_ino
            and a.st_ctime_ns == b.st_ctime_ns
            and a.st_mtime_ns == b.st_mtime_ns
            and a.st_size == b.st_size
            and a.st_mode == b.st_mode
        )
        return same and bool(a.st_ctime_ns % 10**9 or a.st_ctime < self.exact_before)

    def _what(self, name: bytes, a: os.stat_result, b: os.stat_result) -> List[str]:
        """Return what differs in two entries of one kind."""
        if self._same_inode(a, b):
            return []
        what = self._attributes(a, b)
        kind = kind_of(a)
        if kind == "device" and a.st_rdev != b.st_rdev:
            what.append("device")
        try:
            if kind == "link" and read_link(self.at_a, name) != read_link(self.at_b, name):
                what.append("link target")
            if kind == "file":
                what = self._content(name, a, b) + what
            if attributes(self.at_a.here, name) != attributes(self.at_b.here, name):
                what.append("xattr")
        except FileNotFoundError:  # removed meanwhile
            what.append("content")
        if not what and kind != "folder" and a.st_mtime_ns != b.st_mtime_ns:
            what.append("times")
        return what

    def _attributes(self, a: os.stat_result, b: os.stat_result) -> List[str]:
        what = []
        if stat.S_IMODE(a.st_mode) != stat.S_IMODE(b.st_mode):
            what.append("mode")
        if (a.st_uid, a.st_gid) != (b.st_uid, b.st_gid):
            what.append("owner")
        return what

    def _content(self, name: bytes, a: os.stat_result, b: os.stat_result) -> List[str]:
        if a.st_size != b.st_size:
            return ["content", "size"]
        with closing(self.a.contents(self.at_a.here, name, a)) as before:
            with closing(self.b.contents(self.at_b.here, name, b)) as after:
                return [] if same_contents(before, after) else ["content"]


def merge(a: List[bytes], b: List[bytes]) -> Iterator[Tuple[bytes, bool, bool]]:
    """Merge two lists of names; yield each name in order, and whether it is in each list."""
    in_a, in_b = set(a), set(b)
    for name in sorted(in_a | in_b):
        yield name, name in in_a, name in in_b


def same_contents(a: Contents, b: Contents) -> bool:
    """Whether two files have the same contents."""
    if a.size != b.size:
        return False
    for number in sorted({*a.windows(), *b.windows()}):
        token = a.token(number)
        if token is not None and token == b.token(number):
            continue
        if a.window(number) != b.window(number):
            return False
    return True


def is_there(state: State) -> bool:
    """Whether the container sees an entry: a whiteout hides the image's."""
    return state is not None and kind_of(state) != "removed"


def descend(cursor: DirCursor, path: Sequence[bytes], when: str) -> bool:
    """Enter the last folder of a path from its parent; return False if there is no such folder.

    Raises:
        Problem: it is a symbolic link.
    """
    state = lstat(cursor, path[-1])
    if state and stat.S_ISLNK(state.st_mode):
        target = show_raw(read_link(cursor, path[-1]))
        raise Problem(
            "%s was a symbolic link %s, to %s" % (show(path), when, target), "give the path that it points to", 3
        )
    return bool(state and stat.S_ISDIR(state.st_mode) and enter(cursor, path[-1]))


def read_link(cursor: DirCursor, name: bytes) -> bytes:
    """Return the target of a symbolic link."""
    return os.readlink(name, dir_fd=cursor.here)


def attributes(folder: int, name: bytes) -> Dict[str, bytes]:
    """Return the extended attributes of an entry in an open folder, with ACLs, without those internal to overlayfs."""
    path = b"/proc/self/fd/%d/%s" % (folder, name)
    found = {}
    for one in os.listxattr(path, follow_symlinks=False):
        if one not in INTERNAL:
            try:
                found[one] = os.getxattr(path, one, follow_symlinks=False)
            except OSError as error:
                if error.errno != errno.ENODATA:  # removed meanwhile
                    raise
    return found


def has_xattr(cursor: DirCursor, name: bytes, attribute: str) -> bool:
    """Whether an entry has an extended attribute; overlayfs's ``opaque`` must have the value y."""
    try:
        value = os.getxattr(b"/proc/self/fd/%d/%s" % (cursor.here, name), attribute, follow_symlinks=False)
    except OSError:
        return False
    return attribute != OPAQUE or value == b"y"


def attribute_values(a: os.stat_result, b: os.stat_result, what: List[str]) -> Row:
    """Return the old and new values of what differs."""
    row: Row = {}
    if "size" in what:
        row.update(was_size=a.st_size, size=b.st_size)
    if "mode" in what:
        row.update(was_mode="%04o" % stat.S_IMODE(a.st_mode), mode="%04o" % stat.S_IMODE(b.st_mode))
    if "owner" in what:
        row.update(was_owner="%d:%d" % (a.st_uid, a.st_gid), owner="%d:%d" % (b.st_uid, b.st_gid))
    return row


def measure(cursor: DirCursor, name: bytes) -> Tuple[int, int]:
    """Return the number of entries below a folder, and the bytes of the files among them."""
    below = [state.st_size if stat.S_ISREG(state.st_mode) else 0 for path, state in walk(cursor, name) if path[1:]]
    return len(below), sum(below)
