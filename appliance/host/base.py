"""Host interface: run commands, copy files, stream bytes. All access to the outside goes through it."""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from appliance.errors import SmsError, disk_hint
from appliance.shared.files import ALWAYS
from appliance.shared.locks import UnsafeLock
from appliance.shared.outputs import MAX_OUTPUT
from appliance.shared.records import RecordError, check_value
from appliance.shared.secret import redact, redact_text
from appliance.text import one_line, printable_text

if TYPE_CHECKING:
    from appliance.host.stream import Stream
    from appliance.shared.requests import Request

BLOCK = 1 << 18
"""Block size of ``send`` and ``fetch``, in bytes."""

MAX_SHOWN, MAX_SHOWN_LINE = 8000, 1000
"""The last bytes of an output that an error shows lines of, and how many letters of each."""

SIZE_MISMATCH = 77
"""Exit status of ``WRITE_ATOMIC`` when the input has another size than announced."""
UNSAFE_LOCK = 78
"""Exit status of ``LOCK`` if other users could hold or replace the lock."""
LOCK = f"""\
umask 077
folder=$(dirname "$1")
[ -d "$folder" ] || mkdir -p "$folder" || exit
[ -e "$1" ] || (set -C; : >"$1") 2>/dev/null
unsafe=$(find "$folder/." "$1" -prune \\( ! -user 0 ! -user "$(id -u)" -o -type d -perm -002 -o -type f -perm /022 \\))
[ -f "$1" ] && [ ! -L "$1" ] || unsafe=$1
[ -z "$unsafe" ] || {{ echo "other users could hold or replace the lock: $unsafe" >&2; exit {UNSAFE_LOCK}; }}
[ ! -O "$1" ] || chmod 600 "$1" || exit
exec flock -w "$2" -E 75 "$1" sh -c "echo held; exec cat >/dev/null"
"""
"""Shell script: hold lock file $1 until standard input ends, after at most $2 seconds; as ``hold_lock`` of
``appliance/shared/locks.py``, for hosts without the agent."""
WRITE_ATOMIC = f"""\
folder=$(dirname "$1") above=/
new=$folder/.$(basename "$1").new~
case $folder in */logrotate.d | logrotate.d) new=$folder/$(basename "$1").new~ ;; esac
trap 'exit 143' HUP INT TERM
trap 'trap "" HUP INT TERM; if [ "$new" -ef "/proc/$$/fd/9" ]; then flock -n 9; [ $? = 1 ] || rm -f "$new"; fi' EXIT
umask 077
[ -d "$folder" ] || above=$folder
mkdir -p "$folder" || exit
until [ "$new" -ef "/proc/$$/fd/9" ]; do
    [ ! -L "$new" ] || rm -f "$new"
    exec 9>>"$new" || exit
    flock 9 || case $? in 65 | 71) ;; *) exit 1 ;; esac # a file system without locks
done
chmod 600 "$new" && : >"$new" && cat >&9 || exit
[ "$(stat -c %s "$new")" = "$3" ] || exit {SIZE_MISMATCH}
chmod "$2" "$new" && sync "$new" && mv -fT "$new" "$1" && sync "$folder" || exit
while [ "$above" != / ] && [ "$above" != . ]; do above=$(dirname "$above") && sync "$above" || exit; done
"""
"""Shell script: write $3 bytes of standard input to file $1 with mode $2, atomically, and flush it and its folder.

The size is checked because a broken connection looks like the end of the input; two runs that write one file do so
one after the other. It is ``replace_file`` of ``appliance/shared/files.py`` for hosts without the agent, under the same
name (``path_beside`` there); a new folder is flushed with those above it.
"""


READ = '[ -e "$1" ] || exit 44; [ -f "$1" ] || { echo "$1: not a regular file" >&2; exit 1; }; exec cat -- "$1"'
"""Shell script: print file $1; status 44 if there is none."""
STATE = '[ -f "$1" ] && [ "$(stat -c "%a %s" "$1")" = "$2" ] && echo "$2" && exec cat -- "$1"'
"""Shell script: print mode and size of file $1, and its content, if they are $2."""


def write_argv(path: str, mode: int, size: int) -> tuple[str, ...]:
    """Return the command that writes ``size`` bytes of its standard input to ``path``, atomically."""
    return ("sh", "-c", WRITE_ATOMIC, "write", path, f"{mode:o}", str(size))


OnLine = Callable[[str], None]
Progress = Callable[[int], None]
"""Called with the number of bytes copied so far."""


@dataclass(frozen=True)
class Result:
    """Result of a command: exit status, standard output and standard error.

    ``secrets`` are those of its input. Standard error, which is for messages, never has them.
    """

    host: str
    argv: tuple[str, ...]
    status: int
    stdout: bytes
    stderr: bytes
    secrets: tuple[bytes, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.secrets:
            object.__setattr__(self, "stderr", redact(self.stderr, self.secrets))

    @property
    def shown(self) -> bytes:
        """Standard output for a message: without the secrets."""
        return redact(self.stdout, self.secrets)

    @property
    def text(self) -> str:
        """Standard output as text, stripped of surrounding white space."""
        return self.stdout.decode(errors="replace").strip()

    def parse(self, kind: Any, *, empty: bytes = b"", last: bool = False) -> Any:
        """Return standard output, which is JSON, as ``kind`` (``check_value``).

        Args:
            empty: stands for an empty output.
            last: only the last line is read; other programs may have printed before it.

        Raises:
            OddOutput: it is not of this type.
        """
        data = self.stdout.rstrip().rpartition(b"\n")[2] if last else self.stdout.strip()
        try:
            return check_value(kind, json.loads(data or empty))
        except RecordError as error:
            raise OddOutput(self, str(error)) from None
        except (ValueError, RecursionError):
            raise OddOutput(self, "it is not JSON") from None

    def numbers(self, count: int) -> list[int]:
        """Return the whole numbers of the last line, as ``stat`` and ``df`` print them.

        Raises:
            OddOutput: there are not ``count`` of them.
        """
        words = self.stdout.rstrip().rpartition(b"\n")[2].split()
        if len(words) != count or not all(word.isdigit() and len(word) < 20 for word in words):
            raise OddOutput(self, f"it is not {'a number' if count == 1 else f'{count} numbers'}")
        return [int(word) for word in words]

    def words(self, count: int) -> list[str]:
        """Return the words of the last line.

        Raises:
            OddOutput: there are not ``count`` of them.
        """
        found = self.text.rpartition("\n")[2].split()
        if len(found) != count:
            raise OddOutput(self, f"it is not {count} words")
        return found

    def expect(self, ok: Container[int] | None) -> Result:
        """Return it.

        Raises:
            CommandError: the status is not in ``ok``; ``None`` accepts any.
        """
        if ok is not None and self.status not in ok:
            raise CommandError(self)
        return self


class OddOutput(SmsError):
    """A command printed something else than it should: another program, version or host than ours answers."""

    def __init__(self, result: Result, why: str) -> None:
        shown = one_line(result.shown[:400].decode(errors="replace"), 100)
        super().__init__(
            f"{result.host}: `{_command(result)}` printed {shown!r}: {why}",
            hint="was the program replaced? of one in the container: `sms stop`, then `sms start`, starts the image's",
        )


def _command(result: Result) -> str:
    command = shlex.join("..." if "\n" in word else word for word in result.argv)  # without the text of scripts
    return command if len(command) <= 300 else command[:300] + " ..."


class CommandError(SmsError):
    """A command ended with a status that its caller did not expect."""

    def __init__(self, result: Result, *, hint: str = "") -> None:
        self.result = result
        end = (result.stderr or result.shown)[-MAX_SHOWN:].decode(errors="replace")
        output = [printable_text(line)[:MAX_SHOWN_LINE] for line in end.strip().splitlines()[-8:]]
        command = _command(result)
        message = f"{result.host}: `{command}` ended with status {result.status}"
        super().__init__("\n    ".join([message, *output]), hint=hint or disk_hint(" ".join(output)))


class CommandTimeout(CommandError):
    """A command exceeded its time limit and was terminated with its process group."""


class TooMuchOutput(CommandError):
    """A command printed more than its caller accepts, and was terminated with its process group."""

    def __init__(self, result: Result, limit: int) -> None:
        super().__init__(result, hint="run it there by hand to see what it prints; is that machine what it should be?")
        command, *rest = self.message.split("\n", 1)
        command = command.rpartition(" ended with status ")[0]
        size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit} bytes"
        self.message = "\n".join([f"{command} printed more than {size} and was terminated", *rest])
        self.args = (self.message,)


class NoProgram(SmsError):
    """The host has no such program in its PATH, or it cannot be executed."""


class Unreachable(SmsError):
    """The host cannot be reached, or its identity cannot be verified."""


class Stuck(Unreachable):
    """The host accepts connections but does not respond in time: it is alive, but overloaded or broken."""


def without_secrets(error: SmsError, secrets: Sequence[str | bytes]) -> SmsError:
    """Return an error whose message and hint do not show secrets, which the other side may have quoted."""
    error.message, error.hint = redact_text(error.message, secrets), redact_text(error.hint, secrets)
    error.args = (error.message,)
    return error


def check_written(host: str, path: str, status: int, stderr: bytes) -> None:
    """Raise CommandError if ``WRITE_ATOMIC`` ended with a nonzero status."""
    if status:
        hint = (
            "the transfer was incomplete and the file is unchanged; run the command again"
            if status == SIZE_MISMATCH
            else ""
        )
        raise CommandError(Result(host, ("write", path), status, b"", stderr), hint=hint)


class Host(ABC):
    """A machine that runs commands. ``run`` is thread-safe."""

    name: str
    remote = False
    """Whether it is another machine."""

    @abstractmethod
    def run(
        self,
        *argv: str,
        input: bytes | None = None,
        ok: Container[int] | None = (0,),
        timeout: float | None = 60,
        on_line: OnLine | None = None,
        limit: int = MAX_OUTPUT,
    ) -> Result:
        """Run ``argv`` and wait for it to end.

        Args:
            input: bytes for its standard input; empty by default. The secrets of a ``SecretInput`` are in no error.
            ok: accepted exit statuses; ``None`` accepts any.
            timeout: seconds until the command's process group is terminated; ``None`` for no limit.
            on_line: called with each line of standard output as it arrives.
            limit: maximum size of each output, in bytes.

        Raises:
            CommandError: the status is not in ``ok``.
            CommandTimeout: the time limit was exceeded.
            TooMuchOutput: an output is larger than ``limit``.
            NoProgram: there is no such program.
            Unreachable: the host did not respond.
        """

    @abstractmethod
    def hold(self, *argv: str, timeout: float = 30) -> AbstractContextManager[str]:
        """Run ``argv`` for the duration of the context; yield the first line it prints.

        The command must print one line when it is ready, and end when its standard input
        closes, which also happens when this process or the connection dies.

        Raises:
            CommandError: the command ended before it printed a line.
            CommandTimeout: the command printed no line in time.
            Unreachable: the host did not respond.
        """

    @abstractmethod
    def stream(self, *argv: str, on_line: OnLine | None = None) -> AbstractContextManager[Stream]:
        """Run ``argv`` and let the caller stream its input and output, without a time limit.

        On exit before ``result``, by an error or Ctrl-C, the command's process group is terminated.

        Args:
            on_line: called with each line of standard error as it arrives, from another thread.

        Raises:
            Unreachable: the host did not respond.
        """

    @abstractmethod
    def interact(self, *argv: str) -> int:
        """Run ``argv`` on the user's terminal and return its exit status."""

    @contextmanager
    def limit_silence(self, seconds: float) -> Iterator[None]:
        """Within the context, a host that is gone is noticed after so many seconds without a reply of its kernel."""
        yield

    def accepts_connections(self) -> bool:
        """Return whether it accepts a new connection, which a machine that is off does not; nothing is run on it."""
        return True

    def works(self, *argv: str) -> bool:
        """Return whether ``argv`` ends with status 0."""
        return self.run(*argv, ok=None).status == 0

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file, of ``MAX_OUTPUT`` at most, or None if it does not exist.

        Raises:
            CommandError: it cannot be read, or is not a regular file: a pipe would keep the caller waiting. The error
                does not show what was read.
        """
        result = self.run("sh", "-c", READ, "read", path, ok=None)
        if result.status not in (0, 44):
            raise CommandError(replace(result, stdout=b""))
        return None if result.status == 44 else result.stdout

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> bool:
        """Write ``data`` to ``path`` with ``mode``, atomically; return whether anything changed."""
        as_wanted = f"{mode:o} {len(data)}\n"
        state = self.run(
            *("sh", "-c", STATE, "state", path, as_wanted.strip()), ok=None, limit=max(MAX_OUTPUT, 2 * len(data))
        )
        if state.status == 0 and state.stdout == as_wanted.encode() + data:
            return False
        result = self.run(*write_argv(path, mode, len(data)), input=data, ok=None)
        check_written(self.name, path, result.status, result.stderr)
        return True

    def perform(self, request: Request, may_commit: AbstractContextManager[bool] = ALWAYS) -> Any:
        """Perform a request in this process if the host is this machine.

        Args:
            may_commit: entered before the file is changed; yields whether it may be.

        Raises:
            NotImplementedError: it is another machine, where the agent performs it (``Agents.perform``).
            OSError: the request failed.
        """
        raise NotImplementedError

    def remove(self, path: str) -> None:
        """Remove one file, if it exists. Never a folder."""
        self.run("rm", "-f", "--", path)

    @contextmanager
    def lock(self, path: str, *, wait_s: float = 0) -> Iterator[None]:
        """Hold an exclusive lock on ``path``; it is released when this process dies for any reason.

        Args:
            wait_s: seconds to wait for another holder.

        Raises:
            CommandError: another process holds the lock.
            SmsError: other users could hold or replace it.
        """
        argv = ("sh", "-c", LOCK, "lock", path, f"{wait_s:g}")
        with ExitStack() as stack:
            try:
                stack.enter_context(self.hold(*argv, timeout=30 + wait_s))
            except CommandError as error:
                if error.result.status != UNSAFE_LOCK:
                    raise
                why = error.result.stderr.decode(errors="replace").strip()
                raise SmsError(
                    f"{self.name}: {path} cannot be trusted as a lock: {why}", hint=UnsafeLock.hint
                ) from error
            yield
