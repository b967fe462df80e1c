"""Addresses as people write them -> as the core writes them."""

from __future__ import annotations

import re
import socket
from ipaddress import ip_address

_MAC = re.compile(
    r"[0-9a-f]{1,2}(?P<joint>[:-])[0-9a-f]{1,2}((?P=joint)[0-9a-f]{1,2}){4}|([0-9a-f]{4}\.){2}[0-9a-f]{4}",
    re.ASCII | re.IGNORECASE,
)
"""52:54:0:12:34:56 (arp -a of BSD leaves zeros out), 52-54-00-12-34-56 (IEEE 802), 5254.0012.3456 (switches)."""


def read_mac(text: str) -> str:
    """A link address in lower case with colons; "" where the text is none."""
    if not _MAC.fullmatch(text):
        return ""
    if "." in text:
        return bytes.fromhex(text.replace(".", "")).hex(":")
    return ":".join(f"{part:0>2}" for part in re.split("[:-]", text.lower()))


def read_ip(text: str) -> str:
    """An IPv4 or IPv6 address as inet_ntop(3) writes it, without its zone (RFC 4007, 11); "" where the text is none."""
    try:
        found = ip_address(text.partition("%")[0] if ":" in text else text)
    except ValueError:
        return ""
    return socket.inet_ntop(socket.AF_INET if found.version == 4 else socket.AF_INET6, found.packed)


def read_address(text: str) -> str:
    """An IP or link address as the core writes it; "" where the text is neither."""
    return read_ip(text) or read_mac(text)


def packed(text: str) -> bytes:
    """The 4, 6 or 16 bytes of an IP or link address; none where the text is neither."""
    if ip := read_ip(text):
        return ip_address(ip).packed
    return bytes.fromhex(read_mac(text).replace(":", ""))
