"""The resolver of a host, for many names at once."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.host.base import Host
from appliance.tools.scripts import python_argv

WAIT_S, PER_S = 3, 500
"""Seconds that names may take together, and how many more a second."""


def resolve(host: Host, names: Sequence[str]) -> str:
    """Return what ``definitions/scripts/resolve-names`` prints: a line for each name that has IPv4 addresses."""
    wait_s = WAIT_S + len(names) // PER_S
    argv = python_argv("resolve-names", str(wait_s))
    return host.run(*argv, input="\n".join(names).encode(), timeout=wait_s + 30).stdout.decode(errors="replace")
