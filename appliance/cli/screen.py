"""Terminal output with rich; ``steps`` has the display of progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from appliance.cli.edge import stream_below
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
