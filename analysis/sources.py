"""Open files and streams as descriptors for the native core.

Compressed files are piped through the decompressor of their format; zstd is decompressed by the core if possible.
"""

from __future__ import annotations

import fcntl
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
ABI = 5
"""Expected ABI version of the core."""
HEAD = 1 << 16
"""Bytes read to detect the format and the time of the first packet."""

ZSTD = b"\x28\xb5\x2f\xfd"
PROGRAMS: tuple[tuple[bytes, tuple[tuple[str, ...], ...]], ...] = (
    (b"\x1f\x8b", (("igzip", "-dc"), ("pigz", "-dc"), ("gzip", "-dc"))),
    (ZSTD, (("zstd", "-qdc"),)),
    (b"\xfd7zXZ\x00", (("xz", "-dc", "--memlimit-decompress=512MiB"),)),
    (b"\x04\x22\x4d\x18", (("lz4", "-dc"),)),
    (b"BZh", (("bzip2", "-dc"),)),
)
"""Magic bytes of compressed files, and the programs that decompress them, fastest first."""

_SKIPPABLE = tuple(bytes([byte]) + b"\x2a\x4d\x18" for byte in range(0x50, 0x60))
"""Skippable frames that zstd and lz4 allow before the first frame (RFC 8878, 3.1.2)."""


@dataclass
class Source:
    """Input of the core: a descriptor, the bytes already read from it, and how it ends.

    Attributes:
        zstd: whether the core decompresses it.
        place: returns the bytes of the file that are done, for the progress; None: as counted by the core.
        endless: whether it ends only by Ctrl-C.
        end: makes the writer stop.
        error: called after the end; returns the error of the decompressor, or "".
    """

    descriptor: int
    prefix: bytes = b""
    zstd: bool = False
    place: Callable[[], int] | None = None
    endless: bool = False
    end: Callable[[], None] = lambda: None
    error: Callable[[], str] = lambda: ""


GRACE_S = 2.0
"""Seconds that the writer, which also received Ctrl-C, has to flush its output."""


def core() -> Any:
    """Import the native module.

    Raises:
        CaptureError: it was not built, or from other sources.
    """
    try:
        from analysis import _core
    except ImportError as error:
        raise CaptureError(f"the native core is missing: {error}", "in a checkout: make core") from None
    if _core.ABI != ABI:
        raise CaptureError("the native core has another version", "in a checkout: make core")
    return _core


def name_of(file: str) -> str:
    """Return the name for messages."""
    return "standard input" if file == STDIN else file


def check_files(files: Sequence[str]) -> None:
    """Check all files before the first is read, which may take hours.

    Raises:
        CaptureError: no file is given, one is given twice, does not exist or is not readable.
    """
    if not files:
        raise CaptureError("no capture given", "sms classify FILE..., or - for standard input, or --live INTERFACE")
    if files.count(STDIN) > 1:
        raise CaptureError("standard input (-) can be read only once", "name - once")
    seen: dict[tuple[int, int], str] = {}
    for file in files:
        if file == STDIN:
            continue
        status = _status(file)
        if (again := seen.setdefault((status.st_dev, status.st_ino), file)) != file or files.count(file) > 1:
            also = f", also as {again}" if again != file else ""
            raise CaptureError(f"{file} is given twice{also}", "name every file once")


def _status(file: str) -> os.stat_result:
    """Return the status of a readable file.

    Raises:
        CaptureError: it does not exist, is not readable or is a folder.
    """
    try:
        status = Path(file).stat()
        # Opening a named pipe would block until its writer opens it.
        if not (stat.S_ISDIR(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            os.close(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", "") or str(error)).lower()
        raise CaptureError(f"{file}: cannot be read: {reason}", "check the path and its permissions") from None
    if stat.S_ISDIR(status.st_mode):
        raise CaptureError(f"{file} is a folder", f"name the files in it: {file.rstrip('/')}/*.pcap")
    return status


def in_order(files: Sequence[str]) -> list[str]:
    """Sort files by the time of their first packet: files of `tcpdump -C -W` are not in order by name."""
    if len(files) == 1:
        return list(files)
    return sorted(files, key=lambda file: 2**63 if file == STDIN else _first_time(file))


def _first_time(file: str) -> int:
    if not stat.S_ISREG(Path(file).stat().st_mode):
        return 2**63  # a pipe can be read only once
    with opened(file) as source:
        head = source.prefix
        while source.descriptor >= 0 and len(head) < HEAD and (more := os.read(source.descriptor, HEAD - len(head))):
            head += more
        source.end()
    time_ns: int = core().first_time(head, source.zstd)
    return time_ns if time_ns >= 0 else Path(file).stat().st_mtime_ns


def size_of(file: str) -> int:
    """Return the bytes of a regular file, else 0."""
    if file == STDIN:
        return 0
    status = Path(file).stat()
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


@contextmanager
def opened(file: str) -> Iterator[Source]:
    """Open a file or standard input, through a decompressor if it is compressed."""
    try:
        descriptor = sys.stdin.fileno() if file == STDIN else os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CaptureError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    try:
        if file == STDIN and os.isatty(descriptor):
            raise CaptureError("standard input is a terminal", "tcpdump -i IFACE -w - | sms classify -")
        seekable = stat.S_ISREG(os.fstat(descriptor).st_mode)
        here = os.lseek(descriptor, 0, os.SEEK_CUR) if seekable else 0
        head = os.pread(descriptor, 6, here) if seekable else _read_at_least(descriptor, 6)
        zstd = head.startswith((ZSTD, *_SKIPPABLE)) and core().has_zstd()
        program = () if zstd else _decompressor(head)
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
                # The child shares the file offset of this descriptor.
                source.place = lambda: os.lseek(descriptor, 0, os.SEEK_CUR)
            yield source
    finally:
        if file != STDIN:
            os.close(descriptor)


def _read_at_least(descriptor: int, count: int) -> bytes:
    """Read the first bytes of a pipe; tcpdump without -U may write nothing before it receives Ctrl-C, too."""
    head, patience = b"", None
    while len(head) < count:
        try:
            if not select.select([descriptor], [], [], patience)[0]:
                raise KeyboardInterrupt
            more = os.read(descriptor, HEAD)
        except KeyboardInterrupt:
            if patience:
                raise
            patience = GRACE_S
            continue
        if not more:
            break
        head += more
    return head


def _decompressor(head: bytes) -> tuple[str, ...]:
    """Return the decompressor for a file with these first bytes; () if it is not compressed."""
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
    _enlarge_pipe(output.fileno())
    if prefix:
        threading.Thread(target=_pump, args=(prefix, descriptor, child.stdin), daemon=True).start()
    chunks: list[bytes] = []
    stderr_reader = threading.Thread(target=lambda: chunks.append(errors.read(1 << 16)), daemon=True)
    stderr_reader.start()

    def error() -> str:
        output.close()
        child.wait()
        stderr_reader.join()
        if child.returncode in (0, -signal.SIGPIPE):  # SIGPIPE: the core stopped reading
            return ""
        lines = b"".join(chunks).decode(errors="replace").strip().splitlines()
        return f"{Path(program[0]).name} failed: {lines[-1] if lines else f'status {child.returncode}'}"

    try:
        yield Source(output.fileno(), error=error)
    finally:
        child.kill()
        child.wait()
        output.close()
        stderr_reader.join()
        errors.close()


def _pump(prefix: bytes, descriptor: int, to: Any) -> None:
    """Copy standard input into a decompressor, starting with the bytes already read."""
    with suppress(OSError):
        block = prefix
        while block:
            to.write(block)
            block = os.read(descriptor, HEAD)
    with suppress(OSError):
        to.close()


def _enlarge_pipe(descriptor: int) -> None:
    """Enlarge a pipe to a megabyte: fewer context switches."""
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, 1 << 20)
