"""This machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from appliance.errors import SmsError
from appliance.host.base import (
    BLOCK,
    WRITE_BESIDE,
    CommandError,
    CommandTimeout,
    Host,
    OnLine,
    Progress,
    Result,
    check_written,
    count_bytes,
)
from appliance.host.stream import LATE_S, Ears, Stream

ENVIRONMENT = {"LC_ALL": "C.UTF-8", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
"""What commands see besides the caller's own environment: messages that can be read back."""

CONTAINER_TOOLS = ("APPTAINER_", "SINGULARITY_")
PIPE_BYTES = 1 << 20
"""What a pipe of a stream holds, so that both sides work at the same time."""
KEPT = {tool + what for tool in CONTAINER_TOOLS for what in ("TMPDIR", "CACHEDIR")}


def inherited() -> dict[str, str]:
    """The caller's environment without what sites export for their users' containers, such as APPTAINER_BIND."""
    return {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith(CONTAINER_TOOLS)}


@dataclass
class Running:
    """A command under way. Read ``out``, its standard output, to the end; then ask for its ``result``."""

    process: subprocess.Popen[bytes]
    out: int
    said: BinaryIO
    host: str
    argv: tuple[str, ...]
    stopped: bool = False

    def stop(self) -> None:
        """End it as Ctrl-C on a terminal does; asked again, for good. ``out`` comes to its end then."""
        signum, self.stopped = signal.SIGKILL if self.stopped else signal.SIGINT, True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signum)

    def result(self) -> Result:
        """Wait for its end. ``stdout`` is empty: it has been read."""
        status = self.process.wait()
        self.said.seek(0)
        return Result(self.host, self.argv, status, b"", self.said.read())


class LocalStream(Stream):
    """A child of this process, in a session of its own."""

    def __init__(self, host: str, argv: tuple[str, ...], process: subprocess.Popen[bytes], errors: int, ears: Ears):
        self.host = host
        self.argv = argv
        self.process = process
        self.ears = ears
        assert process.stdin and process.stdout
        self._in: int | None = process.stdin.fileno()
        self._out = process.stdout.fileno()
        for descriptor in (self._in, self._out):
            with contextlib.suppress(OSError):  # more than a user may have
                fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._thread = threading.Thread(target=self._hear, args=(errors,), daemon=True)
        self._thread.start()

    def _hear(self, errors: int) -> None:
        with open(errors, "rb", 0) as stream:
            while block := stream.read(BLOCK):
                self.ears.hear(block)
        self.ears.hear(b"")

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        while len(view):
            try:
                assert self._in is not None, "its input is closed"
                view = view[os.write(self._in, view) :]
            except BrokenPipeError:
                raise self._went() from None
        return len(data)

    def _went(self) -> CommandError:
        return CommandError(self.result(ok=None), hint="it ended before it had read all")

    def end(self) -> None:
        if self._in is not None:
            self._in = None
            assert self.process.stdin
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def read(self, size: int = BLOCK) -> bytes:
        return os.read(self._out, size)

    def result(self, *, ok: Container[int] | None = (0,)) -> Result:
        self.end()
        while os.read(self._out, BLOCK):
            pass
        status = self.process.wait()
        self._thread.join(LATE_S)
        result = Result(self.host, self.argv, status, b"", self.ears.said)
        if ok is not None and status not in ok:
            raise CommandError(result)
        return result

    def close(self) -> None:
        """End it, if it has not ended, and let go of its pipes."""
        if self.process.poll() is None:
            _end_group(self.process)
        self.end()
        assert self.process.stdout
        self.process.stdout.close()
        self._thread.join(LATE_S)


class Local(Host):
    """Commands run as children of this process, each in a session of its own."""

    def __init__(self, name: str = "localhost", prefix: tuple[str, ...] = ()) -> None:
        self.name = name
        self.prefix = prefix

    def _spawn(
        self, argv: tuple[str, ...], stdin: int, stderr: int | BinaryIO = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [*self.prefix, *argv],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                env={**inherited(), **ENVIRONMENT},
            )
        except FileNotFoundError as error:
            raise SmsError(
                f"{self.name}: no such program: {error.filename}", hint="`sms doctor` lists what is missing"
            ) from error

    def run(
        self,
        *argv: str,
        input: bytes | None = None,
        ok: Container[int] | None = (0,),
        timeout: float | None = 60,
        on_line: OnLine | None = None,
    ) -> Result:
        process = self._spawn(argv, subprocess.PIPE if input is not None else subprocess.DEVNULL)
        try:
            if on_line is None:
                stdout, stderr = process.communicate(input, timeout)
            else:
                stdout, stderr = _communicate_lines(process, input, timeout, on_line)
        except subprocess.TimeoutExpired:
            said = _end_group(process)
            result = Result(self.name, argv, -signal.SIGKILL, b"", said)
            raise CommandTimeout(result, hint=f"it did not end within {timeout:g} s and was ended") from None
        except BaseException:
            _end_group(process)
            raise
        result = Result(self.name, argv, process.returncode, stdout, stderr)
        if ok is not None and result.status not in ok:
            raise CommandError(result)
        return result

    def send(self, source: BinaryIO, path: str, *, mode: int = 0o600, progress: Progress | None = None) -> None:
        size = count_bytes(source)
        process = self._spawn(("sh", "-c", WRITE_BESIDE, "send", path, f"{mode:o}", str(size)), subprocess.PIPE)
        assert process.stdin
        done = 0
        try:
            while block := source.read(BLOCK):
                try:
                    process.stdin.write(block)
                except BrokenPipeError:
                    break  # its own words are below
                done += len(block)
                if progress:
                    progress(done)
            _, stderr = process.communicate()
        except BaseException:
            _end_group(process)
            raise
        check_written(self.name, path, process.returncode, stderr)

    def fetch(self, path: str, sink: BinaryIO, *, progress: Progress | None = None) -> None:
        process = self._spawn(("cat", "--", path), subprocess.DEVNULL)
        assert process.stdout
        done = 0
        try:
            while block := process.stdout.read(BLOCK):
                sink.write(block)
                done += len(block)
                if progress:
                    progress(done)
            _, stderr = process.communicate()
        except BaseException:
            _end_group(process)
            raise
        if process.returncode:
            raise CommandError(Result(self.name, ("cat", path), process.returncode, b"", stderr))

    @contextmanager
    def hold(self, *argv: str, timeout: float = 30) -> Iterator[str]:
        process = self._spawn(argv, subprocess.PIPE)
        assert process.stdout and process.stdin
        expired = threading.Event()
        watchdog = threading.Timer(timeout, _expire, (process, expired))
        watchdog.start()
        try:
            line = process.stdout.readline()
            if not line:
                _, stderr = process.communicate()
                if expired.is_set():
                    result = Result(self.name, argv, -signal.SIGKILL, b"", stderr)
                    raise CommandTimeout(result, hint=f"it was not ready within {timeout:g} s and was ended")
                raise CommandError(Result(self.name, argv, process.returncode, b"", stderr))
            watchdog.cancel()
            yield line.decode(errors="replace").rstrip("\n")
        finally:
            watchdog.cancel()
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                _end_group(process)
            process.stdout.close()
            assert process.stderr
            process.stderr.close()

    @contextmanager
    def running(self, *argv: str) -> Iterator[Running]:
        """Run ``argv`` and give its standard output to read while it runs; it ends with the context."""
        with tempfile.TemporaryFile() as said:  # not a pipe, which fills up while nobody reads it
            process = self._spawn(argv, subprocess.DEVNULL, said)
            assert process.stdout
            with process.stdout:
                try:
                    yield Running(process, process.stdout.fileno(), said, self.name, argv)
                finally:
                    if process.poll() is None:
                        _end_group(process)

    @contextmanager
    def stream(self, *argv: str, on_line: OnLine | None = None) -> Iterator[Stream]:
        errors, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            with open(theirs, "wb", 0) as far:  # noqa: PTH123 - a descriptor
                process = self._spawn(argv, subprocess.PIPE, far)
        except BaseException:
            os.close(errors)
            raise
        stream = LocalStream(self.name, argv, process, errors, Ears(on_line))
        try:
            yield stream
        finally:
            stream.close()

    def interact(self, *argv: str) -> int:
        return subprocess.run([*self.prefix, *argv], check=False, env=inherited()).returncode


def _communicate_lines(
    process: subprocess.Popen[bytes], input: bytes | None, timeout: float | None, on_line: OnLine
) -> tuple[bytes, bytes]:
    """Like ``communicate``, handing over each line of standard output as it comes."""
    errors: list[bytes] = []
    lines: list[bytes] = []

    def drain() -> None:
        assert process.stderr
        errors.append(process.stderr.read())

    def feed() -> None:
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(input or b"")
            process.stdin.close()

    threads = [threading.Thread(target=drain, daemon=True)]
    if input is not None:
        threads.append(threading.Thread(target=feed, daemon=True))
    for thread in threads:
        thread.start()
    expired = threading.Event()
    watchdog = threading.Timer(timeout, _expire, (process, expired)) if timeout else None
    if watchdog:
        watchdog.start()
    try:
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            on_line(line.decode(errors="replace").rstrip("\n"))
        process.wait()
        for thread in threads:
            thread.join()
    finally:
        if watchdog:
            watchdog.cancel()
    if expired.is_set():
        raise subprocess.TimeoutExpired(process.args, timeout or 0)
    return b"".join(lines), b"".join(errors)


def _expire(process: subprocess.Popen[bytes], expired: threading.Event) -> None:
    expired.set()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _end_group(process: subprocess.Popen[bytes]) -> bytes:
    """End the process and all it started, wait for it, and give what it had said on stderr."""
    for signum, grace in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signum)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and _lives(process, with_group=signum == signal.SIGTERM):
            time.sleep(0.02)
    try:
        return process.communicate(timeout=1)[1] or b""
    except (subprocess.TimeoutExpired, ValueError, OSError):
        return b""


def _lives(process: subprocess.Popen[bytes], *, with_group: bool) -> bool:
    """Whether the process, or any of its group, has not ended."""
    if process.poll() is None:
        return True
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return with_group
