"""The resolver of a host, for many names at once."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.host.base import Host
from appliance.tools.scripts import python_argv

WAIT_S = 3
"""Seconds that all names together may take."""


def resolve(host: Host, names: Sequence[str]) -> str:
    """Return what ``definitions/scripts/resolve-names`` prints: a line for each name that has IPv4 addresses."""
    argv = python_argv("resolve-names", str(WAIT_S))
    return host.run(*argv, input="\n".join(names).encode(), timeout=WAIT_S + 30).stdout.decode(errors="replace")
