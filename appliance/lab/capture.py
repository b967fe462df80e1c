"""Capture points of a lab's provisioning network."""

from __future__ import annotations

from appliance.errors import ConfigError
from appliance.host.local import Local
from appliance.lab.layout import PROVISIONING, Layout

SWITCH = "switch"


def places(layout: Layout) -> tuple[str, ...]:
    """Return the capture points: the switch, which sees all traffic, and the hosts on the provisioning network."""
    return (SWITCH, *(host.name for host in layout.hosts if PROVISIONING in host.addresses))


def listener(layout: Layout, place: str) -> tuple[Local, str]:
    """Return this machine in the network namespace of the capture point, and the interface.

    Raises:
        ConfigError: there is no such capture point.
    """
    if place not in places(layout):
        raise ConfigError(
            f"{place} is not on the provisioning network of lab {layout.name}",
            hint=f"--at {', '.join((*places(layout), 'sms'))}",
        )
    found = {host.name: host for host in layout.hosts}.get(place)
    # Local traffic of a carrier is on its bridge, not on its cable.
    interface = (
        found.interface(PROVISIONING) if found and found.kind != "carrier" else layout.plan.bridges[PROVISIONING]
    )
    return in_network(place, f"/run/netns/{layout.namespace(place)}"), interface


def in_network(name: str, namespace: str) -> Local:
    """Return this machine with another network namespace.

    Only the network namespace is entered: with a PID namespace signals would not reach the command directly.
    """
    return Local(name, ("nsenter", f"--net={namespace}", "--"))
