"""Brings an image to a host and holds it against the site's keys there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from appliance.errors import Refused
from appliance.flow.context import Cluster
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.progress import Progress
from appliance.tools import apptainer


@dataclass(frozen=True)
class Image:
    """An image on a host, whose signature holds."""

    path: str
    key: str
    sha256: str
    signer: str


def deliver(cluster: Cluster, host: Host, chosen: Path | None, progress: Progress) -> str:
    """The path of the image on ``host``; sent there when it has not got it.

    Raises:
        Refused: there is no image.
    """
    current = chosen or Path(cluster.places.current)
    if not current.is_file():
        if not isinstance(host, Local) and not chosen and host.works("test", "-f", str(cluster.places.current)):
            return host.run("readlink", "-f", str(cluster.places.current)).text
        raise Refused(f"there is no image {current}", hint="`sms build` makes one")
    source = current.resolve()
    if isinstance(host, Local):
        return str(source)
    target = f"{cluster.places.images}/{source.name}"
    size = source.stat().st_size
    there = host.run("stat", "-c", "%s", target, ok=(0, 1))
    if there.status == 0 and there.text == str(size):
        return target
    with progress.step(f"send the image to {host.name}") as step, source.open("rb") as stream:
        host.send(stream, target, mode=0o600, progress=lambda done: step.moved(done, size))
    return target


def trust(cluster: Cluster, host: Host, path: str) -> Image:
    """Verify the image on the host with the site's keys; tell what it is.

    Raises:
        Refused: it is not to be trusted, or is not an image of ours.
    """
    signing = cluster.site.signing
    keys: list[str] = []
    for public in signing.public_keys:
        try:
            data = public.read_bytes()
        except OSError as error:
            raise Refused(f"cannot read {public}: {error.strerror}", hint="`sms key create` makes a pair") from error
        # The host verifies with the keys that the one who gives the order trusts.
        there = f"{cluster.places.public_keys}/{public.name}"
        host.write(there, data)
        keys.append(there)
    signer = apptainer.verify_pem(host, path, keys)
    if signing.pgp_fingerprint:
        keyring = str(signing.pgp_keyring) if signing.pgp_keyring else None
        apptainer.verify_pgp(host, path, keyring, signing.pgp_fingerprint)
        signer += f", PGP {signing.pgp_fingerprint}"
    labels = apptainer.labels(host, path)
    try:
        key, services = labels["sms.key"], set(labels["sms.services"].split(","))
    except KeyError:
        raise Refused(f"{path} is signed, but is no image of ours", hint="`sms build` makes one") from None
    missing = [service.name for service in cluster.services if service.name not in services]
    if missing:
        raise Refused(
            f"the image lacks {', '.join(missing)}, which the site file wants", hint="`sms build` makes one that has it"
        )
    digest = host.run("sha256sum", path, timeout=600).text.split()[0]
    return Image(path, key, digest, signer)
