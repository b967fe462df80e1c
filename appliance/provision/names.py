"""How MAC addresses, xnames, node names and the words of SMD are written, and what each becomes."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Any

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
DHCP_WORD = re.compile(r"(?i:ignore|infinite|[0-9]+[smhdw]?)")
"""What dnsmasq takes for an order or for a lease's time where a name stands: no node is called so."""
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
BMC = re.compile(r"[A-Za-z0-9:/._~%\[\]-]{0,255}")
PROFILE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,62})?")

STATES = ("Unknown", "Empty", "Populated", "Off", "On", "Standby", "Halt", "Ready", "Active", "Paused")
FLAGS = ("Unknown", "OK", "Warning", "Alert", "Locked")
ARCHES = ("X86", "ARM", "Other", "UNKNOWN")
CLASSES = ("", "River", "Mountain", "Hill", "OEM", "None")
NET_TYPES = ("Sling", "Infiniband", "Ethernet", "OEM", "None", "")

TYPES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("System", r"s0"),
        ("CDU", r"d\d{1,4}"),
        ("CabinetCDU", r"x\d{1,4}d\d"),
        ("Cabinet", r"x\d{1,4}"),
        ("CEC", r"x\d{1,4}e\d"),
        ("CabinetPDUController", r"x\d{1,4}m\d"),
        ("CabinetPDU", r"x\d{1,4}m\dp\d"),
        ("Chassis", r"x\d{1,4}c\d"),
        ("ChassisBMC", r"x\d{1,4}c\db\d"),
        ("ComputeModule", r"x\d{1,4}c\ds\d{1,3}"),
        ("RouterModule", r"x\d{1,4}c\dr\d{1,3}"),
        ("RouterBMC", r"x\d{1,4}c\dr\d{1,3}b\d{1,2}"),
        ("MgmtSwitch", r"x\d{1,4}c\dw\d{1,3}"),
        ("MgmtHLSwitch", r"x\d{1,4}c\dh\d{1,3}s\d{1,2}"),
        ("NodeEnclosure", r"x\d{1,4}c\ds\d{1,3}e\d{1,2}"),
        ("NodeBMC", r"x\d{1,4}c\ds\d{1,3}b\d{1,2}"),
        ("NodeBMCNic", r"x\d{1,4}c\ds\d{1,3}b\d{1,2}i\d"),
        ("Node", r"x\d{1,4}c\ds\d{1,3}b\d{1,2}n\d{1,2}"),
        ("VirtualNode", r"x\d{1,4}c\ds\d{1,3}b\d{1,2}n\d{1,2}v\d{1,3}"),
        ("NodeNic", r"x\d{1,4}c\ds\d{1,3}b\d{1,2}n\d{1,2}i\d{1,2}"),
        ("Processor", r"x\d{1,4}c\ds\d{1,3}b\d{1,2}n\d{1,2}p\d{1,2}"),
        ("Memory", r"x\d{1,4}c\ds\d{1,3}b\d{1,2}n\d{1,2}d\d{1,3}"),
    )
)
"""What an xname's form says it is."""
DEFAULTS: dict[str, Any] = {
    "xname": None,
    "nid": None,
    "role": "Compute",
    "subrole": "",
    "address": None,
    "macs": [],
    "groups": [],
    "bmc": "",
    "profile": "",
    "enabled": True,
    "state": "Unknown",
    "arch": "X86",
}
"""What a node is that says no more than its name."""


def clean_mac(text: str) -> str:
    """A MAC address as ``02:00:0a:4d:00:97``, however it was written; empty where it is no machine's."""
    digits = re.sub(r"[:.-]", "", text.strip().lower())
    if not re.fullmatch(r"[0-9a-f]{12}", digits) or digits in ("0" * 12, "f" * 12) or int(digits[:2], 16) & 1:
        return ""
    return ":".join(digits[at : at + 2] for at in range(0, 12, 2))


def mac_id(mac: str) -> str:
    """SMD's ID of an interface: its MAC address without colons."""
    return mac.replace(":", "")


def clean_address(text: str) -> str:
    """An address in its usual form; empty where it is none of a machine's."""
    try:
        address = ipaddress.ip_address(text.strip())
    except ValueError:
        return ""
    bad = address.is_multicast or address.is_unspecified or address.is_loopback or "%" in text
    return "" if bad else str(address)


def clean_xname(text: str) -> str:
    """An xname as SMD writes it: lower case, numbers without zeros before them. It may be none."""
    return re.sub(r"(?<=[a-z])0+(?=[0-9])", "", text.strip().lower())


def type_of(xname: str) -> str:
    """What an xname names; empty where it is none."""
    return next((name for name, pattern in TYPES if pattern.fullmatch(xname)), "")


def clean_id(text: str) -> str:
    """The ID of a component as it is stored: an xname in its usual form, and any other name as it is."""
    xname = clean_xname(text)
    return xname if type_of(xname) else text.strip()


def pick(word: str, words: Iterable[str]) -> str | None:
    """The word of a list, however it is written; None where it is not there."""
    return next((each for each in words if each.lower() == word.strip().lower()), None)


def bmc_of(xname: str) -> str:
    """The xname of a node's controller: all before its ``n``; empty for what is no node's."""
    return xname[: xname.rindex("n")] if type_of(xname) == "Node" else ""
