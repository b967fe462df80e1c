"""Convert services of the catalogue, and the site's own, into signatures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from analysis.signatures import ANY_PORT, ANYWHERE, PROTOCOLS, FirstBytes, Signature
from appliance.catalog import Service, read_catalog
from appliance.catalog.own import OwnService, read_own
from appliance.catalog.traffic import First
from appliance.operations.classify.compiled import Known
from appliance.share import share


def read_services(own: Path | None = None) -> tuple[dict[str, Known], dict[str, Known]]:
    """Return the shipped services and those of the folder ``own``.

    Raises:
        ConfigError: with every problem in that folder.
    """
    shipped = read_catalog(share("definitions", "services"))
    found = read_own(own, shipped) if own else {}
    return (
        {name: _known(each, each.container) for name, each in shipped.items()},
        {name: _known(each, _carried(each, shipped)) for name, each in found.items()},
    )


def _known(service: Service, carried: bool) -> Known:
    return Known(service.ports, service.known_as, make_signature(service, carried))


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
        first=tuple(map(_first, traffic.first)),
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


def _first(pattern: First) -> FirstBytes:
    beside = _port(pattern.beside) if pattern.beside else None
    offset = ANYWHERE if pattern.within else pattern.at
    return FirstBytes(*_port(pattern.port), offset, *pattern.bounds, beside)


def _port(text: str) -> tuple[int, int]:
    protocol, _, number = text.partition("/")
    return PROTOCOLS[protocol], ANY_PORT if number == "any" else int(number)
