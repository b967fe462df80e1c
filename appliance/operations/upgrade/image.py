"""Images of an upgrade: send the new one to the host under a unique name, and keep the old one."""

from __future__ import annotations

from pathlib import Path

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.image.build import make_current
from appliance.operations.image.copy import HostFile, copy_file
from appliance.operations.image.deliver import check_confined, verify_here
from appliance.plan.upgrade.upgrade import Side
from appliance.tools import apptainer, files
from appliance.tools.sha256 import find_digest


def check_rollback_image(host: Host, side: Side) -> None:
    """Check that an image is still where it was started from.

    Raises:
        Refused: it is missing, has changed, or cannot be started any more.
    """
    if not side.sha256 or find_digest(host, side.path, needed=False) != side.sha256:
        raise Refused(
            f"{side.path} on {host.name} is no longer the running image: a rollback would be impossible",
            hint="`sms stop` and `sms start` start the image of that file",
        )
    check_confined(apptainer.labels(host, side.path), side.path)


def send_image(cluster: Cluster, host: Host, source: Path) -> Side:
    """Send the image to the host's store under a unique name, unless it is there.

    Raises:
        Refused: it is not trusted, or was not built by `sms build`.
    """
    verify_here(cluster, source)
    source = source.resolve()
    key = apptainer.labels(Local(), str(source)).get("sms.key")
    if not key or "/" in key:
        raise Refused(f"{source} is signed, but was not built by `sms build`", hint="`sms build` creates one")
    digest = find_digest(Local(), str(source))
    images = Path(cluster.places.images)
    if isinstance(host, Local) and source.parent == images.resolve():
        return Side(str(source), key, digest)
    files.make_folders(host, str(images))
    target = f"{images}/{key}.sif"
    for path in (target, f"{images}/{key}-{digest[:12]}.sif"):
        found = find_digest(host, path, needed=False)
        if found == digest:
            return Side(path, key, digest)
        target = path
        if not found:  # unused name: never replace an image that may be running
            break
    copy_file(cluster.env, HostFile(Local(), str(source), digest), host, target, "the image")
    return Side(target, key, digest)


def make_current_here(cluster: Cluster, side: Side) -> None:
    """Make the running image this machine's current one, if its store has it."""
    image = Path(cluster.places.images) / Path(side.path).name
    try:
        if image.is_file() and find_digest(Local(), str(image)) == side.sha256:
            make_current(Path(cluster.places.current), image.name)
    except OSError as error:
        raise SmsError(
            f"the upgrade is done, but {cluster.places.current} still points to the previous image: {error}",
            hint=f"ln -sfn {image.name} {cluster.places.current}",
        ) from error
