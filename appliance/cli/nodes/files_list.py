"""``sms files list``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from appliance.cli.common import Verbs, add_json, print_result, verb
from appliance.cli.nodes.files_common import audience, open_vm

EXAMPLES = """\
  sms files list           every master file: its version, owner and clients
  sms files list --json    with digests, for scripts"""

TITLES = ("path", "v", "size", "mode and owner", "since", "for")


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(actions, "list", "the master files", "List the master files of the provisioning VM.", EXAMPLES)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List them."""
    from appliance.operations.nodes.files import list_masters

    _, api = open_vm(arguments)
    found = list_masters(api)
    none = ["the VM has no master files; `sms files push` uploads those of the site file"]
    print_result(arguments, found, rows(found) if found else none)
    return 0


def rows(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line per file, without truncation or wrapping, so that paths can be copied."""
    from appliance.units import format_size, format_time

    table = [TITLES]
    for each in found:
        owner = f"{each['mode']} {each['owner']}:{each['group']}"
        words = (each["path"], str(each["version"]), format_size(each["size"]), owner, format_time(each["made"])[:16])
        table.append((*words, audience(each)))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)).rstrip()
