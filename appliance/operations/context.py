"""What most verbs begin with: the site, its catalogue, and the host to act on."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.catalog import Base, Service, read_bases, read_catalog, select
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

    @property
    def places(self) -> Places:
        """Where things lie on an admin host."""
        return places(self.site)


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
    assert isinstance(site.services, tuple)
    catalog = read_catalog(share("definitions", "services"))
    bases = read_bases(share("definitions", "bases"))
    return Cluster(site, select(catalog, site.services), bases[site.base.os], path.absolute())


def find_host(site: Site, wanted: str | None) -> Host:
    """The admin host to act on: the one named, or the one this process runs on.

    Raises:
        ConfigError: no admin host has that name.
        Refused: none was named, and this machine is not an admin host.
    """
    here = socket.gethostname()
    by_name = {host.name: host for host in site.admin_hosts}
    if wanted is None:
        if here in by_name:
            return Local(here)
        names = ", ".join(by_name)
        raise Refused(f"this machine ({here}) is not an admin host of the site", hint=f"name one: --host {names}")
    if wanted not in by_name:
        raise ConfigError(f"no admin host named {wanted}", hint=f"the site has: {', '.join(by_name)}")
    return Local(here) if wanted == here else _over_ssh(site, by_name[wanted])


def find_target(site: Site, wanted: str | None) -> Host:
    """The admin host to act on, as ``find_host`` gives it; on this one, acting takes root."""
    host = find_host(site, wanted)
    if isinstance(host, Local):
        need_root()
    return host


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
