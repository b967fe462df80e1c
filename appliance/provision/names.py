"""Syntax and normal forms of MAC addresses, xnames, node names and SMD's enumerations."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from appliance.provision import payloads

NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
DHCP_WORD = re.compile(r"(?i:ignore|infinite|[0-9]+[smhdw]?)")
"""Words that dnsmasq interprets as a keyword or a lease time instead of a host name: not allowed as node names."""
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
"""Component types by the form of the xname."""
DEFAULTS: payloads.Node = {
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
"""Fields of a node of which only the name is given."""


def clean_mac(text: str) -> str:
    """Return a MAC address in the form ``02:00:0a:4d:00:97``; empty if it is not a unicast address."""
    digits = re.sub(r"[:.-]", "", text.strip().lower())
    if not re.fullmatch(r"[0-9a-f]{12}", digits) or digits in ("0" * 12, "f" * 12) or int(digits[:2], 16) & 1:
        return ""
    return ":".join(digits[at : at + 2] for at in range(0, 12, 2))


def mac_id(mac: str) -> str:
    """Return SMD's ID of an interface: its MAC address without colons."""
    return mac.replace(":", "")


def clean_address(text: str) -> str:
    """Return an IP address in its normal form; empty if no machine can have it."""
    try:
        address = ipaddress.ip_address(text.strip())
    except ValueError:
        return ""
    bad = address.is_multicast or address.is_unspecified or address.is_loopback or "%" in text
    return "" if bad else str(address)


def clean_xname(text: str) -> str:
    """Return an xname in SMD's form: lower case, without leading zeros. It is not validated."""
    return re.sub(r"(?<=[a-z])0+(?=[0-9])", "", text.strip().lower())


def type_of(xname: str) -> str:
    """Return the component type of an xname; empty if it is not an xname."""
    return next((name for name, pattern in TYPES if pattern.fullmatch(xname)), "")


def clean_id(text: str) -> str:
    """Return the stored ID of a component: an xname in its normal form, any other name unchanged."""
    xname = clean_xname(text)
    return xname if type_of(xname) else text.strip()


def pick(word: str, words: Iterable[str]) -> str | None:
    """Return the entry of a list that equals ``word`` regardless of case, or None."""
    return next((each for each in words if each.lower() == word.strip().lower()), None)


def bmc_of(xname: str) -> str:
    """Return the xname of a node's controller: the part before ``n``; empty if it is not a node's xname."""
    return xname[: xname.rindex("n")] if type_of(xname) == "Node" else ""
