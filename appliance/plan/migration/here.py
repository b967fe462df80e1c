"""The plan of a switch on one host: its outages, as bounds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from appliance.catalog import Service
from appliance.plan.migration.move import PARTS, ServiceOutage, predict_outages
from appliance.plan.services.apply import bound

GATE = "sms_gate"
"""nftables table of a second instance whose services with state must not be reached yet."""
SWITCHED = "switched"
"""Event of the history with the measured parts of a switch."""
BOUNDS = {"stop": 1.5, "last changes": 1.0, "start": 6.0, "switch": 0.5}
"""Seconds, when no switch has been measured on the host."""
RECENT = 5
"""Number of previous switches that a bound uses."""


def gate_rules(streams: Sequence[int]) -> str:
    """Return the nftables rules that let no TCP packet of the container itself pass, but those of these ports.

    Services with state talk to others by TCP. Forwarded packets, such as those of NAT, and UDP are not concerned.
    """
    allowed = ", ".join(map(str, streams))
    lines = [f"add table inet {GATE}"]
    for hook, interface, port in (("input", "iifname", "dport"), ("output", "oifname", "sport")):
        but = f"tcp {port} != {{ {allowed} }} " if streams else "meta l4proto tcp "
        lines += [
            f"add chain inet {GATE} {hook} {{ type filter hook {hook} priority -200 ; }}",
            f'add rule inet {GATE} {hook} {interface} != "lo" {but}drop',
        ]
    return " ; ".join(lines)


def recent_switches(history: Iterable[Mapping[str, object]]) -> list[dict[str, float]]:
    """Return the measured parts of the last switches in the history of a host."""
    parts = [line["parts"] for line in history if line.get("event") == SWITCHED]
    found = [
        {str(name): float(took) for name, took in one.items() if isinstance(took, int | float)}
        for one in parts
        if isinstance(one, dict)
    ]
    return found[-RECENT:]


def bound_parts(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return how many seconds each part of a switch takes at most."""
    known = {part: [one[part] for one in measured if part in one] for part in PARTS}
    return {part: bound(known[part]) if known[part] else BOUNDS[part] for part in PARTS}


def bound_outages(services: Sequence[Service], measured: Sequence[Mapping[str, float]]) -> list[ServiceOutage]:
    """Return the outage of each service that a switch does not exceed."""
    return predict_outages(services, bound_parts(measured), shared=False)
