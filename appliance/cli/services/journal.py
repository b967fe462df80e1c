"""``sms journal``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

from appliance.cli.common import Verbs, add_json, filled, open_site, print_result, verb
from appliance.text import one_line
from appliance.units import format_time

EXAMPLES = """\
  sms journal                    the last 30 lines of all admin hosts
  sms journal --host host-a -n 0   all lines of one
  sms journal --json             for scripts: {"lines": [...], "silent": {...}}"""
HEAD = ("at", "host", "verb", "event")
MAX_VALUE = 200
"""Characters of one value; --json prints it completely."""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "journal",
        "show when the services container was started, stopped, migrated or upgraded",
        "Show the events that start, stop, migrate, adopt, failover, upgrade and the guard record on the admin hosts.",
        EXAMPLES,
    )
    parser.add_argument(
        "--host", type=filled, metavar="NAME", help="show the journal of this admin host (default: all that answer)"
    )
    parser.add_argument(
        "-n", "--lines", type=_count, default=30, metavar="N", help="show the last N lines (30; 0: all)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Show the journal."""
    from appliance.cli.screen import err
    from appliance.operations.services.journal import read_journal

    cluster = open_site(arguments)
    journal = read_journal(cluster, arguments.host, last=arguments.lines)
    result = {"lines": journal.lines, "silent": journal.silent}
    print_result(arguments, result, map(text_of, journal.lines))
    if arguments.json:
        return 0
    for name, why in journal.silent.items():
        err.print(f"note: {name} cannot be read: {why}", markup=False)
    if not journal.lines:
        err.print("nothing has been recorded yet", markup=False)
    return 0


def text_of(line: Mapping[str, object]) -> str:
    """Return the text of one line."""
    at = line.get("at")
    when = format_time(at) if isinstance(at, int | float) else "?" * 19
    head = " ".join(_plain(line.get(name, "?")) for name in HEAD[1:])
    facts = [f"{name}={_plain(value)}" for name, value in line.items() if name not in HEAD and value not in ("", None)]
    return f"{when}  {head}" + (f": {', '.join(facts)}" if facts else "")


def _plain(value: object) -> str:
    """Return a value on one line without control characters: it may contain output of other programs."""
    if isinstance(value, dict):
        return "{" + "; ".join(f"{_plain(name)} {_plain(one)}" for name, one in value.items()) + "}"
    text = value if isinstance(value, str) else str(value)
    if re.fullmatch(r"[0-9a-f]{64}", text):
        return text[:12]
    return one_line(text, MAX_VALUE)
