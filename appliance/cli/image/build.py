"""``sms build``."""

from __future__ import annotations

import argparse
from pathlib import Path

from appliance.cli.common import Verbs, add_json, open_site, print_result, verb

EXAMPLES = """\
  sms build              build, sign and verify; skip the build if nothing changed
  sms build --dry-run    print the definition that would be built, and its key
  sms build --locked     fail if the mirror's package versions differ from sms.lock"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs,
        "build",
        "build, sign and verify the image",
        "Build the services container from the site file, sign it, verify it, make it the current image.",
        EXAMPLES,
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
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Build the image and print the result."""
    from appliance.operations.image.build import build, plan
    from appliance.operations.site.locate import find_site

    cluster = open_site(arguments, classification=arguments.classification)
    lock = arguments.lock or find_site(arguments.site).with_name("sms.lock")
    if arguments.dry_run:
        made = plan(cluster, lock=lock, locked=arguments.locked)
        result = {"key": made.key, "definition": made.definition}
        print_result(arguments, result, [f"# key: {made.key}\n{made.definition}"])
        return 0
    built = build(cluster, lock=lock, locked=arguments.locked, force=arguments.force)
    lines = [
        f"{'built' if built.fresh else 'up to date:'} {built.image}",
        f"  {built.packages} packages, {built.bytes >> 20} MiB, signed by {built.signer}",
    ]
    print_result(arguments, built, lines)
    return 0
