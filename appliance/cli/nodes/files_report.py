"""``sms files report``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, absolute, add_json, print_result, verb
from appliance.cli.nodes.files_common import lines, open_vm

if TYPE_CHECKING:
    from appliance.operations.nodes.files import ClientReport

EXAMPLES = """\
  sms files report           which clients are up to date, lack files, or are offline
  sms files report --path /etc/motd    the version of a file on each client, and since when
  sms files report --json    all reports"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    text = "Show which files nodes and the container have, by their last reports."
    parser = verb(actions, "report", "which files the clients have", text, EXAMPLES)
    parser.add_argument("--path", type=absolute, metavar="PATH", help="only this file")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show it."""
    from appliance.operations.nodes.files import need_known_path, read_reports

    cluster, api = open_vm(arguments)
    reports = read_reports(cluster, api)
    if arguments.path:
        need_known_path(api, arguments.path, reports)
        shown = _lines_of(arguments.path, reports)
    else:
        online = any(one.state != "silent" for one in reports)
        shown = lines(reports) if online else _offline_lines(reports)
    print_result(arguments, reports, shown)
    return 0


def _lines_of(path: str, reports: Sequence[ClientReport]) -> Iterator[str]:
    """Yield a line per client: its version of the file."""
    from appliance.units import format_time

    for one in reports:
        has = one.has.get(path)
        words = f"{has['sha256'][:16]} since {format_time(has['since'])[:16]}" if has else "-"
        late = "  not the newest" if path in one.missing else ""
        yield f"{one.client:<20} {words}{late}"


def _offline_lines(reports: Sequence[ClientReport]) -> Iterator[str]:
    """Yield a line per state, when all clients are offline."""
    from appliance.config.hostlist import fold
    from appliance.units import format_time

    states: dict[str, list[str]] = {}
    for one in reports:
        contact = f"last report {format_time(one.at)[:16]}" if one.at is not None else "no report yet"
        lacks = f"{len(one.missing)} files missing" if one.missing else "up to date"
        states.setdefault(f"{contact}, {lacks}", []).append(one.client)
    rows = [(fold(names), words) for words, names in states.items()]
    width = min(40, max((len(names) for names, _ in rows), default=0))
    yield "no client is online"
    for names, words in rows:
        yield f"  {names:<{width}}  {words}"
