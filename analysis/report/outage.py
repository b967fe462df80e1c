"""The predicted effect of an outage of the management node, by its length: what the report's slider shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from analysis import units
from analysis.model import Classification, Service

LENGTHS = (10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86_400.0, 3 * 86_400.0, 7 * 86_400.0)
"""Seconds that can be chosen."""
CHOSEN = 3
"""Index of the length that is shown first: a reboot."""
MAX_NAMED = 8
"""Services named in a summary."""


@dataclass(frozen=True)
class Effect:
    """What an outage does to a service.

    Attributes:
        state: "noticed" if it lasts longer than the tolerated outage, else "tolerated"; "unknown" without a budget.
        nodes: who notices then; "" if that is unknown.
        contacts: how many contacts fail or wait.
    """

    state: str
    nodes: str
    contacts: str


@dataclass(frozen=True)
class Outage:
    """One length: its number and unit, and what it does altogether."""

    seconds: float
    number: str
    unit: str
    summary: str


@dataclass(frozen=True)
class Row:
    """A service and the effects by length."""

    service: Service
    number: int
    effects: tuple[Effect, ...]


def predict(found: Classification, services: Sequence[tuple[int, Service]]) -> tuple[list[Outage], list[Row]]:
    """Return the lengths, and the services in the order in which an outage reaches them."""
    covered_s = found.capture.covered_s or found.capture.duration_s
    order = sorted(services, key=lambda pair: (_tolerated_s(pair[1]), pair[1].verdict != "time-critical", pair[1].name))
    rows = [Row(one, number, tuple(effect(one, length, covered_s) for length in LENGTHS)) for number, one in order]
    lengths = []
    for index, seconds in enumerate(LENGTHS):
        number, _, unit = units.span(seconds).partition(" ")
        lengths.append(Outage(seconds, number, unit, _summary(seconds, rows, index)))
    return lengths, rows


def effect(service: Service, length_s: float, covered_s: float) -> Effect:
    """Predict the effect on one service.

    Nodes contact it independently, at the rate that the capture shows: of ``clients`` nodes with c contacts in the time
    of the outage, clients · (1 - exp(-c / clients)) are expected to try at least once (Poisson).
    """
    tolerated_s = _tolerated_s(service)
    state = "unknown" if tolerated_s == math.inf and service.budget_s <= 0 else "tolerated"
    state = "noticed" if length_s > tolerated_s else state
    if service.phase == "boot":
        return Effect(state, "nodes that boot", "")
    if service.initiator == "sms":
        return Effect(state, "not by nodes", "")
    contacts = service.contacts or service.connections.node
    made = contacts * length_s / covered_s if covered_s > 0 else math.nan
    if not math.isfinite(made) or service.clients <= 0:
        return Effect(state, "", "")
    nodes = service.clients * -math.expm1(-made / service.clients)
    return Effect(state, _about(nodes, "node"), _about(made, "contact"))


def _tolerated_s(service: Service) -> float:
    """Return the tolerated outage; infinite if it is unknown."""
    if service.budget_s > 0:
        return service.budget_s
    known = service.budget_s == 0 and (service.budget_why or service.verdict == "time-critical")
    return 0.0 if known else math.inf


def _about(value: float, what: str) -> str:
    if value < 0.5:
        return f"hardly a {what}"
    # Two digits: it is an expectation.
    shown = round(value, 1 - math.floor(math.log10(value))) if value >= 100 else round(value)
    return f"~{units.counted(int(shown), what)}"


def _summary(seconds: float, rows: Sequence[Row], index: int) -> str:
    noticed = [row.service for row in rows if row.effects[index].state == "noticed"]
    if not noticed:
        unknown = sum(row.effects[index].state == "unknown" for row in rows)
        where = (
            f"noticed in no service, unknown in {unknown} of {len(rows)}" if unknown else "tolerated in every service"
        )
        return f"{units.span(seconds)}: {where}."
    names = [units.plain(one.name, 32) for one in noticed]
    of = units.counted(len(rows), "service")
    return f"{units.span(seconds)}: noticed in {len(noticed)} of {of}: {units.listed(names, MAX_NAMED)}."
