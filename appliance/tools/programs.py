"""Which programs a host has."""

from __future__ import annotations

from appliance.host.base import Host

FIND = 'for p; do command -v "$p" >/dev/null || echo "$p"; done'


def find_missing(host: Host, *names: str) -> list[str]:
    """Those of the named programs that are not in the host's path, in their order."""
    return host.run("sh", "-c", FIND, "find", *names, ok=None).text.split()


def has_program(host: Host, name: str) -> bool:
    """Whether a program is in the host's path."""
    return not find_missing(host, name)
