"""The overlay of the appliance: made, checked and seeded before a start."""

from __future__ import annotations

import json

from appliance.catalog import read_extra_files
from appliance.errors import Refused, SmsError
from appliance.flow.context import Cluster, read_given
from appliance.flow.image import Image
from appliance.host.base import Host
from appliance.plan.machine import seed_argv
from appliance.plan.overlay import SECRET_PLACES, seed_archive, seed_digest, seed_files
from appliance.progress import Progress
from appliance.share import share
from appliance.tools import apptainer, ext3


def archive_for(cluster: Cluster) -> bytes:
    """The seed of this site's overlay. Holds secrets: it goes to a command's standard input only."""
    site = cluster.site
    sources = {**dict(site.secrets), **dict(site.accounts)}
    given = read_given(site, [(name, sources[name]) for name in SECRET_PLACES])
    overlays = share("overlays")
    extra = read_extra_files(overlays / "base" / "overlay.yaml").files
    return seed_archive(seed_files(site, cluster.services, overlays=overlays, extra=extra, given=given))


def ready_overlay(cluster: Cluster, host: Host, image: Image, progress: Progress) -> None:
    """An overlay that is whole and holds what the site file says; made where there is none.

    Raises:
        Refused: something on this host has it open.
        SmsError: it is damaged, or cannot be seeded.
    """
    path = str(cluster.places.overlay)
    archive = archive_for(cluster)
    # Accounts are merged with those of the image: another image, another seed.
    wanted = f"{seed_digest(archive)} {image.key}"
    exists = host.works("test", "-e", path)
    if exists:
        users = ext3.users_of(host, path)
        if users:
            raise Refused(
                f"{path} is in use on {host.name} ({', '.join(users)})",
                hint="is an instance or a mount of it left? `losetup -l` shows who has it",
            )
        with progress.step("check the overlay"):
            ext3.check(host, path)
    if exists and _seeded_with(cluster, host) == wanted:
        return
    with progress.step("seed the overlay" if exists else "create and seed the overlay") as step:
        if exists:
            report = _seed(cluster, host, image.path, path, archive)
        else:
            # Made beside its name: an overlay that carries the name has a key and its files.
            beside = f"{path}.new"
            host.run("mkdir", "-p", "-m", "0700", str(cluster.places.overlay.parent))
            host.remove(beside)
            _check_room(cluster, host)
            try:
                apptainer.create_overlay(host, beside, cluster.site.overlay.size_mb)
                report = _seed(cluster, host, image.path, beside, archive)
                host.run("sh", "-c", 'sync "$1" && mv -nT "$1" "$2" && sync "$(dirname "$2")"', "place", beside, path)
            except BaseException:
                host.remove(beside)
                raise
        note = {"seed": wanted}
        host.write(str(cluster.places.overlay_note), json.dumps(note).encode(), mode=0o600)
        step.detail(f"{len(report['changed'])} files")
    if not exists:
        progress.say(
            f"note: {host.name} had no overlay {path}: this one is new, with no jobs and no accounting of before"
        )
    for kept in report["kept"]:
        progress.say(f"note: a file was changed inside the container; its old text is kept as {kept}")


def _seed(cluster: Cluster, host: Host, image: str, overlay: str, archive: bytes) -> dict[str, list[str]]:
    said = host.run(*seed_argv(cluster.site, image, overlay), input=archive, timeout=120)
    report: dict[str, list[str]] = json.loads(said.text.splitlines()[-1])
    return report


def _seeded_with(cluster: Cluster, host: Host) -> str:
    """Digest of the seed that the overlay got last, and the key of the image it was seeded with."""
    note = host.read(str(cluster.places.overlay_note))
    try:
        return str(json.loads(note or b"{}").get("seed", ""))
    except ValueError:
        return ""


def _check_room(cluster: Cluster, host: Host) -> None:
    """The file system must be able to take the overlay when it is full: it is sparse at first."""
    folder = str(cluster.places.overlay.parent)
    free = int(host.run("df", "--block-size=1M", "--output=avail", folder).text.splitlines()[-1])
    if free < cluster.site.overlay.size_mb:
        raise Refused(
            f"{folder} on {host.name} has {free} MiB free, the overlay may grow to {cluster.site.overlay.size_mb}",
            hint="make room, or set a smaller overlay.size_mb",
        )


def prove_writable(host: Host, run_inside: tuple[str, ...]) -> None:
    """Write a file inside and read it back: a read-only overlay only warns and goes on.

    Raises:
        SmsError: it cannot be written.
    """
    script = 'f=/var/lib/.sms-write; echo "$1" >"$f" && sync "$f" && [ "$(cat "$f")" = "$1" ] && rm "$f"'
    result = host.run(*run_inside, "sh", "-c", script, "prove", "sms", ok=None)
    if result.status:
        raise SmsError(
            "the overlay cannot be written", hint="is the file system it lies on full, or mounted read-only?"
        )
