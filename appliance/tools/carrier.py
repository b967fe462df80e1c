"""Which uplinks of this machine have a carrier, from /sys; changes of interfaces, from rtnetlink(7)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from appliance.shared.ports import split_macvlan

NETWORK = Path("/sys/class/net")
RTMGRP_LINK = 1
"""Multicast group of messages about interfaces (linux/rtnetlink.h)."""


def has_uplink(bridge: str, port: str, *, network: Path = NETWORK) -> bool:
    """Return whether a bridge has an uplink that is up and has a carrier; False if there is no such bridge.

    Its uplinks are the ports that are network cards, bonds, VLANs, or others on top of these: ports of local guests do
    not count. Without any (a lab), all ports but ``port`` and the taps of virtual machines are uplinks. If ``port`` is
    a macvlan interface, ``bridge`` is its parent, and the uplink.
    """
    if split_macvlan(port):
        return _has_carrier(network / bridge)
    with suppress(OSError):
        ports = [network / path.name for path in (network / bridge / "brif").iterdir()]
        uplinks = [one for one in ports if _leads_out(one)]
        if not uplinks:
            uplinks = [one for one in ports if one.name != port and not (one / "tun_flags").exists()]
        return any(_has_carrier(one) for one in uplinks)
    return False


def _leads_out(interface: Path) -> bool:
    return any((interface / name).exists() for name in ("device", "bonding")) or any(interface.glob("lower_*"))


def _has_carrier(interface: Path) -> bool:
    try:
        return (interface / "carrier").read_text().strip() == "1"
    except OSError:  # it is down, or gone
        return False


def is_port(bridge: str, interface: str, *, network: Path = NETWORK) -> bool:
    """Return whether an interface is a port of a bridge."""
    return (network / bridge / "brif" / interface).exists()


def exists(port: str, *, network: Path = NETWORK) -> bool:
    """Return whether there is a port of this name: an interface, or a macvlan interface's process."""
    macvlan = split_macvlan(port)
    return Path(f"/proc/{macvlan[1]}").exists() if macvlan else (network / port).exists()


@contextmanager
def link_events() -> Iterator[Callable[[float], None]]:
    """Yield a function that returns when an interface has changed since its last call, or after that many seconds."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.bind((0, RTMGRP_LINK))

        def wait(timeout_s: float) -> None:
            # A message that did not fit (ENOBUFS) is a change as well.
            with suppress(OSError):
                sock.settimeout(timeout_s)
                sock.recv(1 << 16)
                sock.setblocking(False)
                while True:
                    sock.recv(1 << 16)

        yield wait
