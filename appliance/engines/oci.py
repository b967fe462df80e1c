"""The OCI form of an image: config, manifest and index (OCI Image Format Specification 1.1).

The same SIF gives the same bytes: all of them come from it, and JSON is written in one way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
"""Content of the file ``oci-layout``."""
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/libexec"
START = "/opt/sms/bin/sms-init"
"""What the start script of the SIF executes."""


@dataclass(frozen=True)
class Blob:
    """A file of the layout: media type, SHA-256 in hex, size in bytes."""

    kind: str
    sha256: str
    size: int

    @property
    def digest(self) -> str:
        """The digest as OCI writes it."""
        return f"sha256:{self.sha256}"


@dataclass(frozen=True)
class OciImage:
    """The documents of an image with one layer.

    Attributes:
        blobs: content by SHA-256 in hex: config and manifest.
        index: content of ``index.json``.
        manifest: it identifies the image.
    """

    blobs: Mapping[str, bytes]
    index: bytes
    manifest: Blob


def describe(labels: Mapping[str, str], sif: str, architecture: str, layer: Blob, cluster: str) -> OciImage:
    """Return the documents of the OCI image of a SIF.

    Args:
        labels: of the SIF.
        sif: its SHA-256 in hex.
        architecture: as OCI names it, such as ``amd64``.
        layer: its file system as a tar.
        cluster: the name of the image is ``sms/CLUSTER``, its tag the start of the SIF's key.
    """
    kept = {name: value for name, value in labels.items() if name.startswith("sms.")}
    kept = {**kept, "sms.sif": f"sha256:{sif}"}
    config = _json(
        {
            "architecture": architecture,
            "os": "linux",
            "config": {"Env": [f"PATH={PATH}", "LC_ALL=C.UTF-8"], "Cmd": [START], "Labels": kept},
            "rootfs": {"type": "layers", "diff_ids": [layer.digest]},
            "history": [{"created_by": f"sms image oci of sha256:{sif}"}],
        }
    )
    described = _blob(CONFIG_TYPE, config)
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _descriptor(described),
            "layers": [_descriptor(layer)],
            "annotations": kept,
        }
    )
    found = _blob(MANIFEST_TYPE, manifest)
    tag = labels["sms.key"][:12]
    names = {
        "io.containerd.image.name": f"{image_name(cluster)}:{tag}",
        "org.opencontainers.image.ref.name": tag,
    }
    entry = {**_descriptor(found), "platform": {"architecture": architecture, "os": "linux"}, "annotations": names}
    index = _json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]})
    return OciImage({described.sha256: config, found.sha256: manifest}, index, found)


def image_name(cluster: str) -> str:
    """Return the name of a cluster's image, without a tag. Podman calls the registry of an image of none so."""
    return f"localhost/sms/{cluster.rstrip('-')}"


def _blob(kind: str, data: bytes) -> Blob:
    return Blob(kind, hashlib.sha256(data).hexdigest(), len(data))


def _descriptor(blob: Blob) -> dict[str, object]:
    return {"mediaType": blob.kind, "digest": blob.digest, "size": blob.size}


def _json(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
