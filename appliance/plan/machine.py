"""File locations on an admin host, and the commands that start and stop the services container."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from appliance.catalog import Service
from appliance.config.model import Site
from appliance.plan.overlay.seed import seed_program
from appliance.plan.services.confinement import Confinement
from appliance.plan.services.network import network_options
from appliance.plan.services.runs import ROOT, Once, join_run, once_run, start_run
from appliance.shared.migration import Second

PROBE = "/opt/sms/bin/sms-probe"
GATEWAY = "_gateway"
"""End of the name of what a cluster keeps on an admin host while an engine has its other services: of its instance,
overlay and lease. No cluster has such a name."""


class Places:
    """Paths of a site's files on an admin host, below the state folder except for the locks in /run/sms.

    ``label``: name of the folder of snapshots, if not the cluster's.
    """

    def __init__(self, site: Site, label: str = "") -> None:
        state, run = PurePosixPath(site.state), PurePosixPath("/run/sms")
        whole = site.cluster.removesuffix(GATEWAY)
        overlays = PurePosixPath(site.overlay.directory) if site.overlay.directory else state / "overlays"
        self.images = state / "images"
        self.current = self.images / f"{whole}.sif"
        self.overlay = overlays / f"{site.cluster}.img"
        # Folder of a mirrored overlay; the path of the overlay is then a link into it.
        self.mirror = overlays / f"{site.cluster}.mirror"
        self.mirrored = self.mirror / self.overlay.name
        self.mirror_note = overlays / f"{site.cluster}.mirror.json"
        self.snapshots = PurePosixPath(site.snapshots.directory or state / "snapshots") / (label or site.cluster)
        # Beside the overlay: hosts that share the overlay share the lease.
        self.lease = overlays / f"{site.cluster}.lease"
        # What the container may do.
        self.seccomp = state / "seccomp.json"
        self.empty = state / "empty"
        self.journal = state / "journal"
        self.history = self.journal / f"{site.cluster}.history"
        # What Slurm had when the services container was stopped.
        self.jobs = self.journal / f"{site.cluster}.jobs"
        # What is deployed to an engine: a folder of bundles, and the record with .json at its end.
        self.deployments = state / "engines" / site.cluster
        self.lock = run / f"{site.cluster}.lock"
        self.guard_lock = run / f"{whole}.guard.lock"
        # The container's ports that the guard has taken off their bridges.
        self.uplink_mark = run / f"{site.cluster}.uplink"
        self.guard_log = self.journal / f"{whole}.guard.log"
        # Written by the guard of the host that serves, on every other host: when it was last heard from.
        self.sign = run / f"{site.cluster}.alive"
        # Revoked certificates, the same list on all admin hosts.
        self.revoked = state / f"{site.cluster}.revoked"
        self.public_keys = state / "keys"
        # Borg's cache and its data about repositories.
        self.borg = state / "borg" / site.cluster
        self.borg_lock = run / f"{site.cluster}.borg.lock"
        # On the machine that prunes a repository to which admin hosts may only append.
        self.borg_archives = self.journal / f"{label or site.cluster}.borg-archives.json"
        self.borg_key_note = self.journal / f"{site.cluster}.borg-key.json"


def instance_of(cluster: str) -> str:
    """Return the name of the Apptainer instance of a cluster."""
    return f"sms-{cluster}"


def instance_name(site: Site) -> str:
    """Return the name of the Apptainer instance."""
    return instance_of(site.cluster)


def start_argv(
    site: Site, confinement: Confinement, image: str, *, isolated: bool = False, second: Second | None = None
) -> tuple[str, ...]:
    """Return the command that starts the instance, or a second one; ``isolated``: without macvlan interfaces."""
    overlay = second.overlay if second else str(Places(site).overlay)
    options = (*network_options(site, isolated=isolated), "--hostname", site.hostname, "--overlay", overlay)
    return start_run(site, confinement, image, second.instance if second else instance_name(site), options)


def seed_argv(site: Site, confinement: Confinement, image: str, overlay: str, mark: str) -> tuple[str, ...]:
    """Return the command that reads the seed archive and seeds an overlay that is not in use.

    ``mark`` is written last; it identifies what the overlay was seeded with.
    """
    once = Once("seed", seed_program(ROOT, mark), overlay=overlay, writable=True)
    return once_run(site, confinement, image, once)


def trial_argv(site: Site, confinement: Confinement, image: str) -> tuple[str, ...]:
    """Return the command that prints status and mountinfo (proc(5)) of a process confined as those of the instance.

    It runs without an overlay, so that nobody but the signed image answers.
    """
    return once_run(site, confinement, image, Once("trial", ("cat", "/proc/self/status", "/proc/self/mountinfo")))


def stop_timeout(services: Sequence[Service]) -> int:
    """Return how many seconds the supervisor may take to stop all services, one after the other."""
    return sum(service.stop_wait_s for service in services) + 30


def stop_argv(site: Site, timeout_s: int, *, name: str = "") -> tuple[str, ...]:
    """Return the command that stops the instance, or one of another ``name``."""
    name = name or instance_name(site)
    return ("apptainer", "instance", "stop", "--signal", "SIGTERM", "--timeout", str(timeout_s), name)


def dump_argv(site: Site, services: Sequence[Service], service: Service) -> tuple[str, ...]:
    """Return the command that makes a service dump its data inside the running instance."""
    limit = ("timeout", "--kill-after=10", str(service.dump_wait_s))
    return inside_argv(site, services, *limit, "sh", "-c", service.dump, f"dump-{service.name}")


def inside_argv(site: Site, services: Sequence[Service], *argv: str, confined: bool = True) -> tuple[str, ...]:
    """Return the command that runs ``argv`` inside the running instance, with its capabilities and system calls.

    Apptainer would give it all capabilities, and its programs are those of the overlay: anyone who is root in the
    container can replace them.

    Args:
        confined: whether the instance is. One that an early version of sms started is not, and has its probes,
            which need all capabilities.
    """
    return join_run(instance_name(site), services if confined else None, argv)


def inside_second(second: Second, services: Sequence[Service], *argv: str) -> tuple[str, ...]:
    """Return the command that runs ``argv`` as ``inside_argv``, but inside the second instance."""
    return join_run(second.instance, services, argv)


def probe_argv(site: Site, services: Sequence[Service], *argv: str, confined: bool) -> tuple[str, ...]:
    """Return the command that probes services of the running instance; ``confined``: that of ``inside_argv``."""
    return inside_argv(site, services, PROBE, *argv, confined=confined)
