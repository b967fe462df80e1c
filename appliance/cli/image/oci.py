"""``sms image oci``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from appliance.cli.common import add_json, filled, open_site, print_result, verb

EXAMPLES = """\
  sms image oci -o image                  a folder for `podman load`, `ctr images import` and skopeo
  sms image oci -o image --load host-a    also import it on an admin host that is a cluster node
  sms image oci -o image --push           also copy it to the registry of the site file
  sms image oci -o image --push --json    `pushed` is its name with the digest, for `engines.kubernetes.image`"""


def add(actions: Any) -> None:
    """Add the action's parser."""
    parser = verb(
        actions,
        "oci",
        "write the OCI form of an image, for containerd, Podman and registries",
        "Write the OCI form of a signed image: the same SIF gives the same digest. The registry's account is that of\n"
        "`skopeo login`, which keeps it in a file; it is never an argument.",
        EXAMPLES,
    )
    parser.add_argument("key", nargs="?", help="start of its key (default: the current image)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="new folder for the OCI layout")
    parser.add_argument(
        "--load",
        metavar="HOST",
        type=filled,
        action="append",
        default=[],
        help="import it into containerd and Podman of an admin host; may be given several times",
    )
    parser.add_argument("--push", action="store_true", help="copy it to the registry of `engines.kubernetes.image`")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write an OCI layout."""
    from appliance.operations.engines.image import make_oci
    from appliance.operations.image.list import find_image

    cluster = open_site(arguments)
    image = find_image(cluster, arguments.key)
    done = make_oci(cluster, Path(image.path), arguments.output)
    lines = [
        f"{done.path}: {done.name}, {done.bytes >> 20} MiB" + ("" if done.fresh else ", unchanged"),
        f"  {done.digest}",
        f"  of the SIF sha256:{done.sif}",
    ]
    pushed = ""
    if arguments.load or arguments.push:
        from appliance.operations.engines.distribute import load_image, push_image

        for name in arguments.load:
            host = cluster.target(name)
            lines.append(f"  on {name}: {', '.join(load_image(Path(done.path), host, cluster.env.progress))}")
        if arguments.push:
            pushed = push_image(cluster, done)
            lines.append(f"  pushed: {pushed}")
    print_result(arguments, {**asdict(done), "pushed": pushed}, lines)
    return 0
