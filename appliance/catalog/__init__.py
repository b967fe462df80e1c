"""The catalogue: definitions of services and bases, one file each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from appliance.catalog.base import Base, ExtraFiles
from appliance.catalog.model import Role, Service
from appliance.config.read import read_model
from appliance.errors import ConfigError, Problem

__all__ = ["Base", "ExtraFiles", "Service", "find_role", "read_bases", "read_catalog", "read_extra_files", "select"]


def read_catalog(*folders: Path) -> dict[str, Service]:
    """Return services by name from ``folders``; a file of a later folder replaces one of the same name.

    Raises:
        ConfigError: with every mistake of every file.
    """
    services: dict[str, Service] = {}
    problems: list[Problem] = []
    for path in (path for folder in folders for path in sorted(folder.glob("*.yaml"))):
        try:
            service = read_model(path.read_text(), str(path), Service)
        except ConfigError as error:
            problems += error.problems
            continue
        if service.name != path.stem:
            problems.append(Problem(str(path), 1, "name", f"{service.name} does not match the file's name"))
        services[service.name] = service
    problems += _unknown_needs(services)
    if problems:
        raise ConfigError(problems=problems)
    return services


def _unknown_needs(services: Mapping[str, Service]) -> Iterable[Problem]:
    for service in services.values():
        for need in (*service.needs, *service.after):
            if need not in services:
                yield Problem(f"{service.name}.yaml", 0, "needs", f"{need} is not in the catalogue")


def read_bases(folder: Path) -> dict[str, Base]:
    """Return bases by name."""
    return {path.stem: read_model(path.read_text(), str(path), Base) for path in sorted(folder.glob("*.yaml"))}


def read_extra_files(path: Path) -> ExtraFiles:
    """Return the files of every overlay."""
    return read_model(path.read_text(), str(path), ExtraFiles)


def select(catalog: Mapping[str, Service], names: Iterable[str]) -> tuple[Service, ...]:
    """Return the named services and their dependencies in start order, dependencies first.

    Raises:
        ConfigError: a name is unknown, the container cannot run the service, or dependencies are circular.
    """
    ordered: list[Service] = []
    under_way: list[str] = []

    def visit(name: str) -> None:
        if name in under_way:
            raise ConfigError(f"circular dependency of services: {' -> '.join([*under_way, name])}")
        if name not in catalog:
            raise ConfigError(f"unknown service: {name}", hint=f"known: {', '.join(sorted(catalog))}")
        service = catalog[name]
        if service in ordered:
            return
        if not service.container:
            raise ConfigError(f"the container cannot run {name}", hint=service.outage.why)
        under_way.append(name)
        for need in service.needs:
            visit(need)
        for other in service.after:
            if other in requested:
                visit(other)
        under_way.pop()
        ordered.append(service)

    requested = sorted(names)
    for name in requested:
        visit(name)
    return tuple(ordered)


def find_role(services: Iterable[Service], role: Role) -> Service | None:
    """Return the service with a role; None without one."""
    return next((service for service in services if service.role == role), None)
