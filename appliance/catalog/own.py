"""The site's own word on services: a folder of files of the catalogue's shape that `sms classify` reads besides it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from appliance.catalog.model import Service
from appliance.config.document import first_problems, read_document
from appliance.config.read import read_text, validate
from appliance.errors import ConfigError, Problem

MOST_FIRST = 254
"""Patterns of first bytes that the native core tells apart: it has one byte for their number, and 0 is none."""


class OwnService(Service):
    """A service of the site's, told by its traffic; nothing is built or started by it."""

    critical: bool = Field(True, description="What to think of it where too little was seen.")
    container: bool = Field(False, description="Nothing is built from a file of the site's own.")
    verdict: Literal["", "time-critical", "deferrable"] = Field("", description="Stands before what was seen.")
    why: str = Field("", description="Why the site says so.")


def read_own(folder: Path, shipped: Mapping[str, Service]) -> dict[str, OwnService]:
    """The site's own services by name.

    A file named as one that is shipped says only what differs: the rest is the shipped one's.

    Raises:
        ConfigError: with every mistake of every file, such as a port that two of them claim; or there is no such
            folder, or nothing in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder", hint="--services takes a folder of files NAME.yaml")
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and not path.is_dir())
    if not paths:
        raise ConfigError(f"{folder} has no file that ends in .yaml", hint="write one a service: NAME.yaml")
    services: dict[str, OwnService] = {}
    files: dict[str, str] = {}
    problems: list[Problem] = []
    for path in paths:
        try:
            service = _read(path, shipped)
        except ConfigError as error:
            problems += error.problems or (Problem(str(path), 0, "", error.message, error.hint),)
            continue
        if service.name != path.stem:
            hint = f"name the file {service.name}.yaml, or write `name: {path.stem}`"
            problems.append(Problem(str(path), 1, "name", f"{service.name} does not match the file's name", hint))
        services[service.name] = service
        files[service.name] = str(path)
    problems += _claimed_twice(services, files) or _too_many(services, files, shipped)
    if problems:
        raise ConfigError(problems=first_problems(problems))
    return services


def _claimed_twice(services: Mapping[str, OwnService], files: Mapping[str, str]) -> list[Problem]:
    """Ports that two of the site's services say are theirs: whose verdict would stand is nobody's guess."""
    owners: dict[str, str] = {}
    problems = []
    for name, service in services.items():
        for port in dict.fromkeys((*service.ports, *service.traffic.ports)):
            if (owner := owners.setdefault(port, name)) != name:
                hint = f"leave it to one of them; {files[owner]} says which ports {owner} has"
                problems.append(Problem(files[name], 0, "ports", f"{port} is {owner}'s already", hint))
    return problems


def _too_many(
    services: Mapping[str, OwnService], files: Mapping[str, str], shipped: Mapping[str, Service]
) -> list[Problem]:
    """More first bytes, together with those that are shipped, than the core tells apart."""
    both: dict[str, Service] = {**shipped, **services}
    if (count := sum(len(each.traffic.first) for each in both.values())) <= MOST_FIRST or not services:
        return []
    most = max(services, key=lambda name: len(services[name].traffic.first))
    words = f"{len(services[most].traffic.first)} patterns, {count} with those of all other services: too many"
    return [Problem(files[most], 0, "traffic.first", words, f"{MOST_FIRST} is the most; tell services by ports")]


def _read(path: Path, shipped: Mapping[str, Service]) -> OwnService:
    document = read_document(read_text(path), str(path))
    if isinstance(document.data, dict) and (known := shipped.get(str(document.data.get("name")))):
        before = known.model_dump(mode="json", exclude_unset=True)
        document = replace(document, data={**before, **document.data})
    return validate(document, OwnService)
