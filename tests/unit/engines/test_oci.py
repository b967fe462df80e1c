"""The documents of an OCI image: the same input, the same bytes, and what they name."""

from __future__ import annotations

import hashlib
import json

import pytest

from appliance.engines.oci import LAYER_TYPE, Blob, OciImage, describe, image_name

LABELS = {
    "org.label-schema.build-date": "today",
    "sms.key": "72d49e5b2947aee52d48fafb885da3633af8c8270989e898478c621d83567320",
    "sms.services": "munge,slurmctld",
}
LAYER = Blob(LAYER_TYPE, "a" * 64, 100)


def made(**changes: str) -> OciImage:
    return describe({**LABELS, **changes}, "b" * 64, "amd64", LAYER, "lab")


def test_blobs_are_named_by_their_digests() -> None:
    image = made()
    assert {name: hashlib.sha256(data).hexdigest() for name, data in image.blobs.items()} == {
        name: name for name in image.blobs
    }
    manifest = json.loads(image.blobs[image.manifest.sha256])
    assert manifest["layers"] == [{"mediaType": LAYER_TYPE, "digest": f"sha256:{'a' * 64}", "size": 100}]
    config = image.blobs[manifest["config"]["digest"].removeprefix("sha256:")]
    assert json.loads(config)["rootfs"]["diff_ids"] == [f"sha256:{'a' * 64}"]
    entry = json.loads(image.index)["manifests"][0]
    assert entry["digest"] == image.manifest.digest and entry["size"] == len(image.blobs[image.manifest.sha256])
    assert entry["annotations"]["io.containerd.image.name"] == "localhost/sms/lab:72d49e5b2947"


def test_the_labels_name_the_sif_and_no_time() -> None:
    labels = json.loads(made().blobs[made().manifest.sha256])["annotations"]
    assert labels == {
        "sms.key": LABELS["sms.key"],
        "sms.services": "munge,slurmctld",
        "sms.sif": f"sha256:{'b' * 64}",
    }


def test_the_same_sif_gives_the_same_digest() -> None:
    assert made() == made(**{"org.label-schema.build-date": "tomorrow"})
    assert made().manifest != made(**{"sms.services": "munge"}).manifest


@pytest.mark.parametrize(("cluster", "name"), [("lab", "localhost/sms/lab"), ("a-b-", "localhost/sms/a-b")])
def test_names_are_valid_for_registries(cluster: str, name: str) -> None:
    assert image_name(cluster) == name
