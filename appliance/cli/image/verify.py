"""``sms verify``."""

from __future__ import annotations

import argparse
from pathlib import Path

from appliance.cli.common import Verbs, add_json, open_site, print_result, verb

EXAMPLES = """\
  sms verify                the current image
  sms verify other.sif      any image; exit status 3 if it is not trusted
  sms verify lab.oci        the folder of `sms image oci`"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    parser = verb(
        verbs, "verify", "verify an image's signature", "Verify an image's signature with the site's keys.", EXAMPLES
    )
    parser.add_argument(
        "image",
        nargs="?",
        type=Path,
        metavar="IMAGE",
        help="a file, or an OCI folder (default: the current image)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verify the image and print the signer."""
    from appliance.operations.image.deliver import verify_here

    cluster = open_site(arguments)
    image = arguments.image or Path(cluster.places.current)
    signer = verify_here(cluster, image)
    print_result(arguments, {"image": str(image), "signer": signer}, [f"{image}: intact, signed by {signer}"])
    return 0
