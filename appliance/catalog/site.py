"""Services of the site: ``services.d/NAME.yaml`` beside the site file, in the catalogue's format."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.catalog.model import Service
from appliance.config.document import MAX_CHARACTERS, Document, Place, first_problems, read_document
from appliance.config.read import read_text, validate
from appliance.errors import ConfigError, Problem

RESERVED = (
    "/dev",
    "/etc/munge",
    "/etc/slurm",
    "/etc/sms",
    "/opt/sms",
    "/proc",
    "/run",
    "/sys",
    "/var/lib/sms",
    "/var/run",
)
"""Folders of the container in which a service of the site has no files and no state."""
LOGS = ("messages", "supervisor")
"""Names of logs that are not of one service (`sms logs`)."""
EXPORTS = re.compile(r"place|probe|namespace|kustomization|slurm-c(n|tl)|prepare-.*|.*-nodes")
"""Names that exports give to jobs, containers, files and objects of their own (appliance/engines)."""
COMMON = ("/etc/passwd", "/etc/group", "/etc/shadow", "/etc/hosts", "/etc/logrotate.conf")
"""Files of every container."""


@dataclass(frozen=True)
class SiteService:
    """A service of the site with its templates read in; ``document``: its file, for the lines of problems."""

    service: Service
    document: Document


def read_site_services(folder: Path, shipped: Mapping[str, Service]) -> dict[str, SiteService]:
    """Return the services of the site by name; none if there is no such folder.

    Templates are files of the folder. Their text replaces their names, so that nothing reads the folder again.

    Raises:
        ConfigError: with every problem of every file.
    """
    found: dict[str, SiteService] = {}
    problems: list[Problem] = []
    if not folder.is_dir():
        return found
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.suffix not in (".yaml", ".yml"):
            continue
        try:
            if path.suffix == ".yml":
                raise _wrong(path, "is not read", f"rename it to {path.stem}.yaml")
            inside(folder, path.name)
            one = _read(folder, path)
        except ConfigError as error:
            problems += error.problems or (Problem(str(path), 0, "", error.message, error.hint),)
            continue
        found[one.service.name] = one
    problems += [problem for one in found.values() for problem in _check(one, found, shipped)]
    if problems:
        raise ConfigError(problems=sorted(problems, key=lambda problem: (problem.file, problem.line))[:100])
    return found


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file of the folder.

    Raises:
        ConfigError: it does not exist, is not a regular file, or is not in the folder.
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder.resolve(strict=True)):
            raise _wrong(path, f"is outside of {folder}", "keep templates beside the services, without links to others")
        if not stat.S_ISREG(real.stat().st_mode):
            raise _wrong(path, "is not a regular file", "name a file")
    except (OSError, ValueError, RuntimeError) as error:
        raise _wrong(path, f"cannot be read: {getattr(error, 'strerror', None) or 'invalid path'}") from None
    return path


def _wrong(path: Path, what: str, hint: str = "check the path and its permissions") -> ConfigError:
    return ConfigError(problems=[Problem(str(path), 0, "", what, hint)])


def _read(folder: Path, path: Path) -> SiteService:
    document = read_document(read_text(path), str(path))
    service = validate(document, Service)
    problems = []
    if service.name != path.stem:
        hint = f"name the file {service.name}.yaml, or write `name: {path.stem}`"
        problems.append(document.problem(("name",), f"{service.name} does not match the file's name", hint))
    files = []
    for index, file in enumerate(service.files):
        if file.template is None:
            files.append(file)
            continue
        try:
            text = read_text(inside(folder, file.template))
            if len(text) > MAX_CHARACTERS:
                raise _wrong(folder / file.template, f"is larger than {MAX_CHARACTERS >> 20} MiB", "make it shorter")
            files.append(file.model_copy(update={"template": None, "content": text}))
        except ConfigError as error:
            problem = error.problems[0] if error.problems else Problem("", 0, "", error.message, error.hint)
            words = f"{problem.file} {problem.message}".strip()
            problems.append(document.problem(("files", index, "template"), words, problem.hint))
    if problems:
        raise ConfigError(problems=first_problems(problems))
    return SiteService(service.model_copy(update={"files": tuple(files)}), document)


def _check(one: SiteService, found: Mapping[str, SiteService], shipped: Mapping[str, Service]) -> Iterator[Problem]:
    """Yield what a service may not have: what others have, or what sms itself depends on."""
    service, document = one.service, one.document
    others = {each.service.name: each.service for each in found.values() if each is not one}
    names = {**_names(others), **_names(shipped)}
    for place, name in (("name", service.name), *(("known_as", alias) for alias in service.known_as)):
        if name in names:
            hint = "choose another name; a service of the site does not replace one of the catalogue"
            yield document.problem((place,), f"{name} is already the service {names[name]}", hint)
    if service.name in LOGS:
        yield document.problem(("name",), f"{service.name} is the name of another log", "choose another name")
    if EXPORTS.fullmatch(service.name):
        words = f"{service.name} is a name that `sms export` uses itself"
        yield document.problem(("name",), words, "choose another name")
    for index, name in enumerate(service.engines.reads):
        if name not in shipped and name not in others:
            words = f"{name} is not a service"
            yield document.problem(("engines", "reads", index), words, "use a name of the catalogue")
    if service.site_files:
        yield document.problem(("site_files",), "only slurmctld has a folder for slurm.files", "use files")
    if service.role:
        yield document.problem(("role",), f"{service.role} is a role of the catalogue", "remove it")
    for field in ("needs", "after"):
        for index, need in enumerate(getattr(service, field)):
            if need not in shipped and need not in others:
                yield document.problem((field, index), f"{need} is not a service", "use a name of the catalogue")
    runnable = {name: each for name, each in {**others, **shipped}.items() if each.container}
    ports = {port: name for name, each in runnable.items() for port in each.ports}
    ports |= {port: name for name, each in runnable.items() for port in each.engines.ports}
    for place_of_port, given in ((("ports",), service.ports), (("engines", "ports"), service.engines.ports)):
        for index, port in enumerate(given if service.container else ()):
            if port in ports:
                words = f"{port} already belongs to {ports[port]}"
                yield document.problem((*place_of_port, index), words, "use another port")
    taken = {file.path: name for name, each in runnable.items() for file in each.files}
    taken |= dict.fromkeys(COMMON, "every container")
    for index, file in enumerate(service.files):
        place_of: Place = ("files", index, "path")
        if file.path in taken:
            yield document.problem(place_of, f"{file.path} already belongs to {taken[file.path]}", "use another path")
        taken[file.path] = service.name
    yield from _reserved(one)
    for name, value in service.sysctl.items():
        for other in runnable.values():
            if other.sysctl.get(name, value) != value:
                words = f"{name} is {other.sysctl[name]!r} for {other.name}"
                yield document.problem(("sysctl", name), words, "remove it; there is one value for the whole container")


def _reserved(one: SiteService) -> Iterator[Problem]:
    """Yield files and state in folders of sms or of the system, and state that contains such a folder."""
    service = one.service
    places: list[tuple[Place, str]] = [
        (("files", index, "path"), file.path) for index, file in enumerate(service.files)
    ]
    places += [(("state", index), path) for index, path in enumerate(service.state)]
    places += [(("tails", index), path) for index, path in enumerate(service.tails)]
    places += [(("engines", "scratch", index), path) for index, path in enumerate(service.engines.scratch)]
    if service.running:
        places.append((("running",), service.running))
    for place, path in places:
        for top in RESERVED:
            if path == top or path.startswith(f"{top}/"):
                yield one.document.problem(place, f"{path} is in a folder of sms or of the system", "use another path")
            elif top.startswith(f"{path.rstrip('/')}/"):
                yield one.document.problem(
                    place, f"{path} contains {top}, a folder of sms or of the system", "use a path below it"
                )
                break


def _names(services: Mapping[str, Service]) -> dict[str, str]:
    """Return the service of each name and alias."""
    return {name: each.name for each in services.values() for name in (*each.known_as, each.name)}
