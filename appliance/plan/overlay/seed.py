"""The seed of an overlay: every file that differs per site, as bytes with owner and mode."""

from __future__ import annotations

import hashlib
import io
import ipaddress
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.catalog import Service
from appliance.catalog.model import SecretName, SeedFile
from appliance.config.hostlist import expand
from appliance.config.model import Site
from appliance.config.slurm_files import FOLDER
from appliance.plan.render import Templates
from appliance.plan.services.controllers import CONTAINER, other_controllers
from appliance.plan.services.supervisor import services_json, supervisor_conf
from appliance.share import share
from appliance.shared.secret import SecretInput, secret_archive

SECRET_PLACES = {
    "munge_key": ("/etc/munge/munge.key", "munge", 0o600),
    "jwt_key": ("/etc/slurm/jwt_hs256.key", "slurm", 0o600),
    "ssh_host_key": ("/etc/ssh/ssh_host_ed25519_key", "root", 0o600),
    "sssd_conf": ("/etc/sssd/sssd.conf", "root", 0o600),
    "shadow": ("/etc/shadow", "root", 0o600),
    "tls_ca": ("/etc/sms/tls/ca.pem", "root", 0o600),
    "tls_cert": ("/etc/sms/tls/cert.pem", "root", 0o600),
    "tls_key": ("/etc/sms/tls/key.pem", "root", 0o600),
    "passwd": ("/etc/passwd", "root", 0o644),
    "group": ("/etc/group", "root", 0o644),
}
"""Path, owner and mode in the container of the files that a site names."""
OF_SERVICES = ("jwt_key", "ssh_host_key", "sssd_conf")
"""Those that only services have: their owners are in an image with such a service."""


SHORTEST_KEY = 32
"""Bytes of a munge key, at least (MUNGE_MINIMUM_SECRET_KEY_LEN of munged)."""


@dataclass(frozen=True)
class Seed:
    """One file of a new overlay, or a folder if its path ends with /; ``data`` may be secret and is not in its repr."""

    path: str
    data: bytes
    owner: str = "root"
    group: str = "root"
    mode: int = 0o644

    def __repr__(self) -> str:
        return f"Seed({self.path}, {len(self.data)} bytes, {self.owner}:{self.group} {self.mode:o})"


def seed_program(root: str, mark: str) -> tuple[str, ...]:
    """Return the command that seeds an overlay with an archive, in the image; ``root``: where its files are there."""
    modules = {name: share("definitions", "runtime", f"{name}.py").read_text() for name in ("smsfiles", "smsseed")}
    text = share("definitions", "scripts", "seed-overlay").read_text()
    return ("python3", "-I", "-c", text, root, mark, json.dumps(modules))


def seed_files(
    site: Site,
    services: Sequence[Service],
    *,
    overlays: Path,
    extra: Sequence[SeedFile],
    given: Mapping[str, bytes],
    names: Mapping[str, str] | None = None,
) -> tuple[Seed, ...]:
    """Return all files of the overlay, sorted by path.

    Args:
        overlays: the folder of the templates.
        extra: files besides those of the services.
        given: contents of the files that the site names, by the keys of ``SECRET_PLACES``; of ``slurm.files`` by path.
        names: IPv4 addresses of nodes' names that the site file lacks.
    """
    templates = Templates(overlays, **template_values(site, services, names))
    seeds = [
        Seed("/etc/sms/supervisord.conf", supervisor_conf(services, site.overlay.size_mb).encode()),
        Seed("/etc/sms/services.json", (json.dumps(services_json(services, templates), indent=1) + "\n").encode()),
    ]
    service_files = [file for service in services for file in service.files]
    for file in (*extra, *service_files):
        text = templates.file(file.template) if file.template else templates.text(file.content or "")
        seeds.append(Seed(file.path, text.encode(), file.owner, file.group, int(file.mode, 8)))
    read = {name for service in services for name in secrets_of(service)}
    for name, data in given.items():
        if name in OF_SERVICES and name not in read:
            continue
        if name in SECRET_PLACES:
            path, owner, mode = SECRET_PLACES[name]
            seeds.append(Seed(path, data, owner, owner, mode))
        else:
            seeds.append(Seed(name, data, mode=slurm_mode(data)))
    # The last of a path counts: a file of the site replaces the catalogue's.
    found = {seed.path: seed for seed in seeds}
    # passwd before shadow: the seed program reads the image's own accounts from there.
    return tuple(found[path] for path in sorted(found))


def find_short(path: object, size: int) -> tuple[str, str] | None:
    """Return message and hint for a munge key of this many bytes that munged refuses; None if it takes it."""
    if size >= SHORTEST_KEY:
        return None
    short = f"{path} has {size} bytes: munged refuses keys of fewer than {SHORTEST_KEY}"
    return short, "copy /etc/munge/munge.key of a node as it is"


def secrets_of(service: Service) -> tuple[SecretName, ...]:
    """Return the secret files of the site that a service reads, by their names in the site file."""
    return (*service.secrets, *service.needs_secrets)


def template_values(
    site: Site, services: Sequence[Service], names: Mapping[str, str] | None = None
) -> dict[str, object]:
    """Return what templates of the container's files may use. ``names``: as for ``seed_files``."""
    return {
        "site": site,
        "services": [service.name for service in services],
        "node_addresses": node_addresses(site, names),
        "other_controllers": other_controllers(site, services, CONTAINER),
    }


def slurm_mode(data: bytes) -> int:
    """Return the mode of a file in /etc/slurm: programs are executable."""
    return 0o755 if data.startswith((b"#!", b"\x7fELF")) else 0o644


def slurm_sources(site: Site) -> list[tuple[str, Path | None]]:
    """Return path in the container and source of each of the site's ``slurm.files``."""
    return [(f"{FOLDER}/{name}", source) for name, source in site.slurm.files.items()]


def named_nodes(site: Site) -> Iterator[tuple[str, str]]:
    """Yield name and address of every node of Slurm; the address is empty if the site file has none."""
    for node in site.slurm.nodes:
        names = expand(node.name)
        yield from zip(names, expand(node.address) if node.address else [""] * len(names), strict=False)


def node_addresses(site: Site, names: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Return (address, names) of every node whose address is known, for /etc/hosts.

    Args:
        names: IPv4 addresses of the others by their names, which a name service resolves.
    """
    pairs: list[tuple[str, str]] = []
    for name, address in named_nodes(site):
        try:
            pairs.append((str(ipaddress.IPv4Address(address)), name))
        except ValueError:  # none, or a name
            if found := (names or {}).get(address or name):
                pairs.append((found, f"{address} {name}" if address not in ("", name) else name))
    return pairs


def seed_archive(seeds: Sequence[Seed]) -> SecretInput:
    """Return the seed as a tar archive with owners by name: their ids are the container's."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for seed in seeds:
            member = tarfile.TarInfo(seed.path.strip("/"))
            member.type = tarfile.DIRTYPE if seed.path.endswith("/") else tarfile.REGTYPE
            member.size = len(seed.data)
            member.mode = seed.mode
            member.uname, member.gname = seed.owner, seed.group
            archive.addfile(member, io.BytesIO(seed.data))
    return secret_archive(buffer.getvalue())


def seed_digest(archive: bytes) -> str:
    """Return the digest that identifies a seed archive."""
    return hashlib.sha256(archive).hexdigest()
