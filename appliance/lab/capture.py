"""Where in a lab its provisioning network can be listened to."""

from __future__ import annotations

from appliance.errors import ConfigError
from appliance.host.local import Local
from appliance.lab.layout import PROVISIONING, Layout

SWITCH = "switch"


def places(layout: Layout) -> tuple[str, ...]:
    """Hosts on the provisioning network, and the switch, which sees what all of them send."""
    return (SWITCH, *(host.name for host in layout.hosts if PROVISIONING in host.addresses))


def listener(layout: Layout, place: str) -> tuple[Local, str]:
    """This machine in the network of the place, and the interface there.

    Raises:
        ConfigError: there is no such place on the provisioning network.
    """
    if place not in places(layout):
        raise ConfigError(
            f"{place} is not on the provisioning network of lab {layout.name}",
            hint=f"--at {', '.join((*places(layout), 'sms'))}",
        )
    found = {host.name: host for host in layout.hosts}.get(place)
    # What a carrier sends itself passes its bridge, not its cable alone.
    interface = found.interface(PROVISIONING) if found and found.kind == "node" else layout.plan.bridges[PROVISIONING]
    return in_network(place, f"/run/netns/{layout.namespace(place)}"), interface


def in_network(name: str, namespace: str) -> Local:
    """This machine, with the network of a namespace's file: its programs and files, another's interfaces.

    The network alone is entered: a namespace of pids would put a process between a signal and the command.
    """
    return Local(name, ("nsenter", f"--net={namespace}", "--"))
