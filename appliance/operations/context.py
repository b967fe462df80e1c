"""What most verbs begin with: the site, its catalogue, and the host to act on."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from appliance.catalog import Base, Service, read_bases, read_catalog, select
from appliance.catalog.model import Role
from appliance.config.model import AdminHost, Site
from appliance.errors import ConfigError, Refused
from appliance.host.base import Host
from appliance.host.local import Local
from appliance.operations.site.find import open_site
from appliance.plan.machine import Places, places
from appliance.progress import Progress
from appliance.share import share


@dataclass(frozen=True)
class Cluster:
    """A site together with the services it wants, in starting order; ``path`` is where its file lies."""

    site: Site
    services: tuple[Service, ...]
    base: Base
    path: Path | None = None

    _hosts: dict[str, Host] = field(default_factory=dict, init=False, repr=False, compare=False)
    _opening: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    @property
    def places(self) -> Places:
        """Where things lie on an admin host."""
        return places(self.site)

    def find_role(self, role: Role) -> Service | None:
        """The service with that part in the cluster; None where the site has none."""
        return next((service for service in self.services if service.role == role), None)

    def host(self, wanted: str | None) -> Host:
        """The admin host of that name, or the one this process runs on: the same object, and so the same connection.

        Raises:
            ConfigError: no admin host has that name.
            Refused: none was named, and this machine is not an admin host.
        """
        here = socket.gethostname()
        by_name = {host.name: host for host in self.site.admin_hosts}
        if wanted is None:
            if here not in by_name:
                raise Refused(
                    f"this machine ({here}) is not an admin host of the site",
                    hint=f"name one: --host {', '.join(by_name)}",
                )
            wanted = here
        if wanted not in by_name:
            raise ConfigError(f"no admin host named {wanted}", hint=f"the site has: {', '.join(by_name)}")
        with self._opening:
            if wanted not in self._hosts:
                self._hosts[wanted] = Local(here) if wanted == here else _over_ssh(self.site, by_name[wanted])
            return self._hosts[wanted]

    def target(self, wanted: str | None) -> Host:
        """The admin host to act on, as ``host`` gives it; on this one, acting takes root."""
        host = self.host(wanted)
        if isinstance(host, Local):
            need_root()
        return host


def open_cluster(path: Path, state: Path | None, progress: Progress, *, classification: Path | None = None) -> Cluster:
    """The site at ``path``, checked, its services in starting order, and its base.

    Args:
        state: stands before the folder that the file names.
        classification: a file that says the services instead of the site file.
    """
    loaded = open_site(path, state, classification)
    for notice in loaded.notices:
        progress.say(f"note: {notice}")
    site = loaded.site
    catalog = read_catalog(share("definitions", "services"))
    bases = read_bases(share("definitions", "bases"))
    return Cluster(site, select(catalog, site.service_names), bases[site.base.os], path.absolute())


def _over_ssh(site: Site, host: AdminHost) -> Host:
    from appliance.host.ssh import Ssh  # paramiko takes a tenth of a second, and most verbs act here

    return Ssh(host.name, host.address, user=host.user, port=host.port, key=host.key, known_hosts=site.known_hosts)


def runtime_files() -> dict[str, bytes]:
    """The programs that run inside the container."""
    folder = share("definitions", "runtime")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def need_root() -> None:
    """Refuse when this process is not root.

    Raises:
        Refused: it is not.
    """
    if os.geteuid():
        raise Refused("this needs root", hint="run it with sudo")


def read_given(site: Site, names: Sequence[tuple[str, Path | None]]) -> dict[str, bytes]:
    """Bytes of the files that the site names, secrets among them. They stay in memory."""
    given: dict[str, bytes] = {}
    for name, path in names:
        if path is None:
            continue
        try:
            given[name] = path.read_bytes()
        except OSError as error:
            made = "; `sms key ca create` makes one" if name.startswith("tls_") else ""
            hint = f"the site file names it as {name}{made}"
            raise Refused(f"cannot read {path}: {error.strerror}", hint=hint) from error
    return given
