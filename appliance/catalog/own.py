"""Service definitions of the site: a folder of files in the catalogue's format, for `sms classify`."""

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
"""Maximum number of first-byte patterns: the native core stores their number in one byte, and 0 is none."""


class OwnService(Service):
    """A service of the site, used for classification only."""

    critical: bool = Field(True, description="Assumed verdict if the capture is too short.")
    container: bool = Field(False, description="Not used: a service with run and probe can run in the container.")
    verdict: Literal["", "time-critical", "deferrable"] = Field("", description="Overrides the measured verdict.")
    why: str = Field("", description="Reason for the verdict.")


def read_own(folder: Path, shipped: Mapping[str, Service]) -> dict[str, OwnService]:
    """Return the site's own services by name.

    A file with the name of a shipped service only overrides the fields that it contains.

    Raises:
        ConfigError: with every problem of every file, such as a port that two of them claim; or the folder does not
            exist or is empty.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder", hint="--services takes a folder of files NAME.yaml")
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and not path.is_dir())
    if not paths:
        raise ConfigError(f"{folder} has no .yaml files", hint="write one file per service: NAME.yaml")
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
    """Return a problem for each port that two of the site's services claim, which would make the verdict ambiguous."""
    owners: dict[str, str] = {}
    problems = []
    for name, service in services.items():
        for port in dict.fromkeys((*service.ports, *service.traffic.ports)):
            if (owner := owners.setdefault(port, name)) != name:
                hint = f"remove it from one of them; {files[owner]} lists the ports of {owner}"
                problems.append(Problem(files[name], 0, "ports", f"{port} already belongs to {owner}", hint))
    return problems


def _too_many(
    services: Mapping[str, OwnService], files: Mapping[str, str], shipped: Mapping[str, Service]
) -> list[Problem]:
    """Return a problem if there are more first-byte patterns, with the shipped ones, than the core supports."""
    both: dict[str, Service] = {**shipped, **services}
    if (count := sum(len(each.traffic.first) for each in both.values())) <= MOST_FIRST or not services:
        return []
    most = max(services, key=lambda name: len(services[name].traffic.first))
    words = f"{len(services[most].traffic.first)} patterns, {count} with those of all other services: too many"
    return [Problem(files[most], 0, "traffic.first", words, f"the limit is {MOST_FIRST}; use ports")]


def _read(path: Path, shipped: Mapping[str, Service]) -> OwnService:
    document = read_document(read_text(path), str(path))
    if isinstance(document.data, dict) and (known := shipped.get(str(document.data.get("name")))):
        before = known.model_dump(mode="json", exclude_unset=True)
        document = replace(document, data={**before, **document.data})
    return validate(document, OwnService)
