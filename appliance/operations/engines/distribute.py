"""The OCI form of an image to where engines take it from: a host's containerd or Podman, or a registry."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import BinaryIO, cast

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.host.stream import Stream
from appliance.operations.context import Cluster
from appliance.operations.engines.image import OciFolder
from appliance.progress import Progress
from appliance.tools.programs import find_missing
from appliance.tools.sealed import check_seal

LAYOUT = ("oci-layout", "index.json", "blobs")
"""What of the folder belongs to the image; the seal does not."""
IMPORTS = {
    "ctr": ("ctr", "-n", "k8s.io", "images", "import", "--digests", "-"),
    "podman": ("podman", "load"),
}
"""Command by program: each reads an archive. The kubelet's images are in the namespace k8s.io."""
PUSH_S = 1800
FATAL = re.compile(r'level=fatal msg="(.*)"$')
NO_ACCOUNT = "unauthorized"


def load_image(folder: Path, host: Host, progress: Progress) -> list[str]:
    """Import a layout of this machine into containerd and Podman of a host; return which of them it has.

    Raises:
        Refused: it has neither.
        CommandError: one of them failed.
    """
    missing = find_missing(host, *IMPORTS)
    found = [name for name in IMPORTS if name not in missing]
    if "ctr" in found and not host.works("ctr", "version"):
        found.remove("ctr")  # the program without the daemon
    if not found:
        raise Refused(
            f"{host.name} has neither containerd that runs, nor Podman",
            hint="on a cluster node with another runtime, import the archive with its own program",
        )
    for name in found:
        with progress.step(f"import into {name} on {host.name}"), host.stream(*IMPORTS[name]) as stream:
            _send(folder, stream)
            stream.result()
    return found


def _send(folder: Path, stream: Stream) -> None:
    """Write the layout as an archive."""
    with tarfile.open(fileobj=cast("BinaryIO", stream), mode="w|", bufsize=1 << 20) as archive:
        for name in LAYOUT:
            archive.add(folder / name, name)


def push_image(cluster: Cluster, made: OciFolder) -> str:
    """Copy a layout to the registry that the site file names; return the name with its digest.

    The registry's account is that of `skopeo login`.

    Raises:
        ConfigError: the site file names no registry.
        Refused: it names another digest, or skopeo is missing.
        SmsError: the registry did not take it.
    """
    given = cluster.site.engines.kubernetes.image
    if given is None:
        raise ConfigError(
            "the site file names no registry",
            hint="set `engines.kubernetes.image`, such as registry.example.org/sms/hpc",
        )
    name, _, digest = given.partition("@")
    if digest and digest != made.digest:
        raise Refused(
            f"the site file names {digest}, the image is {made.digest}", hint="set `engines.kubernetes.image` to that"
        )
    check_seal(Path(made.path), cluster.site.signing.public_keys)
    host = Local()
    if find_missing(host, "skopeo"):
        raise Refused(f"{host.name} lacks skopeo", hint="install the package skopeo")
    target = f"{_untagged(name)}@{digest}" if digest else name
    with cluster.env.progress.step(f"push to {target}"):
        # Without the option it compresses the layer, and the registry has another digest than the signed one.
        words = ("copy", "--preserve-digests", f"oci:{made.path}", f"docker://{target}")
        result = host.run("skopeo", *words, ok=None, timeout=PUSH_S)
        if result.status:
            text = result.stderr.decode(errors="replace").strip()
            host_name = name.partition("/")[0]
            raise SmsError(
                f"{target}: {_reason(text) or 'skopeo failed'}",
                hint=f"`skopeo login {host_name}` gives it an account"
                if NO_ACCOUNT in text
                else "`skopeo inspect` shows more",
            )
    return f"{_untagged(name)}@{made.digest}"


def _reason(text: str) -> str:
    """Return what an error of skopeo ends with: before that it has what it was about to do."""
    message = FATAL.search(text)
    return (message[1] if message else text.rpartition("\n")[2]).replace('\\"', '"')[-300:]


def _untagged(name: str) -> str:
    head, colon, tag = name.rpartition(":")
    return head if colon and "/" not in tag else name
