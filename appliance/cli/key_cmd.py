"""``sms key``."""

from __future__ import annotations

import argparse
from typing import Any

EPILOG = """\
examples:
  sms key create    make the pair that the site file names, the private one with mode 0600
  sms key show      fingerprints of the keys that images are held against"""


def add(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb's parser."""
    parser = verbs.add_parser(
        "key",
        help="make or show the keys that images are signed with",
        description="Make or show the keys that images are signed with.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser("create", help="make the pair that the site file names")
    create.set_defaults(run=run_create)
    show = actions.add_parser("show", help="fingerprints of the keys that images are held against")
    show.add_argument("--json", action="store_true", help="print the result as JSON")
    show.set_defaults(run=run_show)


def run_create(arguments: argparse.Namespace) -> int:
    """Make the pair."""
    from appliance.cli.screen import out
    from appliance.flow.keys import create_pair
    from appliance.flow.site import find_site, load_site

    signing = load_site(find_site(arguments.site), arguments.state).signing
    found = create_pair(signing.private_key, signing.public_keys[0])
    out.print(f"{signing.private_key} (keep it secret)", markup=False)
    out.print(f"{signing.public_keys[0]} sha256:{found}", markup=False)
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Show fingerprints."""
    from appliance.cli.screen import out, print_json
    from appliance.flow.keys import fingerprint
    from appliance.flow.site import find_site, load_site

    signing = load_site(find_site(arguments.site), arguments.state).signing
    found = {str(path): fingerprint(path) for path in signing.public_keys}
    if arguments.json:
        print_json(found)
        return 0
    for path, digest in found.items():
        out.print(f"{path} sha256:{digest}", markup=False)
    return 0
