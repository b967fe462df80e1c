"""The agent: a zipapp that is copied to an admin host and runs one request at a time."""

from __future__ import annotations

import hashlib
import io
import json
import queue
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any

from appliance.errors import Busy, ConfigError, Refused, SmsError, disk_hint
from appliance.host.base import (
    CommandError,
    CommandTimeout,
    Host,
    OnLine,
    Result,
    check_written,
    without_secrets,
    write_argv,
)
from appliance.host.stream import LineReader, Silence, Stream, expires_after
from appliance.progress import Progress, Silent, Step
from appliance.share import PACKAGE
from appliance.shared.adopt import AdoptRequest, ReturnRequest
from appliance.shared.migration import MigrationRequest
from appliance.shared.records import RecordError
from appliance.shared.requests import Request
from appliance.shared.results import ALIVE_S
from appliance.tools.move import Endpoint
from appliance.tools.python import find_python
from appliance.tools.reply import ENDED_HINT, Reply

LEAVES = ("text.py", "units.py")
"""Modules of the package's top level that the agent uses."""
MAX_REPLY = 64 << 20
"""Bytes that an agent may print: the progress of a terabyte needs less."""
SILENT_S = 10 * ALIVE_S
"""Seconds in which an agent may print nothing."""
LIFELINE = "lifeline"
"""Argument that makes the agent abort when its standard input ends."""
FOREIGN_HINT = "is that machine what it should be? `sms doctor` looks at it"
OnRows = Callable[[list[dict[str, Any]]], None]
KINDS: dict[int, type[SmsError]] = {2: ConfigError, 3: Refused}

MAIN = "from appliance.agent.main import main\nraise SystemExit(main())\n"


class AgentEnded(CommandError):
    """An agent ended without a result. The message shows neither its request nor its messages to this program."""

    def __init__(self, result: Result, *, hint: str = ENDED_HINT) -> None:
        lines = [line for line in result.stderr.decode(errors="replace").splitlines() if not is_message(line)]
        how = f"was killed by signal {-result.status}" if result.status < 0 else f"ended with status {result.status}"
        super().__init__(result, hint=hint)
        self.message = "\n    ".join([f"{result.host}: the agent there {how}, without a result", *lines[-8:]])
        self.args = (self.message,)


class AgentTimeout(AgentEnded, CommandTimeout):
    """An agent exceeded its time limit."""


@contextmanager
def short_errors() -> Iterator[None]:
    """Raise failures of an agent's command without its command line."""
    try:
        yield
    except AgentEnded:
        raise
    except CommandTimeout as error:
        raise AgentTimeout(error.result, hint=error.hint) from error
    except CommandError as error:
        raise AgentEnded(error.result, hint=error.hint or ENDED_HINT) from error


def is_message(line: str) -> bool:
    """Return whether a line of output is a message of an agent, which ``MessageReader`` parses."""
    try:
        return "kind" in json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return False


@cache
def build_zipapp() -> bytes:
    """Return the agent as a zipapp; reproducible for the same sources."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        folders = (sorted((PACKAGE / name).glob("*.py")) for name in ("agent", "shared"))
        paths = [*chain.from_iterable(folders), *(PACKAGE / name for name in LEAVES)]
        sources = {f"appliance/{path.relative_to(PACKAGE)}": path.read_bytes() for path in paths}
        for name, data in {**sources, "appliance/__init__.py": b"", "__main__.py": MAIN.encode()}.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def argv(installed: tuple[str, ...], command: str, request: dict[str, Any]) -> tuple[str, ...]:
    """Return the command line of a request. It never contains a secret: other users see command lines."""
    return (*installed, command, json.dumps(request))


@dataclass(frozen=True)
class Bounds:
    """Of a request, on this side. A long one has no limit of time as long as its agent shows that it is alive.

    Attributes:
        seconds: how long it may take; ``None`` for no limit.
        size: how many bytes the agent may print.
        silent_s: for how many seconds nothing may arrive.
    """

    seconds: float | None = None
    size: int = MAX_REPLY
    silent_s: float = SILENT_S


BOUNDS = Bounds()


class Cancellation:
    """Entered by a thread that commits: yields whether its caller still waits, who cannot give up meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False

    def __enter__(self) -> bool:
        self._lock.acquire()
        return not self._cancelled

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def cancel(self) -> None:
        """Forbid the commit. One that is under way ends first, unless its disk blocks it for more than a second."""
        held = self._lock.acquire(timeout=1)
        self._cancelled = True
        if held:
            self._lock.release()


def _within(timeout: float, host: Host, request: Request) -> Any:
    """Perform a request in this process, in a thread of its own: a failed disk may block it for ever.

    If this ends early, by an interrupt or by its time limit, the request changes nothing afterwards.
    """
    done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
    cancellation = Cancellation()

    def work() -> None:
        try:
            done.put((host.perform(request, cancellation), None))
        except Exception as error:
            done.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        reply, error = done.get(timeout=timeout)
    except BaseException as reason:
        cancellation.cancel()
        if not isinstance(reason, queue.Empty):
            raise
        result = Result(host.name, (type(request).__name__, request.path), -signal.SIGKILL, b"", b"")
        raise CommandTimeout(result, hint=f"it did not end within {timeout:g} s; has the disk failed?") from None
    if error:
        raise error
    return reply


class Session:
    """A running agent whose input and output the caller streams. All methods raise the problem that it reports."""

    def __init__(self, stream: Stream, reader: MessageReader) -> None:
        self.stream = stream
        self.reader = reader

    def write(self, data: bytes) -> None:
        """Write all of ``data``."""
        try:
            self.stream.write(data)
        except CommandError as error:
            raise self._early_end(error) from error

    def end(self) -> None:
        """Close the agent's standard input."""
        self.stream.end()

    def leave(self) -> None:
        """Let the agent continue to its own end when the context ends."""
        self.stream.leave()

    def read(self) -> bytes:
        """Return the next block; empty at the end."""
        return self.stream.read()

    def read_exactly(self, size: int) -> bytes:
        """Return exactly ``size`` bytes."""
        try:
            return self.stream.read_exactly(size)
        except CommandError as error:
            raise self._early_end(error) from error

    def _early_end(self, error: CommandError) -> SmsError:
        """Return the error for an agent that ended although more was expected.

        Raises:
            Busy, Refused, SmsError: the problem that it reported.
        """
        self.reader.outcome(error.result)
        return SmsError(f"{error.result.host}: the agent there ended before it had finished", hint=ENDED_HINT)

    def outcome(self) -> dict[str, Any]:
        """Wait for the agent to end; return its result."""
        return self.reader.outcome(self.stream.result(ok=None))


class MessageReader:
    """Parses the agent's messages: reports progress, and keeps result or problem."""

    def __init__(self, progress: Progress, stack: ExitStack, on_rows: OnRows | None = None) -> None:
        self.progress = progress
        self.stack = stack
        self.on_rows = on_rows
        self.current: Step | None = None
        self.secrets: tuple[bytes, ...] = ()
        """Of what was sent to the agent: no error shows them."""
        self.result: Reply | None = None
        self.problem: dict[str, Any] | None = None
        self.odd = ""
        """What is wrong with the first message that is not one of an agent of ours."""

    def feed(self, line: str) -> None:
        """Parse one line."""
        if not line.startswith("{"):
            return  # the output of another program, such as sudo, which may have no end
        try:
            message = Reply("", json.loads(line))
            kind = message.get("kind")
        except (ValueError, RecursionError) as error:
            # Else the output of another program, such as sudo.
            self.odd = self.odd or (str(error) if isinstance(error, RecordError) and is_message(line) else "")
            return
        if kind == "result":
            self.result = message
        elif kind == "problem":
            self.problem = message
        elif kind == "step" and message.get("text"):
            self.stack.close()
            self.current = self.stack.enter_context(self.progress.step(message["text"]))
        elif kind == "moved" and self.current:
            self.current.moved(message.get("done", 0), message.get("total", 0))
        elif kind == "detail" and self.current:
            self.current.detail(message.get("text", ""))
        elif kind == "note":
            self.progress.report(message.get("text", ""))
        elif kind == "rows" and self.on_rows:
            self.on_rows(message.get("rows", []))

    def outcome(self, result: Result) -> dict[str, Any]:
        """Return the agent's result.

        Raises:
            Busy, Refused, SmsError, CommandError: as ``call``.
        """
        if self.problem:
            problem = self.problem
            kind = Busy if problem.get("busy") else KINDS.get(problem.get("status", 1), SmsError)
            message = problem.get("message", "it failed")
            found = kind(f"{result.host}: {message}", hint=problem.get("hint") or disk_hint(message))
            raise without_secrets(found, self.secrets)
        if self.odd:
            raise SmsError(f"{result.host}: the agent there sent an invalid message: {self.odd}", hint=ENDED_HINT)
        if self.result is None or result.status:
            raise AgentEnded(replace(result, secrets=self.secrets))
        self.result.host = result.host
        return self.result


@dataclass(frozen=True)
class Agents:
    """The agents on hosts: how a verb has them do something there, and how they reply.

    What runs in this process, or on a host without an agent, does not belong here.
    """

    folder: str = "/run/sms"
    """Of a host, for the copy of the agent there."""

    def installed_path(self) -> str:
        """Return the agent's path on a host."""
        return f"{self.folder}/agent-{hashlib.sha256(build_zipapp()).hexdigest()[:16]}.pyz"

    def install(self, host: Host, time_left: Callable[[], float] = lambda: 60.0) -> tuple[str, ...]:
        """Copy the agent to the host unless it is there; return the command that runs it.

        Args:
            time_left: returns the seconds that the next command may take.

        Raises:
            Refused: the host has no supported Python.
            CommandTimeout, Unreachable: as ``Host.run``.
        """
        path, python, zipapp = self.installed_path(), find_python(host, timeout=time_left()), build_zipapp()
        if host.run("test", "-s", path, ok=None, timeout=time_left()).status:
            written = host.run(*write_argv(path, 0o600, len(zipapp)), input=zipapp, ok=None, timeout=time_left())
            check_written(host.name, path, written.status, written.stderr)
            # Newer ones may be in use by an sms of another version.
            old = ("-name", "agent-*.pyz*", "!", "-path", path, "-mtime", "+0", "-exec", "rm", "-f", "{}", "+")
            host.run("find", self.folder, "-maxdepth", "1", "-type", "f", *old, ok=None, timeout=time_left())
        return (python, "-I", path)

    def call(
        self,
        host: Host,
        command: str,
        request: dict[str, Any],
        progress: Progress | None = None,
        *,
        on_rows: OnRows | None = None,
        bounds: Bounds = BOUNDS,
    ) -> dict[str, Any]:
        """Run a request on the agent; return its result. It aborts when this process ends, which also frees its locks.

        Args:
            on_rows: called with the rows of a long result as they arrive.
            bounds: after which it is ended, on this side.

        Raises:
            Busy, Refused, SmsError: the problem that the agent reports; it exceeds its bounds.
            CommandError: the agent ended without a result.
        """
        installed = self.install(host)
        with short_errors(), ExitStack() as stack:
            reader = MessageReader(progress or Silent(), stack, on_rows)
            with (
                host.stream(*argv(installed, command, request), LIFELINE, on_line=reader.feed) as stream,
                expires_after(bounds.seconds, stream.abort) as expired,
                Silence(bounds.silent_s, stream.abort) as silence,
            ):
                lines = LineReader(reader.feed)
                while (block := silence.limit(stream.read)) and not expired.is_set():
                    lines.feed(block)
                    if lines.size > bounds.size:
                        stream.abort()
                        raise SmsError(
                            f"{host.name}: the agent there printed more than {bounds.size >> 20} MiB", hint=FOREIGN_HINT
                        )
                lines.feed(b"")
                result = silence.limit(partial(stream.result, ok=None))
                if silence.expired:
                    raise SmsError(
                        f"{host.name}: the agent there sent nothing for {bounds.silent_s:g} s", hint=FOREIGN_HINT
                    )
                if expired.is_set():
                    seconds = f"{bounds.seconds:g} s"
                    raise SmsError(f"{host.name}: the agent there did not end within {seconds}", hint=FOREIGN_HINT)
                return reader.outcome(result)

    def perform(self, host: Host, request: Request, *, timeout: float = 60) -> Any:
        """Perform a request of ``shared/requests.py`` on the host; return its reply.

        Ctrl-C leaves the file unchanged, or changed before this ends.

        Args:
            timeout: seconds for all of it, with the copy of the agent to the host.

        Raises:
            SmsError: the host reports that it failed.
            Refused: as ``install``.
            CommandTimeout, Unreachable: as ``Host.run``.
        """
        end = time.monotonic() + timeout

        def time_left() -> float:
            return max(end - time.monotonic(), 0.1)  # 0 would be no limit

        try:
            return _within(timeout, host, request)
        except NotImplementedError:
            fields = {"kind": type(request).__name__, "of": asdict(request)}
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            hint = getattr(error, "hint", "") or disk_hint(why)
            raise SmsError(f"{host.name}: {error.filename or request.path}: {why}", hint=hint) from error
        return self._run(host, "perform", fields, time_left)["reply"]

    def query(self, host: Host, command: str, request: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """Run a short request that changes nothing; return its result.

        Args:
            timeout: seconds for all of it, with the copy of the agent to the host. A process on a failed disk is left.

        Raises:
            As ``call`` and ``install``.
        """
        end = time.monotonic() + timeout
        return self._run(host, command, request, lambda: max(end - time.monotonic(), 0.1))

    @contextmanager
    def open_session(
        self,
        host: Host,
        command: str,
        request: dict[str, Any],
        progress: Progress | None = None,
        *,
        on_line: OnLine | None = None,
    ) -> Iterator[Session]:
        """Run a request that reads or writes a byte stream; the agent's messages arrive on standard error.

        Args:
            on_line: called with each line of standard error, including those of programs that the agent starts.
        """
        installed = self.install(host)
        with ExitStack() as stack:
            reader = MessageReader(progress or Silent(), stack)

            def feed(line: str) -> None:
                reader.feed(line)
                if on_line:
                    on_line(line)

            with host.stream(*argv(installed, command, request), on_line=feed) as stream:
                yield Session(stream, reader)

    @contextmanager
    def open_endpoint(
        self, host: Host, command: str, request: MigrationRequest | AdoptRequest | ReturnRequest, progress: Progress
    ) -> Iterator[Endpoint]:
        """Run the agent of a host as an endpoint of a migration or adoption; after the context, it decides on its own.

        Raises:
            SmsError: the problem that ended the agent.
        """
        with self.open_session(host, command, asdict(request), progress) as session:
            endpoint = Endpoint(host, session)
            try:
                yield endpoint
            finally:
                endpoint.close()
                session.leave()  # it may have to wait until its network works
                endpoint.wait()

    def _run(self, host: Host, command: str, request: dict[str, Any], time_left: Callable[[], float]) -> dict[str, Any]:
        installed = self.install(host, time_left)
        with short_errors():
            result = host.run(*argv(installed, command, request), ok=None, timeout=time_left())
        reader = MessageReader(Silent(), ExitStack())
        for line in result.text.splitlines():
            reader.feed(line)
        return reader.outcome(result)
