"""``sms image oci``: the OCI form of a signed image, from the SIF itself, without a second build."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from appliance.engines.oci import INDEX_TYPE, LAYER_TYPE, LAYOUT, Blob, OciImage, describe, image_name
from appliance.errors import Refused
from appliance.host.local import Local
from appliance.operations.context import Cluster, need_build_host
from appliance.operations.image.deliver import trust
from appliance.shared.files import sync_folder
from appliance.tools import apptainer, files
from appliance.tools.oci import find_system, write_layer
from appliance.tools.sealed import check_seal, seal
from appliance.tools.sha256 import find_digest
from appliance.tools.space import need_space

GROWTH = 5
"""A SIF and its uncompressed tar have at most so many times the size of the SIF, as measured of images of all bases."""


@dataclass(frozen=True)
class OciFolder:
    """An OCI layout in a folder, sealed with the site's key.

    ``digest`` identifies the image; ``name`` is what engines call it. ``fresh``: it was written now.
    """

    path: str
    name: str
    digest: str
    sif: str
    bytes: int
    fresh: bool = True


def make_oci(cluster: Cluster, image: Path, folder: Path) -> OciFolder:
    """Write the OCI layout of a verified SIF of this machine into a new folder, and seal it.

    The same SIF gives the same digest. A folder that has the image already is verified and left as it is.

    Raises:
        Refused: the image is not trusted, the folder has something else, or this machine is not the build host.
    """
    need_build_host(cluster.site)
    host, folder = Local(), folder.absolute()
    with cluster.env.progress.step("verify the image") as step:
        trusted = trust(cluster, host, str(image.resolve()))
        step.detail(trusted.signer)
    tag = f"{image_name(cluster.site.cluster)}:{trusted.key[:12]}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return _read(cluster, folder, tag, trusted.sha256)
    if folder == Path.cwd():  # it is replaced, and the caller would be in a folder that is gone
        raise Refused("the image cannot be written into the current folder", hint="name a new one: -o DIR")
    if not folder.parent.is_dir():
        raise Refused(f"there is no folder {folder.parent}", hint=f"mkdir -p {folder.parent}")
    need_space(
        host, str(folder.parent), GROWTH * image.stat().st_size, "MiB free, the image may need %d MiB",
        hint="free space there, or name another folder: -o DIR",
    )  # fmt: skip
    lock = f"{cluster.places.lock.parent}/{cluster.site.cluster}.oci.lock"
    with cluster.env.locks.hold(host, lock, "another `sms image oci` is at work"):
        work = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(work, ignore_errors=True)  # of a killed run
        try:
            made = _write(cluster, str(image.resolve()), trusted.sha256, work)
            host.run("sync", "-f", str(work), timeout=files.SYNC_S)
            work.rename(folder)  # replaces an empty folder
            sync_folder(str(folder.parent))
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return OciFolder(str(folder), tag, made.manifest.digest, trusted.sha256, _size(folder))


def _write(cluster: Cluster, sif: str, sha256: str, work: Path) -> OciImage:
    """Write and seal a layout."""
    host, blobs = Local(), work / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    number, architecture = find_system(host, sif)
    with cluster.env.progress.step("convert the file system") as step:
        digest, size = write_layer(host, sif, number, work / "layer")
        if find_digest(host, sif) != sha256:
            raise Refused(f"{sif} was changed while it was read", hint="`sms image oci` again, once it stays as it is")
        (work / "layer").rename(blobs / digest)
        step.detail(f"{size >> 20} MiB")
    made = describe(
        apptainer.labels(host, sif), sha256, architecture, Blob(LAYER_TYPE, digest, size), cluster.site.cluster
    )
    for name, data in made.blobs.items():
        (blobs / name).write_bytes(data)
    (work / "index.json").write_bytes(made.index)
    (work / "oci-layout").write_bytes(LAYOUT)
    with cluster.env.progress.step("sign it"):
        about = {"kind": INDEX_TYPE, "digest": made.manifest.digest, "sif": sha256}
        seal(work, cluster.site.signing.private_key, about=about)
        check_seal(work, cluster.site.signing.public_keys)
    return made


def _read(cluster: Cluster, folder: Path, name: str, sif: str) -> OciFolder:
    """Return a folder that has the image already.

    Raises:
        Refused: it has something else.
    """
    try:
        about = check_seal(folder, cluster.site.signing.public_keys).about
    except Refused as error:
        raise Refused(f"{folder} is in use: {error.message}", hint="name a new folder: -o DIR") from error
    if about.get("sif") != sif:
        raise Refused(f"{folder} has another image", hint="name a new folder: -o DIR")
    return OciFolder(str(folder), name, str(about["digest"]), sif, _size(folder), fresh=False)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
