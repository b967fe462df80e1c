"""``sms files list``."""

from __future__ import annotations

import argparse
from typing import Any

from appliance.cli.common import add_json, verb
from appliance.cli.files.common import open_vm

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
        # A path that is cut says nothing.
        table.add_column(title, overflow="fold", min_width=16 if title == "path" else None)
    for each in found:
        owner = f"{each['mode']} {each['owner']}:{each['group']}"
        since = when(each["made"])[5:16]
        words = (each["path"], str(each["version"]), size(each["size"]), owner, audience(each), since)
        table.add_row(*map(escape, words))
    out.print(table)
    return 0


def audience(master: dict[str, Any]) -> str:
    """Who has it."""
    from appliance.config.hostlist import fold

    parts = [fold(master["nodes"])] if master["nodes"] else []
    parts += [f"@{group}" for group in master["groups"]]
    whole = ",".join(parts) or "all nodes"
    return whole + (", services" if master["services"] else "") + (" (template)" if master["template"] else "")
