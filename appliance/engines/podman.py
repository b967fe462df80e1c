"""Containers of Podman for a deployment on one host, as quadlets or for Compose.

They have the network of the host. Those of a workload share /etc, which its first container assembles, and /run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from appliance.config.model import Site
from appliance.engines.config import Network, placed_files, unit_argv
from appliance.engines.model import Deployment, SecretFile, Unit, Workload, secrets_of
from appliance.engines.yaml_text import dump
from appliance.errors import ConfigError
from appliance.plan.services.confinement import capabilities_for

Value: TypeAlias = "str | int | bool | Sequence[Value] | Mapping[str, Value]"

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*|/[A-Za-z0-9._/@-]*|--[a-z-]+")
"""A word that means itself in a unit of systemd, on a command line, and in YAML."""
SECRETS = "/sms/secrets"
START_S = 600
"""Timeout of a start, in seconds: the first one creates a database."""
LONG_S = 86400
"""That of a health check, of what may recover or convert its data for hours; systemd has none for it."""
HEADER = "# Written by `sms export {}`. Changes belong into the site file.\n"


@dataclass(frozen=True)
class Options:
    """The host, the address at which nodes reach it, name servers, and the image."""

    host: str
    address: str
    dns: tuple[str, ...]
    image: str


@dataclass(frozen=True)
class Container:
    """A container; ``once``: it ends, and others start after that. ``mounts``: target by volume.

    ``needs``: containers that have to be healthy, or have ended, before it starts. ``folder``: of its files.
    ``starts_long``: no deadline ends its start.
    """

    name: str
    argv: tuple[str, ...]
    capabilities: tuple[str, ...]
    mounts: Mapping[str, str]
    needs: tuple[str, ...] = ()
    health: tuple[str, ...] = ()
    timeout_s: int = 10
    stop_s: int = 10
    once: bool = False
    folder: str = ""
    secrets: tuple[SecretFile, ...] = ()
    starts_long: bool = False


def read_options(site: Site, image: str) -> Options:
    """Return the options of a site.

    Raises:
        ConfigError: the address is missing.
    """
    given = site.engines.podman
    if given.address is None:
        raise ConfigError(
            "`engines.podman.address` is missing: the address at which nodes reach that host",
            hint="it cannot be the container's, which keeps its address for what stays in it",
        )
    dns = tuple(str(server) for server in site.networks.dns) or ("127.0.0.1",)
    return Options(given.host or site.admin_hosts[0].name, str(given.address), dns, given.image or image)


def network_of(deployment: Deployment, options: Options) -> Network:
    """Return how the containers are reached: they have the network of the host."""
    return Network(options.address, {one.name: options.host for one in deployment.workloads}, {}, shared=True)


def containers(deployment: Deployment) -> list[Container]:
    """Return all containers, in starting order.

    Raises:
        ConfigError: a folder has a name that a unit or a command line could read otherwise.
    """
    return [each for one in deployment.workloads for each in _containers(deployment, one)]


def _containers(deployment: Deployment, one: Workload) -> Iterator[Container]:
    prefix = f"sms-{deployment.cluster}-{one.name}"
    volumes = {f"{prefix}-etc": "/etc", f"{prefix}-run": "/run"}
    volumes |= {_volume(prefix, path): path for path in (*one.state, *one.scratch)}
    if "/var/log" not in one.state:
        volumes[f"{prefix}-log"] = "/var/log"
    first = {name: "/sms/etc" if path == "/etc" else path for name, path in volumes.items()}
    for path in volumes.values():
        if not WORD.fullmatch(path):
            raise ConfigError(f"{path} of {one.name} cannot be a folder of a container", hint="use another path")
    place = f"{prefix}-place"
    yield Container(
        place,
        ("/opt/sms/bin/sms-place", "/sms/config/files.json", "/sms/etc"),
        capabilities_for([]),
        first,
        once=True,
        folder=one.name,
        secrets=one.secrets,
    )
    helpers = {unit.name for unit in one.units if unit.helper}
    for unit in one.units:
        needs = [f"{prefix}-{name}" for name in unit.service.needs if name in helpers]
        yield Container(
            f"{prefix}-{unit.name}",
            tuple(unit_argv(unit, "--jobsync")),
            capabilities_for([unit.service]),
            volumes,
            needs=(place, *needs),
            health=("/opt/sms/bin/sms-probe", unit.name),
            timeout_s=_timeout(unit),
            stop_s=one.stop_s,
            starts_long=unit.service.engines.starts_long,
        )


def _timeout(unit: Unit) -> int:
    return int(unit.service.probe.timeout_s) + 2 if unit.service.probe else 10


def _volume(prefix: str, path: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-")
    plain = "/" + slug.replace("-", "/") == path
    return f"{prefix}-{slug}" if plain else f"{prefix}-{slug[:40]}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"


def config_files(deployment: Deployment) -> dict[str, str]:
    """Return the files of the containers, by path: a folder for each workload."""
    files: dict[str, str] = {}
    for one in deployment.workloads:
        secrets = {secret.name: f"{SECRETS}/{secret.name}" for secret in one.secrets}
        files |= {f"config/{one.name}/{file.key}": file.text for file in one.files}
        files[f"config/{one.name}/files.json"] = placed_files(one, "/sms/config", secrets)
    return files


def config_folder(deployment: Deployment) -> str:
    """Return where the files of an export have to be on the host for its quadlets."""
    return f"/etc/sms/quadlet/{deployment.cluster}"


def quadlet_files(deployment: Deployment, options: Options) -> dict[str, str]:
    """Return quadlets and the files of their containers by path."""
    files = config_files(deployment)
    made = containers(deployment)
    for each in made:
        files[f"{each.name}.container"] = _quadlet(each, deployment, options)
    for name in sorted({volume for each in made for volume in each.mounts}):
        files[f"{name}.volume"] = f"{HEADER.format('quadlet')}[Volume]\nVolumeName={name}\n"
    return files


def _quadlet(each: Container, deployment: Deployment, options: Options) -> str:
    needs = " ".join(f"{name}.service" for name in each.needs)
    lines = [
        "[Unit]",
        f"Description={each.name}",
        *((f"Requires={needs}", f"After={needs}") if needs else ()),
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Container]",
        f"ContainerName={each.name}",
        f"Image={options.image}",
        "Pull=never",
        f"Exec={' '.join(each.argv)}",
        "Network=host",
        *(f"DNS={server}" for server in options.dns),
        "ReadOnly=true",
        "NoNewPrivileges=true",
        "DropCapability=all",
        f"AddCapability={' '.join(f'CAP_{name}' for name in each.capabilities)}",
        *(f"Volume={name}.volume:{target}" for name, target in each.mounts.items()),
        *((f"Volume={config_folder(deployment)}/config/{each.folder}:/sms/config:ro",) if each.folder else ()),
        *(
            f"Secret={secret_name(deployment, one)},type=mount,target={SECRETS}/{one.name},mode=0400"
            for one in each.secrets
        ),
    ]
    if each.health:
        lines += [
            f"HealthCmd={' '.join(each.health)}",
            "HealthInterval=10s",
            f"HealthTimeout={each.timeout_s}s",
            "HealthRetries=3",
            # Started is not ready: units that need it wait until its probe has succeeded.
            "Notify=healthy",
            f"StopTimeout={each.stop_s}",
        ]
    service = ["Type=oneshot", "RemainAfterExit=true"] if each.once else ["Restart=always", "RestartSec=5"]
    start = "infinity" if each.starts_long else START_S
    lines += ["", "[Service]", *service, f"TimeoutStartSec={start}", f"TimeoutStopSec={each.stop_s + 10}"]
    return HEADER.format("quadlet") + "\n".join((*lines, "", "[Install]", "WantedBy=multi-user.target", ""))


def secret_name(deployment: Deployment, secret: SecretFile) -> str:
    """Return the name of a secret for Podman: a host can have several clusters."""
    return f"sms-{deployment.cluster}-{secret.slug}"


def compose_files(deployment: Deployment, options: Options) -> dict[str, str]:
    """Return ``compose.yaml`` and the files of its containers by path."""
    made = containers(deployment)
    document: dict[str, Value] = {
        "name": f"sms-{deployment.cluster}",
        "services": {each.name: _compose(each, made, options, deployment) for each in made},
        "volumes": {name: {"name": name} for name in sorted({volume for each in made for volume in each.mounts})},
    }
    if secrets := secrets_of(deployment):
        document["secrets"] = {secret_name(deployment, one): {"external": True} for one in secrets}
    return {"compose.yaml": HEADER.format("compose") + dump([document]), **config_files(deployment)}


def _compose(
    each: Container, others: Sequence[Container], options: Options, deployment: Deployment
) -> dict[str, Value]:
    once = {other.name for other in others if other.once}
    volumes: list[Value] = [f"{name}:{target}" for name, target in each.mounts.items()]
    if each.folder:
        volumes.append(f"./config/{each.folder}:/sms/config:ro")
    made: dict[str, Value] = {
        "container_name": each.name,
        "image": options.image,
        "pull_policy": "never",
        "command": list(each.argv),
        "network_mode": "host",
        "dns": list(options.dns),
        "read_only": True,
        "security_opt": ["no-new-privileges:true"],
        "cap_drop": ["ALL"],
        "cap_add": list(each.capabilities),
        "volumes": volumes,
        "restart": "no" if each.once else "always",
    }
    if each.secrets:
        made["secrets"] = [
            {"source": secret_name(deployment, one), "target": f"{SECRETS}/{one.name}", "mode": "0400"}
            for one in each.secrets
        ]
    if each.needs:
        ended, healthy = "service_completed_successfully", "service_healthy"
        made["depends_on"] = {name: {"condition": ended if name in once else healthy} for name in each.needs}
    if each.health:
        made["healthcheck"] = {
            "test": ["CMD", *each.health],
            "interval": "10s",
            "timeout": f"{each.timeout_s}s",
            "retries": 3,
            "start_period": f"{LONG_S if each.starts_long else START_S}s",
        }
        made["stop_grace_period"] = f"{each.stop_s}s"
    return made
