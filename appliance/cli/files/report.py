"""``sms files report``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_json, verb
from appliance.cli.files.common import lines, open_vm

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
    from appliance.flow.files import read_reports
    from appliance.flow.status import when

    cluster, api, _ = open_vm(arguments)
    told = read_reports(cluster, api)
    if arguments.json:
        print_json([one.as_dict() for one in told])
        return 0
    if not arguments.path:
        for line in lines(told):
            out.print(line, markup=False)
        return 0
    for one in told:
        has = one.has.get(arguments.path)
        words = f"{has['sha256'][:16]} since {when(has['since'])[:16]}" if has else "-"
        late = "  not the newest" if arguments.path in one.missing else ""
        out.print(f"{one.client:<20} {words}{late}", markup=False)
    return 0
