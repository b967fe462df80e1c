"""``sms files report``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from appliance.cli.common import add_json, verb
from appliance.cli.nodes.files_common import lines, open_vm

if TYPE_CHECKING:
    from appliance.operations.nodes.files import Told

EXAMPLES = """\
  sms files report           who has all, who has not, who was not heard lately
  sms files report --path /etc/motd    who has which version of a file, and since when
  sms files report --json    all that every client has told"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    text = "Show what nodes and the container have told of the files that they have."
    parser = verb(actions, "report", "who has what", text, EXAMPLES)
    parser.add_argument("--path", metavar="PATH", help="only this file")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show it."""
    from appliance.cli.screen import out, print_json
    from appliance.operations.nodes.files import need_known_path, read_reports
    from appliance.operations.services.status import when

    cluster, api, _ = open_vm(arguments)
    told = read_reports(cluster, api)
    if arguments.path:
        need_known_path(api, arguments.path, told)
    if arguments.json:
        print_json([one.as_dict() for one in told])
        return 0
    if not arguments.path:
        for line in lines(told) if any(one.state != "silent" for one in told) else _unheard(told):
            out.print(line, markup=False)
        return 0
    for one in told:
        has = one.has.get(arguments.path)
        words = f"{has['sha256'][:16]} since {when(has['since'])[:16]}" if has else "-"
        late = "  not the newest" if arguments.path in one.missing else ""
        out.print(f"{one.client:<20} {words}{late}", markup=False)
    return 0


def _unheard(told: Sequence[Told]) -> Iterator[str]:
    """Every client, where none was heard lately: those of one state in one line."""
    from appliance.config.hostlist import fold
    from appliance.operations.services.status import when

    states: dict[str, list[str]] = {}
    for one in told:
        heard = f"last heard {when(one.at)[:16]}" if one.at is not None else "never heard"
        lacks = f"{len(one.missing)} files to come" if one.missing else "has all"
        states.setdefault(f"{heard}, {lacks}", []).append(one.client)
    rows = [(fold(names), words) for words, names in states.items()]
    width = min(40, max((len(names) for names, _ in rows), default=0))
    yield "no client was heard lately"
    for names, words in rows:
        yield f"  {names:<{width}}  {words}"
