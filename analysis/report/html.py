"""Render a classification as one HTML file: no script, no external resources, reproducible."""

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
from analysis.model import LOW_CONFIDENCE, Classification, Nodes, Service, Unseen
from analysis.report import calibration, drawing, grid, outage

MAX_SERVICES = 300
"""Services shown individually. A real network has tens; a scan of all ports could create thousands."""
MAX_ROWS = 100
"""Maximum rows of every other list."""

_HERE = Path(__file__).parent


def render_html(classification: Classification) -> str:
    """Return the complete page. Text from the capture or the site is always escaped."""
    found = classification
    style = (_HERE / "report.css").read_text(encoding="utf-8")
    numbered = list(enumerate(found.services[:MAX_SERVICES], 1))
    start = units.read_time(found.capture.start)
    bars, budget_ticks = drawing.budgets(numbered)
    shown = found.parts
    outages, effects = outage.predict(found, numbered)
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
            left_out=found.services[MAX_SERVICES:],
            start=start,
            end=units.later(start, found.capture.duration_s),
            bars=bars,
            budget_ticks=budget_ticks,
            outages=outages,
            chosen=outage.CHOSEN,
            effects=effects,
            strips=[drawing.strip(one, number, shown) for number, one in numbered],
            gaps=drawing.gaps_outline(found, shown),
            time_ticks=drawing.time_ticks(start, found.bin_s * shown),
            talk=drawing.talk(found, numbered),
            matrix=grid.draw(found),
            head=grid.HEAD,
            levels=grid.LEVELS,
            parts=parts(found),
            notices=notices(found),
            most=MAX_ROWS,
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
        later=units.later,
        budget_label=drawing.budget_label,
        opener=OPENERS.__getitem__,
        phase=PHASES.__getitem__,
        toward=TOWARD.__getitem__,
        kind=CLASSES.__getitem__,
        budget_from=units.BUDGETS.__getitem__,
        boots=boots,
        unseen=describe_unseen,
        calibration=calibration.points,
        calibration_size=calibration.SIZE,
        low_confidence=LOW_CONFIDENCE,
    )
    return environment


class Part(NamedTuple):
    """A category of the capture's packets; ``begin`` and ``width`` are its segment of the bar, in per cent."""

    kind: str
    name: str
    packets: int
    bytes: int
    begin: float
    width: float


CLASSES = {"time-critical": "critical", "deferrable": "deferrable"}
"""CSS class of each verdict."""
OPENERS = {"node": "nodes", "sms": "SMS", "both": "both"}
TOWARD = {
    "sms": "nodes connect to the management node",
    "nodes": "the management node connects to nodes",
    "both": "both sides open connections",
    "outside": "nodes connect to the outside through the management node",
}
PHASES = {"boot": "boot only", "steady": "steady", "both": "boot and steady"}


def boots(nodes: Nodes) -> str:
    """Describe how many boots were seen."""
    if nodes.boots_hidden:
        return "boots cannot be counted"
    return units.counted(nodes.booted, "boot") if nodes.booted else "no boot"


def describe_unseen(unseen: Unseen) -> str:
    """Describe what it means that a service was not seen; the capture needed, if one could show it."""
    if unseen.finding == "elsewhere":
        return "used at other machines"
    if unseen.needed_capture_s <= 0:
        return "not visible in any capture"
    needed = units.span(unseen.needed_capture_s)
    return f"{needed}, of all traffic in use" if unseen.finding == "not shown" else needed


def content_policy(style: str) -> str:
    """Return the Content-Security-Policy (CSP Level 3): only this style sheet, identified by its digest."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"


def headline(found: Classification) -> str:
    """Summarize the verdicts in one sentence."""
    critical = sum(one.verdict == "time-critical" for one in found.services)
    rest = len(found.services) - critical
    if not found.services:
        return "No services seen"
    if not found.nodes.cluster:
        return "This does not look like a cluster"
    if not critical:
        return f"{units.counted(rest, 'service')} can wait, none seen that must never stop"
    return f"{units.counted(critical, 'service')} must never stop" + (
        f", {units.number(rest)} can wait" if rest else ""
    )


def parts(found: Classification) -> list[Part]:
    """Split the capture's packets into categories. Routed traffic is not counted among the services again."""
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
    """Return warnings about the verdicts as (CSS class, heading, text)."""
    services = found.services
    result = [("act", f"{_name(one)} cannot run in the services container", _advice(one)) for one in to_do(services)]
    overridden = _names(one for one in services if one.overridden)
    if overridden:
        text = "Set by the site; the evidence shows what was seen."
        result.append(("note", f"Verdict set by the site: {overridden}", text))
    vague = [one for one in services if not one.confidence >= LOW_CONFIDENCE]
    if vague:
        text = f"{_names(vague)}: confidence is under {units.share(LOW_CONFIDENCE)}. Capture for longer, or more nodes."
        result.append(("note", f"{units.counted(len(vague), 'verdict has', 'verdicts have')} low confidence", text))
    return [(kind, heading, text) for kind, heading, text in result[:MAX_ROWS]]


def to_do(services: tuple[Service, ...]) -> list[Service]:
    """Return the time-critical services that the services container cannot run."""
    return [one for one in services if one.verdict == "time-critical" and not one.carried]


def _name(service: Service) -> str:
    return units.plain(service.name, 64)


def _names(services: Iterable[Service]) -> str:
    """Join the first six names."""
    names = [_name(one) for one in services]
    return units.listed(names, 6)


def _advice(service: Service) -> str:
    return service.advice or "Nodes need it: keep it running elsewhere, or add it to the catalogue."
