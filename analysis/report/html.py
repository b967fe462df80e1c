"""A classification as one HTML file: no script, nothing fetched, the same file for the same classification."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from analysis import units
from analysis.model import Classification, Nodes, Service
from analysis.report import drawing

MOST_SERVICES = 300
"""Services shown one by one. A real network has tens; a scan of all ports could make thousands."""
MOST_ROWS = 100
"""Lines of every other list."""

UNSURE = 0.5
"""Confidence below which a verdict is called unsure."""

_HERE = Path(__file__).parent


def render_html(classification: Classification) -> str:
    """The report, complete. Text of the capture's or of the site's is escaped wherever it stands."""
    found = classification
    style = (_HERE / "report.css").read_text(encoding="utf-8")
    numbered = list(enumerate(found.services[:MOST_SERVICES], 1))
    start = units.read_time(found.capture.start)
    bars, budget_ticks = drawing.budgets(numbered)
    shown = drawing.parts_shown(found)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            found=found,
            style=Markup(style),  # noqa: S704 - the file beside this one
            policy=content_policy(style),
            headline=headline(found),
            services=numbered,
            critical=[pair for pair in numbered if pair[1].verdict == "time-critical"],
            deferrable=[pair for pair in numbered if pair[1].verdict != "time-critical"],
            left_out=found.services[MOST_SERVICES:],
            start=start,
            end=units.later(start, found.capture.duration_s),
            bars=bars,
            budget_ticks=budget_ticks,
            strips=[drawing.strip(one, number, shown) for number, one in numbered],
            time_ticks=drawing.time_ticks(start, found.bin_s * shown),
            talk=drawing.talk(found, numbered),
            parts=parts(found),
            notices=notices(found),
            most=MOST_ROWS,
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: units.plain(value) if type(value) is str else value,
    )
    environment.filters.update(
        number=units.number,
        size=units.size,
        span=units.span,
        share=units.share,
        part=units.part,
        clock=units.clock,
        plain=units.plain,
    )
    environment.globals.update(
        counted=units.counted,
        budget_label=drawing.budget_label,
        opener=OPENERS.__getitem__,
        phase=PHASES.__getitem__,
        toward=TOWARD.__getitem__,
        kind=CLASSES.__getitem__,
        budget_from=units.BUDGETS.__getitem__,
        boots=boots,
        unsure=UNSURE,
    )
    return environment


class Part(NamedTuple):
    """A part of the capture's packets; ``begin`` and ``width`` are its piece of the whole, in per cent."""

    kind: str
    name: str
    packets: int
    bytes: int
    begin: float
    width: float


CLASSES = {"time-critical": "critical", "deferrable": "deferrable"}
"""A verdict, and what the style sheet calls it."""
OPENERS = {"node": "nodes", "sms": "SMS", "both": "both"}
TOWARD = {
    "sms": "nodes ask the management node",
    "nodes": "the management node asks nodes",
    "both": "each asks the other",
    "outside": "nodes ask the outside, through the management node",
}
PHASES = {"boot": "boot only", "steady": "steady", "both": "boot and steady"}


def boots(nodes: Nodes) -> str:
    """How many boots were seen."""
    if nodes.boots_hidden:
        return "boots not to be counted"
    return units.counted(nodes.booted, "boot") if nodes.booted else "no boot"


def content_policy(style: str) -> str:
    """What a browser may load for this page: this one style sheet, told by its digest (CSP Level 3), and no more."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"


def headline(found: Classification) -> str:
    """The verdict in one sentence."""
    critical = sum(one.verdict == "time-critical" for one in found.services)
    rest = len(found.services) - critical
    if not found.services:
        return "No service was seen"
    if not critical:
        return f"{units.counted(rest, 'service')} can wait, none was seen that must never stop"
    return f"{units.counted(critical, 'service')} must never stop" + (
        f", {units.number(rest)} can wait" if rest else ""
    )


def parts(found: Classification) -> list[Part]:
    """Where the packets went, in pieces of one whole. What is routed is not counted among the services again."""
    router = drawing.routing(found)
    services = [one for one in found.services if one is not router]
    by = {verdict: [one for one in services if one.verdict == verdict] for verdict in CLASSES}
    rows = [
        *((group, f"Services, {verdict}", *_sum(by[verdict])) for verdict, group in CLASSES.items()),
        ("routed", "Routed to the outside", found.routed.packets, found.routed.bytes),
        ("elsewhere", "Elsewhere", found.elsewhere.packets, found.elsewhere.bytes),
        ("unknown", "Not understood", found.unclassified.packets, found.unclassified.bytes),
    ]
    pieces = drawing.shares([max(row[2], 0) for row in rows])
    return [Part(*row, begin, width) for row, (begin, width) in zip(rows, pieces, strict=True)]


def _sum(services: list[Service]) -> tuple[int, int]:
    return sum(one.packets for one in services), sum(one.bytes for one in services)


def notices(found: Classification) -> list[tuple[str, str, str]]:
    """What to know before building on this: (class, heading, text)."""
    services = found.services
    told = [("act", f"{_name(one)} is not carried by the services container", _advice(one)) for one in to_do(services)]
    said = _names(one for one in services if one.overridden)
    if said:
        text = "The site says so; the evidence says what was seen."
        told.append(("note", f"Verdict of the site's own: {said}", text))
    vague = [one for one in services if not one.confidence >= UNSURE]
    if vague:
        text = f"{_names(vague)}: confidence is under {units.share(UNSURE)}. More time and more nodes say more."
        told.append(("note", f"{units.counted(len(vague), 'verdict is', 'verdicts are')} unsure", text))
    return [(kind, heading, text) for kind, heading, text in told[:MOST_ROWS]]


def to_do(services: tuple[Service, ...]) -> list[Service]:
    """Services that must never stop and that the container cannot carry."""
    return [one for one in services if one.verdict == "time-critical" and not one.carried]


def _name(service: Service) -> str:
    return units.plain(service.name, 64)


def _names(services: Iterable[Service]) -> str:
    """The first six names."""
    names = [_name(one) for one in services]
    return units.listed([*names[:6], *([units.counted(len(names) - 6, "other")] if len(names) > 6 else [])])


def _advice(service: Service) -> str:
    return service.advice or "Nodes need it: keep it running elsewhere, or add it to the catalogue."
