"""What an admin host offers as an image is fetched as one of several, and only if it can be trusted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.errors import Refused, SmsError
from appliance.operations.context import Cluster, open_cluster
from appliance.operations.site.keys import create_pair
from appliance.operations.upgrade import rehearse
from appliance.progress import Silent
from appliance.share import share
from tests.support.fake import Fake

DATA = "not a SIF"


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    path = tmp_path / "sms.yaml"
    path.write_text(share("definitions", "profiles", "lab.yaml").read_text())
    opened = open_cluster(path, tmp_path / "state", Silent())
    key = tmp_path / "sign.pub"
    create_pair(tmp_path / "sign.pem", key)
    signing = opened.site.signing.model_copy(update={"public_keys": (key,), "pgp_fingerprint": None})
    return replace(opened, site=opened.site.model_copy(update={"signing": signing}))


def offers(path: str, digest: str = hashlib.sha256(DATA.encode()).hexdigest()) -> Fake:
    """A host whose current image is a link to this path."""
    answers = {("test", "-f"): (0, ""), ("readlink",): (0, path), ("python3",): (0, digest)}
    return Fake({**answers, ("stat",): (0, str(len(DATA))), ("tail",): (0, DATA)}, name="host-b")


@pytest.mark.parametrize(("name", "here"), [("lab.sif", r"lab-[0-9a-f]{12}\.sif"), ("0123.sif", r"0123\.sif")])
def test_an_image_that_cannot_be_trusted_does_not_stay(
    need: Callable[[str], str], cluster: Cluster, name: str, here: str
) -> None:
    """Where this machine has none, the name lab.sif would make it the current one."""
    need("apptainer")
    with pytest.raises(Refused, match=rf"/{here}\.[0-9a-f]+\.part cannot be trusted"):
        rehearse.find_image(cluster, offers(f"/var/lib/sms/images/{name}"), "")
    assert list(Path(cluster.places.images).iterdir()) == []


@pytest.mark.parametrize(
    "path", ["/", "/..", "/x/-y.sif", "/x/manifest.json", "/x/a\x1b[2J.sif", f"/x/{'a' * 300}.sif"]
)
def test_a_name_is_one_of_an_image(cluster: Cluster, path: str) -> None:
    with pytest.raises(Refused, match="is not the path of an image"):
        rehearse.find_image(cluster, offers(path), "")


def test_a_digest_is_no_path(cluster: Cluster) -> None:
    with pytest.raises(SmsError, match="is not a digest"):
        rehearse.find_image(cluster, offers("/x/a.sif", "../../../etc/x"), "")
