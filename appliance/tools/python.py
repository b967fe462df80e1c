"""Find the Python interpreter of a host for our programs."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from appliance.errors import Refused
from appliance.host.base import Host

OLDEST = (3, 9)
"""The version of Rocky 9. SLES and Leap 15 have 3.6, and 3.11 as package python311."""
# The system's interpreter first: it has the package manager's modules, which Ansible needs.
FIND = """\
for name in /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9; do
    "$name" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null && echo "$name" && break
done
"""
"""Shell script: print the first interpreter that is not too old."""
_found: WeakKeyDictionary[Host, str] = WeakKeyDictionary()


def find_python(host: Host, *, timeout: float = 60) -> str:
    """Return the host's interpreter; searched once per run, for at most ``timeout`` seconds.

    Raises:
        Refused: the host has none that is new enough.
    """
    if host not in _found:
        name = host.run("sh", "-c", FIND, ok=None, timeout=timeout).text
        if not name:
            raise Refused(
                f"{host.name} has no Python 3.9 or newer",
                hint="install python3 there (SLES 15: zypper install python311)",
            )
        _found[host] = name
    return _found[host]
