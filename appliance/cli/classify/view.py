"""A classification on the terminal: the two groups of the paper's Table 1, what else was seen, and the reasons.

All text goes through ``Text`` and ``plain``: captures are hostile, and what they hold must neither be taken for
rich's markup nor reach the terminal as control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from appliance.operations.classify.classify import units

if TYPE_CHECKING:
    from analysis.model import Classification, Heap, Service, Unclassified

GROUPS = (
    (
        "time-critical",
        "SMS-services: time-critical, must never stop",
        "red",
        'nodes turn to these at any time; how long they bear it without an answer is under "can be away"',
    ),
    (
        "deferrable",
        "SMS-mgmt: deferrable, can wait",
        "green",
        'running nodes do not wait for these; after the time under "can be away" something would be missed',
    ),
)
OPENED = {"node": "nodes", "sms": "SMS", "both": "both"}
PHASES = {"boot": "while nodes booted", "steady": "while nodes ran", "both": "while nodes booted and while they ran"}
NO_TRAFFIC = "it has no traffic of its own, or its ports are those of a service of the site's: no capture shows it"
NARROWEST = 40
"""Columns of the narrowest screen that is cared for."""
WIDE = 1000
"""Columns that any sentence fits into."""
FEW = 5
"""Lines of a list that are shown without --verbose."""


def console_for(width: int) -> Console:
    """A terminal; one narrower than NARROWEST breaks the lines itself."""
    return Console(width=max(width, NARROWEST), highlight=False, emoji=False)


def view_text(found: Classification, *, why: Collection[str] = (), verbose: bool = False) -> str:
    """The screen for files and pipes: without colours, every fact on one line, nothing behind its end."""
    console = Console(file=StringIO(), width=WIDE, highlight=False, emoji=False, color_system=None)
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
    """The whole screen.

    Args:
        why: services whose reasons are wanted, and nothing else.
        verbose: all of both.
        stacked: one group below the other, however wide the screen is.
    """
    if why and not verbose:
        return Group(*_remarks(found), *list(_reasons(found, why, verbose=False))[0 if found.capture.remarks else 1 :])
    parts: list[RenderableType] = [*_remarks(found), _head(found), Text(), *_tables(found, console, stacked)]
    if lacking := [each for each in found.services if each.verdict == "time-critical" and not each.carried]:
        parts += [Text(), _titled("Time-critical, and the container cannot carry it", "yellow")]
        parts.append(_pairs((each.name, each.advice or "keep it on a machine that stays up") for each in lacking))
    parts += _rest(found, verbose)
    parts += _reasons(found, why, verbose)
    if not verbose and found.services:
        parts += [Text(), Text("-v or --why NAME shows the reasons; -o FILE.yaml is for sms build --from", style="dim")]
    return Group(*parts)


def _remarks(found: Classification) -> Iterator[RenderableType]:
    """What one should know before believing the rest."""
    for words in found.capture.remarks:
        yield _pairs([("note", words)], "bold yellow")


def _text(value: str, style: str = "") -> Text:
    return Text(units.plain(value), style=style)


def _titled(value: str, style: str = "") -> Text:
    return Text(value, style=f"bold {style}".strip())


def _pairs(rows: Iterable[tuple[str, str]], style: str = "") -> Table:
    """Names on the left, sentences on the right, which may take several lines."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, max_width=24, overflow="ellipsis", style=style)
    table.add_column(overflow="fold")
    for name, words in rows:
        table.add_row(_text(name), _text(words))
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
    boots = "boots not to be counted in these packets" if nodes.boots_hidden else boots
    rows.append(("nodes", f"{units.number(nodes.count)}, {boots}" if nodes.count else "none was seen"))
    return _pairs(rows)


def _tables(found: Classification, console: Console, stacked: bool) -> Iterator[RenderableType]:
    """The groups side by side where both fit, else one after the other; a narrow terminal gets fewer columns."""
    for drop in range(len(DROPPED) + 1):
        left_out = DROPPED[:drop]
        groups = [_group(found, group, {*COLUMNS} - {*left_out}) for group in GROUPS]
        widths = [Measurement.get(console, console.options.update(width=WIDE), each).maximum for each in groups]
        if max(widths) <= console.width:
            break
    if sum(widths) + 4 <= console.width and not stacked:
        both = Table.grid(padding=(0, 4, 0, 0))
        both.add_row(*groups)
        yield both
    else:
        yield Group(groups[0], Text(), groups[1])
    if left_out and found.services:
        yield Text(f"too narrow for: {', '.join(left_out)}", "dim")


def _group(found: Classification, group: tuple[str, str, str, str], columns: set[str]) -> RenderableType:
    verdict, title, colour, means = group
    services = [each for each in found.services if each.verdict == verdict]
    table: RenderableType = _table(services, columns) if services else Text("none was seen", "dim")
    return Group(_titled(f"{title} ({len(services)})", colour), _Filling(means), table)


class _Filling:
    """A line that is as wide as what stands below it, and breaks there."""

    def __init__(self, words: str) -> None:
        self.text = Text(words, "dim")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self.text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, 1)


def _table(services: Iterable[Service], columns: set[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("service", max_width=24, overflow="ellipsis", no_wrap=True)
    shown = [title for title in COLUMNS if title in columns]
    for title in shown:
        table.add_column(title, justify="right" if title in NUMBERS else "left", no_wrap=True)
    for each in services:
        table.add_row(_text(each.name), *(COLUMNS[title](each) for title in shown))
    return table


def _contacts(service: Service) -> int:
    """Contacts where they were counted, else connections."""
    return service.contacts or service.connections.node + service.connections.sms


def _period(service: Service) -> str:
    """How often one node is in contact; ~ where that varies by more than half of it."""
    if service.phase == "boot":
        return "boot only"
    if service.interval_s is None or service.interval_s.median <= 0:
        return "-"
    varies = service.interval_s.jitter > service.interval_s.median / 2
    return f"{'~' if varies else ''}{units.span(service.interval_s.median)}"


def _budget(seconds: float) -> str:
    return units.span(seconds) if seconds >= 1 else "not at all"


def _sure(service: Service) -> str:
    return "by site" if service.overridden else f"{min(max(service.confidence, 0), 1) * 100:.0f} %"


COLUMNS: dict[str, Callable[[Service], str]] = {
    "opened by": lambda each: OPENED.get(each.initiator, each.initiator),
    "contacts": lambda each: units.number(_contacts(each)),
    "nodes": lambda each: units.number(each.clients),
    "every": _period,
    "can be away": lambda each: _budget(each.budget_s),
    "sure": _sure,
}
NUMBERS = ("contacts", "nodes", "sure")
DROPPED = ("contacts", "nodes", "every", "opened by")
"""Columns that a narrow terminal goes without, one after the other."""


# What is no service


def _rest(found: Classification, verbose: bool) -> Iterator[RenderableType]:
    rows = [*_routed(found, verbose), *_unseen(found, verbose)]
    rows += _heap("elsewhere", "not between nodes and SMS", found.elsewhere, verbose)
    rows += _heap("unclassified", "not understood", found.unclassified, verbose)
    rows += _unread(found, verbose)
    if rows:
        yield Text()
        yield _pairs(rows)


def _few(items: list[str], verbose: bool, joint: str = ", ") -> str:
    shown = items if verbose else items[:FEW]
    more = f"{joint}{len(items) - len(shown)} more" if len(items) > len(shown) else ""
    return joint.join(shown) + more


def _routed(found: Classification, verbose: bool) -> Iterator[tuple[str, str]]:
    routed = found.routed
    if routed.packets:
        places = [f"{each.address} {' '.join(each.ports[:3])}".strip() for each in routed.destinations]
        to = f": {_few(places, verbose)}" if places else ""
        yield "routed", f"{_amount(routed.packets, routed.bytes)} to the outside{to}"


def _unseen(found: Classification, verbose: bool) -> Iterator[tuple[str, str]]:
    """What is probably not used here, what a longer capture may show, shortest first, and what no capture can."""
    lasted = found.capture.covered_s or found.capture.duration_s
    by_time = sorted(found.unseen, key=lambda each: each.needed_capture_s)
    silent = [each.name for each in by_time if each.needed_capture_s <= 0]
    gone = [each for each in by_time if 0 < each.needed_capture_s <= lasted]
    late = [each for each in by_time if each.needed_capture_s > lasted]
    if gone:
        yield "not seen", f"and hardly used here (95 % sure): {', '.join(each.name for each in gone)}"
    if late:
        spans = ", ".join(f"{each.name} {units.span(each.needed_capture_s)}" for each in late)
        yield ("" if gone else "not seen"), f"a capture so long would be 95 % sure to show it: {spans}"
    if silent:
        yield "not visible", f"no capture can show it: {', '.join(silent)}"
    for each in by_time if verbose else ():
        if each.why:
            yield "", f"{each.name}: {each.why}"


def _heap(title: str, what: str, heap: Unclassified, verbose: bool) -> Iterator[tuple[str, str]]:
    if heap.packets:
        yield title, f"{what}: {_amount(heap.packets, heap.bytes)}: {_few(list(map(_one, heap.top)), verbose)}"


def _one(heap: Heap) -> str:
    return f"{heap.what} ({units.number(heap.packets)})"


def _unread(found: Classification, verbose: bool) -> Iterator[tuple[str, str]]:
    capture = found.capture
    if capture.skipped:
        yield "skipped", _few([f"{units.number(count)} x {what}" for what, count in capture.skipped.items()], verbose)
    if capture.truncated:
        yield "truncated", "a file ends in the middle of a record; it was read up to there"
    shown = capture.problems if verbose else capture.problems[:FEW]
    for index, problem in enumerate(shown):
        yield ("" if index else "problems"), problem
    if len(capture.problems) > len(shown):
        yield "", f"and {len(capture.problems) - len(shown)} more; -v shows them"


def _amount(packets: int, size: int) -> str:
    return f"{units.counted(packets, 'packet')}, {units.size(size)}"


# Reasons, on demand


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
            words = unseen[name].why if name in unseen else NO_TRAFFIC
            yield Padding(_pairs([("why", words)]), (0, 0, 0, 2))


def _evidence(service: Service) -> Iterator[tuple[str, str]]:
    if service.title:
        yield "what", service.title
    for index, reason in enumerate(service.reasons):
        yield ("" if index else "why"), reason
    yield "can be away", f"{_budget(service.budget_s)}: {service.budget_why}".removesuffix(": ")
    yield "known from", units.BUDGETS[service.budget_from]
    made = service.connections
    opened = f"{units.number(made.node)} opened by nodes, {units.number(made.sms)} by the SMS"
    extra = [f"{units.number(count)} {what}" for count, what in _others(service) if count]
    yield "connections", ", ".join((opened, *extra))
    ways = zip(service.packets_each, service.bytes_each, ("to the server", "back"), strict=True)
    yield "traffic", "; ".join(f"{_amount(packets, size)} {way}" for packets, size, way in ways)
    if service.ports:
        yield "ports", ", ".join(service.ports)
    if service.interval_s:
        every, spread = units.span(service.interval_s.median), units.span(service.interval_s.jitter)
        yield "one node", f"every {every}, the median; the middle half of all intervals spans {spread}"
    if service.latency_ms:
        half, nearly = (units.span(value / 1000) for value in (service.latency_ms.p50, service.latency_ms.p99))
        yield "answers", f"half of them within {half}, 99 % within {nearly}"
    first, last = units.span(service.first_s), units.span(service.last_s)
    yield "seen", f"{PHASES.get(service.phase, service.phase)}, from {first} to {last} after the beginning"
    if service.advice:
        yield "advice", service.advice


def _others(service: Service) -> tuple[tuple[int, str], ...]:
    return (service.connections.midstream, "open already"), (service.connections.unanswered, "not answered")
