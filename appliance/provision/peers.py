"""Identify the peer of an unauthenticated request by its address and the kernel's ARP table."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from pathlib import Path

from appliance.provision import names
from appliance.provision.model import Component, Inventory
from appliance.provision.payloads import UnknownMachine

ARP = Path("/proc/net/arp")
"""The kernel's ARP table: it contains every peer that just opened a connection."""
COMPLETE = 0x2
MAX_UNKNOWN = 1000


def neighbour_mac(address: str, table: Path | None = None) -> str:
    """Return the MAC address of a neighbour from the ARP table; empty if there is none."""
    try:
        text = (table or ARP).read_text()
    except OSError:
        return ""
    # Lines begin with the address; splitting hundreds of them would be slow.
    start = text.find(f"\n{address} ")
    while start >= 0:
        parts = text[start + 1 : start + 200].partition("\n")[0].split()
        if len(parts) >= 4 and int(parts[2], 16) & COMPLETE:
            return names.clean_mac(parts[3])
        start = text.find(f"\n{address} ", start + 1)
    return ""


def is_node(inventory: Inventory, node: Component, address: str, table: Path | None) -> bool:
    """Return whether a request from an address comes from this node, as far as ARP shows."""
    if not node.address or address != node.address:
        return False
    mac = neighbour_mac(address, table)
    return bool(mac) and any(each.mac == mac for each in inventory.interfaces_of(node.id))


class UnknownMachines:
    """MAC addresses that requested a boot script and belong to no node; the oldest are dropped."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, UnknownMachine] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, mac: str, address: str) -> None:
        with self._lock:
            before = self._seen.pop(mac, None)
            count = before["count"] + 1 if before else 1
            self._seen[mac] = {"mac": mac, "address": address, "count": count, "last": time.time()}
            while len(self._seen) > MAX_UNKNOWN:
                self._seen.popitem(last=False)

    def forget(self, inventory: Inventory) -> None:
        """Drop those that are in the inventory by now."""
        with self._lock:
            for mac in [mac for mac in self._seen if mac in inventory.interfaces]:
                del self._seen[mac]

    def rows(self) -> list[UnknownMachine]:
        """Return the entries, latest first."""
        with self._lock:
            return list(reversed(self._seen.values()))
