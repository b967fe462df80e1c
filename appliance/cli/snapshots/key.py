"""``sms overlay key``."""

from __future__ import annotations

import argparse
from pathlib import Path

from appliance.cli.common import Verbs, add_host, add_json, filled, open_target, print_result, verb

EXAMPLES = """\
  sms overlay key export /media/usb/sms-borg.key    write a copy, to be kept outside of the cluster
  sms overlay key check /media/usb/sms-borg.key     is it still the repository's?"""
EXPORT = """\
  sms overlay key export /media/usb/sms-borg.key    a second run only compares it"""
CHECK = """\
  sms overlay key check /media/usb/sms-borg.key     exit status 3 if it is not"""


def add(actions: Verbs) -> None:
    """Add the action's parser, and those of its own actions."""
    parser = verb(
        actions,
        "key",
        "keep a copy of the Borg repository's key",
        "The key that decrypts the Borg repository is in the repository itself: if its configuration is damaged or\n"
        "removed, every archive is lost without a copy. The copy is encrypted with the passphrase; keep both.",
        EXAMPLES,
    )
    own = parser.add_subparsers(dest="key", metavar="WHAT", required=True)
    export = verb(own, "export", "write it to a file", "Write it to a new file of this machine, mode 0600.", EXPORT)
    export.set_defaults(run=run_export)
    check = verb(own, "check", "compare a copy with it", "Compare a file of this machine with it.", CHECK)
    check.set_defaults(run=run_check)
    for each in (export, check):
        each.add_argument("file", type=filled, metavar="FILE", help="a file of this machine")
        add_host(each)
        add_json(each)


def run_export(arguments: argparse.Namespace) -> int:
    """Export it."""
    from appliance.operations.snapshots.repository import export_key

    cluster, host = open_target(arguments)
    done = export_key(cluster, host, Path(arguments.file))
    verdict = "is written to" if done.written else "is in"
    lines = [
        f"the key of {done.repository} {verdict} {done.path}",
        "keep it and a copy of the passphrase outside of the cluster; `borg key import` puts it back",
    ]
    print_result(arguments, done, lines)
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Compare a copy with it."""
    from appliance.operations.snapshots.repository import check_key

    cluster, host = open_target(arguments)
    done = check_key(cluster, host, Path(arguments.file))
    print_result(arguments, done, [f"{done.path} is the key of {done.repository}"])
    return 0
