"""Progress on standard error: a spinner on a terminal, otherwise one line per step.

Files and pipes need no rich, whose import takes a quarter of the time of a small capture.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from appliance.progress import Progress, Silent, Step

if TYPE_CHECKING:
    from rich.status import Status


def progress(quiet: bool) -> Progress:
    """Return the progress display that the user chose."""
    return Quiet() if quiet else Shown()


class Quiet(Silent):
    """Only warnings: what a forced verb costs is said whether somebody watches or not."""

    def warn(self, text: str) -> None:
        _print(f"WARNING: {text}")


class _ShownStep:
    def __init__(self, text: str, spinner: Status | None) -> None:
        self.text = text
        self.spinner = spinner
        self.last = ""
        self.began = time.monotonic()

    def detail(self, text: str) -> None:
        self.last = text
        if self.spinner:
            from rich.markup import escape

            from appliance.cli.screen import err

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
    """Progress for the user."""

    @contextmanager
    def step(self, text: str) -> Iterator[Step]:
        began = time.monotonic()
        spinner = _start_spinner(text)
        step = _ShownStep(text, spinner)
        try:
            yield step
        except BaseException:
            if spinner:
                spinner.stop()
            _print(text, mark="✗", colour="red")
            raise
        if spinner:
            spinner.stop()
        detail = f": {step.last}" if step.last else ""
        _print(f"{text}{detail}", mark="✓", colour="green", took=f" ({time.monotonic() - began:.1f} s)")

    def report(self, text: str) -> None:
        _print(text)

    def warn(self, text: str) -> None:
        _print(f"WARNING: {text}")


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show on a terminal what is waited for; nothing is left of it at the end, and nothing is written elsewhere."""
    spinner = _start_spinner(text)
    try:
        yield
    finally:
        if spinner:
            spinner.stop()


def _start_spinner(text: str) -> Status | None:
    if not sys.stderr.isatty():
        return None
    from rich.markup import escape

    from appliance.cli.screen import err

    spinner = err.status(escape(text))
    spinner.start()
    return spinner


def _print(text: str, *, mark: str = "", colour: str = "", took: str = "") -> None:
    start = f"{mark} " if mark else ""
    if not sys.stderr.isatty():
        sys.stderr.write(f"{start}{text}{took}\n")
        return
    from rich.text import Text

    from appliance.cli.screen import err

    err.print(Text.assemble((start, colour), text, (took, "dim")))
