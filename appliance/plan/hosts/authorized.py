"""Lines of authorized_keys with which one admin host lets another one in."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address

OPTIONS = "restrict,pty"
"""No forwarding of ports, agents and X11, and no ~/.ssh/rc; `sms exec` and `shell` need a terminal."""

_KEY = re.compile(r"((?:ssh|ecdsa|sk-ssh|sk-ecdsa)-[a-z0-9@.-]{1,60}) ([A-Za-z0-9+/]{1,8192}={0,2})(?: [^\n]*)?")


def authorized_line(key: str, addresses: Iterable[str], comment: str) -> str:
    """Return the line that accepts a public key from these addresses only."""
    return f'{OPTIONS},from="{",".join(addresses)}" {key} {comment}'


def mark_of(cluster: str, host: str = "") -> str:
    """Return the comment of the line of a host; it identifies the line. Without ``host`` it is the beginning of all."""
    return f"sms:{cluster}:{host}"


def read_public(text: str) -> str | None:
    """Return type and key of a public key that another machine printed; None if it is not one."""
    found = _KEY.fullmatch(text.strip())
    return f"{found[1]} {found[2]}" if found else None


def peer_addresses(texts: Iterable[str]) -> list[str]:
    """Return those that are addresses from which another machine can connect, sorted; what is none is left out."""
    found = set()
    for text in texts:
        try:
            address = ip_address(text.strip())
        except ValueError:
            continue
        if not (address.is_loopback or address.is_unspecified or address.is_multicast or "%" in str(address)):
            found.add(address)
    return [str(address) for address in sorted(found, key=lambda each: (each.version, int(each)))]
