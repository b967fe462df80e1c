"""The context of most verbs: the site, its catalogue, and the host to act on."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from appliance.catalog import Base, Service, find_role, read_bases, select
from appliance.catalog.model import Role
from appliance.config.model import Site
from appliance.errors import ConfigError, Refused
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.env import Env
from appliance.operations.site.find import open_site
from appliance.plan.machine import GATEWAY, Places
from appliance.plan.vm.vm import need_vm
from appliance.progress import Progress
from appliance.share import share

GATEWAY_MB = 1024
"""Size of the overlay of what stays on an admin host, in MiB; that of the site if it is smaller."""


@dataclass(frozen=True)
class Cluster:
    """A site with its selected services in starting order; ``path`` is that of the site file.

    ``vm``: verbs of snapshots act on those of the VM's state instead of the overlay's. ``names``: IPv4 addresses of
    nodes' names that the site file lacks, for the container's hosts file.
    """

    site: Site
    services: tuple[Service, ...]
    base: Base
    path: Path | None = None
    vm: bool = False
    names: Mapping[str, str] = field(default_factory=dict, repr=False)
    env: Env = field(default_factory=Env, repr=False, compare=False)

    @cached_property
    def places(self) -> Places:
        """File locations on an admin host."""
        return Places(self.site, self.label)

    @property
    def label(self) -> str:
        """The cluster's name in its snapshots, archives and schedules; with ``vm`` one that no cluster can have."""
        return f"{self.site.cluster}.vm" if self.vm else self.site.cluster

    def of_vm(self) -> Cluster:
        """Return the same cluster with the same hosts, for snapshots of the VM's state.

        Raises:
            ConfigError: the site has no VM.
        """
        need_vm(self.site)
        return replace(self, vm=True)

    def showing(self, progress: Progress) -> Cluster:
        """Return the same cluster, whose verbs report to ``progress``."""
        return replace(self, env=replace(self.env, progress=progress))

    def reconnecting(self) -> Cluster:
        """Return the same cluster, with connections to its hosts of its own."""
        return replace(self, env=replace(self.env, hosts=self.env.hosts.separate()))

    def of_gateway(self, services: Sequence[Service] | None = None) -> Cluster:
        """Return what stays on an admin host while an engine has the other services, as a cluster of its own.

        Its instance, overlay, lease and history are others; its image, addresses and guard are those of this cluster.

        Args:
            services: those that stay; without them it can be stopped and queried, not started.
        """
        # It keeps logs, mail and no state of Slurm, whose files it does not need, and has no certificate of the VM.
        slurm = self.site.slurm.model_copy(update={"files": {}})
        overlay = self.site.overlay.model_copy(update={"size_mb": min(self.site.overlay.size_mb, GATEWAY_MB)})
        name = f"{self.site.cluster}{GATEWAY}"
        changes = {"cluster": name, "overlay": overlay, "provisioning": None, "slurm": slurm}
        site = self.site.model_copy(update=changes)
        return replace(self, site=site, services=self.services if services is None else tuple(services))

    @property
    def is_gateway(self) -> bool:
        """Whether this is a cluster of ``of_gateway``."""
        return self.site.cluster.endswith(GATEWAY)

    def find_role(self, role: Role) -> Service | None:
        """Return the service with that role; None if the site has none."""
        return find_role(self.services, role)

    def host(self, name: str | None) -> Host:
        """Return the admin host of that name, or the local one. Always the same object, so connections are reused.

        Raises:
            ConfigError: no admin host has that name.
            Refused: no name was given, and this machine is not an admin host.
        """
        here = self.env.hosts.here
        by_name = {host.name: host for host in self.site.admin_hosts}
        if name is None:
            if here not in by_name:
                raise Refused(
                    f"this machine ({here}) is not an admin host of the site",
                    hint=f"name one: --host {', '.join(by_name)}",
                )
            name = here
        if name not in by_name:
            raise ConfigError(f"no admin host named {name}", hint=f"the site has: {', '.join(by_name)}")
        return self.env.hosts.open(self.site, by_name[name])

    def target(self, name: str | None) -> Host:
        """Return the admin host to act on, as ``host`` does; acting on the local host requires root."""
        host = self.host(name)
        if isinstance(host, Local):
            need_root()
        return host


def open_cluster(path: Path, state: Path | None, progress: Progress, *, classification: Path | None = None) -> Cluster:
    """Return the checked site at ``path`` with its services in starting order and its base.

    Args:
        state: overrides the state folder that the site file names.
        classification: a file that selects the services instead of the site file.
    """
    loaded = open_site(path, state, classification)
    for notice in loaded.notices:
        progress.report(f"note: {notice}")
    site = loaded.site
    bases = read_bases(share("definitions", "bases"))
    services = select(loaded.catalog, site.service_names)
    cluster = Cluster(site, services, bases[site.base.os], path.absolute(), env=Env(progress=progress))
    if classification is not None and (left := _left_out(cluster, path)):
        progress.report(
            f"note: the site file also enables {', '.join(left)}: `sms start` and `sms upgrade` refuse an image without"
            " them; `services: {from: FILE}` in the site file selects those of the classification"
        )
    return cluster


def _left_out(cluster: Cluster, path: Path) -> list[str]:
    """Return the services that the site file enables and the cluster, which has those of a classification, lacks."""
    try:
        enabled = open_site(path)
    except ConfigError:  # of the classification that the site file names, instead of which another one was given
        return []
    here = {service.name for service in cluster.services}
    return [service.name for service in select(enabled.catalog, enabled.site.service_names) if service.name not in here]


def runtime_files() -> dict[str, bytes]:
    """Return the programs that run inside the container, by file name."""
    folder = share("definitions", "runtime")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def need_root() -> None:
    """Refuse unless this process is root.

    Raises:
        Refused: it is not root.
    """
    if os.geteuid():
        raise Refused("this needs root", hint="run it with sudo")


def need_build_host(site: Site) -> None:
    """Refuse to sign on a machine that is not the build host; without `build.host` every machine with the key is one.

    A machine is recognized by its host name, as an admin host is.

    Raises:
        Refused: it is another machine.
    """
    here = socket.gethostname()
    if site.build.host not in (None, here):
        raise Refused(
            f"this machine ({here}) does not sign images: build.host in the site file is {site.build.host}",
            hint=f"run it on {site.build.host}, or correct build.host, if this machine is meant",
        )


def read_given(names: Sequence[tuple[str, Path | None]]) -> dict[str, bytes]:
    """Return the contents of files that the site names, by setting. May be secrets: keep them in memory only."""
    given: dict[str, bytes] = {}
    for name, path in names:
        if path is None:
            continue
        try:
            given[name] = path.read_bytes()
        except OSError as error:
            create = "; `sms key ca create` creates one" if name.startswith("tls_") else ""
            hint = f"the site file names it as {name}{create}"
            raise Refused(f"cannot read {path}: {error.strerror}", hint=hint) from error
    return given


def read_password(path: Path) -> str:
    """Return the password in a file that only its owner may read.

    Raises:
        Refused: it cannot be read, others may read it, or it is empty.
    """
    try:
        mode, text = path.stat().st_mode, path.read_text().strip()
    except (OSError, ValueError) as error:
        raise Refused(f"cannot read {path}: {error}", hint="the site file names it as password_file") from error
    if mode & 0o077:
        raise Refused(f"others may read the password in {path}", hint=f"chmod 600 {path}")
    if not text or "\n" in text:
        raise Refused(f"{path} does not contain exactly one line", hint="write only the password into it")
    return text
