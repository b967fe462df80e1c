"""Convert the catalogue and the site's own services into the signatures that `analysis` uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.signatures import ANY_PORT, PROTOCOLS, FirstBytes, Signature
from appliance.catalog import Service, read_catalog
from appliance.catalog.own import OwnService, read_own
from appliance.share import share
from appliance.text import nearest


@dataclass(frozen=True)
class Catalogue:
    """The shipped services, and the site's own, which take precedence."""

    shipped: Mapping[str, Service]
    own: Mapping[str, OwnService]

    def find(self, name: str) -> str:
        """Return the name of the service with this name, alias or port; else the name unchanged."""
        both: dict[str, Service] = {**self.shipped, **self.own}
        other = {alias.lower(): each.name for each in both.values() for alias in (*each.ports, *each.known_as)}
        lower = name.lower()
        return lower if lower in both else other.get(lower, name)

    def has(self, name: str) -> bool:
        """Return whether a service has this name."""
        return name in self.shipped or name in self.own

    def nearest(self, name: str, seen: Collection[str]) -> str:
        """Return a hint for an unknown name: the closest one of the catalogue or of ``seen``, or all of ``seen``."""
        names = {*self.shipped, *self.own, *(alias for each in self.shipped.values() for alias in each.known_as)}
        return nearest(name, {*names, *seen}, listed=seen, label="seen")


def open_catalogue(services: Path | None) -> Catalogue:
    """Read the shipped catalogue and the site's own folder.

    Raises:
        ConfigError: with every problem in that folder.
    """
    shipped = read_catalog(share("definitions", "services"))
    return Catalogue(shipped, read_own(services, shipped) if services else {})


def make_signatures(catalogue: Catalogue) -> tuple[Signature, ...]:
    """Return the signature of every service: the site's own first, with exclusive ports."""
    shipped, own = catalogue.shipped, catalogue.own
    ours = [make_signature(each, _carried(each, shipped)) for each in own.values()]
    taken = {port for each in ours for port in each.ports}
    theirs = [make_signature(each, each.container) for name, each in shipped.items() if name not in own]
    return (*ours, *(_without(each, taken) for each in theirs))


def _without(signature: Signature, taken: Collection[tuple[int, int]]) -> Signature:
    """Remove the ports of the site's own services; the absence of the service then means nothing."""
    left = tuple(port for port in signature.ports if port not in taken)
    return replace(signature, ports=left, silent=signature.silent or left != signature.ports)


def _carried(service: Service, shipped: Mapping[str, Service]) -> bool:
    if service.name in shipped:
        return shipped[service.name].container
    return bool(service.run and service.probe) and (service.container or "container" not in service.model_fields_set)


def make_signature(service: Service, carried: bool) -> Signature:
    """Convert a service of the catalogue into a signature."""
    traffic = service.traffic
    verdict: str = service.verdict if isinstance(service, OwnService) else ""
    why = service.why if isinstance(service, OwnService) else ""
    # A routing service is recognized by its routed traffic, not by its own ports.
    ports = () if traffic.routed else dict.fromkeys((*service.ports, *traffic.ports))
    return Signature(
        name=service.name,
        summary=service.summary,
        ports=tuple(_port(port) for port in ports),
        first=tuple(FirstBytes(*_port(each.port), each.at, *each.bounds) for each in traffic.first),
        routed=traffic.routed,
        critical=service.critical,
        boot=traffic.boot,
        poll=traffic.poll,
        sms_opens=traffic.sms_opens,
        every_s=traffic.every_s,
        budget_s=service.outage.seconds,
        budget_why=service.outage.why,
        carried=carried,
        silent=traffic.silent,
        advice=service.advice,
        verdict=verdict,
        verdict_why=why,
    )


def _port(text: str) -> tuple[int, int]:
    protocol, _, number = text.partition("/")
    return PROTOCOLS[protocol], ANY_PORT if number == "any" else int(number)
