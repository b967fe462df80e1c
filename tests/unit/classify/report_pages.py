"""The pages that tests of the HTML report show, and how they are written."""

from __future__ import annotations

from pathlib import Path

from analysis.model import Classification
from analysis.report.html import render_html
from tests.unit import classification_example as example

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&lt;{{7*7}}\x00\x1b[31m\u202e\ud800\x85" + "A" * 300

PAGES: dict[str, Classification] = {
    "paper": example.paper(),
    "nothing": example.empty(),
    "gaps": example.interrupted(),
    "one service": example.many(1),
    "60 services": example.many(60),
    "huge": example.huge(),
    "3 seconds": example.lasting(3.0),
    "30 days": example.lasting(30 * example.DAY),
    "moved": example.moved(),
    "hostile": example.with_text(example.moved(), lambda: HOSTILE),
}


def written(name: str, folder: Path) -> Path:
    page = folder / "report.html"
    page.write_text(render_html(PAGES[name]), encoding="utf-8")
    return page
