"""The HTML report: its structure, escaping of hostile text, and rendering in a real browser."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from itertools import count
from pathlib import Path

import pytest

from analysis import units
from analysis.model import Classification, Interval, Latency, Nodes, Provenance, Service
from analysis.report import drawing
from analysis.report.html import MAX_SERVICES, headline, render_html
from tests.unit import classification_example as example
from tests.unit.browser import Browser
from tests.unit.classify.report_pages import PAGES, written

VOID = {"meta", "link", "img", "br", "hr", "input"}
SHAPES = {"rect", "line", "path"}


class Page(HTMLParser):
    """Parses a page and checks that it is well formed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SHAPES, f"<{tag}/> is not an HTML element"
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_whole_and_fetch_nothing(name: str) -> None:
    text = render_html(PAGES[name])
    page = Page(text)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    assert [link for link in links if link[:1] != "#" or link[1:] not in ids] == []
    named = [one for _, attrs in page.tags for one in attrs.get("aria-labelledby", "").split()]
    assert set(named) <= set(ids)
    assert [attrs["href"] for tag, attrs in page.tags if tag == "link"] == ["data:,"]
    assert {tag for tag, _ in page.tags} & {
        "script",
        "img",
        "iframe",
        "object",
        "embed",
        "form",
        "base",
        "use",
    } == set()
    names = {name for _, attrs in page.tags for name in attrs}
    assert {
        name for name in names if name.startswith("on") or name in ("style", "src", "srcset", "xlink:href")
    } == set()
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert set(re.findall(r"url\(([^)]*)\)", style)) == {'"#hatch"', '"#gaps"'} and "@import" not in style
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy


@pytest.mark.parametrize("name", PAGES)
def test_no_invisible_characters(name: str) -> None:
    text = render_html(PAGES[name])
    assert [one for one in text if not one.isprintable() and one != "\n"] == []
    text.encode()


def test_rendering_is_reproducible() -> None:
    assert render_html(example.paper()) == render_html(example.paper())


def test_every_text_is_shown_and_none_becomes_markup() -> None:
    """Each string of the model is in the page, escaped; this finds forgotten fields."""
    numbers = count()
    found = example.with_text(example.moved(), lambda: f"<i>&q{next(numbers)}q\x07")
    text = render_html(found)
    assert next(numbers) > 150
    assert [n for n in range(next(numbers) - 1) if f"&lt;i&gt;&amp;q{n}q\\x07" not in text] == []
    assert "<i>" not in text


def test_the_groups_are_table_1() -> None:
    text = Page(render_html(example.paper())).text()
    groups = text[text.index("The two groups") : text.index("Before you use these verdicts")]
    mgmt, services = groups.split("SMS-services ")
    assert [one.name for one in example.SERVICES if one.name in mgmt] == ["provisioning", "warewulf", "ssh"]
    critical = ["slurmctld", "rsyslog", "nfs", "nat", "ganglia", "postfix", "chrony"]
    assert [one.name for one in example.SERVICES if one.name in services] == critical
    assert "7 services must never stop, 3 can wait" in text


def test_remarks_stand_before_all_verdicts() -> None:
    """Not in grey at the end; the page also names the version and the options."""
    found = example.paper()
    made = Provenance("1.2.3", options={"sms": "10.1.0.1", "override": "ssh=deferrable"})
    text = Page(render_html(replace(found, made=made))).text()
    assert text.index("Limits of this capture") < text.index(found.capture.remarks[0]) < text.index("The two groups")
    assert "sms classify 1.2.3, --override ssh=deferrable, --sms 10.1.0.1" in text
    plain = Page(render_html(replace(found, capture=replace(found.capture, remarks=())))).text()
    assert "Limits of this capture" not in plain


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (Nodes(8, (), 2), "2 boots in the capture"),
        (Nodes(8, ()), "no boot in the capture"),
        (Nodes(8, (), 0, True), "boots cannot be counted in the capture"),
    ],
)
def test_boots_are_described_consistently(nodes: Nodes, expected: str) -> None:
    text = Page(render_html(replace(example.paper(), nodes=nodes))).text()
    assert expected in text
    assert ("no boot" in text) == (expected.startswith("no boot"))


def test_advice_is_shown() -> None:
    text = Page(render_html(example.paper())).text()
    for expected in (
        "nfs cannot run in the services container",
        "send monitoring through syslog",
        "Verdict set by the site: ssh",
        "121 records (under 0.1 %) damaged or lost",
        "byte 1,000,341,504",
        "450 nodes use its DHCP and Slurm",
        "5 Mar",
        "not visible in any capture",
    ):
        assert expected in text
    assert "low confidence" not in text
    vague = replace(example.paper(), services=tuple(replace(one, confidence=0.2) for one in example.SERVICES))
    assert "10 verdicts have low confidence" in Page(render_html(vague)).text()


def accounts(found: Classification) -> list[list[str]]:
    rows = Page(render_html(found)).rows
    first = next(number for number, row in enumerate(rows) if row[0].strip() == "Services, time-critical")
    last = next(number for number, row in enumerate(rows) if row[0] == "The capture")
    return [[cell.strip() for cell in row] for row in rows[first : last + 1]]


def whole(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize("name", ["paper", "nothing", "60 services"])
def test_the_parts_add_up(name: str) -> None:
    rows = accounts(PAGES[name])
    assert len(rows) == 6
    assert sum(whole(row[1]) for row in rows[:-1]) == whole(rows[-1][1]) == PAGES[name].capture.packets


def test_what_does_not_add_up_is_shown() -> None:
    found = example.paper()
    found = replace(found, capture=replace(found.capture, packets=found.capture.packets + 17))
    rows = accounts(found)
    assert rows[-2][:2] == ["Counted in the capture, in none of the above", "17"]


def test_thousands_of_services_are_not_drawn() -> None:
    text = render_html(example.many(MAX_SERVICES + 1))
    assert "1 more service is not shown" in text
    assert f"service-{MAX_SERVICES}" in text and f"service-{MAX_SERVICES + 1}" not in text


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -1.0, 1e300])
def test_numbers_that_cannot_be(value: float) -> None:
    strange = replace(
        example.SLURM,
        confidence=value,
        budget_s=value,
        first_s=value,
        last_s=value,
        interval_s=Interval(value, value),
        latency_ms=Latency(value, value),
        timeline=(-5, 3),
    )
    found = example.paper()
    found = replace(
        found, services=(strange, example.SSH), bin_s=value, capture=replace(found.capture, duration_s=value)
    )
    drawn = [attrs for tag, attrs in Page(render_html(found)).tags if tag in (*SHAPES, "text", "svg")]
    assert [attrs for attrs in drawn for one in attrs.values() if re.search(r"\b(nan|inf)", one)] == []


@pytest.mark.parametrize(
    ("critical", "deferrable", "expected"),
    [
        (0, 0, "No services seen"),
        (1, 0, "1 service must never stop"),
        (2, 1, "2 services must never stop, 1 can wait"),
        (0, 2, "2 services can wait, none seen that must never stop"),
    ],
)
def test_headline(critical: int, deferrable: int, expected: str) -> None:
    services = (example.SLURM,) * critical + (example.SSH,) * deferrable
    assert headline(replace(example.paper(), services=services)) == expected


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.span(0), "0 s"),
        (units.span(0.00021), "210 µs"),
        (units.span(0.21), "210 ms"),
        (units.span(41.72), "41.7 s"),
        (units.span(60), "1 min"),
        (units.span(80), "80 s"),
        (units.span(1024), "17.1 min"),
        (units.span(3600), "1 h"),
        (units.span(86_400), "24 h"),
        (units.span(432_000), "5 days"),
        (units.span(math.inf), "unlimited"),
        (units.span(math.nan), "unknown"),
        (units.size(0), "0 bytes"),
        (units.size(999), "999 bytes"),
        (units.size(999_999), "1 MB"),
        (units.size(63_400_000_000), "63.4 GB"),
        (units.size(1 << 64), "18.4 EB"),
        (units.share(0), "0 %"),
        (units.share(0.0001), "under 0.1 %"),
        (units.share(0.005), "0.5 %"),
        (units.share(7), "100 %"),
        (units.counted(1, "node"), "1 node"),
        (units.counted(1450, "node"), "1,450 nodes"),
        (units.listed(["a", "b", "c"]), "a, b and c"),
        (units.listed(["a"]), "a"),
        (units.listed([]), ""),
        (units.plain("a\x00b\tc\u202ed\ud800é", 99), "a\\x00b c\\u202ed\\ud800é"),
        (units.plain("abcdef", 4), "abc…"),
    ],
)
def test_numbers_in_words(shown: str, expected: str) -> None:
    assert shown == expected


AT = datetime(2024, 2, 27, 23, 59, 58, 500_000, tzinfo=UTC)


@pytest.mark.parametrize(
    ("start", "length_s", "labels"),
    [
        (AT, 3.0, "58.5 s/23:59 59.0 s 59.5 s 00.0 s 00.5 s/00:00 01.0 s 01.5 s"),
        (AT, 60.0, "00:00:00/28 Feb 00:00:10 00:00:20 00:00:30 00:00:40 00:00:50"),
        (AT, 3600.0, "00:00/28 Feb 00:10 00:20 00:30 00:40 00:50"),
        (
            AT.replace(hour=6, minute=0, second=0),
            86_400.0,
            "06:00/27 Feb 09:00 12:00 15:00 18:00 21:00 00:00/28 Feb 03:00 06:00",
        ),
        (AT, 30 * 86_400.0, "29 Feb 7 Mar 14 Mar 21 Mar 28 Mar"),
        (None, 3600.0, "0 s 10 min 20 min 30 min 40 min 50 min 1 h"),
        (AT, 0.0, ""),
        (AT, math.nan, ""),
        (AT, math.inf, ""),
    ],
)
def test_time_axis(start: datetime | None, length_s: float, labels: str) -> None:
    ticks = drawing.time_ticks(start, length_s)
    assert " ".join(tick.label + (f"/{tick.note}" if tick.note else "") for tick in ticks) == labels
    assert all(0 <= tick.at <= 100 for tick in ticks)


def test_time_axis_at_the_end_of_the_calendar() -> None:
    ticks = drawing.time_ticks(datetime.max.replace(tzinfo=UTC), 1e9)
    assert [tick.label for tick in ticks[:2]] == ["0 s", "1,157 days"]


def test_of_two_services_like_the_routed_traffic_its_ports_decide() -> None:
    found = example.paper()
    routed, ports = found.routed, tuple(port for one in found.routed.destinations for port in one.ports)
    other, router = (
        Service(name, "deferrable", ports=named, packets=routed.packets, bytes=routed.bytes)
        for name, named in (("a", ("tcp/1",)), ("b", ports))
    )
    assert ports and drawing.routing(replace(found, services=(other, router))) == router
    assert drawing.routing(replace(found, services=())) is None


def test_bars_of_budgets_are_on_one_scale() -> None:
    bars, ticks = drawing.budgets(list(enumerate(example.SERVICES, 1)))
    by_name = {bar.service.name: bar for bar in bars}
    assert [bar.service.name for bar in bars[:4]] == ["nat", "rsyslog", "nfs", "ganglia"]
    assert by_name["rsyslog"].width == 0 and by_name["rsyslog"].label == "none"
    assert by_name["provisioning"].width == 100
    at = {tick.label: tick.at for tick in ticks}
    assert by_name["nfs"].width == at["1 min"]
    assert by_name["warewulf"].width == at["24 h"]
    assert at["10 s"] - at["1 s"] == pytest.approx(at["10 min"] - at["1 min"], abs=0.01)


@pytest.mark.parametrize(
    ("steady", "boot", "line", "marks"),
    [((0, 4), (), 100, (1, 0)), ((), (3, 0), 4, (0, 1)), ((2, 2), (2, 0), 52, (2, 1)), ((), (), 100, (0, 0))],
)
def test_timelines(steady: tuple[int, ...], boot: tuple[int, ...], line: float, marks: tuple[int, int]) -> None:
    strip = drawing.strip(Service("x", "deferrable", timeline=steady, timeline_boot=boot), 1, 2)
    assert (strip.line, (strip.steady.count("M"), len(strip.boot))) == (line, marks)
    assert all(strip.line + height <= 100.01 for _, _, height in strip.boot)


def test_a_timeline_ends_with_the_capture() -> None:
    """The core doubles the length of a part when it runs out of parts: up to half of them may be empty."""
    found = replace(example.paper(), bin_s=2500.0)
    assert found.parts == 35
    assert example.paper().parts == 64
    assert drawing.strip(example.CHRONY, 1, 35).parts == 35
    assert example.empty().parts == 0


def test_gaps_are_shaded_and_listed() -> None:
    found = example.interrupted()
    assert drawing.gaps_outline(found, 64) == "M0.4 0h0.2v1H0.4zM0.8 0h0.003v1H0.8z"
    assert drawing.gaps_outline(found, 32) == "M0.8 0h0.2v1H0.8z", "the second is after the end"
    text = Page(render_html(found)).text()
    assert "nothing was captured: 2 gaps" in text
    assert "4.8 h, from 2024-03-05 15:36:00 UTC" in text
    assert "gap" not in Page(render_html(example.paper())).text()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 1e300])
def test_gaps_that_cannot_be(bad: float) -> None:
    found = example.interrupted()
    for gaps in (((bad, 5.0),), ((5.0, bad),)):
        made = replace(found, capture=replace(found.capture, gaps=gaps))
        assert not re.search("nan|inf", drawing.gaps_outline(made, 64))
        assert not re.search("nan|inf", drawing.gaps_outline(replace(made, bin_s=bad), 64))


def test_arrows_follow_who_opens() -> None:
    found = example.paper()
    talk = drawing.talk(found, list(enumerate(found.services, 1)))
    toward = {lane.name: lane.toward for lane in talk.lanes}
    assert toward == {
        **dict.fromkeys(("nfs", "ganglia", "rsyslog", "chrony", "postfix", "provisioning", "warewulf"), "sms"),
        "slurmctld": "both",
        "ssh": "nodes",
        "nat": "outside",
    }
    height = {lane.name: lane.height for lane in talk.lanes}
    assert height["provisioning"] == 16 and height["postfix"] == 2
    assert drawing.talk(example.many(60), list(enumerate(example.many(60).services, 1))).more > 0


# In a browser


MEASURE = """(() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = rgb => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(rgb[i] / 255), 0);
  const ground = el => {
    for (; el; el = el.parentElement) {
      const rgb = parse(getComputedStyle(el).backgroundColor);
      if (rgb.length === 3 || rgb[3] > 0.99) return rgb;
    }
    return [255, 255, 255];
  };
  const out = {outside: [], overlaps: [], pale: [], clipped: [], texts: 0, width: document.documentElement.scrollWidth};
  const boxes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const el = node.parentElement, words = node.data.trim();
    if (!words || ['STYLE', 'title'].includes(el.tagName) || el.closest('.hidden')) continue;
    const closed = el.closest('details:not([open])');
    if (closed && !el.closest('summary') && !PRINT) continue;
    if (getComputedStyle(el).display === 'none') continue;
    out.texts += 1;
    const svg = el.closest('text'), style = getComputedStyle(el);
    const range = document.createRange();
    range.selectNodeContents(node);
    const rects = svg ? [svg.getBoundingClientRect()] : [...range.getClientRects()];
    const inScroll = el.closest('.scroll');
    for (const r of rects) {
      if (r.width < 1) continue;
      if (!inScroll && (r.left < -1 || r.right > innerWidth + 1)) out.outside.push([words.slice(0, 60), r.right]);
      const air = r.height * 0.22;
      boxes.push({words, top: r.top + air, bottom: r.bottom - air, left: r.left + 1, right: r.right - 1});
    }
    const colour = parse(svg ? style.fill : style.color), a = light(colour), b = light(ground(el));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) out.pale.push([words.slice(0, 60), ratio]);
  }
  boxes.sort((a, b) => a.top - b.top);
  for (let i = 0; i < boxes.length; i++)
    for (let j = i + 1; j < boxes.length && boxes[j].top < boxes[i].bottom; j++)
      if (boxes[i].left < boxes[j].right && boxes[j].left < boxes[i].right)
        out.overlaps.push([boxes[i].words.slice(0, 60), boxes[j].words.slice(0, 60), boxes[i].top]);
  for (const el of document.querySelectorAll('body *:not(.hidden, svg, svg *)'))
    if (['hidden', 'clip'].includes(getComputedStyle(el).overflowX) && el.scrollWidth > el.clientWidth + 1)
      out.clipped.push(el.className || el.tagName);
  return out;
})()"""
"""Text that is outside of the window, overlapping, below a contrast of 4.5 to 1 (WCAG 2.2, 1.4.3), or clipped."""


def measure(browser: Browser, *, width: int, prints: bool = False) -> None:
    found = browser.evaluate(MEASURE.replace("PRINT", "true" if prints else "false"))
    assert found["texts"] > 30
    if not prints:
        assert found["width"] <= width
    assert {name: found[name] for name in ("outside", "overlaps", "pale", "clipped") if found[name]} == {}


ROWS = """
(() => {
  const low = el => Math.max(...[...el.getClientRects()].map(one => one.bottom));
  const below = [...document.querySelectorAll('.evidence summary')].filter(
    row => [...row.children].some(one => low(one) > low(row) + 1));
  const lines = cell => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    return range.getClientRects().length;
  };
  const broken = [...document.querySelectorAll('.small tbody th')].filter(
    cell => !cell.childElementCount && !/\\s/.test(cell.textContent.trim()) && lines(cell) > 1);
  return [...below, ...broken].map(one => one.textContent.trim().slice(0, 60));
})()"""
"""Rows of the evidence that do not hold all of their text, and names in the first column that are broken into lines."""


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 320])
def test_on_a_telephone_rows_hold_their_texts_and_names_are_whole(width: int, browser: Browser, tmp_path: Path) -> None:
    browser.visit(written("paper", tmp_path), width=width)
    assert browser.evaluate(ROWS) == []


WINDOWS = [
    pytest.param(width, scheme, marks=[] if (width, scheme) in ((1280, "light"), (320, "dark")) else pytest.mark.full)
    for width in (1280, 1010, 900, 390, 320)
    for scheme in ("light", "dark")
]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), WINDOWS)
@pytest.mark.parametrize("name", PAGES)
def test_in_a_browser(name: str, width: int, scheme: str, browser: Browser, tmp_path: Path) -> None:
    """No requests, no console errors, no overlap, overflow or low contrast; with the evidence closed and open."""
    page = written(name, tmp_path)
    browser.visit(page, width=width, scheme=scheme)
    measure(browser, width=width)
    browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    measure(browser, width=width)
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []
    dark = browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 22, 25)"
    assert dark == (scheme == "dark")


@pytest.mark.slow
def test_on_paper_the_evidence_is_open(browser: Browser, tmp_path: Path) -> None:
    browser.visit(written("paper", tmp_path), width=720, scheme="dark", media="print")
    shown = browser.evaluate("document.getElementById('service-1').getBoundingClientRect().height")
    assert shown > 50
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    measure(browser, width=720, prints=True)


@pytest.mark.slow
def test_a_name_leads_to_its_evidence(browser: Browser, tmp_path: Path) -> None:
    browser.visit(written("paper", tmp_path), width=1280)
    opened = """(async () => {
      document.querySelector('.group.critical a').click();
      await new Promise(done => setTimeout(done, 200));
      return [...document.querySelectorAll('details[open] summary b')].map(one => one.textContent);
    })()"""
    assert browser.evaluate(opened) == ["slurmctld"]


@pytest.mark.slow
def test_the_content_policy_is_enforced(browser: Browser, tmp_path: Path) -> None:
    """Injected content cannot run scripts, change styles or make requests."""
    browser.visit(written("paper", tmp_path), width=1280)
    tried = """(async () => {
      const script = document.createElement('script');
      script.textContent = 'window.ran = true';
      document.body.append(script);
      document.body.setAttribute('style', 'margin-top: 77px');
      const got = await fetch('http://127.0.0.1:9/').then(() => true, () => false);
      return [window.ran === true, getComputedStyle(document.body).marginTop, got];
    })()"""
    assert browser.evaluate(tried) == [False, "0px", False]
    assert len(browser.complaints()) >= 3
    assert browser.requests()[1:] == []


@pytest.mark.slow
def test_the_charts_are_drawn(browser: Browser, tmp_path: Path) -> None:
    """Bars, bands and arrows have a position and a size in the browser, and different colours."""
    browser.visit(written("paper", tmp_path), width=390)
    drawn = browser.evaluate("""['.bar', '.bar.boot', '.band', '.tip'].map(kind => {
      const all = [...document.querySelectorAll(kind)].map(one => one.getBoundingClientRect());
      return [all.length, all.every(r => r.width > 0 && r.height > 0 && r.left >= 0 && r.right <= 390)];
    })""")
    assert [fits for _, fits in drawn] == [True] * 4
    assert [number for number, _ in drawn[2:]] == [10, 11]
    assert len(browser.picture()) > 50_000
