"""The VM's image on a host: brought there, and its seal and every byte held against the site's keys before a boot."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.image.deliver import FOREIGN
from appliance.plan.vm.vm import vm_places
from appliance.progress import Progress
from appliance.tools.sealed import MANIFEST, SIGNATURE, open_manifest, read_seal
from appliance.tools.sha256 import find_digest

DISK = "disk.qcow2"
KIND = "provisioning-vm"


@dataclass(frozen=True)
class VmImage:
    """An image on a host that is what was sealed. ``digest``: of its manifest; ``sha256``: of its disk."""

    path: str
    key: str
    digest: str
    sha256: str
    signer: str


def deliver_vm(cluster: Cluster, host: Host, progress: Progress, *, chosen: str = "") -> VmImage:
    """The current image on ``host``, sent there when it has not got it, checked there.

    Args:
        chosen: the key of another image.

    Raises:
        Refused: there is none, it is not signed with the site's keys, or not what was signed.
    """
    where = vm_places(cluster.site)
    here = Path(where.images) / (chosen or "current")
    if here.is_dir() and not chosen:
        here = here.resolve()
    if not here.is_dir():
        there = host.run("readlink", "-f", "--", f"{where.images}/{chosen or 'current'}", ok=None).text
        if there and host.works("test", "-d", there):
            return check_there(cluster, host, there, progress)
        raise Refused(f"there is no image of the VM in {where.images}", hint="`sms vm build` makes one")
    folder = f"{where.images}/{here.name}"
    if not _is_this_folder(host, here, folder):
        _send(cluster, host, here, folder, progress)
    return check_there(cluster, host, folder, progress)


def find_vm_image(cluster: Cluster, source: Host, target: Host, key: str) -> tuple[Host, str]:
    """Which host has the image that a move takes, and the digest of its manifest: this machine's, the target's, or
    that of the source. An empty key is the current one. The bytes of its disk are not read.

    Raises:
        Refused: none has it, or it is not signed with the site's keys.
    """
    images, keys = vm_places(cluster.site).images, cluster.site.signing.public_keys
    for host in (Local(), target, *((source,) if key else ())):
        folder = f"{images}/{key or 'current'}"
        manifest, signature = (host.read(f"{folder}/{name}") for name in (MANIFEST, SIGNATURE))
        if manifest and signature and host.works("test", "-f", f"{folder}/{DISK}"):
            return host, open_manifest(f"{host.name}: {folder}", manifest, signature, keys).digest
    raise Refused(
        f"neither this machine nor {target.name} nor {source.name} has the VM's image in {images}",
        hint="`sms vm build` makes one",
    )


def fetch_vm(cluster: Cluster, source: Host, key: str, progress: Progress) -> None:
    """Bring an image of another host into this machine's store: whole, with its seal, or not at all.

    Raises:
        Refused: its seal is none.
    """
    images = vm_places(cluster.site).images
    folder, part = Path(images) / key, Path(images) / f"{key}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(mode=0o700, parents=True)
    try:
        for name in (SIGNATURE, MANIFEST):
            (part / name).write_bytes(source.read(f"{images}/{key}/{name}") or b"")
        size = read_seal(part, cluster.site.signing.public_keys).files[DISK][1]
        with progress.step(f"fetch the VM's image from {source.name}") as step, (part / DISK).open("wb") as sink:
            (part / DISK).chmod(0o600)
            source.fetch(f"{images}/{key}/{DISK}", sink, progress=lambda done: step.moved(done, size))
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _is_this_folder(host: Host, here: Path, folder: str) -> bool:
    """Whether the host sees the very folder, or has one with the same manifest and a disk."""
    if type(host) is Local:
        return True
    same = host.read(f"{folder}/{MANIFEST}") == (here / MANIFEST).read_bytes()
    return same and host.works("test", "-f", f"{folder}/{DISK}")


def _send(cluster: Cluster, host: Host, here: Path, folder: str, progress: Progress) -> None:
    found = read_seal(here, cluster.site.signing.public_keys)
    host.run("mkdir", "-p", "-m", "0700", folder)
    size = found.files[DISK][1]
    with progress.step(f"send the VM's image to {host.name}") as step, (here / DISK).open("rb") as stream:
        host.send(stream, f"{folder}/{DISK}", mode=0o600, progress=lambda done: step.moved(done, size))
    # The manifest last: where it is, the rest has been sent.
    for name in (SIGNATURE, MANIFEST):
        host.write(f"{folder}/{name}", (here / name).read_bytes())


def check_there(cluster: Cluster, host: Host, folder: str, progress: Progress) -> VmImage:
    """Hold an image of a host against the keys that the one who gives the order trusts.

    Raises:
        Refused: it is not signed, not what was signed, or others can change it.
    """
    with progress.step("check the image's seal") as step:
        manifest, signature = (host.read(f"{folder}/{name}") for name in (MANIFEST, SIGNATURE))
        if manifest is None or signature is None:
            raise Refused(f"{host.name}: {folder} is not signed", hint="`sms vm build` builds and seals it")
        found = open_manifest(f"{host.name}: {folder}", manifest, signature, cluster.site.signing.public_keys)
        if found.about.get("kind") != KIND or DISK not in found.files:
            raise Refused(f"{host.name}: {folder} is signed, but is no image of the VM", hint="`sms vm build`")
        if host.run("sh", "-c", FOREIGN, "foreign", f"{folder}/{DISK}").text:
            raise Refused(
                f"{host.name}: others can write {folder}: it could be changed after it is checked",
                hint="put it where only root can write",
            )
        wanted, _ = found.files[DISK]
        if find_digest(host, f"{folder}/{DISK}", needed=False) != wanted:
            raise Refused(
                f"{host.name}: {folder}/{DISK} is not what was signed",
                hint="`sms vm build --force` makes it anew; how did it change?",
            )
        step.detail(f"{found.signer.name} sha256:{wanted[:16]}")
    return VmImage(f"{folder}/{DISK}", str(found.about["key"]), found.digest, wanted, found.signer.name)
