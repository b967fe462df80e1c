"""The overlay of the services container: created, checked and seeded before a start."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from appliance.catalog import read_extra_files
from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster, read_given
from appliance.operations.image.deliver import Image
from appliance.operations.lease import hold_lease_still
from appliance.operations.overlay.mirrored import ADOPT, find_mirror, is_linked, opened
from appliance.operations.overlay.names import resolve_nodes
from appliance.operations.preflight import find_instance, lock_host, prepare_confinement, query_confinement
from appliance.plan.machine import inside_argv, seed_argv
from appliance.plan.overlay.names import HOSTS
from appliance.plan.overlay.seed import (
    SECRET_PLACES,
    Seed,
    find_short,
    seed_archive,
    seed_digest,
    seed_files,
    slurm_sources,
)
from appliance.plan.services.runs import shown
from appliance.share import share
from appliance.shared.lease import Lease
from appliance.tools import apptainer, ext3, files
from appliance.tools.space import need_space

MARK = "/etc/sms/seed.mark"
"""Stored in the overlay itself, so that a restored copy identifies its own seed."""


def archive_for(cluster: Cluster) -> bytes:
    """Return the seed archive of this site's overlay. It holds secrets: pass it on standard input only."""
    return seed_archive(seeds_for(cluster))


def seeds_for(cluster: Cluster) -> tuple[Seed, ...]:
    """Return the files of this site's overlay; some are secret.

    Raises:
        Refused: a file that the site names cannot be read, or munged would not start with the key.
    """
    site = cluster.site
    sources = {**dict(site.secrets), **dict(site.accounts)}
    given = read_given([*((name, sources[name]) for name in SECRET_PLACES), *slurm_sources(site)])
    if "munge_key" in given and (short := find_short(site.secrets.munge_key, len(given["munge_key"]))):
        raise Refused(short[0], hint=short[1])
    overlays = share("overlays")
    extra = read_extra_files(overlays / "base" / "overlay.yaml").files
    return seed_files(site, cluster.services, overlays=overlays, extra=extra, given=given, names=cluster.names)


def second_overlay(cluster: Cluster) -> str:
    """Return the path of the overlay of a second instance, until it has replaced the first one (``sms apply``)."""
    return f"{cluster.places.overlay}.second"


def resolve_running(cluster: Cluster, host: Host) -> Cluster:
    """Return it with the addresses of nodes' names, as ``resolve_nodes`` of the running services container."""
    argv = inside_argv(cluster.site, cluster.services, "cat", HOSTS)
    return resolve_nodes(cluster, host, lambda: host.run(*argv, ok=None).stdout)[0]


def overlay_mark(archive: bytes, image: Image) -> str:
    """Return the mark of a seed and image. It includes the image because accounts are merged with the image's.

    Args:
        archive: without addresses of nodes' names, which others than the site file change.
    """
    return f"{seed_digest(archive)} {image.key}"


def running_mark(cluster: Cluster, host: Host) -> str:
    """Return the seed mark in the overlay of the running services container."""
    return host.run(*inside_argv(cluster.site, cluster.services, "cat", MARK), ok=None).text


def check_overlay(cluster: Cluster, host: Host) -> bool:
    """Return whether there is an overlay; check that it is not in use, or that there is room for a new one.

    Raises:
        Refused: something on this host has it open, or there is no room.
    """
    path = str(cluster.places.overlay)
    if not host.works("test", "-e", path):
        if is_on_closed_mirror(cluster, host):
            return True
        # For the full overlay: it is sparse at first.
        folder, hint = str(cluster.places.overlay.parent), "free space, or set a smaller overlay.size_mb"
        need_space(host, folder, cluster.site.overlay.size_mb << 20, "MiB free, the overlay may grow to %d", hint=hint)
        return False
    users = ext3.users_of(host, path)
    if users:
        raise _in_use(path, host, users)
    return True


def is_on_closed_mirror(cluster: Cluster, host: Host) -> bool:
    """Whether the overlay is on a mirror that is not open.

    Raises:
        Refused: it is on a mirror whose note is missing.
    """
    if not is_linked(cluster, host):
        return False
    if find_mirror(cluster, host) is None:
        raise Refused(
            f"{cluster.places.overlay} on {host.name} is on a mirror, but {cluster.places.mirror_note} is missing",
            hint=f"recover it from a folder with a member: {ADOPT}",
        )
    return True


def _in_use(path: str, host: Host, users: list[str]) -> Refused:
    return Refused(
        f"{path} is in use on {host.name} ({', '.join(users)})",
        hint="is an instance or a mount of it left? `losetup -l` shows its users",
    )


@contextmanager
def keep_stopped(cluster: Cluster, host: Host, *, fenced: Collection[str] = ()) -> Iterator[Lease]:
    """Keep the services container stopped on all hosts that share the overlay, within the context; yield the lease.

    An overlay on a mirror is accessible within the context.

    Args:
        fenced: admin hosts known to be off; leases that they hold are ignored.

    Raises:
        Refused: it runs here, another host has the lease, another run is in progress, or the overlay is in use.
    """
    with (
        lock_host(cluster, host),
        hold_lease_still(host, cluster, fenced=fenced) as lease,
    ):
        check_stopped(cluster, host)
        with opened(cluster, host) as mirror:
            if mirror:
                check_stopped(cluster, host)
            yield lease


def check_stopped(cluster: Cluster, host: Host) -> None:
    """Check that nothing on the host has the overlay open.

    Raises:
        Refused: the services container runs there, or something else has the overlay open.
    """
    if find_instance(cluster, host):
        raise Refused(f"the services container runs on {host.name}", hint=f"sms stop --host {host.name}")
    users = ext3.users_of(host, str(cluster.places.overlay))
    if users:
        raise _in_use(str(cluster.places.overlay), host, users)


def seeded_with(host: Host, path: str) -> str:
    """Return the seed mark of an overlay that is not in use; empty where it was never seeded."""
    return ext3.read_inside(host, path, f"/upper{MARK}").decode(errors="replace").strip()


def overlay_commands(cluster: Cluster, host: Host, image: Image, mark: str, exists: bool) -> list[str]:
    """Return the commands that create and seed an overlay, for display."""
    overlay = str(cluster.places.overlay)
    create = f"apptainer overlay create --size {cluster.site.overlay.size_mb} --sparse {overlay}"
    confinement = query_confinement(cluster, host)
    seed = shlex.join(shown(seed_argv(cluster.site, confinement, image.path, overlay, mark)))
    return [*([] if exists else [create]), f"{seed} <the site's files>"]


def fitting(cluster: Cluster, host: Host) -> Cluster:
    """Return it with the size that its overlay has, if that is less than the site file's: limits of queues follow."""
    size = query_size(cluster, host)
    if not size or size >= cluster.site.overlay.size_mb:
        return cluster
    cluster.env.progress.report(
        f"note: overlay.size_mb is {cluster.site.overlay.size_mb}, and the overlay of {host.name} has {size} MiB: "
        f"`sms overlay grow {cluster.site.overlay.size_mb}M` enlarges it"
    )
    overlay = cluster.site.overlay.model_copy(update={"size_mb": size})
    return replace(cluster, site=cluster.site.model_copy(update={"overlay": overlay}))


def query_size(cluster: Cluster, host: Host) -> int:
    """Return the size of the overlay in MiB; 0 if there is none."""
    size = host.run("stat", "-L", "-c", "%s", "--", str(cluster.places.overlay), ok=None).text
    return int(size) >> 20 if size.isdecimal() else 0


def query_room(cluster: Cluster, host: Host) -> int | None:
    """Return the bytes that services can still write in the running container; None if it does not say."""
    argv = inside_argv(cluster.site, cluster.services, "df", "--block-size=1", "--output=avail", "/")
    words = host.run(*argv, ok=None).text.split()
    return int(words[-1]) if words and words[-1].isdecimal() else None


def ready_overlay(
    cluster: Cluster,
    host: Host,
    image: Image,
    *,
    filled: bool = False,
    may_seed: Callable[[bool], bool] = lambda _: True,
) -> list[str]:
    """Check the overlay, or create it where there is none, and seed it from the site file.

    Return the paths of the files that changed in an existing one.

    Args:
        filled: the state of the services is copied into it afterwards: a new one is not reported.
        may_seed: called for an existing one, with whether its files are to stay; False: they stay in any case.

    Raises:
        Refused: something on this host has it open, or there is no room for a new one.
        SmsError: it is damaged, or cannot be seeded.
    """
    path = str(cluster.places.overlay)
    exists = check_overlay(cluster, host)
    cluster = fitting(cluster, host) if exists else cluster
    mark = overlay_mark(archive_for(cluster), image)
    if exists:
        with cluster.env.progress.step("check the overlay"):
            ext3.check(host, path)
    read_known = (lambda: ext3.read_inside(host, path, f"/upper{HOSTS}")) if exists else bytes
    cluster, renamed = resolve_nodes(cluster, host, read_known)
    same = exists and seeded_with(host, path) == mark
    stays = same and not renamed
    if exists and (not may_seed(stays) or stays):
        return []
    archive = archive_for(cluster)
    with cluster.env.progress.step("seed the overlay" if exists else "create and seed the overlay") as step:
        if exists:
            report = _seed(cluster, host, image.path, path, archive, mark)
        else:
            report = _create(cluster, host, image.path, path, archive, mark)
        step.detail(f"{len(report['changed'])} files")
    if not (exists or filled or cluster.is_gateway):
        cluster.env.progress.report(
            f"note: {host.name} had no overlay {path}: this one is new, without earlier jobs and accounting"
        )
    for kept in report["kept"]:
        cluster.env.progress.report(
            f"note: a file was changed inside the container; the changed text is kept as {kept}"
        )
    return report["changed"] if exists else []


def _create(cluster: Cluster, host: Host, image: str, path: str, archive: bytes, mark: str) -> dict[str, list[str]]:
    """Create the overlay under a temporary name, so that one with the final name is always completely seeded."""
    beside = f"{path}.new"
    host.remove(beside)
    try:
        apptainer.create_overlay(host, beside, cluster.site.overlay.size_mb)
        report = _seed(cluster, host, image, beside, archive, mark)
        files.place(host, beside, path, replace=False)
    except BaseException:
        host.remove(beside)
        raise
    return report


def _seed(cluster: Cluster, host: Host, image: str, overlay: str, archive: bytes, mark: str) -> dict[str, list[str]]:
    argv = seed_argv(cluster.site, prepare_confinement(cluster, host), image, overlay, mark)
    report: dict[str, list[str]] = apptainer.run_container(host, *argv, input=archive, timeout=120).parse(
        dict[str, list[str]], last=True
    )
    return report
