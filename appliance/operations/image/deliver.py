"""Send an image to a host and verify it there with the site's keys."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.errors import Refused, SmsError
from appliance.host.base import Host, Unreachable
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.image.copy import HostFile, copy_file
from appliance.operations.site.keys import fingerprint
from appliance.text import is_plain_name, one_line
from appliance.tools import apptainer, files
from appliance.tools.sealed import check_seal
from appliance.tools.sha256 import find_digest


@dataclass(frozen=True)
class Image:
    """An image on a host with a valid signature."""

    path: str
    key: str
    sha256: str
    signer: str
    runtime: str = ""


class LacksService(Refused):
    """An image lacks a service that the site file enables."""


def missing_image(path: Path | str) -> Refused:
    """Return the refusal where an image has to be on this machine."""
    return Refused(f"there is no image {path}", hint="`sms build` creates one")


def deliver(
    cluster: Cluster,
    host: Host,
    chosen: Path | None,
    *,
    before_sending: Callable[[], object] = lambda: None,
) -> tuple[str, str]:
    """Send the image to ``host`` if it is missing there; return its path on the host, and its digest if it was computed
    there, as arguments of ``trust``.

    Args:
        chosen: an image other than the current one: a path on this machine or on the host.
        before_sending: called before the image is sent; an exception cancels the transfer.

    Raises:
        Refused: there is no image.
    """
    current = chosen or Path(cluster.places.current)
    if not current.is_file():
        if not isinstance(host, Local) and host.works("test", "-f", str(current)):
            return host.run("readlink", "-f", str(current)).text, ""
        raise missing_image(current)
    source = current.resolve()
    if isinstance(host, Local):
        return str(source), ""
    target = f"{cluster.places.images}/{source.name}"
    digest = find_digest(Local(), str(source))
    # Compared by digest, so that a damaged copy, or one signed with an older key, is sent again.
    if find_digest(host, target, needed=False) == digest:
        return target, digest
    before_sending()
    copy_file(cluster.env, HostFile(Local(), str(source), digest), host, target, "the image")
    return target, digest


def image_name(path: str) -> str:
    """Return the name that an image of another host has in a store of images.

    Raises:
        Refused: it is not one that a file of a store may have.
    """
    name = path.rpartition("/")[2]
    if not is_plain_name(name) or not name.endswith(".sif"):
        raise Refused(f"{one_line(path, 200)} is not the path of an image", hint="name it KEY.sif, as `sms build` does")
    return name


def fetch_image(cluster: Cluster, source: HostFile, target: Host, path: str) -> Image:
    """Copy another host's image, unless it is there; it gets its name once it is trusted. Return its description.

    Raises:
        Refused: it cannot be trusted; nothing of a copy stays.
    """
    found = []

    def check(at: str) -> None:
        with cluster.env.progress.step(f"verify the image on {target.name}") as step:
            found.append(replace(trust(cluster, target, at), path=path))
            step.detail(found[0].signer)

    if not copy_file(cluster.env, source, target, path, "the image", check=check):
        check(path)
    return found[0]


def trust(cluster: Cluster, host: Host, path: str, sha256: str = "") -> Image:
    """Verify the image on the host with the site's keys; return its description.

    Args:
        sha256: its digest, if it was just computed there.

    Raises:
        Refused: it is not trusted, was not built by `sms build`, or lacks a service.
    """
    signer = verify(cluster, host, path)
    labels = apptainer.labels(host, path)
    try:
        key, services = labels["sms.key"], set(labels["sms.services"].split(","))
    except KeyError:
        raise Refused(f"{path} is signed, but was not built by `sms build`", hint="`sms build` creates one") from None
    check_confined(labels, path)
    missing = [service.name for service in cluster.services if service.name not in services]
    if missing:
        raise LacksService(
            f"the image lacks {', '.join(missing)}, which the site file enables", hint="`sms build` builds a new image"
        )
    return Image(path, key, sha256 or find_digest(host, path), signer, labels.get("sms.runtime", ""))


def verify(cluster: Cluster, host: Host, path: str) -> str:
    """Verify the signature of an image on the host with the site's keys; return the signer.

    Raises:
        Refused: it is not signed by them, was changed, or others could change it.
    """
    if files.others_can_write(host, path):
        raise Refused(
            f"{path} is writable by others: it could be changed after verification",
            hint="move it to a folder that only root can write to",
        )
    return check_signature(cluster, host, path)


def check_confined(labels: Mapping[str, str], path: str) -> None:
    """Check that the programs of an image can start with the container's few capabilities.

    Raises:
        Refused: an earlier version of sms built it.
    """
    if "sms.confined" not in labels:
        raise Refused(
            f"{path} was built by an earlier version of sms: its programs need capabilities that the container no "
            "longer has",
            hint="`sms build` builds a new one; `sms stop` and `sms start` switch to it",
        )


def find_refusal(host: Host, image: str) -> str:
    """Return why this version of sms cannot start an image on the host; empty if it can, or there is none.

    Its signature and its services are not checked.
    """
    if not host.works("test", "-e", image):
        return ""
    try:
        labels = apptainer.labels(host, image)
    except Unreachable:
        raise
    except (SmsError, ValueError) as error:
        return f"{image} cannot be read: {one_line(str(error), 200)}"
    try:
        check_confined(labels, image)
    except Refused:
        return (
            f"this version of sms cannot start {image} again, as after a failure: an earlier version built it; "
            "run `sms build` now, then `sms stop` and `sms start`"
        )
    return ""


def check_signature(cluster: Cluster, host: Host, image: str) -> str:
    """Verify an image on a host with this machine's public keys; return the signer.

    Raises:
        Refused: none of the keys has signed it, or it was changed.
    """
    signing = cluster.site.signing
    if signing.pgp_fingerprint:
        apptainer.verify_pgp(host, image, _keyring(cluster, host), signing.pgp_fingerprint)
        return f"PGP {signing.pgp_fingerprint.upper()}"
    names = {_key_on(cluster, host, key): key for key in signing.public_keys}
    key = names[apptainer.verify_pem(host, image, list(names))]
    return f"{key.name} sha256:{fingerprint(key)[:16]}"


def verify_here(cluster: Cluster, image: Path) -> str:
    """Verify an image of this machine with the site's keys, a SIF or the folder of its OCI form; return the signer.

    Raises:
        Refused: none of the keys has signed it, or it was changed.
    """
    if image.is_dir():
        key = check_seal(image, cluster.site.signing.public_keys).signer
        return f"{key.name} sha256:{fingerprint(key)[:16]}"
    if not image.is_file():
        raise missing_image(image)
    return check_signature(cluster, Local(), str(image))


def _key_on(cluster: Cluster, host: Host, key: Path) -> str:
    """Copy a public key to the host; return its path there."""
    try:
        data = key.read_bytes()
    except OSError as error:
        raise Refused(
            f"cannot read {key}: {error.strerror}",
            hint="copy it from the build host; `sms key create` creates a new pair",
        ) from error
    if isinstance(host, Local):
        return str(key)
    there = f"{cluster.places.public_keys}/{hashlib.sha256(data).hexdigest()[:16]}.pub"
    host.write(there, data)
    return there


def _keyring(cluster: Cluster, host: Host) -> str | None:
    """Return a keyring on the host that contains the site's PGP key."""
    signing = cluster.site.signing
    own = str(signing.pgp_keyring) if signing.pgp_keyring else None
    if isinstance(host, Local):
        return own
    assert signing.pgp_fingerprint
    there = f"{cluster.places.public_keys}/{signing.pgp_fingerprint.upper()}"
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder, "key.asc")
        apptainer.export_pgp(Local(), own, signing.pgp_fingerprint, str(exported))
        if host.write(f"{there}.asc", exported.read_bytes()) or not host.works("test", "-d", there):
            apptainer.import_pgp(host, there, f"{there}.asc")
    return there
