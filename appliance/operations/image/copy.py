"""Copy large files from one host to another: images, and disks of the VM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

from appliance.errors import Busy, SmsError
from appliance.host.base import CommandError, Host
from appliance.host.local import Local
from appliance.operations.env import Env
from appliance.progress import Progress, Step
from appliance.tools import files
from appliance.tools.scripts import script_argv
from appliance.tools.sha256 import find_digest
from appliance.tools.space import SPARE_BYTES, need_space

DIGEST_S = 3600
"""Seconds that reading a file may take."""
LOCK = "/run/sms/{}.{}.copy.lock"
"""Of a copy on the target; with the name of the file and the beginning of its digest."""
Check = Callable[[str], object]


@dataclass(frozen=True)
class HostFile:
    """A file of a host, with the SHA-256 digest of its content in hexadecimal."""

    host: Host
    path: str
    sha256: str


def copy_file(
    env: Env, source: HostFile, target: Host, path: str, what: str, *, check: Check = lambda part: None
) -> bool:
    """Copy a file to ``path`` on a host, readable only by root, unless it is there; return whether anything was sent.

    The file appears when it is complete and verified. A copy that was interrupted is resumed by the next call.

    Args:
        what: names the file in the progress display.
        check: called with the path of the complete copy, before it gets its name; an exception removes the copy.

    Raises:
        Busy: another copy of the file to that host is under way.
        Refused: the target has no room for it.
        SmsError: the copy is corrupt, was interrupted, or does not end where the source said.
    """
    if _is_there(source, target, path):
        return False
    lock = LOCK.format(PurePosixPath(path).name, source.sha256[:16])
    # Of two copies at once, each would continue or replace what the other one has begun.
    with env.locks.hold(target, lock, f"another command copies {source.path} to {target.name}"):
        if _is_there(source, target, path):
            return False
        part = _copy(source, target, path, what, env.progress)
        try:
            check(part)
        except BaseException:
            target.remove(part)
            raise
        files.place(target, part, path)
    return True


def _is_there(source: HostFile, target: Host, path: str) -> bool:
    return find_digest(target, path, needed=False, timeout=DIGEST_S) == source.sha256


def _copy(source: HostFile, target: Host, path: str, what: str, progress: Progress) -> str:
    """Copy it; return the path of the copy. The lock is held.

    Raises:
        As ``copy_file``.
    """
    (size,) = source.host.run("stat", "-c", "%s", "--", source.path).numbers(1)
    # The digest in its name: what is left of another version is not continued.
    part = f"{path}.{source.sha256[:16]}.part"
    done = files.size_of(target, part)
    folder = str(PurePosixPath(path).parent)
    if not 0 < done <= size:
        files.make_folders(target, folder)
        remove_partial(target, path)
        done = 0
    need_space(
        target, folder, size - done + SPARE_BYTES, f"MiB free, {what} may need %d MiB", hint="free some space there"
    )
    if not done:
        files.make_file(target, part)
    fetched = isinstance(target, Local)
    text = f"fetch {what} from {source.host.name}" if fetched else f"send {what} to {target.name}"
    with progress.step(text) as step:
        _append(source, target, part, (done, size), step)
        if find_digest(target, part, timeout=DIGEST_S) != source.sha256:
            target.remove(part)
            raise SmsError(
                f"the copy of {source.path} on {target.name} is corrupt", hint="run it again to send it again"
            )
        step.detail(f"{(size - done) >> 20} MiB, sha256:{source.sha256[:16]}")
    return part


def _append(source: HostFile, target: Host, part: str, position: tuple[int, int], step: Step) -> None:
    """Append the rest of a file to its partial copy; ``position``: bytes that the copy has, and of the file.

    Raises:
        SmsError: the source sends more than that; the copy is removed.
    """
    done, size = position
    dd = ("dd", f"of={part}", "oflag=append", "conv=notrunc", "bs=1M", "status=none")
    with (
        source.host.stream("tail", "-c", f"+{done + 1}", "--", source.path) as reader,
        target.stream(*script_argv("append-locked", str(files.HELD), part, *dd)) as writer,
    ):
        try:
            while (block := reader.read()) and done + len(block) <= size:
                writer.write(block)
                done += len(block)
                step.moved(done, size)
            writer.end()
            writer.result()
            if block:
                target.remove(part)
                message = f"{source.host.name} sends more than the {size} bytes of {source.path}"
                raise SmsError(message, hint="does something write to that file? run it again")
        except CommandError as error:
            if error.result.status == files.HELD:
                raise Busy(f"another command copies {source.path} to {target.name}") from error
            raise
        reader.result()


def remove_partial(host: Host, path: str) -> None:
    """Remove what interrupted copies to ``path`` left; not what a running copy, of another version, holds."""
    where = PurePosixPath(path)
    partial = ("-maxdepth", "1", "-type", "f", "-name", f"{where.name}.*part")
    host.run("find", str(where.parent), *partial, "-exec", "flock", "-n", "{}", "rm", "-f", "--", "{}", ";")
