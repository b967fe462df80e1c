"""Who is at the other end of a plain request: the address, and what the kernel knows of the machine that has it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from appliance.provision import names
from appliance.provision.model import Component, Inventory

ARP = Path("/proc/net/arp")
"""The kernel's table of neighbours: who just opened a connection stands in it. Read at once, no program needed."""
COMPLETE = 0x2
MOST_STRANGERS = 1000


def neighbour_mac(address: str, table: Path | None = None) -> str:
    """The MAC address that the kernel has for a neighbour; empty where it has none."""
    try:
        text = (table or ARP).read_text()
    except OSError:
        return ""
    # Lines begin with the address; hundreds of them are not all taken apart.
    start = text.find(f"\n{address} ")
    while start >= 0:
        parts = text[start + 1 : start + 200].partition("\n")[0].split()
        if len(parts) >= 4 and int(parts[2], 16) & COMPLETE:
            return names.clean_mac(parts[3])
        start = text.find(f"\n{address} ", start + 1)
    return ""


def is_node(inventory: Inventory, node: Component, address: str, table: Path | None) -> bool:
    """Whether a request from an address comes from this node itself, as far as the network can tell."""
    if not node.address or address != node.address:
        return False
    mac = neighbour_mac(address, table)
    return bool(mac) and any(each.mac == mac for each in inventory.interfaces_of(node.id))


class Strangers:
    """MAC addresses that asked for a boot script and are nobody's; the oldest are forgotten."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, mac: str, address: str) -> None:
        with self._lock:
            count = self._seen.pop(mac, {"count": 0})["count"]
            self._seen[mac] = {"mac": mac, "address": address, "count": count + 1, "last": time.time()}
            while len(self._seen) > MOST_STRANGERS:
                self._seen.popitem(last=False)

    def forget(self, inventory: Inventory) -> None:
        """Those that are somebody's by now."""
        with self._lock:
            for mac in [mac for mac in self._seen if mac in inventory.interfaces]:
                del self._seen[mac]

    def rows(self) -> list[dict[str, Any]]:
        """The latest first."""
        with self._lock:
            return list(reversed(self._seen.values()))
