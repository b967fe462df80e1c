"""A host for unit tests: looks results up in a table and records the commands."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from appliance.host.base import (
    BLOCK,
    Host,
    OnLine,
    Result,
    TooMuchOutput,
)
from appliance.host.stream import LineReader, Stream
from appliance.shared.files import ALWAYS
from appliance.shared.history import AppendLine
from appliance.shared.lease import WRITTEN, SwapLease
from appliance.shared.outputs import MAX_OUTPUT
from appliance.shared.overlay import MarkOverlay, OverlayMark
from appliance.shared.records import to_json
from appliance.shared.requests import Request
from appliance.shared.secret import secrets_of

Answer = tuple[int, str] | Callable[[tuple[str, ...], bytes | None], tuple[int, str]]


class FakeStream(Stream):
    """Computes its whole output at the first read, from the input written so far."""

    def __init__(self, host: str, argv: tuple[str, ...], answer: Callable[[bytes], Result], stderr: LineReader) -> None:
        self.host = host
        self.argv = argv
        self.answer = answer
        self.stderr = stderr
        self.given = b""
        self._result: Result | None = None
        self._out = b""

    def _complete(self) -> Result:
        if self._result is None:
            self._result = self.answer(self.given)
            self._out = self._result.stdout
            self.stderr.feed(self._result.stderr)
            self.stderr.feed(b"")
        return self._result

    def write(self, data: bytes | memoryview) -> int:
        self.given += bytes(data)
        return len(data)

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def read(self, size: int = BLOCK) -> bytes:
        self._complete()
        block, self._out = self._out[:size], self._out[size:]
        return block

    def result(self, *, ok: Container[int] | None = (0,)) -> Result:
        complete = self._complete()
        return Result(self.host, self.argv, complete.status, b"", self.stderr.tail).expect(ok)


class Fake(Host):
    """``answers`` maps argv prefixes to status and output; the longest match wins.

    An argv without an entry is an error of the test, not an empty success.
    """

    def __init__(self, answers: Mapping[tuple[str, ...], Answer], *, name: str = "fake") -> None:
        self.name = name
        self.answers = dict(answers)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, ...]] = []

    def run(
        self,
        *argv: str,
        input: bytes | None = None,
        ok: Container[int] | None = (0,),
        timeout: float | None = 60,
        on_line: OnLine | None = None,
        limit: int = MAX_OUTPUT,
    ) -> Result:
        result = self._answer(argv, input)
        if max(len(result.stdout), len(result.stderr)) > limit:
            raise TooMuchOutput(result, limit)
        if on_line:
            for line in (result.stdout or result.stderr).decode().splitlines():
                on_line(line)
        return result.expect(ok)

    def _answer(self, argv: tuple[str, ...], given: bytes | None) -> Result:
        self.asked.append(argv)
        matches = [key for key in self.answers if argv[: len(key)] == key]
        if not matches:
            raise AssertionError(f"no answer for {argv}")
        answer = self.answers[max(matches, key=len)]
        status, text = answer if isinstance(answer, tuple) else answer(argv, given)
        out, errors = (b"", text.encode()) if status else (text.encode(), b"")
        return Result(self.name, argv, status, out, errors, secrets_of(given))

    def read(self, path: str) -> bytes | None:
        return self.files.get(path)

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> bool:
        changed = self.files.get(path) != data
        self.files[path] = data
        return changed

    @contextmanager
    def hold(self, *argv: str, timeout: float = 30) -> Iterator[str]:
        self.asked.append(argv)
        yield "held"

    @contextmanager
    def stream(self, *argv: str, on_line: OnLine | None = None) -> Iterator[Stream]:
        yield FakeStream(self.name, argv, lambda given: self._answer(argv, given), LineReader(on_line))

    def perform(self, request: Request, may_commit: AbstractContextManager[bool] = ALWAYS) -> Any:
        """Change the contents of ``files``; a request that is not handled here is an error of the test."""
        if isinstance(request, MarkOverlay):
            return self.write(request.path, to_json(OverlayMark(request.cluster, request.generation)))
        if isinstance(request, SwapLease):
            self.files[request.path] = request.text.encode()
            return WRITTEN
        assert isinstance(request, AppendLine), f"no answer for {request}"
        self.files[request.path] = self.files.get(request.path, b"") + request.line.encode() + b"\n"
        return None

    def interact(self, *argv: str) -> int:
        return self.run(*argv, ok=None).status
