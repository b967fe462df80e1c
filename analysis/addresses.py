"""Parse addresses in common notations and normalize them to the core's notation."""

from __future__ import annotations

import re
import socket
from ipaddress import IPv6Address, ip_address

UNSPECIFIED = ("0.0.0.0", "::")  # noqa: S104
_MAC = re.compile(
    r"[0-9a-f]{1,2}(?P<joint>[:-])[0-9a-f]{1,2}((?P=joint)[0-9a-f]{1,2}){4}|([0-9a-f]{4}\.){2}[0-9a-f]{4}",
    re.ASCII | re.IGNORECASE,
)
"""52:54:0:12:34:56 (arp -a of BSD leaves zeros out), 52-54-00-12-34-56 (IEEE 802), 5254.0012.3456 (switches)."""


def read_mac(text: str) -> str:
    """Return a link address in lower case with colons; "" if the text is not one."""
    if not _MAC.fullmatch(text):
        return ""
    if "." in text:
        return bytes.fromhex(text.replace(".", "")).hex(":")
    return ":".join(f"{part:0>2}" for part in re.split("[:-]", text.lower()))


def read_ip(text: str) -> str:
    """Return an IP address as inet_ntop(3) writes it, without its zone (RFC 4007, 11); "" if the text is not one."""
    try:
        found = ip_address(text.partition("%")[0] if ":" in text else text)
    except ValueError:
        return ""
    return socket.inet_ntop(socket.AF_INET if found.version == 4 else socket.AF_INET6, found.packed)


def read_address(text: str) -> str:
    """Return an IP or link address in the core's notation; "" if the text is neither."""
    return read_ip(text) or read_mac(text)


def packed(text: str) -> bytes:
    """Return the 4, 6 or 16 bytes of an IP or link address; no bytes if the text is neither."""
    if ip := read_ip(text):
        return ip_address(ip).packed
    return bytes.fromhex(read_mac(text).replace(":", ""))


# Kinds of addresses in the core's notation; "" is of no kind.


def is_local(address: str) -> bool:
    """Return whether it is private: RFC 1918, RFC 6598, RFC 3927, RFC 4193, RFC 4291 (link-local), loopback."""
    if ":" in address:
        return address.startswith(("fe8", "fe9", "fea", "feb", "fc", "fd")) or address == "::1"
    if address.startswith(("10.", "192.168.", "169.254.", "127.")):
        return True
    low, high = {"172": (16, 31), "100": (64, 127)}.get(address.partition(".")[0], (1, 0))
    return low <= high and low <= first_byte(address.partition(".")[2]) <= high


def is_link_local(address: str) -> bool:
    """Return whether it is an IPv6 link-local address."""
    return address.startswith(("fe8", "fe9", "fea", "feb"))


def is_loopback(address: str) -> bool:
    """Return whether it is a loopback address."""
    return address.startswith("127.") or address == "::1"


def network(address: str) -> str:
    """Return the prefix that addresses of one cluster network share: 16 bits of IPv4, 64 of IPv6."""
    if ":" in address:
        return str(IPv6Address(address.partition("%")[0]).exploded[:19])
    return address[: address.find(".", address.find(".") + 1)]


def first_byte(address: str) -> int:
    """Return the number before the first dot; 0 if there is none."""
    first = address.partition(".")[0]
    return int(first) if first.isdigit() else 0
