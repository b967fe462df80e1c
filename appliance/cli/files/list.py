"""``sms files list``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_json, verb
from appliance.cli.files.common import audience, open_vm

EXAMPLES = """\
  sms files list           every master file: its version, who has it, where it comes from
  sms files list --json    with digests, for scripts"""


def add(actions: argparse._SubParsersAction[Any]) -> None:
    """Add the action's parser."""
    parser = verb(actions, "list", "the master files", "List the master files of the provisioning VM.", EXAMPLES)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List them."""
    from rich.markup import escape
    from rich.table import Table

    from appliance.cli.node.common import show_table
    from appliance.cli.overlay.view import size
    from appliance.cli.screen import out, print_json
    from appliance.flow.files import list_masters
    from appliance.flow.status import when

    _, api, _ = open_vm(arguments)
    found = list_masters(api)
    if arguments.json:
        print_json(found)
        return 0
    if not found:
        out.print("the VM has no master files; `sms files push` brings those of the site file", markup=False)
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("path", "v", "size", "mode and owner", "for", "since"):
        # A path that is cut, or goes on in the next line, says nothing.
        whole = max(len(each["path"]) for each in found) if title == "path" else None
        table.add_column(title, overflow="fold", no_wrap=title == "path", min_width=whole)
    for each in found:
        owner = f"{each['mode']} {each['owner']}:{each['group']}"
        since = when(each["made"])[:16]
        words = (each["path"], str(each["version"]), size(each["size"]), owner, audience(each), since)
        table.add_row(*map(escape, words))
    show_table(table)
    return 0
