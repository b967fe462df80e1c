"""Finds and reads the site file; every other verb starts here."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from analysis.classification import ClassificationError, Classified, Report, read_classification
from appliance.catalog import Service, read_catalog
from appliance.config.check import check_site
from appliance.config.document import Document, first_problems
from appliance.config.filled import fill_provisioning
from appliance.config.model import ServicesFrom, Site
from appliance.config.read import read_site, read_text
from appliance.config.wording import nearest
from appliance.errors import ConfigError
from appliance.progress import Progress
from appliance.share import share
from appliance.text import printable


@dataclass(frozen=True)
class Loaded:
    """A site without mistakes, where it was read, and what its administrator should know."""

    site: Site
    document: Document
    notices: tuple[str, ...]


STDIN = Path("/dev/stdin")
HINT = "`sms classify CAPTURE -o FILE.yaml` writes one: `services:`, a list of {name, verdict}"
MOST_REMARKS = 5


def find_site(option: Path | None) -> Path:
    """The site file to use: ``--site``, $SMS_SITE, ./sms.yaml or /etc/sms/sms.yaml, the first there is."""
    if option is not None:
        return option
    if named := os.environ.get("SMS_SITE"):
        return Path(named)
    places = (Path("sms.yaml"), Path("/etc/sms/sms.yaml"))
    for place in places:
        if place.is_file():
            return place
    raise ConfigError(
        f"no site file: --site and $SMS_SITE are not given, and there is neither {' nor '.join(map(str, places))}",
        hint="write one with `sms init --profile lab`, openhpc or cray-ex",
    )


def load_site(path: Path, state: Path | None = None, progress: Progress | None = None) -> Site:
    """The site, checked, its services resolved into names; notices go to ``progress``.

    Raises:
        ConfigError: with every problem found.
    """
    loaded = open_site(path, state)
    if progress:
        for notice in loaded.notices:
            progress.say(notice)
    return loaded.site


def open_site(path: Path, state: Path | None = None, classification: Path | None = None) -> Loaded:
    """Read and check a site file.

    Args:
        state: stands before the folder that the file names.
        classification: stands before the services that the file names; - is standard input.
    """
    site, document = read_site(path)
    if classification is not None:
        given = STDIN if str(classification) == "-" else classification
        chosen = ServicesFrom.model_validate({"from": given.absolute()})
        site = site.model_copy(update={"services": chosen})
    catalog = read_catalog(share("definitions", "services"))
    services = {name for name, service in catalog.items() if service.container}
    bases = {file.stem for file in share("definitions", "bases").glob("*.yaml")}
    usual = tuple(name for name in catalog if name in services and catalog[name].default)
    names = usual
    notices: tuple[str, ...] = ()
    problems = []
    if isinstance(site.services, ServicesFrom):
        try:
            names, notices = resolve(site.services, services, advice_of(catalog), set(usual))
        except ClassificationError as error:
            if classification is not None:
                shown = "standard input" if str(classification) == "-" else printable(str(classification), 200)
                raise ConfigError(f"--from: {shown}: {error}", hint=HINT) from None
            message = f"{printable(str(site.services.classification), 200)}: {error}"
            problems.append(document.problem(("services", "from"), message, HINT))
    controllers = {name for name in services if catalog[name].role == "controller"}
    problems += check_site(site, document, services=services, bases=bases, wanted=names, controllers=controllers)
    if problems:
        raise ConfigError(problems=first_problems(problems))
    changes: dict[str, object] = {} if isinstance(site.services, tuple) else {"services": names}
    if state is not None:
        changes["state"] = state.absolute()
    site = fill_provisioning(site.model_copy(update=changes), path.absolute().parent)
    return Loaded(site, document, notices)


def advice_of(catalog: Mapping[str, Service]) -> dict[str, str]:
    """What to do about services that nodes need and the container cannot carry, by every name that they go by."""
    spoken = [service for service in catalog.values() if service.advice]
    return {name: service.advice for service in spoken for name in (*service.known_as, service.name)}


def resolve(
    wanted: ServicesFrom,
    known: Collection[str],
    advice: Mapping[str, str] = MappingProxyType({}),
    usual: Collection[str] = (),
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The services that a classification stands for; a notice for each that cannot be carried, and for every doubt.

    Args:
        known: what the container can carry.
        advice: what to do about services, where the classification itself does not say.
        usual: those of ``known`` that most sites have.
    """
    try:
        seen = read_classification(read_text(wanted.classification))
    except ConfigError as error:
        problem = error.problems[0].message if error.problems else error.message.rpartition(": ")[2]
        raise ClassificationError(problem) from None
    critical = [service for service in seen.services if service.time_critical and service.name not in wanted.without]
    names = dict.fromkeys([*(service.name for service in critical if service.name in known), *wanted.also])
    notices = [_notice(service, advice) for service in critical if service.name not in known]
    every = {service.name for service in seen.services}
    notices += [
        f"services.without: {name} is not in the classification; {nearest(name, every)}"
        for name in wanted.without
        if name not in every
    ]
    if not names:
        raise ClassificationError("it has no time-critical service that the container can carry")
    said = {*wanted.also, *wanted.without}
    notices += _doubts(seen, {*known} - said, {*usual} - said)
    return tuple(names), tuple(notices)


def _doubts(seen: Report, known: Collection[str], usual: Collection[str]) -> list[str]:
    """What the classification itself says against building on it."""
    doubts = [f"the capture: {printable(words, 500)}" for words in seen.remarks[:MOST_REMARKS]]
    if seen.damaged and not doubts:
        doubts.append("the capture was cut off, or parts of it could not be read: services may be missing")
    if unsure := [each for each in seen.services if each.unsure and each.name in known]:
        names = ", ".join(f"{each.name} ({each.verdict}, {each.confidence * 100:.0f} %)" for each in unsure)
        doubts.append(f"hardly sure: {names}; capture for longer, or with more nodes")
    if untold := [name for name in seen.untold if name in usual]:
        doubts.append(f"left out, but the capture is too short to tell whether nodes use it: {', '.join(untold)}")
    return doubts


def _notice(service: Classified, advice: Mapping[str, str]) -> str:
    """What to do about a service that nodes need and the container cannot carry."""
    words = printable(service.advice, 500) or advice.get(service.name.lower(), "keep it on a machine that stays up")
    return (
        f"{service.name} is time-critical, but the container cannot carry it: {words}; "
        f"then name it under services.without in the site file, and this notice is gone"
    )
