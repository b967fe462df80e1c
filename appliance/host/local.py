"""This machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from appliance.errors import SmsError
from appliance.host.base import BLOCK, WRITE_BESIDE, CommandError, CommandTimeout, Host, OnLine, Progress, Result

ENVIRONMENT = {"LC_ALL": "C.UTF-8", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
"""What commands see besides the caller's own environment: messages that can be read back."""


class Local(Host):
    """Commands run as children of this process, each in a session of its own."""

    def __init__(self, name: str = "localhost", prefix: tuple[str, ...] = ()) -> None:
        self.name = name
        self.prefix = prefix

    def _spawn(self, argv: tuple[str, ...], stdin: int) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [*self.prefix, *argv],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, **ENVIRONMENT},
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
        process = self._spawn(("sh", "-c", WRITE_BESIDE, "send", path, f"{mode:o}"), subprocess.PIPE)
        assert process.stdin
        done = 0
        try:
            while block := source.read(BLOCK):
                process.stdin.write(block)
                done += len(block)
                if progress:
                    progress(done)
        except BrokenPipeError:
            pass  # its own words are below
        except BaseException:
            _end_group(process)
            raise
        _, stderr = process.communicate()
        if process.returncode:
            raise CommandError(Result(self.name, ("write", path), process.returncode, b"", stderr))

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
        except BaseException:
            _end_group(process)
            raise
        _, stderr = process.communicate()
        if process.returncode:
            raise CommandError(Result(self.name, ("cat", path), process.returncode, b"", stderr))

    @contextmanager
    def hold(self, *argv: str, timeout: float = 30) -> Iterator[str]:
        process = self._spawn(argv, subprocess.PIPE)
        assert process.stdout and process.stdin
        watchdog = threading.Timer(timeout, _end_group, (process,))
        watchdog.start()
        try:
            line = process.stdout.readline()
            watchdog.cancel()
            if not line:
                _, stderr = process.communicate()
                raise CommandError(Result(self.name, argv, process.returncode, b"", stderr))
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

    def interact(self, *argv: str) -> int:
        return subprocess.run([*self.prefix, *argv], check=False).returncode


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

    def expire() -> None:
        expired.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    watchdog = threading.Timer(timeout, expire) if timeout else None
    if watchdog:
        watchdog.start()
    try:
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            on_line(line.decode(errors="replace").rstrip("\n"))
        process.wait()
    finally:
        if watchdog:
            watchdog.cancel()
    if expired.is_set():
        raise subprocess.TimeoutExpired(process.args, timeout or 0)
    for thread in threads:
        thread.join()
    return b"".join(lines), b"".join(errors)


def _end_group(process: subprocess.Popen[bytes]) -> bytes:
    """End the process and all it started, wait for it, and give what it had said on stderr."""
    for signum, grace in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signum)
        deadline = time.monotonic() + grace
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if process.returncode is not None:
            break
    try:
        return process.communicate(timeout=1)[1] or b""
    except (subprocess.TimeoutExpired, ValueError, OSError):
        return b""
