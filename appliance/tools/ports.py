"""The network ports of an instance: the ends of its cables that lie on the host, on bridges or off them. iproute2."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from appliance.host.base import Host


def find_ports(host: Host, pid: int) -> dict[str, str]:
    """Interface of the instance to its other end on the host: ``{"eth0": "veth1a2b", "eth1": "veth3c4d"}``.

    Args:
        pid: a process of the instance.

    Raises:
        CommandError: there is no such process any more.
    """
    inside = _links(host, "nsenter", f"--net=/proc/{pid}/ns/net")
    # The two ends name each other: a number alone may be that of a cable to somewhere else.
    outside = {(link["ifindex"], link.get("link_index")): link["ifname"] for link in _links(host)}
    ends = ((link["ifname"], (link.get("link_index"), link["ifindex"])) for link in inside)
    return {name: outside[end] for name, end in ends if end in outside}


def _links(host: Host, *prefix: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(host.run(*prefix, "ip", "-json", "link").stdout or b"[]")
    return found


def detach(host: Host, ports: Iterable[str], *, down: bool = False) -> None:
    """Take ports off their bridges, each of them even if another is gone; ``down`` ends their carrier, too.

    Raises:
        CommandError: one is not there.
    """
    _change(host, [f"link set dev {port} nomaster{' down' * down}" for port in ports])


def attach(host: Host, ports: Mapping[str, str]) -> None:
    """Put each port on the bridge that it is given with, and up.

    Raises:
        CommandError: one of them is not there.
    """
    _change(host, [f"link set dev {port} master {bridge} up" for port, bridge in ports.items()])


def _change(host: Host, lines: list[str]) -> None:
    if lines:
        host.run("ip", "-force", "-batch", "-", input="".join(f"{line}\n" for line in lines).encode())
