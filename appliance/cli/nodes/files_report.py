"""``sms files report``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from appliance.cli.common import add_json, verb
from appliance.cli.nodes.files_common import lines, open_vm

if TYPE_CHECKING:
    from appliance.operations.nodes.files import ClientReport

EXAMPLES = """\
  sms files report           which clients are up to date, lack files, or are offline
  sms files report --path /etc/motd    the version of a file on each client, and since when
  sms files report --json    all reports"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    text = "Show which files nodes and the container have, by their last reports."
    parser = verb(actions, "report", "which files the clients have", text, EXAMPLES)
    parser.add_argument("--path", metavar="PATH", help="only this file")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show it."""
    from appliance.cli.screen import out, print_json
    from appliance.operations.nodes.files import need_known_path, read_reports
    from appliance.units import format_time

    cluster, api, _ = open_vm(arguments)
    reports = read_reports(cluster, api)
    if arguments.path:
        need_known_path(api, arguments.path, reports)
    if arguments.json:
        print_json([asdict(one) for one in reports])
        return 0
    if not arguments.path:
        for line in lines(reports) if any(one.state != "silent" for one in reports) else _offline_lines(reports):
            out.print(line, markup=False)
        return 0
    for one in reports:
        has = one.has.get(arguments.path)
        words = f"{has['sha256'][:16]} since {format_time(has['since'])[:16]}" if has else "-"
        late = "  not the newest" if arguments.path in one.missing else ""
        out.print(f"{one.client:<20} {words}{late}", markup=False)
    return 0


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
