"""``sms node import``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.cli.common import Verbs, add_json, open_site, print_result, verb
from appliance.cli.nodes.common import add_yes, confirm

if TYPE_CHECKING:
    from appliance.operations.nodes.import_ import ImportChanges

EXAMPLES = """\
  sms node import nodes.yaml -n                       what it would change
  sms node import nodes.yaml                          add and change what it contains, keep the rest
  sms node import nodes.yaml --replace --yes          replace the inventory by it
  sms node import --from-smd https://api-gw/apis/smd --token-file token
  sms node import --from-smd https://smd:27779 -o nodes.yaml     only write it to a file"""


def add(actions: Verbs) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "import",
        "import an inventory from a file, or from a running CSM or OpenCHAMI",
        "Import an export, or the inventory of a State Manager (SMD), in one transaction. The token for it is read\n"
        "from a file of mode 0600, or from $SMS_SMD_TOKEN.",
        EXAMPLES,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("file", nargs="?", type=Path, metavar="FILE", help="an export; - is standard input")
    source.add_argument("--from-smd", metavar="URL", help="a running State Manager")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="the token for it")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="the CA of its certificate (default: the system's)")
    parser.add_argument("--name-pattern", default="", metavar="PATTERN", help="names by NID (default: nid%%06d)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write it to a file, change nothing")
    parser.add_argument("--replace", action="store_true", help="remove everything that it does not contain")
    parser.add_argument("-n", "--dry-run", action="store_true", help="only print what would change")
    add_yes(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Import it."""
    from appliance.cli.screen import out
    from appliance.operations.nodes import import_ as node_import

    cluster = open_site(arguments)
    if arguments.from_smd:
        converted = node_import.read_smd(
            cluster, arguments.from_smd, arguments.token_file, arguments.ca, arguments.name_pattern
        )
    else:
        converted = node_import.read_file(arguments.file)
    if arguments.output:
        node_import.write_private(node_import.as_yaml(converted.document), arguments.output)
        for note in converted.notes:
            cluster.env.progress.report(f"note: {note}")
        out.print(f"wrote {arguments.output}: {len(converted.document.get('nodes') or [])} nodes", markup=False)
        return 0
    changes = node_import.compare(cluster, converted, replace=arguments.replace)
    if not arguments.dry_run:
        if changes.gone:
            confirm(f"Remove {len(changes.gone)} entries that it does not contain?", yes=arguments.yes)
        node_import.import_document(cluster, converted, replace=arguments.replace)
    result = {**asdict(changes), "dry_run": arguments.dry_run}
    print_result(arguments, result, _lines(changes, dry_run=arguments.dry_run))
    return 0


MOST = 20


def _lines(changes: ImportChanges, *, dry_run: bool) -> Iterator[str]:
    yield from (f"note: {note}" for note in changes.notes[:MOST])
    if len(changes.notes) > MOST:
        yield f"note: and {len(changes.notes) - MOST} more; --json shows all"
    for name, kinds in changes.counts.items():
        words = ", ".join(f"{kinds[kind]} {kind}" for kind in ("new", "changed", "same") if kinds.get(kind))
        yield f"{name}: {words}"
    word = "would remove" if dry_run else "removed"
    yield from (f"{word}: {gone}" for gone in changes.gone[:MOST])
    if len(changes.gone) > MOST:
        yield f"{word}: and {len(changes.gone) - MOST} more"
    if dry_run:
        yield "nothing was written"
