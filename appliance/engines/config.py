"""Files of each workload: as the services container has them, with the engine's addresses and ports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.catalog import Base, Service
from appliance.config.model import Site
from appliance.config.slurm_files import FOLDER
from appliance.engines.group import make_workloads, on_engine, place, user_ids
from appliance.engines.model import ConfigFile, Deployment, SecretFile, Unit, Workload
from appliance.errors import ConfigError
from appliance.plan.overlay.seed import SECRET_PLACES, Seed, secrets_of, seed_files, template_values
from appliance.plan.render import Templates
from appliance.plan.services.jobsync import task_json

SERVICES = "/etc/sms/services.json"
SLURM_CONF = f"{FOLDER}/slurm.conf"
MUNGE = "munge_key"
"""The secret that every cluster has, also one whose site file does not name it."""
LARGEST = 900_000
"""Characters of the files of a workload: a ConfigMap has 1 MiB at most."""
TAKEN = re.compile(
    r"\s*(Slurm(?:ctld|d)Port|SlurmctldHost|SlurmUser|AccountingStorage(?:Host|Port))\s*=", re.IGNORECASE
)
"""A line of slurm.conf that an export writes, or whose value its ports and accounts would have to follow."""
PASSWORD = re.compile(r"^\s*(\w*Pass(?:word)?)\s*=\s*[^\s/#]", re.MULTILINE | re.IGNORECASE)
"""A setting of slurm.conf with a password; a path is that of a socket (slurm.conf(5), AccountingStoragePass)."""

INCLUDE = re.compile(rb"^\s*Include\s", re.MULTILINE | re.IGNORECASE)
"""A line of slurm.conf with another file, which may have any setting."""


@dataclass(frozen=True)
class Network:
    """How an engine's services are reached.

    Attributes:
        address: that nodes use.
        hosts: host name by workload, as its processes see it.
        ports: port that nodes use by port of the service, where it is another one.
        shared: whether all workloads have the network of one host.
        others: HOST(ADDRESS) of the controllers at other places, to which the services may move.
        controller: address of the controller, where it has another one.
    """

    address: str
    hosts: Mapping[str, str]
    ports: Mapping[int, int]
    shared: bool = False
    others: tuple[str, ...] = ()
    controller: str = ""


@dataclass(frozen=True)
class Sources:
    """What is read for an export: the templates' folder, and the contents of the files that the site names."""

    overlays: Path
    given: Mapping[str, bytes]


def make_deployment(site: Site, services: Sequence[Service], base: Base) -> Deployment:
    """Return the workloads of a site and the placement of every service; the workloads have no files yet.

    Raises:
        ConfigError: the ids of a user are not known.
    """
    services = [on_engine(service, site) for service in services]
    workloads = make_workloads(services, user_ids(base, services, site.system_users))
    networks = tuple(str(network) for network in site.node_networks)
    return Deployment(site.cluster, tuple(workloads), place(services, workloads), networks)


def with_files(
    deployment: Deployment, site: Site, services: Sequence[Service], sources: Sources, network: Network
) -> Deployment:
    """Return the deployment with the files and secrets of each workload.

    Raises:
        ConfigError: a file is not below /etc, is not text, or there are too many.
    """
    seeds = {one.path: one for one in seed_files(
        site, services, overlays=sources.overlays, extra=(), given=sources.given
    )}  # fmt: skip
    templates = Templates(sources.overlays, **template_values(site, services))
    by_name = {service.name: on_engine(service, site) for service in services}
    site_files = [path for path in sources.given if path.startswith(f"{FOLDER}/")]
    whole = bool(SLURM_CONF in seeds and INCLUDE.search(seeds[SLURM_CONF].data))
    filled = []
    for workload in deployment.workloads:
        read = dict.fromkeys(("/etc/passwd", "/etc/group"), "") | _find_read(workload, by_name, site_files, whole=whole)
        files = [
            _file(seeds[path], workload, deployment, network, lines=read[path])
            for path in sorted(read.keys() & seeds.keys())
        ]
        files.append(ConfigFile(SERVICES, key_of(SERVICES), _services(workload, by_name, templates, network.ports)))
        filled.append(replace(workload, files=_checked(workload, files), secrets=tuple(_secrets(workload, site))))
    return replace(deployment, workloads=tuple(filled))


def check_settings(site: Site) -> None:
    """Check settings of the site file that an export cannot follow.

    Raises:
        ConfigError: ``slurm.extra`` sets what the export sets.
    """
    for line in site.slurm.extra:
        if found := TAKEN.match(line):
            raise ConfigError(
                f"slurm.extra sets {found[1]}, which an export sets itself", hint="remove it from the site file"
            )


def _find_read(
    workload: Workload, services: Mapping[str, Service], site_files: Sequence[str], *, whole: bool
) -> dict[str, str]:
    """Return the files that the services of a workload read, each with the lines of it: a regular expression or "".

    Args:
        whole: all lines of them, and all files of services whose files they read.
    """
    found: dict[str, str] = {}
    for one in (unit.service for unit in workload.units):
        others = [services[name] for name in one.engines.reads if name in services]
        some = {} if whole else one.engines.settings
        for part in (one, *(others if not some else ())):
            paths = [file.path for file in part.files]
            found |= dict.fromkeys((*paths, *(site_files if part.site_files else ())), "")
        if others:
            found |= {path: lines if found.get(path, lines) == lines else "" for path, lines in some.items()}
    return found


def _file(seed: Seed, workload: Workload, deployment: Deployment, network: Network, *, lines: str) -> ConfigFile:
    try:
        text = seed.data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{seed.path} is not text", hint="engines distribute text files only") from None
    if seed.path in ("/etc/passwd", "/etc/group"):
        text = "".join(f"{_without_hash(line)}\n" for line in text.splitlines())
    if "PRIVATE KEY-----" in text:
        raise ConfigError(f"{seed.path} contains a private key", hint="exported files contain no secrets")
    if seed.path == SLURM_CONF:
        if found := PASSWORD.search(text):
            raise ConfigError(
                f"slurm.extra sets {found[1]}, which would be readable by all",
                hint="exported files contain no secrets: remove it, or keep this service in the services container",
            )
        text = set_lines(text, dict(_slurm_lines(text, workload, deployment, network)))
    if lines:
        wanted = re.compile(lines, re.IGNORECASE)
        text = "".join(line for line in text.splitlines(keepends=True) if wanted.match(line))
    return ConfigFile(seed.path, key_of(seed.path), text, seed.owner, seed.group, f"{seed.mode:04o}")


def _without_hash(line: str) -> str:
    """Return a line of passwd or group without a password in it; the container has none either (shadow(5))."""
    parts = line.split(":")
    return ":".join((parts[0], "x", *parts[2:])) if len(parts) > 1 else line


def _slurm_lines(text: str, here: Workload, deployment: Deployment, network: Network) -> Iterator[tuple[str, str]]:
    """Yield the settings of slurm.conf that differ from those in the services container."""
    controller, accounting = deployment.find("controller"), deployment.find("accounting")
    if controller:
        own = f"{network.hosts[controller.name]}({network.controller or network.address})"
        yield "SlurmctldHost", "\nSlurmctldHost=".join((own, *network.others))
        if port := network.ports.get(controller.ports[0].number):
            yield "SlurmctldPort", str(port)
    if accounting and re.search(r"^AccountingStorageHost=", text, re.MULTILINE):
        # Nodes get the controller's file, too: sacct and sacctmgr on them connect to this address.
        beside = here == accounting and not network.shared
        yield "AccountingStorageHost", "127.0.0.1" if beside else network.address
        if not beside and (port := network.ports.get(accounting.ports[0].number)):
            yield "AccountingStoragePort", str(port)


def set_lines(text: str, values: Mapping[str, str]) -> str:
    """Return a file of KEY=VALUE lines in which each key has the given value, once."""
    rest = dict(values)
    lines = []
    for line in text.splitlines():
        key = line.partition("=")[0].strip()
        if key in values:
            if key in rest:
                lines.append(f"{key}={rest.pop(key)}")
        else:
            lines.append(line)
    return "".join(f"{line}\n" for line in (*lines, *(f"{key}={value}" for key, value in rest.items())))


def _services(
    workload: Workload, services: Mapping[str, Service], templates: Templates, ports: Mapping[int, int]
) -> str:
    """Return services.json for ``sms-run`` and ``sms-probe``: its services, and others that they can wait for."""
    mine = {unit.name for unit in workload.units}
    wanted = {name for unit in workload.units for name in (*unit.service.needs, *unit.service.after)} - mine
    listed = []
    for one in services.values():
        if one.name in mine:
            # The controller listens on the port that slurm.conf has.
            moved = tuple(_moved(port, ports) for port in one.ports) if one.role == "controller" else one.ports
            listed.append(one.model_copy(update={"ports": moved}))
        elif one.name in wanted and _is_remote(one):
            listed.append(one.model_copy(update={"setup": ""}))  # what is only probed from here is not prepared here
    return json.dumps(task_json(listed, templates), indent=1) + "\n"


def _moved(port: str, ports: Mapping[int, int]) -> str:
    protocol, _, number = port.partition("/")
    return f"{protocol}/{ports.get(int(number), number)}" if number.isdecimal() else port


def _is_remote(service: Service) -> bool:
    """Return whether the probe of a service works from another workload: by a client's command, or an address."""
    probe = service.probe
    if service.engines.place != "one" or not service.ports or probe is None:
        return False
    return bool(probe.exec) or (probe.http or "").startswith("http://")


def _secrets(workload: Workload, site: Site) -> Iterator[SecretFile]:
    """Yield the secret files that the services of a workload read."""
    for name in sorted({name for unit in workload.units for name in secrets_of(unit.service)}):
        if name == MUNGE or getattr(site.secrets, name):
            path, owner, mode = SECRET_PLACES[name]
            yield SecretFile(name, path, owner, f"{mode:04o}")


def _checked(workload: Workload, files: Sequence[ConfigFile]) -> tuple[ConfigFile, ...]:
    outside = [file.path for file in files if not file.path.startswith("/etc/")]
    if outside:
        raise ConfigError(
            f"{outside[0]} of {workload.name} is not below /etc",
            hint="engines place files there only",
        )
    keys = [file.key for file in files]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"two files of {workload.name} are called {twice[0]} in an export", hint="rename one")
    size = sum(len(file.text.encode()) for file in files)
    if size > LARGEST:
        raise ConfigError(
            f"the files of {workload.name} have {size} bytes; {LARGEST} fit",
            hint="shorten passwd or slurm.files",
        )
    return tuple(sorted(files, key=lambda file: file.path))


def key_of(path: str) -> str:
    """Return the name of a file below /etc in a flat folder: letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", path.removeprefix("/etc/").replace("/", "."))[:200]


def placed_files(workload: Workload, config: str, secrets: Mapping[str, str]) -> str:
    """Return the list for ``sms-place``: every file with source, owner and mode.

    Args:
        config: folder of the files, by key.
        secrets: path of each secret's content.
    """
    rows: list[dict[str, str]] = [
        {
            "path": file.path,
            "source": f"{config}/{file.key}",
            "owner": file.owner,
            "group": file.group,
            "mode": file.mode,
        }
        for file in workload.files
    ]
    rows += [
        {"path": one.path, "source": secrets[one.name], "owner": one.owner, "group": one.owner, "mode": one.mode}
        for one in workload.secrets
        if one.name in secrets
    ]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def unit_argv(unit: Unit, *options: str) -> list[str]:
    """Return a command of ``sms-run`` for a service."""
    return ["/opt/sms/bin/sms-run", *options, unit.name]
