"""Where things lie on an admin host, and the commands that start and stop the appliance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from appliance.catalog import Service
from appliance.config.model import Site
from appliance.plan.services.network import network_options


@dataclass(frozen=True)
class Places:
    """Paths on an admin host. All but the run folder lie below the state folder."""

    images: PurePosixPath
    current: PurePosixPath
    overlay: PurePosixPath
    mirror: PurePosixPath
    mirror_note: PurePosixPath
    snapshots: PurePosixPath
    lease: PurePosixPath
    journal: PurePosixPath
    history: PurePosixPath
    lock: PurePosixPath
    guard_lock: PurePosixPath
    guard_log: PurePosixPath
    public_keys: PurePosixPath
    borg: PurePosixPath
    borg_lock: PurePosixPath


def places(site: Site) -> Places:
    """Where this site's things lie."""
    state = PurePosixPath(site.state)
    overlays = PurePosixPath(site.overlay.directory) if site.overlay.directory else state / "overlays"
    overlay = overlays / f"{site.cluster}.img"
    return Places(
        images=state / "images",
        current=state / "images" / f"{site.cluster}.sif",
        overlay=overlay,
        # Where the overlay lies when it is mirrored; its own path is a link to there then.
        mirror=overlays / f"{site.cluster}.mirror",
        mirror_note=overlays / f"{site.cluster}.mirror.json",
        snapshots=PurePosixPath(site.snapshots.directory or state / "snapshots") / site.cluster,
        # Beside the overlay: where hosts share the one they share the other.
        lease=overlays / f"{site.cluster}.lease",
        journal=state / "journal",
        history=state / "journal" / f"{site.cluster}.history",
        lock=PurePosixPath("/run/sms") / f"{site.cluster}.lock",
        guard_lock=PurePosixPath("/run/sms") / f"{site.cluster}.guard.lock",
        guard_log=state / "journal" / f"{site.cluster}.guard.log",
        public_keys=state / "keys",
        # Its cache, and what it remembers of repositories.
        borg=state / "borg" / site.cluster,
        borg_lock=PurePosixPath("/run/sms") / f"{site.cluster}.borg.lock",
    )


def instance_name(site: Site) -> str:
    """The name of the Apptainer instance."""
    return f"sms-{site.cluster}"


def container_options(site: Site) -> list[str]:
    """Options of every run of the image: nothing of the host's but the kernel and the time zone."""
    options = ["--no-home", "--contain", "--cleanenv", "--no-mount", "/etc/hosts"]
    # A resolver of the host's may be out of the container's reach; an address that refuses at
    # once beats one that never answers.
    dns = ",".join(str(server) for server in site.networks.dns) or "127.0.0.1"
    return [*options, "--dns", dns]


def start_argv(site: Site, image: str, *, held: bool = False) -> tuple[str, ...]:
    """The command that starts the appliance; ``held``: unseen by anybody (``network.hold_bridges``)."""
    return (
        "apptainer",
        "instance",
        "start",
        *container_options(site),
        *network_options(site, held=held),
        "--hostname",
        site.hostname,
        "--overlay",
        str(places(site).overlay),
        image,
        instance_name(site),
    )


def seed_argv(site: Site, image: str, overlay: str, mark: str) -> tuple[str, ...]:
    """The command that reads the seed's archive and brings it into an overlay nobody uses.

    ``mark`` is written last; it tells what the overlay was seeded with.
    """
    options = container_options(site)
    return ("apptainer", "exec", *options, "--overlay", overlay, image, "/opt/sms/bin/sms-seed", mark)


def stop_timeout(services: Sequence[Service]) -> int:
    """Seconds that the supervisor gets: it ends the services one after the other."""
    return sum(service.stop_wait_s for service in services) + 30


def stop_argv(site: Site, timeout_s: int) -> tuple[str, ...]:
    """The command that stops the appliance."""
    return ("apptainer", "instance", "stop", "--signal", "SIGTERM", "--timeout", str(timeout_s), instance_name(site))


def dump_argv(site: Site, service: Service) -> tuple[str, ...]:
    """The command that has a service of the running appliance dump its data."""
    limit = ("timeout", "--kill-after=10", str(service.dump_wait_s))
    return inside_argv(site, *limit, "sh", "-c", service.dump, f"dump-{service.name}")


def inside_argv(site: Site, *argv: str) -> tuple[str, ...]:
    """A command that runs in the running appliance."""
    return ("apptainer", "exec", "--cleanenv", "--pwd", "/", f"instance://{instance_name(site)}", *argv)
