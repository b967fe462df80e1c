"""Terminal output: progress on standard error, results on standard output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from appliance.progress import Progress, Silent, Step

out = Console(highlight=False, emoji=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


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


def progress(quiet: bool) -> Progress:
    """Return the progress display that the user chose."""
    return Silent() if quiet else Shown()
