"""Read and validate the site file; every other verb starts here."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from types import MappingProxyType

from analysis.classification import ClassificationError, Classified, Report, read_classification
from appliance.catalog import Service, read_catalog
from appliance.catalog.site import SiteService, read_site_services
from appliance.config.check import check_site
from appliance.config.check_starter import check_starter
from appliance.config.document import Document, first_problems, read_document
from appliance.config.filled import fill_provisioning
from appliance.config.model import ServicesFrom, Site
from appliance.config.read import read_text, validate, validate_rest
from appliance.errors import ConfigError, Problem
from appliance.operations.site.locate import SERVICES_FOLDER
from appliance.share import share
from appliance.text import nearest, printable


@dataclass(frozen=True)
class Loaded:
    """A valid site, the document it was read from, the catalogue, and notices for the administrator.

    ``catalog`` has the shipped services and those of the site, which are ``own`` as well.
    """

    site: Site
    document: Document
    catalog: Mapping[str, Service]
    notices: tuple[str, ...]
    own: Mapping[str, SiteService] = field(default_factory=dict)


STDIN = Path("/dev/stdin")
HINT = "`sms classify CAPTURE -o FILE.yaml` writes one: `services:`, a list of {name, verdict}"
MOST_REMARKS = 5


def open_site(
    path: Path, state: Path | None = None, classification: Path | None = None, *, edited: bool = True
) -> Loaded:
    """Read and validate a site file.

    Args:
        state: overrides the state folder of the file.
        classification: overrides the services of the file; - is standard input.
        edited: False to report what is left of a starter file, too.
    """
    document, folder = read_document(read_text(path), str(path)), path.absolute().parent
    left = [] if edited else check_starter(document)
    try:
        site = validate(document, Site, folder=folder)
    except ConfigError as error:
        found = [*error.problems, *_check_rest(document, error, folder), *left]
        raise ConfigError(problems=first_problems(list(dict.fromkeys(found)))) from None
    if classification is not None:
        given = STDIN if str(classification) == "-" else classification
        chosen = ServicesFrom.model_validate({"from": given.absolute()})
        site = site.model_copy(update={"services": chosen})
    shipped = read_catalog(share("definitions", "services"))
    own = read_site_services(path.absolute().parent / SERVICES_FOLDER, shipped)
    catalog = {**shipped, **{name: one.service for name, one in own.items()}}
    services = {name for name, service in catalog.items() if service.container}
    usual = tuple(name for name in catalog if name in services and catalog[name].default)
    names = usual
    notices: tuple[str, ...] = ()
    problems = left
    if isinstance(site.services, ServicesFrom):
        try:
            names, notices = resolve(
                site.services, services, advice_of(catalog), set(usual), networks=site.node_networks
            )
        except ClassificationError as error:
            if classification is not None:
                shown = "standard input" if str(classification) == "-" else printable(str(classification), 200)
                raise ConfigError(f"--from: {shown}: {error}", hint=HINT) from None
            message = f"{printable(str(site.services.classification), 200)}: {error}"
            problems.append(document.problem(("services", "from"), message, HINT))
    problems += _check(site, document, catalog, names)
    if problems:
        raise ConfigError(problems=first_problems(list(dict.fromkeys(problems))))
    changes: dict[str, object] = {} if isinstance(site.services, tuple) else {"services": names}
    if state is not None:
        if state.exists() and not state.is_dir():
            raise ConfigError(f"--state: {state} is not a folder", hint="give the folder of images and overlays")
        changes["state"] = state.absolute()
    site = fill_provisioning(site.model_copy(update=changes), path.absolute().parent)
    return Loaded(site, document, catalog, notices, own)


def _check(site: Site, document: Document, catalog: Mapping[str, Service], names: Collection[str]) -> list[Problem]:
    services = {name for name, service in catalog.items() if service.container}
    bases = {file.stem for file in share("definitions", "bases").glob("*.yaml")}
    controllers = {name for name in services if catalog[name].role == "controller"}
    return check_site(site, document, services=services, bases=bases, selected=names, controllers=controllers)


def _check_rest(document: Document, error: ConfigError, folder: Path) -> list[Problem]:
    """Return the problems of the sections without the errors that ``validate`` has found."""

    def section(problem: Problem) -> str:
        return re.split(r"[.\[]", problem.path)[0]

    broken = {section(problem) for problem in error.problems}
    site = validate_rest(document, broken, folder=folder)
    if site is None:
        return []
    catalog = read_catalog(share("definitions", "services"))
    usual = [name for name, service in catalog.items() if service.container and service.default]
    names = () if isinstance(site.services, ServicesFrom) else usual  # a classification is not read
    return [problem for problem in _check(site, document, catalog, names) if section(problem) not in broken]


def advice_of(catalog: Mapping[str, Service]) -> dict[str, str]:
    """Return the advice for services that nodes need and the container cannot run, by each of their names."""
    advised = [service for service in catalog.values() if service.advice]
    return {name: service.advice for service in advised for name in (*service.known_as, service.name)}


def resolve(
    selection: ServicesFrom,
    known: Collection[str],
    advice: Mapping[str, str] = MappingProxyType({}),
    usual: Collection[str] = (),
    *,
    networks: Sequence[IPv4Network] = (),
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the services selected by a classification, and notices about services that cannot run and about doubts.

    Args:
        known: services that the container can run.
        advice: advice by service, used where the classification has none.
        usual: those of ``known`` that most sites have.
        networks: of the site's compute nodes.
    """
    try:
        report = read_classification(read_text(selection.classification))
    except ConfigError as error:
        problem = error.problems[0].message if error.problems else error.message.rpartition(": ")[2]
        raise ClassificationError(problem) from None
    excluded = selection.without
    critical = [service for service in report.services if service.time_critical and service.name not in excluded]
    names = dict.fromkeys([*(service.name for service in critical if service.name in known), *selection.also])
    notices = [_notice(service, advice) for service in critical if service.name not in known]
    every = {service.name for service in report.services}
    notices += [
        f"services.without: {name} is not in the classification; {nearest(name, every)}"
        for name in excluded
        if name not in every
    ]
    if not names:
        raise ClassificationError("it has no time-critical service that the container can run")
    explicit = {*selection.also, *excluded}
    notices += _doubts(report, {*known} - explicit, {*usual} - explicit)
    notices += _strangers(report, networks)
    return tuple(names), tuple(notices)


def _strangers(report: Report, networks: Sequence[IPv4Network]) -> list[str]:
    """Return a notice if the classification has nodes in networks that the site file does not have."""
    outside = [address for address in report.nodes if not any(address in network for network in networks)]
    if not outside or not networks:
        return []
    return [
        f"the capture has {len(outside)} compute nodes in other networks than the site file, such as {outside[0]}: "
        "list networks behind routers under networks.provisioning.routes; these nodes get no reply otherwise"
    ]


def _doubts(report: Report, known: Collection[str], usual: Collection[str]) -> list[str]:
    """Return reasons of the classification itself not to rely on it."""
    doubts = [f"the capture: {printable(remark, 500)}" for remark in report.remarks[:MOST_REMARKS]]
    if report.damaged and not doubts:
        doubts.append("the capture is truncated, or parts of it could not be read: services may be missing")
    if uncertain := [each for each in report.services if each.low_confidence and each.name in known]:
        names = ", ".join(f"{each.name} ({each.verdict}, {each.confidence * 100:.0f} %)" for each in uncertain)
        doubts.append(f"low confidence: {names}; capture for longer, or with more nodes")
    if undetermined := [name for name in report.undetermined if name in usual]:
        names = ", ".join(undetermined)
        doubts.append(f"left out, but the capture is too short to decide whether nodes use it: {names}")
    return doubts


def _notice(service: Classified, advice: Mapping[str, str]) -> str:
    """Return a notice with advice for a service that nodes need and the container cannot run."""
    text = printable(service.advice, 500) or advice.get(service.name.lower(), "keep it on a machine that stays up")
    return (
        f"{service.name} is time-critical, but the container cannot run it: {text}; "
        f"then list it under services.without in the site file to silence this notice"
    )
