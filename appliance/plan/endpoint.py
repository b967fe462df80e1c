"""Where secrets may be sent: to a server that is verified, over an encrypted connection, or within this machine."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from appliance.errors import ConfigError
from appliance.text import printable


def check_endpoint(url: str, where: str, *, verified: bool = True) -> None:
    """Check the address of a server to which keys and tokens are sent.

    Args:
        where: what names it: a setting, a variable, a file.
        verified: whether its certificate is verified.

    Raises:
        ConfigError: it is neither on this machine nor encrypted and verified.
    """
    if is_local(url):
        return
    shown = printable(url, 200)
    if not url.lower().startswith("https://"):
        raise ConfigError(
            f"{where}: {shown}: keys and tokens would be sent unencrypted",
            hint="use an https URL; or one of this machine, such as an agent, or a tunnel of ssh, on 127.0.0.1",
        )
    if not verified:
        raise ConfigError(
            f"{where}: {shown}: the certificate is not verified: another machine could get keys and tokens",
            hint="name the CA that signed the certificate, and do not skip the verification",
        )


def is_local(url: str) -> bool:
    """Return whether a URL leads to this machine: its loopback, or a Unix socket."""
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme == "unix" or host == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
