"""The VM's image on a host: copy it there; verify its signature and every byte before a boot."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.image.copy import HostFile, copy_file
from appliance.plan.vm.vm import VmPlaces
from appliance.shared.files import replace_file, sync_folder
from appliance.text import is_plain_name, one_line
from appliance.tools import files
from appliance.tools.sealed import MANIFEST, SIGNATURE, open_manifest, read_seal
from appliance.tools.sha256 import find_digest

DISK = "disk.qcow2"
KIND = "provisioning-vm"


@dataclass(frozen=True)
class VmImage:
    """A verified image on a host. ``digest``: of its manifest; ``sha256``: of its disk."""

    path: str
    key: str
    digest: str
    sha256: str
    signer: str


def deliver_vm(cluster: Cluster, host: Host, *, chosen: str = "") -> VmImage:
    """Copy the current image to ``host`` if it is missing there, and verify it on that host.

    Args:
        chosen: key of another image to use.

    Raises:
        Refused: there is no image, it is not signed with the site's keys, or it does not match its manifest.
    """
    where = VmPlaces(cluster.site)
    here = Path(where.images) / (chosen or "current")
    if here.is_dir() and not chosen:
        here = here.resolve()
    if not here.is_dir():
        there = host.run("readlink", "-f", "--", f"{where.images}/{chosen or 'current'}", ok=None).text
        if there and host.works("test", "-d", there):
            return verify_image(cluster, host, there)
        raise Refused(f"there is no image of the VM in {where.images}", hint="`sms vm build` builds one")
    folder = f"{where.images}/{here.name}"
    if not _is_this_folder(host, here, folder):
        _send(cluster, host, here, folder)
    return verify_image(cluster, host, folder)


def make_current(cluster: Cluster, host: Host, path: str) -> None:
    """Make the image with the disk ``path`` the current one of the host: its next start must not use an older one."""
    where, folder = VmPlaces(cluster.site), PurePosixPath(path).parent
    if folder.parent == where.images and host.run("readlink", "--", str(where.current), ok=None).text != folder.name:
        files.link(host, str(where.current), folder.name)


def find_vm_image(cluster: Cluster, source: Host, target: Host, key: str) -> tuple[Host, str]:
    """Return the host that has the image for a migration, and the digest of its manifest.

    This machine is checked first, then the target, then the source. The disk's bytes are not read.

    Args:
        key: of the image; empty for the current one.

    Raises:
        Refused: no host has it, or it is not signed with the site's keys.
    """
    if key and not is_plain_name(key):
        raise Refused(
            f"{source.name}: {one_line(key, 200)} is not the key of an image", hint="`sms vm build` builds one"
        )
    images, keys = VmPlaces(cluster.site).images, cluster.site.signing.public_keys
    for host in (Local(), target, *((source,) if key else ())):
        folder = f"{images}/{key or 'current'}"
        manifest, signature = (host.read(f"{folder}/{name}") for name in (MANIFEST, SIGNATURE))
        if manifest and signature and host.works("test", "-f", f"{folder}/{DISK}"):
            return host, open_manifest(f"{host.name}: {folder}", manifest, signature, keys).digest
    raise Refused(
        f"neither this machine nor {target.name} nor {source.name} has the VM's image in {images}",
        hint="`sms vm build` builds one",
    )


def fetch_vm(cluster: Cluster, source: Host, key: str) -> None:
    """Copy an image with its seal from another host into this machine's store, completely or not at all.

    Raises:
        Refused: its signature is not valid.
    """
    images = VmPlaces(cluster.site).images
    folder, part = Path(images) / key, Path(images) / f"{key}.part"
    for name in (SIGNATURE, MANIFEST):
        replace_file(str(part / name), source.read(f"{images}/{key}/{name}") or b"")
    try:
        sha256 = read_seal(part, cluster.site.signing.public_keys).files[DISK][0]
    except Refused:
        shutil.rmtree(part, ignore_errors=True)
        raise
    disk = HostFile(source, f"{images}/{key}/{DISK}", sha256)
    copy_file(cluster.env, disk, Local(), str(part / DISK), "the VM's image")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    sync_folder(str(folder.parent))


def _is_this_folder(host: Host, here: Path, folder: str) -> bool:
    """Return whether the host is this machine, or has a disk and the same manifest in its folder."""
    if type(host) is Local:
        return True
    same = host.read(f"{folder}/{MANIFEST}") == (here / MANIFEST).read_bytes()
    return same and host.works("test", "-f", f"{folder}/{DISK}")


def _send(cluster: Cluster, host: Host, here: Path, folder: str) -> None:
    sha256 = read_seal(here, cluster.site.signing.public_keys).files[DISK][0]  # refuses an invalid signature
    disk = HostFile(Local(), str(here / DISK), sha256)
    copy_file(cluster.env, disk, host, f"{folder}/{DISK}", "the VM's image")
    # The manifest is sent last: it marks the copy as complete.
    for name in (SIGNATURE, MANIFEST):
        host.write(f"{folder}/{name}", (here / name).read_bytes())


def verify_image(cluster: Cluster, host: Host, folder: str) -> VmImage:
    """Verify an image on a host against the keys that this machine trusts.

    Raises:
        Refused: it is not signed, it does not match its manifest, or other users can change it.
    """
    with cluster.env.progress.step("verify the image") as step:
        manifest, signature = (host.read(f"{folder}/{name}") for name in (MANIFEST, SIGNATURE))
        if manifest is None or signature is None:
            raise Refused(f"{host.name}: {folder} is not signed", hint="`sms vm build` builds and seals it")
        found = open_manifest(f"{host.name}: {folder}", manifest, signature, cluster.site.signing.public_keys)
        if found.about.get("kind") != KIND or DISK not in found.files:
            raise Refused(f"{host.name}: {folder} is signed, but is not an image of the VM", hint="`sms vm build`")
        if files.others_can_write(host, f"{folder}/{DISK}"):
            raise Refused(
                f"{host.name}: others can write {folder}: it could change after the check",
                hint="move it to a folder that only root can write",
            )
        expected, _ = found.files[DISK]
        if find_digest(host, f"{folder}/{DISK}", needed=False) != expected:
            raise Refused(
                f"{host.name}: {folder}/{DISK} does not match its signed manifest",
                hint="find out how it changed; `sms vm build --force` recreates it",
            )
        step.detail(f"{found.signer.name} sha256:{expected[:16]}")
    return VmImage(f"{folder}/{DISK}", str(found.about["key"]), found.digest, expected, found.signer.name)
