"""``sms node export``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from appliance.cli.common import Verbs, add_json, open_site, verb

EXAMPLES = """\
  sms node export -o nodes.yaml       the whole inventory: nodes, groups, controllers, boot parameters
  sms node export --json"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "export",
        "the whole inventory as YAML",
        "Write the inventory as YAML, for `sms node import`. A file gets mode 0600: cloud-init data may contain\n"
        "secrets.",
        EXAMPLES,
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write it to this file")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the inventory."""
    import json

    from appliance.operations.nodes.import_ import as_yaml, write_private
    from appliance.operations.nodes.inventory import open_inventory

    cluster = open_site(arguments)
    document = open_inventory(cluster).export()
    text = json.dumps(document, indent=2) + "\n" if arguments.json else as_yaml(document)
    if arguments.output:
        write_private(text, arguments.output)
    else:
        sys.stdout.write(text)
    return 0
