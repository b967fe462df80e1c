"""The images of an upgrade: the new one taken to the host under a name of its own, the old one still there."""

from __future__ import annotations

from pathlib import Path

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.context import Cluster
from appliance.operations.image.build import make_current
from appliance.operations.image.deliver import verify_here
from appliance.plan.upgrade.upgrade import Side
from appliance.progress import Progress
from appliance.tools import apptainer
from appliance.tools.sha256 import find_digest


def check_way_back(host: Host, side: Side) -> None:
    """Whether an image is still where it was started from.

    Raises:
        Refused: it is gone, or is another one now.
    """
    if not side.sha256 or find_digest(host, side.path, needed=False) != side.sha256:
        raise Refused(
            f"{side.path} on {host.name} is not the image any more that runs: there would be no way back",
            hint="`sms stop` and `sms start` take the one that is there",
        )


def take_image(cluster: Cluster, host: Host, source: Path, progress: Progress) -> Side:
    """Have the image in the host's own store, under a name that nothing else has.

    Raises:
        Refused: it is not to be trusted, or no image of ours.
    """
    verify_here(cluster, source)
    source = source.resolve()
    key = apptainer.labels(Local(), str(source)).get("sms.key")
    if not key or "/" in key:
        raise Refused(f"{source} is signed, but is no image of ours", hint="`sms build` makes one")
    digest = find_digest(Local(), str(source))
    images = Path(cluster.places.images)
    if isinstance(host, Local) and source.parent == images.resolve():
        return Side(str(source), key, digest)
    host.run("mkdir", "-p", "-m", "0700", str(images))
    target = f"{images}/{key}.sif"
    for path in (target, f"{images}/{key}-{digest[:12]}.sif"):
        said = find_digest(host, path, needed=False)
        if said == digest:
            return Side(path, key, digest)
        target = path
        if not said:  # nothing has this name yet: never over one that may run
            break
    size = source.stat().st_size
    with progress.step(f"send the image to {host.name}") as step, source.open("rb") as stream:
        host.send(stream, target, mode=0o600, progress=lambda done: step.moved(done, size))
    return Side(target, key, digest)


def make_current_here(cluster: Cluster, side: Side) -> None:
    """What runs is what this machine's next start takes to the host, where this store has it too."""
    image = Path(cluster.places.images) / Path(side.path).name
    try:
        if image.is_file() and find_digest(Local(), str(image)) == side.sha256:
            make_current(cluster, image)
    except OSError as error:
        raise SmsError(
            f"the upgrade is done, but {cluster.places.current} still names the image of before: {error}",
            hint=f"ln -sfn {image.name} {cluster.places.current}",
        ) from error
