"""Files and streams -> descriptors that the native core reads.

Compressed files are read through the program that knows the format, side by side with the core; zstd by the core
itself where it can.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.errors import CaptureError

STDIN = "-"
ABI = 3
"""Of the core that this file knows."""
HEAD = 1 << 16
"""Bytes that tell what a file is, and when its first packet came."""

ZSTD = b"\x28\xb5\x2f\xfd"
PROGRAMS: tuple[tuple[bytes, tuple[tuple[str, ...], ...]], ...] = (
    (b"\x1f\x8b", (("igzip", "-dc"), ("pigz", "-dc"), ("gzip", "-dc"))),
    (ZSTD, (("zstd", "-qdc"),)),
    (b"\xfd7zXZ\x00", (("xz", "-dc", "--memlimit-decompress=512MiB"),)),
    (b"\x04\x22\x4d\x18", (("lz4", "-dc"),)),
    (b"BZh", (("bzip2", "-dc"),)),
)
"""Compressed files by their first bytes, and the programs that read them, the fastest first."""

_SKIPPABLE = tuple(bytes([byte]) + b"\x2a\x4d\x18" for byte in range(0x50, 0x60))
"""Frames that zstd and lz4 both allow before the first (RFC 8878, 3.1.2)."""


@dataclass
class Source:
    """Where the core reads: a descriptor, what was read of it already, and how it ends.

    Attributes:
        zstd: the core decompresses it.
        place: how many bytes of the file are done, for the progress; None: those that the core has read.
        endless: Ctrl-C is how it ends.
        end: makes whoever writes to it stop.
        verdict: after the end: what is missing of the capture, or "".
    """

    descriptor: int
    prefix: bytes = b""
    zstd: bool = False
    place: Callable[[], int] | None = None
    endless: bool = False
    end: Callable[[], None] = lambda: None
    verdict: Callable[[], str] = lambda: ""


LAST_S = 2.0
"""Seconds that whoever writes to us has after Ctrl-C, which it got too, to say its last."""


def core() -> Any:
    """The native module.

    Raises:
        CaptureError: it was not built, or of other sources.
    """
    try:
        from analysis import _core
    except ImportError as error:
        raise CaptureError(f"the native core is missing: {error}", "in a checkout: make core") from None
    if _core.ABI != ABI:
        raise CaptureError("the native core is of another version", "in a checkout: make core")
    return _core


def name_of(file: str) -> str:
    """What a person calls it."""
    return "standard input" if file == STDIN else file


def check_files(files: Sequence[str]) -> None:
    """Refuse what cannot be captures, before hours are spent on the others.

    Raises:
        CaptureError: nothing is named, something twice, or something that is not there or no file.
    """
    if not files:
        raise CaptureError("no capture is named", "sms classify FILE..., or - for standard input, or --live INTERFACE")
    if files.count(STDIN) > 1:
        raise CaptureError("standard input (-) can be read only once", "name - once")
    seen: dict[tuple[int, int], str] = {}
    for file in files:
        if file == STDIN:
            continue
        status = _status(file)
        if (again := seen.setdefault((status.st_dev, status.st_ino), file)) != file or files.count(file) > 1:
            also = f", as {again} too" if again != file else ""
            raise CaptureError(f"{file} is given twice{also}", "name every file once")


def _status(file: str) -> os.stat_result:
    """What a file is, once it is known that it can be read."""
    try:
        status = Path(file).stat()
        # A named pipe would wait for its writer here.
        if not (stat.S_ISDIR(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            os.close(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", "") or str(error)).lower()
        raise CaptureError(f"{file}: cannot be read: {reason}", "check the path and its permissions") from None
    if stat.S_ISDIR(status.st_mode):
        raise CaptureError(f"{file} is a folder", f"name the files in it: {file.rstrip('/')}/*.pcap")
    return status


def in_order(files: Sequence[str]) -> list[str]:
    """Files by the time of their first packet: what `tcpdump -C -W` leaves is in no order by name."""
    check_files(files)
    if len(files) == 1:
        return list(files)
    return sorted(files, key=lambda file: 2**63 if file == STDIN else _first_time(file))


def _first_time(file: str) -> int:
    if not stat.S_ISREG(Path(file).stat().st_mode):
        return 2**63  # a pipe cannot be looked into and read again
    with opened(file) as source:
        head = source.prefix
        while source.descriptor >= 0 and len(head) < HEAD and (more := os.read(source.descriptor, HEAD - len(head))):
            head += more
        source.end()
    time_ns: int = core().first_time(head, source.zstd)
    return time_ns if time_ns >= 0 else Path(file).stat().st_mtime_ns


def size_of(file: str) -> int:
    """Bytes of a file; 0 where it has no end that is known."""
    if file == STDIN:
        return 0
    status = Path(file).stat()
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


@contextmanager
def opened(file: str) -> Iterator[Source]:
    """A file or standard input, through a decompressor where its first bytes ask for one."""
    try:
        descriptor = sys.stdin.fileno() if file == STDIN else os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CaptureError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    try:
        if file == STDIN and os.isatty(descriptor):
            raise CaptureError("standard input is a terminal", "tcpdump -i IFACE -w - | sms classify -")
        seekable = stat.S_ISREG(os.fstat(descriptor).st_mode)
        here = os.lseek(descriptor, 0, os.SEEK_CUR) if seekable else 0
        head = os.pread(descriptor, 6, here) if seekable else _at_least(descriptor, 6)
        zstd = head.startswith((ZSTD, *_SKIPPABLE)) and core().has_zstd()
        program = () if zstd else _program(head)
        read_already = b"" if seekable else head
        if not program:
            source = Source(descriptor, read_already, zstd=zstd, endless=not seekable)
            if zstd and seekable:
                source.place = lambda: os.lseek(descriptor, 0, os.SEEK_CUR)
            yield source
            return
        with _decompressing(program, descriptor, read_already) as source:
            source.endless = not seekable
            if seekable:
                # The child shares our descriptor's place in the file.
                source.place = lambda: os.lseek(descriptor, 0, os.SEEK_CUR)
            yield source
    finally:
        if file != STDIN:
            os.close(descriptor)


def _at_least(descriptor: int, count: int) -> bytes:
    """The first bytes of a pipe; tcpdump without -U may write nothing before Ctrl-C, which it gets too."""
    head, patience = b"", None
    while len(head) < count:
        try:
            if not select.select([descriptor], [], [], patience)[0]:
                raise KeyboardInterrupt
            more = os.read(descriptor, HEAD)
        except KeyboardInterrupt:
            if patience:
                raise
            patience = LAST_S
            continue
        if not more:
            break
        head += more
    return head


def _program(head: bytes) -> tuple[str, ...]:
    """The decompressor for a file that begins so; () where it is not compressed."""
    for magic, programs in PROGRAMS:
        if head.startswith(magic) or (magic == ZSTD and head.startswith(_SKIPPABLE)):
            for program in programs:
                if path := shutil.which(program[0]):
                    return (path, *program[1:])
            name = programs[-1][0]
            package = {"xz": "xz-utils"}.get(name, name)
            raise CaptureError(f"the capture is compressed, and {name} is not installed", f"apt install {package}")
    return ()


@contextmanager
def _decompressing(program: tuple[str, ...], descriptor: int, prefix: bytes) -> Iterator[Source]:
    feed = subprocess.PIPE if prefix else descriptor
    child = subprocess.Popen(program, stdin=feed, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = child.stdout, child.stderr
    assert output and errors
    _widen(output.fileno())
    if prefix:
        threading.Thread(target=_pump, args=(prefix, descriptor, child.stdin), daemon=True).start()
    words: list[bytes] = []
    listener = threading.Thread(target=lambda: words.append(errors.read(1 << 16)), daemon=True)
    listener.start()

    def verdict() -> str:
        output.close()
        child.wait()
        listener.join()
        if child.returncode in (0, -signal.SIGPIPE):  # the core wanted no more
            return ""
        said = b"".join(words).decode(errors="replace").strip().splitlines()
        return f"{Path(program[0]).name} gave up: {said[-1] if said else f'status {child.returncode}'}"

    try:
        yield Source(output.fileno(), verdict=verdict)
    finally:
        child.kill()
        child.wait()
        output.close()
        listener.join()
        errors.close()


def _pump(prefix: bytes, descriptor: int, to: Any) -> None:
    """Standard input into a decompressor, what was looked at already first."""
    with suppress(OSError):
        block = prefix
        while block:
            to.write(block)
            block = os.read(descriptor, HEAD)
    with suppress(OSError):
        to.close()


def _widen(descriptor: int) -> None:
    """A pipe of a megabyte: fewer turns between the two programs."""
    import fcntl

    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, 1 << 20)
