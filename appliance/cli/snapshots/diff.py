"""``sms overlay diff``."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_host, add_json, filled, open_target, standard_output, verb

if TYPE_CHECKING:
    from appliance.operations.snapshots.paths import Diff

EXAMPLES = """\
  sms overlay diff 41                              what has changed since snapshot 41
  sms overlay diff 41 42                           between the two
  sms overlay diff latest --path /var/spool        only below this folder
  sms overlay diff 41 42 --all --json              everything, file by file, for scripts"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "diff",
        "compare two snapshots, or one with the present overlay",
        "List files and folders that were added (+), changed (~) or removed (-), by their paths in the container.\n"
        "A new or removed folder is one line. An overlay has only what the services container has written; a file\n"
        "of the image that was deleted is listed as removed from the image.",
        EXAMPLES,
    )
    parser.add_argument("before", metavar="A", type=filled, help="a number, or latest: the newest verified one")
    parser.add_argument("after", metavar="B", type=filled, nargs="?", help="the same (default: the present overlay)")
    parser.add_argument(
        "--path", action="append", default=[], type=filled, metavar="PATH", help="only this path and below; repeatable"
    )
    parser.add_argument("--all", action="store_true", help="print all lines, and new and removed folders file by file")
    add_host(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    from appliance.operations.snapshots.paths import DiffOptions, diff

    cluster, host = open_target(arguments)
    options = DiffOptions(arguments.before, arguments.after, arguments.path, arguments.all)
    found = diff(cluster, host, options)
    print_diff(found, as_json=arguments.json)
    return 0


def print_diff(found: Diff, *, as_json: bool) -> None:
    """Print the differences, line by line: there may be a million."""
    from appliance.cli.snapshots.paths_view import diff_line, diff_summary

    with standard_output() as stream:
        if as_json:
            head = {name: getattr(found, name) for name in ("host", "before", "after", "counts", "lines")}
            head["told"] = found.shown
            stream.write(json.dumps(head, indent=2)[:-2] + ',\n  "changes": [')
            for at, row in enumerate(found.rows):
                stream.write((",\n    " if at else "\n    ") + json.dumps(row))
            stream.write("\n  ]\n}\n" if found.shown else "]\n}\n")
            return
        for row in found.rows:
            stream.write(diff_line(row) + "\n")
        stream.write(diff_summary(found) + "\n")
