"""``sms build``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

EPILOG = """\
examples:
  sms build              build, sign and verify; skip the build if nothing changed
  sms build --dry-run    print the definition that would be built, and its key
  sms build --locked     fail if the mirror's package versions differ from sms.lock"""


def add(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add the verb's parser."""
    parser = verbs.add_parser(
        "build",
        help="build, sign and verify the image",
        description="Build the services container from the site file, sign it, verify it, make it the current image.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--locked", action="store_true", help="fail if package versions differ from the lock file")
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help="the lock file (default: sms.lock beside the site file)"
    )
    parser.add_argument("--force", action="store_true", help="build even if the same image exists")
    parser.add_argument(
        "--from", dest="classification", type=Path, metavar="FILE", help="services of a classification; - is stdin"
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="print the definition and build nothing")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Build the image and print the result."""
    from appliance.cli.screen import out, print_json, progress
    from appliance.operations.context import open_cluster
    from appliance.operations.image.build import build, plan
    from appliance.operations.site.find import find_site

    path = find_site(arguments.site)
    shown = progress(arguments.quiet)
    cluster = open_cluster(path, arguments.state, shown, classification=arguments.classification)
    lock = arguments.lock or path.with_name("sms.lock")
    if arguments.dry_run:
        made = plan(cluster, shown, lock=lock, locked=arguments.locked)
        if arguments.json:
            print_json({"key": made.key, "definition": made.definition})
        else:
            out.print(f"# key: {made.key}\n{made.definition}", markup=False)
        return 0
    built = build(cluster, shown, lock=lock, locked=arguments.locked, force=arguments.force)
    if arguments.json:
        print_json(asdict(built))
        return 0
    what = "built" if built.fresh else "up to date:"
    out.print(f"{what} {built.image}", markup=False)
    out.print(f"  {built.packages} packages, {built.bytes >> 20} MiB, signed by {built.signer}", markup=False)
    return 0
