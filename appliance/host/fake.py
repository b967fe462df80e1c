"""A host for unit tests: answers from a table and writes down what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO

from appliance.host.base import SHORT, CommandError, Host, OnLine, Progress, Result, check_written, count_bytes

Answer = tuple[int, str] | Callable[[tuple[str, ...], bytes | None], tuple[int, str]]


class Fake(Host):
    """``answers`` maps the beginning of an argv to its status and output; the longest match wins.

    An argv without an answer is an error of the test, not an empty success.
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
    ) -> Result:
        self.asked.append(argv)
        matches = [key for key in self.answers if argv[: len(key)] == key]
        if not matches:
            raise AssertionError(f"no answer for {argv}")
        answer = self.answers[max(matches, key=len)]
        status, text = answer if isinstance(answer, tuple) else answer(argv, input)
        if on_line:
            for line in text.splitlines():
                on_line(line)
        result = Result(self.name, argv, status, text.encode() if not status else b"", text.encode() if status else b"")
        if ok is not None and status not in ok:
            raise CommandError(result)
        return result

    def read(self, path: str) -> bytes | None:
        return self.files.get(path)

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> bool:
        changed = self.files.get(path) != data
        self.files[path] = data
        return changed

    def send(self, source: BinaryIO, path: str, *, mode: int = 0o600, progress: Progress | None = None) -> None:
        size = count_bytes(source)
        data = source.read()
        check_written(self.name, path, 0 if len(data) == size else SHORT, b"")
        self.files[path] = data

    def fetch(self, path: str, sink: BinaryIO, *, progress: Progress | None = None) -> None:
        sink.write(self.files[path])

    @contextmanager
    def hold(self, *argv: str, timeout: float = 30) -> Iterator[str]:
        self.asked.append(argv)
        yield "held"

    def interact(self, *argv: str) -> int:
        return self.run(*argv, ok=None).status
