"""The Apptainer definition of the services container, and the key that names its image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from appliance import __version__
from appliance.catalog import Base, Service
from appliance.config.model import Repository, SystemUser
from appliance.errors import ConfigError
from appliance.plan.image.repositories import KEYS, dnf_variable, own_sources
from appliance.plan.render import Templates

SQUASHFS = "-comp zstd -Xcompression-level 9"
"""Options of mksquashfs. gzip, the default, takes four times as long to write, and starts more slowly."""
TEMPLATE = "services.def.j2"
IDS_HINT = "`slurm.user` and `munge.user` of the site file must not have ids of other accounts of the image"
SHELLS = frozenset({"sh"})
"""Commands that only run another command."""


@dataclass(frozen=True)
class BuildPlan:
    """All inputs of an image: the same plan gives the same key."""

    key: str
    definition: str
    manifest: str
    runtime: Mapping[str, bytes]
    keys: Mapping[str, bytes] = field(default_factory=dict)

    def context(self) -> dict[str, bytes]:
        """Return the files of the build folder by relative path."""
        files = {f"runtime/{name}": data for name, data in self.runtime.items()}
        files |= {f"keys/{name}.asc": data for name, data in self.keys.items()}
        return {**files, "services.def": self.definition.encode(), "manifest.json": self.manifest.encode()}


def packages_for(base: Base, services: Sequence[Service], more: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the packages to install, sorted and without duplicates. ``more``: packages besides those of services.

    Raises:
        ConfigError: a service has packages, but none for this base.
    """
    names = {*base.packages, *more}
    for service in services:
        sets = [service.packages[key] for key in base.package_sets if key in service.packages]
        if service.packages and not sets and set(service.packages) - {"debian"}:
            raise ConfigError(f"{service.name} has no packages for {base.name}")
        names.update(sets[0] if sets else ())
    return tuple(sorted(names))


class IdTaken(ConfigError):
    """Two accounts of an image have the same id."""

    def __init__(self, number: int, name: str, other: str) -> None:
        super().__init__(f"id {number} of {name} is already used by {other}", hint=IDS_HINT)
        self.names = (name, other)


def fixed_accounts(
    base: Base, services: Sequence[Service], users: Mapping[str, SystemUser]
) -> list[tuple[int, str, int | None]]:
    """Return (gid, name, uid or None for a group only) of accounts with the same ids in every image.

    Args:
        users: ids that the site gives; of others, the catalogue's.

    Raises:
        IdTaken: two accounts have the same id.
    """
    given = {service.user for service in services} & users.keys()
    found: dict[str, tuple[int, str, int | None]] = {name: (users[name].gid, name, users[name].uid) for name in given}
    for service in services:
        sets = [service.accounts[key] for key in base.package_sets if key in service.accounts]
        for accounts in sets[:1]:
            for name, number in accounts.users.items():
                found.setdefault(name, (number, name, number))
            for name, number in accounts.groups.items():
                found.setdefault(name, (number, name, None))
    chosen = sorted(found.values())
    for ids in ([(gid, name) for gid, name, _ in chosen], [(uid, name) for _, name, uid in chosen if uid is not None]):
        names: dict[int, str] = {}
        for number, name in ids:
            if (other := names.setdefault(number, name)) != name:
                raise IdTaken(number, name, other)
    return chosen


def apt_sources(base: Base, mirrors: Mapping[str, str]) -> list[str]:
    """Return the lines of sources.list."""
    return [
        f"deb [signed-by={base.keyring}] {mirrors[name]} {suite} {' '.join(repository.components)}"
        for name, repository in sorted(base.repositories.items())
        for suite in repository.suites
    ]


def repository_urls(base: Base, mirrors: Mapping[str, str]) -> dict[str, str]:
    """Return the URL of each repository in ``mirrors``, named alone or as a part of a whole mirror.

    Raises:
        ConfigError: a name is unknown to the base, or a URL contains a password or a token.
    """
    known = {*base.repositories, *(repository.mirror for repository in base.repositories.values())} - {""}
    for name, url in mirrors.items():
        if name not in known:
            raise ConfigError(f"{base.name} has no mirror {name}", hint=f"known: {', '.join(sorted(known))}")
        if has_credentials(url):
            raise ConfigError(
                f"the URL of mirror {name} contains a user or a token, which would be stored in the image",
                hint="write them into a file of mode 0600, and name it under base.credentials",
            )
    urls: dict[str, str] = {}
    for name, repository in base.repositories.items():
        if name in mirrors:
            urls[name] = mirrors[name].rstrip("/")
        elif repository.mirror in mirrors:
            urls[name] = f"{mirrors[repository.mirror].rstrip('/')}/{repository.path}".rstrip("/")
    return urls


def has_credentials(url: str) -> bool:
    """Return whether a URL contains a user, a password or a token."""
    parts = urlsplit(url)
    return "@" in parts.netloc or bool(parts.query)


def missing_mirrors(base: Base, mirrors: Mapping[str, str]) -> list[str]:
    """Return the repositories without a mirror."""
    return sorted(name for name in base.repositories if name not in mirrors)


def runtime_digest(runtime: Mapping[str, bytes]) -> str:
    """Return a digest that identifies the sms programs of an image."""
    parts = [f"{name} {hashlib.sha256(data).hexdigest()}\n" for name, data in sorted(runtime.items())]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class BuildInputs:
    """What an image is built from besides its base and services.

    Attributes:
        mirrors: URL of each of the base's repositories.
        versions: resolved version of every package, or None if they are unknown before the build.
        runtime: programs that run inside, by name.
        keys: keys that packages are verified with, by repository (dnf, zypper).
        users: ids of system users that the site gives, by name.
        packages: additional packages.
        repositories: the site's own, by name.
        credentials: names of the repositories that demand credentials. The credentials are no input.
    """

    mirrors: Mapping[str, str]
    versions: Mapping[str, str] | None
    runtime: Mapping[str, bytes]
    keys: Mapping[str, bytes] = field(default_factory=dict)
    users: Mapping[str, SystemUser] = field(default_factory=dict)
    packages: Sequence[str] = ()
    repositories: Mapping[str, Repository] = field(default_factory=dict)
    credentials: Collection[str] = ()


def own_repositories(repositories: Mapping[str, Repository]) -> dict[str, object]:
    """Return the site's repositories as the manifest has them."""
    return {name: each.model_dump(mode="json", exclude={"key"}) for name, each in repositories.items()}


def plan_build(base: Base, services: Sequence[Service], inputs: BuildInputs, *, definitions: Path) -> BuildPlan:
    """Plan an image. ``definitions``: folder of the template."""
    mirrors, versions, runtime, keys = inputs.mirrors, inputs.versions, inputs.runtime, inputs.keys
    packages = packages_for(base, services, inputs.packages)
    requested = [f"{name}={version}" for name, version in sorted(versions.items())] if versions else list(packages)
    if base.manager != "apt":
        requested = [name.replace("=", "-", 1) for name in requested]
    templates = Templates(definitions)
    values = {
        "mirrors": {**mirrors, **{name: each.url.rstrip("/") for name, each in inputs.repositories.items()}},
        "sources": apt_sources(base, mirrors) + own_sources(inputs.repositories, KEYS) if base.manager == "apt" else [],
        "repositories": {**base.repositories, **inputs.repositories},
        "credentials": {name: dnf_variable(name) for name in sorted(inputs.credentials)},
    }
    rendered = {
        "name": base.name,
        "python": base.python,
        "header": templates.text(base.header, **values).rstrip(),
        "setup": templates.text(base.setup, **values).rstrip(),
        "cleanup": base.cleanup.rstrip(),
        "list_packages": base.list_packages,
    }
    hashed: dict[str, object] = {
        "base": base.model_dump(mode="json"),
        "mirrors": dict(sorted(mirrors.items())),
        "packages": list(packages),
        "versions": dict(sorted((versions or {}).items())),
        "services": [service.name for service in services],
        "runtime": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(runtime.items())},
        "version": __version__,
        "squashfs": SQUASHFS,
    }
    if keys:
        hashed["keys"] = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(keys.items())}

    if inputs.repositories:
        hashed["repositories"] = own_repositories(inputs.repositories)

    accounts = fixed_accounts(base, services, inputs.users)
    given = {name: inputs.users[name] for _, name, _ in accounts if name in inputs.users}

    def render(key: str) -> str:
        return templates.file(
            TEMPLATE,
            base=rendered,
            runtime=sorted(runtime),
            runtime_digest=runtime_digest(runtime),
            keys=sorted(keys),
            install=templates.text(base.install, packages=" ".join(requested)).rstrip(),
            commands=sorted({service.run[0] for service in services} - SHELLS),
            accounts=accounts,
            given=sorted(given.items()),
            users=sorted({service.user for service in services} - {"root"}),
            services=[service.name for service in services],
            version=__version__,
            key=key,
        )

    material = json.dumps(hashed, sort_keys=True) + render("")
    key = hashlib.sha256(material.encode()).hexdigest()
    manifest = json.dumps({"key": key, **hashed}, indent=1, sort_keys=True) + "\n"
    return BuildPlan(key, render(key), manifest, runtime, keys)
