"""The Python of a host that our programs run with."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from appliance.errors import Refused
from appliance.host.base import Host

OLDEST = (3, 9)
"""Rocky 9's own; SLES and Leap 15 have it beside their 3.6, as package python311."""
# The system's own first: it knows the package manager, which Ansible's modules need.
FIND = """\
for name in /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9; do
    "$name" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null && exec echo "$name"
done
"""
"""Shell: the first of these that is not too old; nothing where none is."""
_found: WeakKeyDictionary[Host, str] = WeakKeyDictionary()


def find_python(host: Host) -> str:
    """The host's interpreter, looked for once in a run.

    Raises:
        Refused: the host has none that is new enough.
    """
    if host not in _found:
        name = host.run("sh", "-c", FIND, ok=None).text
        if not name:
            raise Refused(
                f"{host.name} has no Python {'.'.join(map(str, OLDEST))} or newer",
                hint="install python3 there (SLES 15: zypper install python311)",
            )
        _found[host] = name
    return _found[host]
