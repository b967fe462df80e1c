"""``sms image``."""

from __future__ import annotations

import argparse
from pathlib import Path

from appliance.cli.common import Verbs, add_json, open_site, positive, print_result, verb
from appliance.cli.image import nodes as image_nodes
from appliance.cli.image import oci as image_oci

EXAMPLES = """\
  sms image list                 built images, newest first
  sms image sbom >image.cdx.json its bill of materials (CycloneDX)
  sms image manifest 3f9a        the inputs of the image with that key
  sms image oci -o lab.oci       the current image as an OCI layout, for containerd and Podman
  sms image prune --keep 3 -n    show what would be removed

  sms image build compute        build and seal an image for diskless nodes, unless it is up to date
  sms image push compute         upload it to the provisioning VM: nodes boot it from then on
  sms image rollback compute     let nodes boot the previous image again
  sms image list --nodes         node images on this host and in the VM
  sms image profiles             the site's node images, and the groups that boot them"""


def add(verbs: Verbs) -> None:
    """Add the verb's parser."""
    text = "Manage images of the services container, and images of diskless nodes."
    parser = verb(verbs, "image", "manage images of the container and of nodes", text, EXAMPLES)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    shown = actions.add_parser("list", help="list built images")
    shown.add_argument("--nodes", action="store_true", help="list node images, on this host and in the VM")
    add_json(shown)
    shown.set_defaults(run=run_list)
    for name, suffix, what in (
        ("sbom", ".cdx.json", "the bill of materials (CycloneDX)"),
        ("manifest", ".json", "the manifest (the inputs of the build)"),
    ):
        action = actions.add_parser(name, help=f"print {what} of an image")
        action.add_argument("key", nargs="?", help="start of its key (default: the current image)")
        action.set_defaults(run=run_print, suffix=suffix)
    image_oci.add(actions)
    prune = actions.add_parser("prune", help="remove old images, never the current one")
    prune.add_argument("--keep", type=positive, default=3, metavar="N", help="number of newest images to keep (3)")
    prune.add_argument("--nodes", action="store_true", help="prune node images of this host, per profile")
    prune.add_argument("-n", "--dry-run", action="store_true", help="only print what would be removed")
    add_json(prune)
    prune.set_defaults(run=run_prune)
    image_nodes.add(actions)


def run_list(arguments: argparse.Namespace) -> int:
    """List images."""
    if arguments.nodes:
        return image_nodes.run_list(arguments)
    from appliance.operations.image.list import list_images
    from appliance.units import format_time

    images = list_images(open_site(arguments))
    lines = [
        f"{'*' if image.current else ' '} {image.key[:12]}  {format_time(image.built)}  {image.bytes >> 20:>4} MiB  "
        f"{image.base}  {','.join(image.services)}"
        for image in images
    ]
    print_result(arguments, images, lines or ["no images; `sms build` creates one"])
    return 0


def run_print(arguments: argparse.Namespace) -> int:
    """Print a document that belongs to an image."""
    from appliance.cli.screen import out
    from appliance.operations.image.list import find_image

    image = find_image(open_site(arguments), arguments.key)
    out.print(Path(image.path).with_suffix(arguments.suffix).read_text(), markup=False, end="")
    return 0


def run_prune(arguments: argparse.Namespace) -> int:
    """Remove old images."""
    if arguments.nodes:
        return image_nodes.run_prune(arguments)
    from appliance.operations.image.list import prune_images

    word = "would remove" if arguments.dry_run else "removed"
    images = list(prune_images(open_site(arguments), arguments.keep, dry_run=arguments.dry_run))
    lines = [f"{word} {image.key[:12]}, {image.bytes >> 20} MiB" for image in images]
    print_result(arguments, images, lines or ["nothing to remove"])
    return 0
