"""Copy and remove files with all that they have, by rsync(1) and rm(1)."""

import errno
import os
import re
import subprocess
import threading
from contextlib import suppress
from typing import Iterable, List, Tuple

from appliance.agent.check import run_merged
from appliance.agent.freeze import end_with_parent
from appliance.agent.names import LONGEST, DirCursor, Names, show, show_raw, walk
from appliance.agent.protocol import IMMUTABLE_HINT, Problem
from appliance.shared.outputs import begin
from appliance.text import printable

RSYNC = (
    *("rsync", "--links", "--perms", "--times", "--owner", "--group", "--numeric-ids", "--devices", "--specials"),
    # Twice: attributes that rsync reserves for itself as well. -1: times are compared in nanoseconds.
    *("--hard-links", "--acls", "--xattrs", "--xattrs", "--sparse", "--modify-window=-1"),
    *("--no-implied-dirs", "--from0", "--files-from=-"),
)
MAX_LINES, MAX_LINE = 10_000, 16 << 10
"""Messages of rsync that are kept, and bytes of one."""
PARTIAL_TRANSFER = 23
"""Exit status of rsync(1) when some files or attributes were not copied."""
NOT_SET = re.compile(r"rsync: (\[\w+\] )?(rsync_xal_\w+|set_acl): ")
"""Message that an attribute or an ACL was not set."""


def copy(source: int, target: int, paths: Iterable[Names], *, outside: bool) -> int:
    """Copy entries from an open folder to another one, where they must not exist, except for folders.

    Args:
        paths: exactly what is copied: the entries of a folder are not, unless they are given as well.
        outside: attributes that the target's file system does not support are no error.

    Returns:
        The number of these attributes.

    Raises:
        OSError: the target's file system is full.
        Problem: something was not copied.
    """
    # A leading slash is removed; without it, names that begin with # would be comments.
    names = [b"/" + b"/".join(path) for path in paths]
    for name in names:
        if len(name) >= LONGEST:  # rsync would cut it without an error
            raise Problem(
                "%s... is longer than a path may be, and cannot be copied" % show_raw(name[:200]),
                "`sms overlay restore NUMBER --as NAME` writes the whole snapshot to a file",
                3,
            )
    if not names:
        return 0
    child = begin(
        subprocess.Popen,
        [*RSYNC, "/proc/self/fd/%d/" % source, "/proc/self/fd/%d/" % target],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(source, target),
        preexec_fn=end_with_parent,
        env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
    )
    try:
        lines, more = _exchange(child, b"\0".join(names))
    except BaseException:
        child.kill()
        child.communicate()  # until its own children have ended as well
        raise
    return judge(child.returncode, lines, outside=outside) + more * outside


def _exchange(child: "subprocess.Popen[bytes]", names: bytes) -> Tuple[List[str], int]:
    """Send the names to rsync, and wait for it; return its first messages, and how many more attributes were not set.

    A hostile tree has a message for each of millions of files.
    """
    assert child.stdin and child.stderr
    stdin, stderr = child.stdin, child.stderr
    kept: List[str] = []
    more = 0

    def send() -> None:
        with suppress(BrokenPipeError), stdin:
            stdin.write(names)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    for raw in iter(lambda: stderr.readline(MAX_LINE), b""):
        line = raw.decode(errors="replace").rstrip("\n")
        if len(kept) < MAX_LINES:
            kept.append(line)
        elif NOT_SET.match(line):
            more += 1
        elif not line.startswith("rsync error: "):
            kept[-1] = line  # such as of a full disk
    sender.join()
    child.wait()
    return kept, more


def judge(status: int, lines: List[str], *, outside: bool) -> int:
    """Return the number of attributes that were not set, from rsync's exit status and messages; raises as ``copy``."""
    errors = [line for line in lines if not line.startswith("rsync error: ")]
    failed = [line for line in errors if not (outside and NOT_SET.match(line))]
    unset = len(errors) - len(failed)
    for number in (errno.ENOSPC, errno.EDQUOT):
        if any(line.endswith(" (%d)" % number) for line in failed):
            raise OSError(number, os.strerror(number))
    if status and not (status == PARTIAL_TRANSFER and unset and not failed):
        shown = " / ".join(
            line if len(line) < 300 else line[:140] + "..." + line[-140:] for line in (failed or lines)[:3]
        )
        refused = not outside and any(line.endswith(" (%d)" % errno.EPERM) for line in failed)
        raise Problem("rsync ended with status %d: %s" % (status, printable(shown)), IMMUTABLE_HINT if refused else "")
    return unset


def remove(cursor: DirCursor, name: bytes) -> int:
    """Remove an entry of the cursor's folder, with all below it; return the number of entries removed.

    Raises:
        Problem: it cannot be removed.
    """
    count = sum(1 for _ in walk(cursor, name))
    status, output = _run_on(cursor, name, "rm", "-rf") if count else (0, "")
    if status:
        raise Problem("%s cannot be removed: %s" % (show([name]), printable(output, 500)), IMMUTABLE_HINT)
    return count


def make_removable(cursor: DirCursor, name: bytes) -> None:
    """Clear chattr(1)'s flags that prevent the removal of an entry and of all below it.

    Only for a file system that no other process writes to: chattr works by path.
    """
    _run_on(cursor, name, "chattr", "-R", "-f", "-ia")


def _run_on(cursor: DirCursor, name: bytes, *argv: str) -> Tuple[int, str]:
    return run_merged([*argv, b"/proc/self/fd/%d/%s" % (cursor.here, name)], pass_fds=(cursor.here,))
