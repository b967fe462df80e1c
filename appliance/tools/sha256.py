"""Digests of files on a host."""

from __future__ import annotations

from appliance.host.base import Host

# OpenSSL's, with the processor's own instructions where it has them: sha256sum takes more than three times as long.
PROGRAM = """\
import hashlib, sys
digest = hashlib.sha256()
try:
    stream = open(sys.argv[1], "rb", 0)
except FileNotFoundError:
    sys.exit(44)
for block in iter(lambda: stream.read(1 << 20), b""):
    digest.update(block)
print(digest.hexdigest())
"""
MISSING = 44
"""Its exit status where there is no such file."""


def find_digest(host: Host, path: str, *, needed: bool = True, timeout: float = 600) -> str:
    """The SHA-256 digest of a file, in hexadecimal.

    Args:
        needed: it must be there; else "" is given where it is not.
        timeout: seconds.

    Raises:
        CommandError: it cannot be read, or it is needed and not there.
    """
    ok = (0,) if needed else (0, MISSING)
    return host.run("python3", "-I", "-S", "-c", PROGRAM, path, ok=ok, timeout=timeout).text
