"""Private signing keys on machines that are not the build host."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import Refused
from appliance.host.base import Result
from appliance.host.local import Local
from appliance.operations.context import Cluster, need_build_host, open_cluster
from appliance.operations.engines.image import make_oci
from appliance.operations.hosts.signing import examine_signing, refuse_signing_keys
from appliance.operations.nodes.image import build_node
from appliance.operations.site.keys import create_pair, create_site_pair
from appliance.progress import Silent
from appliance.share import share
from appliance.tools.sealed import check_seal, seal

HERE = socket.gethostname()


def site(folder: Path, build: str = "") -> Cluster:
    """A site whose keys are in a folder of their own."""
    text = share("definitions", "profiles", "lab.yaml").read_text().replace("keys/sign", f"{folder}/own/sign")
    path = folder / "sms.yaml"
    path.write_text(text + (f"build: {{host: {build}}}\n" if build else ""))
    return open_cluster(path, folder / "state", Silent())


@pytest.fixture
def folder(tmp_path: Path, need: Callable[[str], str]) -> Path:
    need("openssl")
    create_pair(tmp_path / "own" / "sign.pem", tmp_path / "own" / "sign.pub")
    (tmp_path / "state" / "images").mkdir(parents=True)
    return tmp_path


def remove_private(folder: Path) -> None:
    (folder / "own" / "sign.pem").unlink()


def other_keys(folder: Path) -> None:
    """Private keys that sign no image, one with a passphrase; and a copy in a snapshot, as restores find it."""
    remove_private(folder)
    create_pair(folder / "state" / "tls.key", folder / "state" / "tls.pub")
    genrsa = ["openssl", "genrsa", "-aes128", "-passout", "pass:x", "-out", str(folder / "state" / "secret.pem")]
    subprocess.run(genrsa, check=True, capture_output=True)
    (folder / "state" / "large.pem").write_bytes(b"-----BEGIN PRIVATE KEY-----\n" + b"x" * (1 << 20))


def copied(folder: Path) -> None:
    shutil.move(folder / "own" / "sign.pem", folder / "state" / "images" / "a copy.txt")


@pytest.mark.parametrize(
    ("change", "build", "state", "path"),
    [
        (lambda _: None, "elsewhere", "missing", "own/sign.pem"),
        (copied, "elsewhere", "missing", "state/images/a copy.txt"),
        (remove_private, "elsewhere", "ok", ""),
        (other_keys, "elsewhere", "ok", ""),
        (lambda _: None, HERE, "ok", ""),
        (lambda _: None, "", "warning", "own/sign.pem"),
        (copied, "", "warning", "state/images/a copy.txt"),
        (remove_private, "", "", ""),
    ],
)
def test_where_a_signing_key_is(
    folder: Path, change: Callable[[Path], None], build: str, state: str, path: str
) -> None:
    change(folder)
    cluster, host = site(folder, build), Local(HERE)
    found = list(examine_signing(cluster, host))
    assert [each.state for each in found] == ([state] if state else [])
    if path:
        assert str(folder / path) in found[0].detail
    if state == "missing":
        quoted = f"'{folder / path}'" if " " in path else str(folder / path)
        assert found[0].mend == f"shred -u {quoted}"
        with pytest.raises(Refused, match=r"build\.host is elsewhere") as refused:
            refuse_signing_keys(cluster, host)
        assert refused.value.status == 3
    else:
        refuse_signing_keys(cluster, host)


def test_without_openssl_nothing_is_assumed(folder: Path) -> None:
    copied(folder)
    programs = folder / "programs"
    programs.mkdir()
    for name in ("sh", "env", "find", "xargs", "grep", "sort", "test"):
        (programs / name).symlink_to(str(shutil.which(name)))

    class Bare(Local):
        """This machine with these programs alone."""

        def run(self, *argv: str, **options: Any) -> Result:
            return super().run("env", f"PATH={programs}", *argv, **options)

    cluster, host = site(folder, "elsewhere"), Bare(HERE)
    (found,) = examine_signing(cluster, host)
    assert found.state == "warning" and "were not compared: openssl is not installed" in found.detail
    with pytest.raises(Refused, match="openssl is not installed"):
        refuse_signing_keys(cluster, host)


def test_only_the_build_host_signs(folder: Path) -> None:
    need_build_host(site(folder).site)
    need_build_host(site(folder, HERE).site)
    other = site(folder, "elsewhere")
    image = folder / "image.sif"
    remove_private(folder)
    (folder / "own" / "sign.pub").unlink()
    for sign in (
        lambda: create_site_pair(other.site),
        lambda: make_oci(other, image, folder / "oci"),
        lambda: build_node(other, "compute"),
    ):
        with pytest.raises(Refused) as refused:
            sign()
        assert f"this machine ({HERE}) does not sign images: build.host" in refused.value.message
        assert "run it on elsewhere" in refused.value.hint
    assert not list((folder / "own").iterdir())


def test_another_signing_key(folder: Path) -> None:
    """As docs/security.md describes it: until the old public key is removed, images of both keys are accepted."""
    cluster = site(folder)
    old = cluster.site.signing
    made = folder / "image"
    made.mkdir()
    (made / "disk").write_text("x")
    seal(made, old.private_key)
    private, public = folder / "own" / "two.pem", folder / "own" / "two.pub"
    signing = old.model_copy(update={"private_key": private, "public_keys": (public, *old.public_keys)})
    create_site_pair(cluster.site.model_copy(update={"signing": signing}))
    assert check_seal(made, signing.public_keys).signer == old.public_keys[0]
    seal(made, signing.private_key)
    assert check_seal(made, signing.public_keys[:1]).signer == signing.public_keys[0]
    seal(made, old.private_key)
    with pytest.raises(Refused, match="is not signed with any of"):
        check_seal(made, signing.public_keys[:1])
