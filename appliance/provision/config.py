"""``/etc/sms/provision.json``: the configuration that the admin host passes to the VM at its start."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import ConfigError

LARGEST_B = 1 << 20
UNCHANGED = (
    *("address", "prefix", "cluster", "hostname", "unknown"),
    *("database", "socket", "socket_group", "token_s", "busy_s"),
)
"""Keys of the file that are fields of the configuration."""


@dataclass(frozen=True)
class Config:
    """The service's configuration; defaults are those of the VM."""

    address: str
    prefix: int = 24
    cluster: str = ""
    hostname: str = "sms-provision"
    gateway: str = ""
    services_address: str = ""
    services_hostname: str = ""
    database: str = "sqlite:////var/lib/sms-provision/inventory.db"
    state: Path = Path("/var/lib/sms-provision")
    tls: Path = Path("/etc/sms/tls")
    socket: str = "/run/sms-provision/api.sock"
    socket_group: str = "www-data"
    unknown: str = "refuse"
    pool: tuple[str, str] | None = None
    token_s: int = 600
    busy_s: float = 5.0
    neighbours: Path | None = None
    """A file in the format of /proc/net/arp, for tests; None: the kernel's table."""
    dns: tuple[str, ...] = ()
    """DNS servers that nodes use."""
    interval_s: int | None = None
    """Seconds between two polls of a client; None: the client's default."""

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        return ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False)

    @property
    def plain_url(self) -> str:
        """Base URL of kernels and images."""
        return f"http://{self.address}"

    @property
    def tls_url(self) -> str:
        """Base URL of everything that requires a certificate."""
        return f"https://{self.address}:8443"


def parse_config(document: Mapping[str, Any]) -> Config:
    """Return the configuration from the file's document; ConfigError lists every invalid key."""
    wrong = [f"{key}: {why}" for key, why in _errors(document)]
    if wrong:
        raise ConfigError(
            f"the service's configuration is invalid: {'; '.join(wrong)}", hint="`sms vm start` recreates it"
        )
    services = document.get("services") or {}
    interval = document.get("interval_s")
    return Config(
        **{key: document[key] for key in UNCHANGED if key in document},
        gateway=document.get("gateway") or "",
        services_address=services.get("address", ""),
        services_hostname=services.get("hostname", ""),
        state=Path(document.get("state", Config.state)),
        tls=Path(document.get("tls", Config.tls)),
        pool=tuple(document["pool"]) if document.get("pool") else None,
        neighbours=Path(document["neighbours"]) if document.get("neighbours") else None,
        dns=tuple(document.get("dns") or ()),
        interval_s=interval if isinstance(interval, int) else None,
    )


def _errors(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    try:
        ipaddress.ip_interface(f"{document.get('address')}/{document.get('prefix', 24)}")
    except ValueError as error:
        found.append(("address", str(error)))
    if document.get("unknown", "refuse") not in ("refuse", "discover"):
        found.append(("unknown", "refuse or discover"))
    pool = document.get("pool")
    if pool is not None and not (isinstance(pool, list) and len(pool) == 2):
        found.append(("pool", "the first and the last address"))
    elif pool:
        try:
            [ipaddress.ip_address(address) for address in pool]
        except ValueError as error:
            found.append(("pool", str(error)))
    for key, kind in (("token_s", int), ("busy_s", (int, float)), ("database", str), ("socket", str)):
        if key in document and not isinstance(document[key], kind):
            found.append((key, "has the wrong type"))
    return found


def read_config(path: Path) -> Config:
    """Read the configuration file; ConfigError if it cannot be read."""
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(LARGEST_B))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", hint="`sms vm start` recreates it") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a JSON object", hint="`sms vm start` recreates it")
    return parse_config(document)
