"""The catalogue and the site's own services as the signatures that `analysis` uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.signatures import Signature
from appliance.operations.classify import compiled
from appliance.operations.classify.compiled import Known
from appliance.text import nearest


@dataclass(frozen=True)
class Catalogue:
    """The shipped services, and the site's own, which take precedence."""

    shipped: Mapping[str, Known]
    own: Mapping[str, Known]

    def find(self, name: str) -> str:
        """Return the name of the service with this name, alias or port; else the name unchanged."""
        both = {**self.shipped, **self.own}
        other = {alias.lower(): name for name, each in both.items() for alias in (*each.ports, *each.known_as)}
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
    """Read the shipped catalogue, in its compiled form if there is no other, and the site's own folder.

    Raises:
        ConfigError: with every problem in that folder.
    """
    if not services and (shipped := compiled.read()):
        return Catalogue(shipped, {})
    # Models and YAML take longer to import than all else.
    from appliance.operations.classify.convert import read_services

    return Catalogue(*read_services(services))


def make_signatures(catalogue: Catalogue) -> tuple[Signature, ...]:
    """Return the signature of every service: the site's own first, with exclusive ports."""
    ours = [each.signature for each in catalogue.own.values()]
    taken = {port for each in ours for port in each.ports}
    theirs = [each.signature for name, each in catalogue.shipped.items() if name not in catalogue.own]
    return (*ours, *(_without(each, taken) for each in theirs))


def _without(signature: Signature, taken: Collection[tuple[int, int]]) -> Signature:
    """Remove the ports of the site's own services; the absence of the service then means nothing."""
    left = tuple(port for port in signature.ports if port not in taken)
    return replace(signature, ports=left, silent=signature.silent or left != signature.ports)
