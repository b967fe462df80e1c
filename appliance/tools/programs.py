"""Find programs in a host's PATH."""

from __future__ import annotations

from appliance.host.base import Host

FIND = 'for p; do command -v "$p" >/dev/null || echo "$p"; done'
PATH_OF = 'command -v "$1"'


def find_missing(host: Host, *names: str) -> list[str]:
    """Return the programs that are not in the host's PATH, in the given order."""
    return host.run("sh", "-c", FIND, "find", *names, ok=None).text.split()


def find_program(host: Host, name: str) -> str:
    """Return the path of a program in the host's PATH; empty if there is none."""
    return host.run("sh", "-c", PATH_OF, "find", name, ok=None).text


def has_program(host: Host, name: str) -> bool:
    """Return whether a program is in the host's PATH."""
    return not find_missing(host, name)
