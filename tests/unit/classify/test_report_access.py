"""The HTML report with the keyboard alone, and as a screen reader gets it: Chromium's accessibility tree."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.unit.browser import Browser
from tests.unit.classify.report_pages import PAGES, written

pytestmark = pytest.mark.slow

NAMED = {"image", "link", "radio", "radiogroup", "region", "table", "navigation", "heading", "button"}
"""Roles that are useless without a name (ARIA 1.2, 5.2.8.6; WCAG 2.2, 1.1.1, 2.4.4, 4.1.2)."""


def value(node: dict[str, Any], key: str) -> str:
    return str(node.get(key, {}).get("value", ""))


def tree(browser: Browser) -> list[dict[str, Any]]:
    """Return what a screen reader gets, in the order of the page."""
    browser.ask("Accessibility.enable")
    nodes = browser.ask("Accessibility.getFullAXTree")["nodes"]
    by_id = {node["nodeId"]: node for node in nodes}

    def walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not node["ignored"]:
            yield node
        for child in node.get("childIds", ()):
            if child in by_id:
                yield from walk(by_id[child])

    return list(walk(next(node for node in nodes if "parentId" not in node)))


@pytest.mark.parametrize("name", PAGES)
def test_a_screen_reader_gets_the_whole_page(name: str, browser: Browser, tmp_path: Path) -> None:
    """Everything that needs a name has one; one main part; headings without a skipped level; no part twice."""
    browser.visit(written(name, tmp_path), width=1280)
    browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    nodes = tree(browser)
    roles = [value(node, "role") for node in nodes]
    nameless = [value(node, "role") for node in nodes if not value(node, "name").strip()]
    assert [role for role in nameless if role in NAMED] == []
    assert [roles.count(role) for role in ("main", "banner", "navigation")] == [1, 1, 1]
    levels = [
        next(one["value"]["value"] for one in node["properties"] if one["name"] == "level")
        for node in nodes
        if value(node, "role") == "heading"
    ]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    regions = [value(node, "name") for node in nodes if value(node, "role") == "region"]
    assert all(regions.count(name) <= 2 for name in regions), "a section, and the table in it that scrolls"


def test_charts_say_what_they_show(browser: Browser, tmp_path: Path) -> None:
    browser.visit(written("gaps", tmp_path), width=1280)
    nodes = tree(browser)
    images = {value(node, "name") for node in nodes if value(node, "role") == "image"}
    assert "provisioning: 0 steady contacts, 64 while booting" in images
    assert any(name.startswith("450 nodes, the management node and the outside, with 10 arrows") for name in images)
    radios = [value(node, "name") for node in nodes if value(node, "role") == "radio"]
    assert radios == ["10 s", "1 min", "5 min", "15 min", "1 h", "4 h", "12 h", "24 h", "3 days", "7 days"]
    assert "Length of the outage" in {value(node, "name") for node in nodes if value(node, "role") == "group"}
    status = next(index for index, node in enumerate(nodes) if value(node, "role") == "status")
    assert value(nodes[status + 1], "role") == "paragraph"


# The keyboard.


def press(browser: Browser, key: str, code: int) -> None:
    for kind in ("keyDown", "keyUp"):
        text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
        browser.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)


FOCUS = """(() => {
  const el = document.activeElement, style = getComputedStyle(el), box = el.getBoundingClientRect();
  return [el.tagName, el.id || el.getAttribute('href') || el.textContent.trim().slice(0, 40),
          style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
          box.bottom > 0 && box.top < innerHeight];
})()"""

ORDER = """[...document.querySelectorAll('a[href], input, summary, [tabindex="0"]')]
  .filter(el => el.type !== 'radio' || el.checked).filter(el => !el.closest('details:not([open]) > :not(summary)'))
  .map(el => [el.tagName, el.id || el.getAttribute('href') || el.textContent.trim().slice(0, 40)])"""


@pytest.mark.parametrize("width", [1280, 320])
@pytest.mark.parametrize("name", ["paper", "nothing"])
def test_tab_reaches_everything_in_order(name: str, width: int, browser: Browser, tmp_path: Path) -> None:
    """What has the focus is visible and in the window; no trap: after the last comes the page's end."""
    browser.visit(written(name, tmp_path), width=width)
    browser.evaluate("document.documentElement.style.scrollBehavior = 'auto'")  # as with prefers-reduced-motion
    order = browser.evaluate(ORDER)
    seen = []
    for _ in order:
        press(browser, "Tab", 9)
        tag, text, outlined, inside = browser.evaluate(FOCUS)
        assert outlined and inside, (tag, text)
        seen.append([tag, text])
    assert seen == order
    press(browser, "Tab", 9)
    assert browser.evaluate("document.activeElement.tagName") in ("BODY", "HTML")


def test_arrows_choose_the_length_of_an_outage(browser: Browser, tmp_path: Path) -> None:
    browser.visit(written("paper", tmp_path), width=1280)
    shown = """[[...document.querySelectorAll('.summaries p, .effects th.at')]
      .filter(one => one.getClientRects().length).map(one => one.textContent), document.activeElement.id]"""
    browser.evaluate("document.getElementById('length-4').focus()")
    press(browser, "ArrowRight", 39)
    (summary, head), focus = browser.evaluate(shown)
    assert (head, focus) == ("1 h", "length-5")
    assert summary.startswith("1 h: noticed in 6 of 10 services: nat, ")
    for _ in range(5):
        press(browser, "ArrowLeft", 37)
    assert browser.evaluate(shown)[1] == "length-10", "before the first comes the last"


def test_without_the_slider_the_table_has_all_lengths(browser: Browser, tmp_path: Path) -> None:
    """On paper, and in a browser without :has()."""
    count = "[...document.querySelectorAll('.effects th.at')].filter(one => one.getClientRects().length).length"
    page = written("paper", tmp_path)
    browser.visit(page, width=720, media="print")
    assert browser.evaluate(count) == 10
    assert browser.evaluate("document.querySelector('.lengths').getClientRects().length") == 0
    browser.visit(page, width=720)
    assert browser.evaluate(count) == 1


def test_enter_opens_the_evidence(browser: Browser, tmp_path: Path) -> None:
    browser.visit(written("paper", tmp_path), width=1280)
    browser.evaluate("document.querySelector('.evidence summary').focus()")
    press(browser, "Enter", 13)
    assert browser.evaluate("document.querySelector('.evidence details').open") is True
