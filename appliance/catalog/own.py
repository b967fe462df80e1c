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
        ConfigError: with every mistake of every file; or there is no such folder, or nothing in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder", hint="--services takes a folder of files NAME.yaml")
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))
    if not paths:
        raise ConfigError(f"{folder} has no file that ends in .yaml", hint="write one a service: NAME.yaml")
    services: dict[str, OwnService] = {}
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
    if problems:
        raise ConfigError(problems=first_problems(problems))
    return services


def _read(path: Path, shipped: Mapping[str, Service]) -> OwnService:
    document = read_document(read_text(path), str(path))
    if isinstance(document.data, dict) and (known := shipped.get(str(document.data.get("name")))):
        before = known.model_dump(mode="json", exclude_unset=True)
        document = replace(document, data={**before, **document.data})
    return validate(document, OwnService)
