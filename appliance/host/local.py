"""This machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from appliance.host.apart import kept_apart
from appliance.host.base import (
    BLOCK,
    CommandError,
    CommandTimeout,
    Host,
    NoProgram,
    OnLine,
    Result,
    TooMuchOutput,
)
from appliance.host.stream import LATE_S, MAX_ERRORS, LineReader, Stream
from appliance.shared.files import ALWAYS
from appliance.shared.outputs import MAX_OUTPUT, Outputs, Overflow, TooLate, begin, end_group
from appliance.shared.requests import Request
from appliance.shared.secret import secrets_of

ENVIRONMENT = {"LC_ALL": "C.UTF-8", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
"""Variables set in addition to the caller's environment: untranslated messages and a full PATH."""

CONTAINER_TOOLS = ("APPTAINER_", "SINGULARITY_")
PIPE_BYTES = 1 << 20
"""Pipe capacity of a stream: large enough that both sides work at the same time."""
KEPT = {tool + suffix for tool in CONTAINER_TOOLS for suffix in ("TMPDIR", "CACHEDIR")}


def inherited() -> dict[str, str]:
    """Return the caller's environment without container settings such as APPTAINER_BIND that sites export to users."""
    return {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith(CONTAINER_TOOLS)}


@dataclass
class Running:
    """A running command. Read ``out``, its standard output, to the end; then call ``result``."""

    process: subprocess.Popen[bytes]
    out: int
    stderr: BinaryIO
    host: str
    argv: tuple[str, ...]
    stopped: bool = False

    def stop(self) -> None:
        """Send SIGINT; SIGKILL at the second call. ``out`` then reaches its end."""
        signum, self.stopped = signal.SIGKILL if self.stopped else signal.SIGINT, True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signum)

    def result(self) -> Result:
        """Wait for the command to end. ``stdout`` is empty: it has been read."""
        status = self.process.wait()
        self.stderr.seek(0)
        return Result(self.host, self.argv, status, b"", self.stderr.read(MAX_OUTPUT))


class LocalStream(Stream):
    """A child process in its own session."""

    def __init__(
        self, host: str, argv: tuple[str, ...], process: subprocess.Popen[bytes], errors: int, stderr: LineReader
    ):
        self.host = host
        self.argv = argv
        self.process = process
        self.stderr = stderr
        assert process.stdin and process.stdout
        self._in: int | None = process.stdin.fileno()
        self._out = process.stdout.fileno()
        for descriptor in (self._in, self._out):
            with contextlib.suppress(OSError):  # exceeds the limit of an unprivileged user
                fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._thread = threading.Thread(target=self._read_stderr, args=(errors,), daemon=True)
        self._thread.start()

    def _read_stderr(self, errors: int) -> None:
        with open(errors, "rb", 0) as stream:
            while block := stream.read(BLOCK):
                self.stderr.feed(block)
                if self.stderr.size > MAX_ERRORS:
                    self.abort()
                    break
        self.stderr.feed(b"")

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        while len(view):
            try:
                if self._in is None:  # its end was noticed by a thread that reads
                    raise self._ended_early()
                view = view[os.write(self._in, view) :]
            except BrokenPipeError:
                raise self._ended_early() from None
        return len(data)

    def _ended_early(self) -> CommandError:
        return CommandError(self.result(ok=None), hint="the command ended before it had read all its input")

    def end(self) -> None:
        if self._in is not None:
            self._in = None
            assert self.process.stdin
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def read(self, size: int = BLOCK) -> bytes:
        if self._closed():
            raise CommandError(self.result(ok=None), hint="the command was ended before it had printed everything")
        return os.read(self._out, size)

    def _closed(self) -> bool:
        """Return whether another thread has closed it: its descriptor may be that of another file by now."""
        assert self.process.stdout
        return self.process.stdout.closed

    def result(self, *, ok: Container[int] | None = (0,)) -> Result:
        self.end()
        while not self._closed() and os.read(self._out, BLOCK):
            pass
        status = self.process.wait()
        self._thread.join(LATE_S)
        return Result(self.host, self.argv, status, b"", self.stderr.tail).expect(ok)

    def close(self) -> None:
        """Terminate the command if it still runs, unless it was left, and close its pipes."""
        if self.process.poll() is None and not self.left:
            end_group(self.process)
        self.end()
        assert self.process.stdout
        self.process.stdout.close()
        self._thread.join(0 if self.left else LATE_S)

    def abort(self) -> None:
        end_group(self.process)


class Local(Host):
    """Commands run as child processes, each in its own session."""

    def __init__(self, name: str = "localhost", prefix: tuple[str, ...] = ()) -> None:
        self.name = name
        self.prefix = prefix

    def _spawn(
        self, argv: tuple[str, ...], stdin: int, stderr: int | BinaryIO = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        try:
            process: subprocess.Popen[bytes] = begin(
                subprocess.Popen,
                [*self.prefix, *argv],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                env={**inherited(), **ENVIRONMENT},
            )
            return process
        except FileNotFoundError as error:
            raise NoProgram(
                f"{self.name}: no such program: {error.filename}", hint="`sms doctor` lists what is missing"
            ) from error
        except PermissionError as error:
            raise NoProgram(f"{self.name}: {error.filename}: {error.strerror}", hint="is it executable?") from error

    def run(
        self,
        *argv: str,
        input: bytes | None = None,
        ok: Container[int] | None = (0,),
        timeout: float | None = 60,
        on_line: OnLine | None = None,
        limit: int = MAX_OUTPUT,
    ) -> Result:
        process = self._spawn(argv, subprocess.PIPE if input is not None else subprocess.DEVNULL)
        outputs = Outputs(process, limit, on_line)
        try:
            outputs.exchange(input, timeout)
        except (TooLate, Overflow) as error:
            end_group(process)
            result = Result(self.name, argv, -signal.SIGKILL, b"", outputs.of_stderr, secrets_of(input))
            if isinstance(error, Overflow):
                raise TooMuchOutput(result, limit) from None
            raise CommandTimeout(
                result, hint=f"the command did not end within {timeout:g} s and was terminated"
            ) from None
        except BaseException:
            end_group(process)
            raise
        finally:
            outputs.close()
        result = Result(self.name, argv, process.returncode, outputs.of_stdout, outputs.of_stderr, secrets_of(input))
        return result.expect(ok)

    @contextmanager
    def hold(self, *argv: str, timeout: float = 30) -> Iterator[str]:
        process = self._spawn(argv, subprocess.PIPE)
        assert process.stdin
        outputs = Outputs(process, MAX_OUTPUT)
        try:
            try:
                outputs.exchange(None, timeout, first_line=True)
            except (TooLate, Overflow) as error:
                end_group(process)
                result = Result(self.name, argv, -signal.SIGKILL, b"", outputs.of_stderr)
                if isinstance(error, Overflow):
                    raise TooMuchOutput(result, MAX_OUTPUT) from None
                hint = f"the command was not ready within {timeout:g} s and was terminated"
                raise CommandTimeout(result, hint=hint) from None
            if not outputs.of_stdout:
                raise CommandError(Result(self.name, argv, process.returncode, b"", outputs.of_stderr))
            yield outputs.of_stdout.partition(b"\n")[0].decode(errors="replace")
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                end_group(process)
            outputs.close()

    @contextmanager
    def running(self, *argv: str) -> Iterator[Running]:
        """Run ``argv`` and let the caller read its standard output; terminate it when the context ends."""
        with tempfile.TemporaryFile() as stderr:  # not a pipe: an unread pipe fills up and blocks
            process = self._spawn(argv, subprocess.DEVNULL, stderr)
            assert process.stdout
            with process.stdout:
                try:
                    yield Running(process, process.stdout.fileno(), stderr, self.name, argv)
                finally:
                    if process.poll() is None:
                        end_group(process)

    @contextmanager
    def stream(self, *argv: str, on_line: OnLine | None = None) -> Iterator[Stream]:
        errors, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            with open(write_end, "wb", 0) as stderr:  # noqa: PTH123 - a descriptor
                process = self._spawn(argv, subprocess.PIPE, stderr)
        except BaseException:
            os.close(errors)
            raise
        stream = LocalStream(self.name, argv, process, errors, LineReader(on_line))
        try:
            yield stream
        finally:
            stream.close()

    def perform(self, request: Request, may_commit: AbstractContextManager[bool] = ALWAYS) -> Any:
        return super().perform(request) if self.prefix else request.perform(may_commit)

    def interact(self, *argv: str) -> int:
        """As `Host.interact`. A program that is not at a terminal, where ^C is for all, has a process group of its own:
        root in the services container could end the group of this process, which is that of a whole script.
        """
        group = None if os.isatty(0) else 0
        with kept_apart() as (stdin, stdout, stderr):
            process: subprocess.Popen[bytes] = begin(
                subprocess.Popen,
                [*self.prefix, *argv],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=inherited(),
                process_group=group,
            )
            try:
                status = process.wait()
                return status if status >= 0 else 128 - status  # ended by a signal: as shells report it
            except BaseException:
                if group is None:
                    process.kill()
                else:
                    end_group(process)
                raise
