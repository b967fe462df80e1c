"""Finds and reads the site file; every other verb starts here."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from analysis.classification import ClassificationError, read_classification
from appliance.catalog import read_catalog
from appliance.config.check import check_site
from appliance.config.document import Document, first_problems, printable
from appliance.config.model import ServicesFrom, Site
from appliance.config.read import read_site, read_text
from appliance.config.wording import nearest
from appliance.errors import ConfigError
from appliance.progress import Progress
from appliance.share import share

ADVICE: dict[str, str] = {
    "nfs": "copy the files that nodes read into the node image, or serve them from a machine that stays up",
    "ganglia": "send the measurements through syslog, which the container receives, or let them rest meanwhile",
    "dhcp": "give nodes fixed addresses or leases longer than the outage; a booted node needs no more",
    "tftp": "nodes need it while they boot only: start the provisioning VM before nodes restart",
    "http": "put files that nodes fetch while running into the node image, or let filesync pull them",
    "dns": "write the hosts file into the node image, or let nodes ask the site's name servers through NAT",
    "ldap": "take the accounts over as passwd and group files (`accounts:`), or let nodes ask through NAT",
}
"""What to do about services that nodes need at every moment and that the container cannot carry."""

_SAME = {"nfsd": "nfs", "sunrpc": "nfs", "mountd": "nfs", "gmond": "ganglia", "gmetad": "ganglia"}
_SAME |= {"bootps": "dhcp", "dhcpd": "dhcp", "domain": "dns", "ldaps": "ldap", "https": "http", "www": "http"}


@dataclass(frozen=True)
class Loaded:
    """A site without mistakes, where it was read, and what its administrator should know."""

    site: Site
    document: Document
    notices: tuple[str, ...]


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
        classification: stands before the services that the file names.
    """
    site, document = read_site(path)
    if classification is not None:
        chosen = ServicesFrom.model_validate({"from": classification.absolute()})
        site = site.model_copy(update={"services": chosen})
    services = {name for name, service in read_catalog(share("definitions", "services")).items() if service.container}
    bases = {file.stem for file in share("definitions", "bases").glob("*.yaml")}
    names: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    problems = []
    if isinstance(site.services, ServicesFrom):
        try:
            names, notices = resolve(site.services, services)
        except ClassificationError as error:
            hint = "it should hold `services:` with a list of {name, verdict: time-critical or deferrable}"
            message = f"{printable(str(site.services.classification), 200)}: {error}"
            problems.append(document.problem(("services", "from"), message, hint))
    problems += check_site(site, document, services=services, bases=bases, wanted=names)
    if problems:
        raise ConfigError(problems=first_problems(problems))
    changes: dict[str, object] = {"services": names} if names else {}
    if state is not None:
        changes["state"] = state.absolute()
    return Loaded(site.model_copy(update=changes), document, notices)


def resolve(wanted: ServicesFrom, known: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The services that a classification stands for, and a notice for each that cannot be carried."""
    try:
        seen = read_classification(read_text(wanted.classification))
    except ConfigError as error:
        problem = error.problems[0].message if error.problems else error.message.rpartition(": ")[2]
        raise ClassificationError(problem) from None
    critical = [service.name for service in seen if service.time_critical and service.name not in wanted.without]
    names = dict.fromkeys([*(name for name in critical if name in known), *wanted.also])
    notices = [_notice(name) for name in critical if name not in known]
    every = {service.name for service in seen}
    notices += [
        f"services.without: {name} is not in the classification; {nearest(name, every)}"
        for name in wanted.without
        if name not in every
    ]
    if not names:
        raise ClassificationError("it has no time-critical service that the container can carry")
    return tuple(names), tuple(notices)


def _notice(name: str) -> str:
    """What to do about a service that nodes need and the container cannot carry."""
    key = name.lower()
    advice = ADVICE.get(_SAME.get(key, key), "keep it on a machine that stays up")
    return (
        f"{name} is time-critical, but the container cannot carry it: {advice}; "
        f"then name it under services.without in the site file, and this notice is gone"
    )
