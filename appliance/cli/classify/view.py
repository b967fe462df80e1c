"""Show a classification on the terminal: the two groups of services, other traffic, and the reasons.

All text goes through ``Text`` and ``plain``: captures are untrusted, and their text must neither be interpreted as
rich's markup nor reach the terminal as control characters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from io import StringIO
from itertools import islice, zip_longest
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from appliance.cli.screen import Screen
from appliance.operations.classify.classify import units

if TYPE_CHECKING:
    from analysis.model import Classification, Service, TrafficKind, Unclassified

GROUPS = (
    (
        "time-critical",
        "SMS-services: time-critical, must never stop",
        "red",
        'nodes contact these at any time; "tolerated outage" is how long they can do without an answer',
    ),
    (
        "deferrable",
        "SMS-mgmt: deferrable, can wait",
        "green",
        'running nodes do not wait for these; after the "tolerated outage" the effects become visible',
    ),
)
OPENERS = {"node": "nodes", "sms": "SMS", "both": "both"}
PHASES = {"boot": "while nodes booted", "steady": "while nodes ran", "both": "while nodes booted and while they ran"}
NO_TRAFFIC = "it has no traffic of its own, or its ports belong to a service of the site: no capture shows it"
SPARKS = 24
"""Maximum parts of a timeline."""
BLOCKS = " ▁▂▃▄▅▆▇█"
MIN_WIDTH = 40
"""Columns of the narrowest supported terminal."""
UNLIMITED_WIDTH = 1000
"""More columns than any sentence has."""
MAX_LINES = 5
"""Lines of a list shown without --verbose."""
MAX_NAMED = 8
"""Services of another machine that are named."""


def console_for(width: int) -> Console:
    """Return a console; a terminal narrower than MIN_WIDTH wraps the lines itself."""
    return Screen(width=max(width, MIN_WIDTH), highlight=False, emoji=False)


def view_text(found: Classification, *, why: Collection[str] = (), verbose: bool = False) -> str:
    """Return the output for files and pipes: no colours, one fact per line, no trailing spaces."""
    console = Screen(file=StringIO(), width=UNLIMITED_WIDTH, highlight=False, emoji=False, color_system=None)
    with console.capture() as captured:
        console.print(view(found, console, why=why, verbose=verbose, stacked=True))
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def view(
    found: Classification,
    console: Console,
    *,
    why: Collection[str] = (),
    verbose: bool = False,
    stacked: bool = False,
) -> RenderableType:
    """Return the whole output.

    Args:
        why: show only the reasons of these services.
        verbose: show tables and all reasons.
        stacked: one group below the other, whatever the width.
    """
    if why and not verbose:
        return Group(
            *_remarks(found),
            *_compared(found),
            *list(_reasons(found, why, verbose=False))[0 if found.capture.remarks else 1 :],
        )
    parts: list[RenderableType] = [
        *_remarks(found),
        _head(found),
        *_compared(found),
        Text(),
        *_tables(found, console, stacked),
    ]
    if lacking := [each for each in found.services if each.verdict == "time-critical" and not each.carried]:
        parts += [Text(), _titled("Time-critical, but cannot run in the container", "yellow")]
        parts.append(_pairs((each.name, each.advice or "keep it on a machine that stays up") for each in lacking))
    parts += _rest(found, verbose)
    parts += _reasons(found, why, verbose)
    if not verbose and found.services:
        parts += [Text(), Text("-v or --why NAME shows the reasons; -o FILE.yaml is for sms build --from", style="dim")]
    return Group(*parts)


def _remarks(found: Classification) -> Iterator[RenderableType]:
    """Show the limits of the capture."""
    for remark in found.capture.remarks:
        yield _pairs([("note", remark)], "bold yellow")


def _compared(found: Classification) -> Iterator[RenderableType]:
    """Show what is different from an earlier classification."""
    compared = found.compared
    if compared is None:
        return
    context = "; ".join(compared.context)
    rows = [("compared", f"with {compared.file}{f': {context}' if context else ''}", "bold")]
    rows += [(each.title, each.text, "" if each.kind == "changed" else "bold yellow") for each in compared.changes]
    same = units.counted(compared.same, "service")
    rows.append(("same", f"{same}: same verdict, similar numbers" if compared.same else "none", ""))
    yield Text()
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text, style in rows:
        table.add_row(_text(name, style), _text(text))
    yield table


def _text(value: str, style: str = "") -> Text:
    return Text(units.plain(value), style=style)


def _titled(value: str, style: str = "") -> Text:
    return Text(value, style=f"bold {style}".strip())


def _pairs(rows: Iterable[tuple[str, str]], style: str = "") -> Table:
    """Return names on the left, sentences on the right, which may wrap."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, max_width=24, overflow="ellipsis", style=style)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(_text(name), _text(text))
    return table


def _head(found: Classification) -> RenderableType:
    capture, sms, nodes = found.capture, found.sms, found.nodes
    files = capture.files[0] if len(capture.files) == 1 else units.counted(len(capture.files), "file")
    began = units.clock(units.read_time(capture.start))
    read = f"{files}: {units.counted(capture.packets, 'packet')}, {units.size(capture.bytes)}, "
    rows = [("capture", f"{read}{units.span(capture.duration_s)}{f' from {began}' if began else ''}")]
    who = ", ".join(filter(None, (sms.mac, *sms.addresses[:4]))) or "unknown"
    more = f" and {len(sms.addresses) - 4} more" if len(sms.addresses) > 4 else ""
    rows.append(("SMS", f"{who}{more}; {sms.found}" if sms.found else who + more))
    boots = f"{units.counted(nodes.booted, 'boot')} seen" if nodes.booted else "no boot seen"
    boots = "boots cannot be counted in these packets" if nodes.boots_hidden else boots
    doubt = "" if nodes.cluster else "; this does not look like a cluster"
    rows.append(("nodes", f"{units.number(nodes.count)}, {boots}{doubt}" if nodes.count else "none seen"))
    return _pairs([*rows, *_servers(found)])


def _servers(found: Classification) -> Iterator[tuple[str, str]]:
    """List the other machines that serve."""
    for index, each in enumerate(found.servers[:MAX_LINES]):
        users = (
            f" for {units.counted(each.nodes, 'node')}"
            if each.nodes
            else " for the SMS"
            if each.role == "server"
            else ""
        )
        served = f"{each.addresses[0]} ({each.role}): {units.listed(each.services, MAX_NAMED)}{users}"
        yield "" if index else "servers", f"{served}, {_amount(each.packets, each.bytes)}"
    if len(found.servers) > MAX_LINES:
        yield "", f"and {len(found.servers) - MAX_LINES} more"


def _tables(found: Classification, console: Console, stacked: bool) -> Iterator[RenderableType]:
    """Show the groups side by side if both fit, else one below the other; a narrow terminal gets fewer columns."""
    for drop in range(len(DROPPED) + 1):
        left_out = DROPPED[:drop]
        groups = [_group(found, group, {*COLUMNS} - {*left_out}) for group in GROUPS]
        widths = [_width(console, each) for each in groups]
        if max(widths) <= console.width:
            break
    if sum(widths) + 4 <= console.width and not stacked:
        both = Table.grid(padding=(0, 4, 0, 0))
        both.add_row(*groups)
        yield both
    else:
        if not (stacked or left_out) and draws_blocks(console):
            drawn = [_group(found, group, {*COLUMNS}, timelines=Timelines(found)) for group in GROUPS]
            groups = drawn if max(_width(console, each) for each in drawn) <= console.width else groups
        yield Group(groups[0], Text(), groups[1])
    if left_out and found.services:
        yield Text(f"too narrow for: {', '.join(left_out)}", "dim")


def _width(console: Console, table: RenderableType) -> int:
    return Measurement.get(console, console.options.update(width=UNLIMITED_WIDTH), table).maximum


def draws_blocks(console: Console) -> bool:
    """Return whether the terminal has the characters of a timeline; the text console of Linux has not."""
    return console.encoding.lower().startswith("utf") and os.environ.get("TERM") != "linux"


class Timelines:
    """Contacts over time in one line of blocks, each on its own scale; dots where nothing was captured."""

    def __init__(self, found: Classification) -> None:
        self.parts = found.parts
        self.each = max(-(-self.parts // SPARKS), 1)
        middles = [(begin + self.each / 2) * found.bin_s for begin in range(0, self.parts, self.each)]
        self.missing = [any(begin <= at < end for begin, end in found.capture.gaps) for at in middles]

    def line(self, service: Service) -> str:
        """Return the line of a service."""
        both = zip_longest(service.timeline, service.timeline_boot, fillvalue=0)
        counts = [max(sum(contacts), 0) for contacts in islice(both, self.parts)]
        counts += [0] * (self.parts - len(counts))
        blocks = [counts[begin : begin + self.each] for begin in range(0, self.parts, self.each)]
        rates = [sum(block) / len(block) for block in blocks]  # the last block may be shorter
        most = max(rates, default=0.0)
        return "".join(
            BLOCKS[math.ceil(rate / most * (len(BLOCKS) - 1))] if rate else "·" if missing else " "
            for rate, missing in zip(rates, self.missing, strict=True)
        )


def _group(
    found: Classification, group: tuple[str, str, str, str], columns: set[str], timelines: Timelines | None = None
) -> RenderableType:
    verdict, title, colour, means = group
    services = [each for each in found.services if each.verdict == verdict]
    table: RenderableType = _table(services, columns, timelines) if services else Text("none seen", "dim")
    return Group(_titled(f"{title} ({len(services)})", colour), _Filling(means), table)


class _Filling:
    """A line that takes the width of the table below it, and wraps."""

    def __init__(self, text: str) -> None:
        self.text = Text(text, "dim")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self.text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, 1)


def _table(services: Iterable[Service], columns: set[str], timelines: Timelines | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("service", max_width=24, overflow="ellipsis", no_wrap=True)
    shown = [title for title in COLUMNS if title in columns]
    for title in shown:
        table.add_column(title, justify="right" if title in NUMBERS else "left", no_wrap=True)
    if timelines:
        table.add_column("contacts over time", no_wrap=True)
    for each in services:
        line = [timelines.line(each)] if timelines else []
        table.add_row(_text(each.name), *(COLUMNS[title](each) for title in shown), *line)
    return table


def _contacts(service: Service) -> int:
    """Return the contacts if they were counted, else the connections."""
    return service.contacts or service.connections.node + service.connections.sms


def _period(service: Service) -> str:
    """Return the interval between a node's contacts; ~ if it varies by more than half."""
    if service.phase == "boot":
        return "boot only"
    if service.interval_s is None or service.interval_s.median <= 0:
        return "-"
    varies = service.interval_s.jitter > service.interval_s.median / 2
    return f"{'~' if varies else ''}{units.span(service.interval_s.median)}"


def _budget(seconds: float) -> str:
    return units.span(seconds) if seconds >= 1 else "none"


def _confidence(service: Service) -> str:
    return "by site" if service.overridden else f"{min(max(service.confidence, 0), 1) * 100:.0f} %"


COLUMNS: dict[str, Callable[[Service], str]] = {
    "opener": lambda each: OPENERS.get(each.initiator, each.initiator),
    "contacts": lambda each: units.number(_contacts(each)),
    "nodes": lambda each: units.number(each.clients),
    "every": _period,
    "tolerated outage": lambda each: _budget(each.budget_s),
    "confidence": _confidence,
}
NUMBERS = ("contacts", "nodes", "confidence")
DROPPED = ("contacts", "nodes", "every", "opener")
"""Columns that a narrow terminal omits, in this order."""


# Traffic that is not a service


def _rest(found: Classification, verbose: bool) -> Iterator[RenderableType]:
    rows = [*_routed(found, verbose), *_unseen(found, verbose)]
    rows += _kinds("elsewhere", "not between nodes and SMS", found.elsewhere, verbose)
    rows += _kinds("unclassified", "not understood", found.unclassified, verbose)
    rows += _unread(found, verbose)
    if rows:
        yield Text()
        yield _pairs(rows)


def _shorten(items: list[str], verbose: bool) -> str:
    shown = items if verbose else items[:MAX_LINES]
    more = f", {len(items) - len(shown)} more" if len(items) > len(shown) else ""
    return ", ".join(shown) + more


def _routed(found: Classification, verbose: bool) -> Iterator[tuple[str, str]]:
    routed = found.routed
    if routed.packets:
        places = [f"{each.address} {' '.join(each.ports[:3])}".strip() for each in routed.destinations]
        to = f": {_shorten(places, verbose)}" if places else ""
        yield "routed", f"{_amount(routed.packets, routed.bytes)} to the outside{to}"


def _unseen(found: Classification, verbose: bool) -> Iterator[tuple[str, str]]:
    """List services that are probably unused, that another or a longer capture may show, and that none can show."""
    by_time = sorted(found.unseen, key=lambda each: each.needed_capture_s)
    silent = [each.name for each in by_time if each.needed_capture_s <= 0]
    by_finding = {
        finding: [each for each in by_time if each.finding == finding and each.needed_capture_s > 0]
        for finding in ("hardly used", "not shown", "elsewhere", "too short")
    }
    titles = {
        "hardly used": "and hardly used here (95 % confidence)",
        "not shown": "in a capture that may not show it",
        "elsewhere": "here, but used at other machines",
        "too short": "capture needed for 95 % confidence",
    }
    title = "not seen"
    for finding, entries in by_finding.items():
        names = ", ".join(
            f"{each.name} {units.span(each.needed_capture_s)}" if finding == "too short" else each.name
            for each in entries
        )
        if entries:
            yield title, f"{titles[finding]}: {names}"
            title = ""
    if silent:
        yield "not visible", f"no capture can show it: {', '.join(silent)}"
    for each in by_time if verbose else ():
        if each.why:
            yield "", f"{each.name}: {each.why}"


def _kinds(title: str, what: str, tally: Unclassified, verbose: bool) -> Iterator[tuple[str, str]]:
    if tally.packets:
        yield title, f"{what}: {_amount(tally.packets, tally.bytes)}: {_shorten(list(map(_kind, tally.top)), verbose)}"


def _kind(kind: TrafficKind) -> str:
    return f"{kind.what} ({units.number(kind.packets)})"


def _unread(found: Classification, verbose: bool) -> Iterator[tuple[str, str]]:
    capture = found.capture
    if capture.skipped:
        yield (
            "skipped",
            _shorten([f"{units.number(count)} x {what}" for what, count in capture.skipped.items()], verbose),
        )
    if capture.truncated:
        yield "truncated", "a file ends in the middle of a record; everything before it was read"
    shown = capture.problems if verbose else capture.problems[:MAX_LINES]
    for index, problem in enumerate(shown):
        yield ("" if index else "problems"), problem
    if len(capture.problems) > len(shown):
        yield "", f"and {len(capture.problems) - len(shown)} more; -v shows them"


def _amount(packets: int, size: int) -> str:
    return f"{units.counted(packets, 'packet')}, {units.size(size)}"


# Reasons of --why and --verbose


def _reasons(found: Classification, why: Collection[str], verbose: bool) -> Iterator[RenderableType]:
    for each in found.services:
        if verbose or each.name in why:
            yield Text()
            yield _text(f"{each.name}: {each.verdict}, {each.group}", "bold")
            yield Padding(_pairs(_evidence(each)), (0, 0, 0, 2))
    unseen = {each.name: each for each in found.unseen}
    for name in why:
        if name not in {each.name for each in found.services}:
            yield Text()
            yield _text(f"{name}: not seen", "bold")
            text = unseen[name].why if name in unseen else NO_TRAFFIC
            yield Padding(_pairs([("why", text)]), (0, 0, 0, 2))


def _evidence(service: Service) -> Iterator[tuple[str, str]]:
    if service.title:
        yield "what", service.title
    for index, reason in enumerate(service.reasons):
        yield ("" if index else "why"), reason
    yield "tolerated outage", f"{_budget(service.budget_s)}: {service.budget_why}".removesuffix(": ")
    yield "source", units.BUDGETS[service.budget_from]
    made = service.connections
    opened = f"{units.number(made.node)} opened by nodes, {units.number(made.sms)} by the SMS"
    extra = [f"{units.number(count)} {what}" for count, what in _other_connections(service) if count]
    yield "connections", ", ".join((opened, *extra))
    ways = zip(service.packets_each, service.bytes_each, ("to the server", "back"), strict=True)
    yield "traffic", "; ".join(f"{_amount(packets, size)} {way}" for packets, size, way in ways)
    if service.ports:
        yield "ports", ", ".join(service.ports)
    if service.interval_s:
        every, spread = units.span(service.interval_s.median), units.span(service.interval_s.jitter)
        yield "interval", f"median {every} per node; interquartile range {spread}"
    if service.latency_ms:
        half, nearly = (units.span(value / 1000) for value in (service.latency_ms.p50, service.latency_ms.p99))
        yield "latency", f"median {half}, 99 % within {nearly}"
    first, last = units.span(service.first_s), units.span(service.last_s)
    yield "seen", f"{PHASES.get(service.phase, service.phase)}, from {first} to {last} after the start"
    if service.advice:
        yield "advice", service.advice


def _other_connections(service: Service) -> tuple[tuple[int, str], ...]:
    return (service.connections.midstream, "open before"), (service.connections.unanswered, "unanswered")
