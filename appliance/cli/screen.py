"""Terminal output: progress on standard error, results on standard output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.status import Status

from appliance.cli.edge import stream_below
from appliance.progress import Progress, Silent, Step
from appliance.text import printable_text


class Screen(Console):
    """A console whose text is escaped (see ``edge``), its own colours are not; links are left out."""

    @property
    def file(self) -> IO[str]:
        """The stream to write to."""
        return stream_below(super().file)

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render, with escaped text."""
        for text, style, control in super().render(renderable, options):
            plain = style.update_link(None) if style and style.link else style
            yield Segment(text if control else printable_text(text), plain, control)


out = Screen(highlight=False, emoji=False, soft_wrap=True)
err = Screen(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output; dataclasses as their ``as_dict``, or with all fields."""
    sys.stdout.write(json.dumps(value, indent=2, default=_as_json) + "\n")


def _as_json(value: Any) -> Any:
    if hasattr(value, "as_dict"):
        return value.as_dict()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


class _ShownStep:
    def __init__(self, text: str, spinner: Status | None) -> None:
        self.text = text
        self.spinner = spinner
        self.last = ""
        self.began = time.monotonic()

    def detail(self, text: str) -> None:
        self.last = text
        if self.spinner:
            room = max(20, err.width - len(self.text) - 12)
            self.spinner.update(f"{escape(self.text)} [dim]{escape(text[:room])}[/]")

    def moved(self, done: int, total: int) -> None:
        if (total or done) < 1 << 20:
            # "0 of 0 MiB" says nothing.
            return
        elapsed = max(time.monotonic() - self.began, 0.001)
        rate = done / elapsed
        left = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
        whole = f" of {total >> 20}" if total else ""
        self.detail(f"{done >> 20}{whole} MiB, {rate / 1048576:.0f} MiB/s{left}")


class Shown:
    """Progress for the user: a spinner on a terminal, otherwise one line per step."""

    @contextmanager
    def step(self, text: str) -> Iterator[Step]:
        began = time.monotonic()
        terminal = err.is_terminal
        spinner = err.status(escape(text)) if terminal else None
        step = _ShownStep(text, spinner)
        if spinner:
            spinner.start()
        try:
            yield step
        except BaseException:
            if spinner:
                spinner.stop()
            err.print(f"[red]✗[/] {escape(text)}")
            raise
        if spinner:
            spinner.stop()
        took = f"{time.monotonic() - began:.1f} s"
        detail = f": {step.last}" if step.last else ""
        err.print(f"[green]✓[/] {escape(text)}{escape(detail)} [dim]({took})[/]")

    def report(self, text: str) -> None:
        err.print(escape(text))


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show on a terminal what is waited for; nothing is left of it at the end, and nothing is written elsewhere."""
    if err.is_terminal:
        with err.status(escape(text)):
            yield
    else:
        yield


def progress(quiet: bool) -> Progress:
    """Return the progress display that the user chose."""
    return Silent() if quiet else Shown()
