"""What differs between two trees of an overlay: walked side by side, in order, without holding either in memory."""

import errno
import os
import stat
from contextlib import ExitStack
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from appliance.agent import ext, words
from appliance.agent.freeze import private_mounts
from appliance.agent.names import Ladder, Names, kind_of, outermost, show, show_raw, split_path, tell
from appliance.agent.sides import Contents, Side, open_now, open_past
from appliance.agent.store import Store
from appliance.agent.words import Problem, field

OVERLAY = "trusted.overlay."
OPAQUE, ORIGIN = OVERLAY + "opaque", OVERLAY + "origin"
INTERNAL = {OVERLAY + name for name in ("opaque", "origin", "impure", "nlink", "uuid")}
"""Attributes by which overlayfs keeps its books; no part of what the container sees."""
COARSE_S = 2
"""A ctime of whole seconds may hide a write that came so many seconds later."""
BATCH = 200
"""Differences told at once."""

State = Optional[os.stat_result]
Row = Dict[str, Any]


def diff(request: Dict[str, Any]) -> Dict[str, Any]:
    """Tell what differs between two snapshots, or between one and now.

    The request's ``a`` and ``b`` are numbers of snapshots, ``latest``, or None for now; ``paths`` limits it;
    ``limit`` is how many differences are told (None: all, new and removed folders file by file); ``lock`` the host's
    lock, where one of them is now and the caller does not hold it.

    Raises:
        Problem: one of them is not there, or damaged.
    """
    store = Store(field(request, "store", str))
    paths = outermost(split_path(one) for one in field(request, "paths", list, []) or ["/"])
    private_mounts()
    with ExitStack() as stack:
        stack.enter_context(store.reading())
        words.step("lay out", "lay out what is compared")
        sides, named = [], []
        for key in ("a", "b"):
            wanted = request.get(key)
            if wanted is None:
                overlay, lock = field(request, "overlay", str), field(request, "lock", str, "")
                sides.append(stack.enter_context(open_now(store, overlay, lock)))
            else:
                snapshot = store.find(str(wanted))
                sides.append(stack.enter_context(open_past(store, snapshot)))
            named.append(None if wanted is None else snapshot.number)
        words.step("compare", "compare")
        report = Report(field(request, "limit", (int, type(None)), None))  # type: ignore[arg-type]
        try:
            for path in paths:
                Walk(sides[0], sides[1], report).run(path)
        except ext.Unknown as error:
            raise Problem("its file system is damaged: %s" % error, "`sms overlay verify` tells which are whole")
        report.flush()
    return dict(report.summary(), a=named[0], b=named[1])


class Report:
    """Tells differences as they are found, and counts them."""

    def __init__(self, limit: Optional[int]) -> None:
        self.limit = limit
        self.counts = {"added": 0, "changed": 0, "gone": 0}
        self.lines = 0
        self.rows: List[Row] = []

    @property
    def everything(self) -> bool:
        """Whether new and removed folders are told file by file."""
        return self.limit is None

    def add(self, names: Sequence[bytes], change: str, **fields: Any) -> None:
        """One difference; fields without a value are left out."""
        self.counts[change] += 1 + fields.get("entries", 0)
        self.lines += 1
        if self.limit is not None and self.lines > self.limit:
            return
        row = dict(tell(names), change=change)
        row.update((name, value) for name, value in fields.items() if value not in (None, []))
        self.rows.append(row)
        if len(self.rows) >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Say what was found and not said yet."""
        if self.rows:
            words.say("rows", rows=self.rows)
        self.rows = []

    def summary(self) -> Dict[str, Any]:
        """How many there are, and how many of them were told."""
        told = self.lines if self.limit is None else min(self.lines, self.limit)
        return {"counts": self.counts, "lines": self.lines, "told": told}


class Frame:
    """A folder under way: names left in it, and on which sides it is one."""

    def __init__(self, names: Iterator[Tuple[bytes, bool, bool]], a: bool, b: bool) -> None:
        self.names = names
        self.a = a
        self.b = b


class Walk:
    """Two trees, walked in the same steps."""

    def __init__(self, a: Side, b: Side, report: Report) -> None:
        self.a = a
        self.b = b
        self.report = report
        self.path: List[bytes] = []
        times = [side.taken for side in (a, b) if side.taken is not None]
        self.sure_before = min(times) - COARSE_S if times else 0.0

    def run(self, path: Names) -> None:
        """Tell what differs at ``path`` and below.

        Raises:
            Problem: it leads through a symbolic link.
        """
        with self.a.ladder() as self.at_a, self.b.ladder() as self.at_b:
            if not path:
                self._pair_root()
                self._walk(self._frame(True, True))
                return
            here_a, here_b = True, True
            for depth, name in enumerate(path[:-1], 1):
                here_a = here_a and descend(self.at_a, path[:depth], "before")
                here_b = here_b and descend(self.at_b, path[:depth], "after")
                self.path.append(name)
            one = Frame(iter([(path[-1], here_a, here_b)]), here_a, here_b)
            found = (here_a and look(self.at_a, path[-1])) or (here_b and look(self.at_b, path[-1]))
            if not found:
                words.note("note: nothing of %s is in either: what is there is the image's" % show(path))
            self._walk(one)

    def _pair_root(self) -> None:
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
            state_a = look(self.at_a, name) if in_a else None
            state_b = look(self.at_b, name) if in_b else None
            go_a, go_b = self._entry(name, state_a, state_b)
            go_a = go_a and into(self.at_a, name)
            go_b = go_b and into(self.at_b, name)
            if go_a or go_b:
                stack.append(self._frame(go_a, go_b))
            else:
                self.path.pop()

    def _entry(self, name: bytes, a: State, b: State) -> Tuple[bool, bool]:
        """Tell what differs in one name; say into which side's folder to go."""
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
            before, after = has(self.at_a, name, OPAQUE), has(self.at_b, name, OPAQUE)
            image = None if before == after else "hides" if after else "shows"
        if what or image:
            values = attribute_values(a, b, what)
            self.report.add(self.path, "changed", kind=kind_b, what=what, image=image, **values)
        return folder_a, folder_b

    def _below(self, name: bytes, a: State, b: State) -> Dict[str, int]:
        """What lies below a folder that is one on one side only."""
        entries = count = 0
        for ladder, state in ((self.at_a, a), (self.at_b, b)):
            if state and stat.S_ISDIR(state.st_mode):
                more, size = measure(ladder, name)
                entries, count = entries + more, count + size
        return {"entries": entries, "bytes": count}

    def _gone(self, name: bytes, a: os.stat_result, b: State) -> bool:
        kind, everything = kind_of(a), self.report.everything
        fields: Dict[str, Any] = {"kind": kind, "was_size": a.st_size if kind == "file" else None}
        if kind == "folder" and not everything:
            fields.update(self._below(name, a, None))
        if b:
            fields["image"] = "removed"
        elif has(self.at_a, name, ORIGIN):
            fields["image"] = "shows"
        if fields.get("image") == "shows":
            self.report.add(self.path, "changed", what=["the image's again"], **fields)
        else:
            self.report.add(self.path, "gone", **fields)
        return kind == "folder" and everything

    def _added(self, name: bytes, a: State, b: os.stat_result) -> bool:
        kind, everything = kind_of(b), self.report.everything
        fields: Dict[str, Any] = {"kind": kind, "size": b.st_size if kind == "file" else None}
        from_image = not a and has(self.at_b, name, ORIGIN)
        if kind == "folder":
            opaque = has(self.at_b, name, OPAQUE)
            if from_image and not opaque:
                return True  # the image's folder, with something of its own in it now
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
        """Whether nothing of an inode was touched: no write goes without a new ctime."""
        same = (
            a.st_ino == b.st_ino
            and a.st_ctime_ns == b.st_ctime_ns
            and a.st_mtime_ns == b.st_mtime_ns
            and a.st_size == b.st_size
            and a.st_mode == b.st_mode
        )
        return same and bool(a.st_ctime_ns % 10**9 or a.st_ctime < self.sure_before)

    def _what(self, name: bytes, a: os.stat_result, b: os.stat_result) -> List[str]:
        """What differs in two entries of one kind."""
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
        except FileNotFoundError:  # gone this moment
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
        contents_a = self.a.contents(self.at_a.here, name, a)
        try:
            contents_b = self.b.contents(self.at_b.here, name, b)
            try:
                return [] if same_contents(contents_a, contents_b) else ["content"]
            finally:
                contents_b.close()
        finally:
            contents_a.close()


def merge(a: List[bytes], b: List[bytes]) -> Iterator[Tuple[bytes, bool, bool]]:
    """Names of two sorted lists in order, each with which of them have it."""
    at_a = at_b = 0
    while at_a < len(a) or at_b < len(b):
        if at_b >= len(b) or (at_a < len(a) and a[at_a] < b[at_b]):
            yield a[at_a], True, False
            at_a += 1
        elif at_a >= len(a) or b[at_b] < a[at_a]:
            yield b[at_b], False, True
            at_b += 1
        else:
            yield a[at_a], True, True
            at_a, at_b = at_a + 1, at_b + 1


def same_contents(a: Contents, b: Contents) -> bool:
    """Whether two files hold the same bytes."""
    if a.size != b.size:
        return False
    for number, _, _ in merge_numbers(a.windows(), b.windows()):
        token = a.token(number)
        if token is not None and token == b.token(number):
            continue
        if a.window(number) != b.window(number):
            return False
    return True


def merge_numbers(a: Iterator[int], b: Iterator[int]) -> Iterator[Tuple[int, bool, bool]]:
    """Numbers of two sorted iterators in order, each with which of them have it."""
    one, two = next(a, None), next(b, None)
    while one is not None or two is not None:
        if two is None or (one is not None and one < two):
            assert one is not None
            yield one, True, False
            one = next(a, None)
        elif one is None or two < one:
            yield two, False, True
            two = next(b, None)
        else:
            yield one, True, True
            one, two = next(a, None), next(b, None)


def look(ladder: Ladder, name: bytes) -> State:
    """lstat(2) in the folder that it stands in; None where nothing is."""
    try:
        return os.stat(name, dir_fd=ladder.here, follow_symlinks=False)
    except FileNotFoundError:
        return None


def is_there(state: State) -> bool:
    """Whether the container sees something: a whiteout hides what the image has."""
    return state is not None and kind_of(state) != "removed"


def into(ladder: Ladder, name: bytes) -> bool:
    """Go into a folder; False where it is none any more."""
    try:
        ladder.down(name)
    except OSError:
        return False
    return True


def descend(ladder: Ladder, path: Sequence[bytes], when: str) -> bool:
    """Go into the last folder of a path, standing in the one before it; False where there is none.

    Raises:
        Problem: it is a symbolic link.
    """
    state = look(ladder, path[-1])
    if state and stat.S_ISLNK(state.st_mode):
        target = show_raw(read_link(ladder, path[-1]))
        raise Problem(
            "%s was a symbolic link %s, to %s" % (show(path), when, target), "name the path that it leads to", 3
        )
    return bool(state and stat.S_ISDIR(state.st_mode) and into(ladder, path[-1]))


def read_link(ladder: Ladder, name: bytes) -> bytes:
    """Where a symbolic link leads."""
    return os.readlink(name, dir_fd=ladder.here)


def attributes(folder: int, name: bytes, *, internal: bool = False) -> Dict[str, bytes]:
    """Extended attributes of an entry in an open folder, ACLs among them; those of overlayfs's books if wanted."""
    path = b"/proc/self/fd/%d/%s" % (folder, name)
    found = {}
    for one in os.listxattr(path, follow_symlinks=False):
        if internal or one not in INTERNAL:
            try:
                found[one] = os.getxattr(path, one, follow_symlinks=False)
            except OSError as error:
                if error.errno != errno.ENODATA:  # taken away this moment
                    raise
    return found


def has(ladder: Ladder, name: bytes, attribute: str) -> bool:
    """Whether an entry has an attribute; overlayfs's opaque counts when it says y."""
    try:
        value = os.getxattr(b"/proc/self/fd/%d/%s" % (ladder.here, name), attribute, follow_symlinks=False)
    except OSError:
        return False
    return attribute != OPAQUE or value == b"y"


def attribute_values(a: os.stat_result, b: os.stat_result, what: List[str]) -> Row:
    """The values behind what differs."""
    row: Row = {}
    if "size" in what:
        row.update(was_size=a.st_size, size=b.st_size)
    if "mode" in what:
        row.update(was_mode="%04o" % stat.S_IMODE(a.st_mode), mode="%04o" % stat.S_IMODE(b.st_mode))
    if "owner" in what:
        row.update(was_owner="%d:%d" % (a.st_uid, a.st_gid), owner="%d:%d" % (b.st_uid, b.st_gid))
    return row


def measure(ladder: Ladder, name: bytes) -> Tuple[int, int]:
    """How many entries lie below a folder, and the bytes of the files among them."""
    entries = size = 0
    if not into(ladder, name):
        return 0, 0
    stack = [iter(ladder.names())]
    while stack:
        one = next(stack[-1], None)
        if one is None:
            stack.pop()
            ladder.up()
            continue
        state = look(ladder, one)
        if state is None:
            continue
        entries += 1
        if stat.S_ISREG(state.st_mode):
            size += state.st_size
        elif stat.S_ISDIR(state.st_mode) and into(ladder, one):
            stack.append(iter(ladder.names()))
    return entries, size
