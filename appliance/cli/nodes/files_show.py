"""``sms files show``."""

from __future__ import annotations

import argparse

from appliance.cli.common import Verbs, add_json, print_result, verb
from appliance.cli.edge import write_data
from appliance.cli.nodes.files_common import audience, open_vm

EXAMPLES = """\
  sms files show /etc/motd              its versions, the newest first
  sms files show /etc/motd --content    its content"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    text = "Show a master file: its versions, of which the last five are kept, or its content."
    parser = verb(actions, "show", "one master file and its versions", text, EXAMPLES)
    parser.add_argument("path", metavar="PATH", help="its path on the clients")
    parser.add_argument("--content", action="store_true", help="print the content of the current version")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show it."""
    from appliance.errors import Refused
    from appliance.operations.nodes.files import read_content, show_master
    from appliance.units import format_size, format_time

    _, api = open_vm(arguments)
    found = show_master(api, arguments.path)
    if arguments.content:
        current = next((each for each in found["versions"] if each["version"] == found["current"]), None)
        data = read_content(api, current["sha256"]) if current else None
        if data is None:
            raise Refused(f"{arguments.path} has no content: it was removed", hint="sms files rollback restores it")
        write_data(data)
        return 0
    lines = [f"{found['path']}{'' if found['current'] else ' (removed)'}"]
    for each in found["versions"]:
        sign = "*" if each["version"] == found["current"] else " "
        facts = f"{each['mode']} {each['owner']}:{each['group']}  {audience(each)}"
        words = f"{format_time(each['made'])[:16]}  {format_size(each['size']):>9}  {each['sha256'][:16]}"
        lines.append(f"{sign} {each['version']:>3}  {words}  {facts}")
    print_result(arguments, found, lines)
    return 0
