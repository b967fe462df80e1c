"""Digests of files on a host."""

from __future__ import annotations

import re

from appliance.host.base import Host, OddOutput

# Python uses OpenSSL with the CPU's SHA instructions: sha256sum may take more than three times as long.
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
"""Exit status of ``PROGRAM`` if the file does not exist."""


def find_digest(host: Host, path: str, *, needed: bool = True, timeout: float = 600) -> str:
    """Return the SHA-256 digest of a file in hexadecimal.

    Args:
        needed: raise an error if the file does not exist, instead of returning "".
        timeout: in seconds.

    Raises:
        CommandError: the file cannot be read, or is needed and does not exist.
        SmsError: the host answers with something else.
    """
    ok = (0,) if needed else (0, MISSING)
    result = host.run("python3", "-I", "-S", "-c", PROGRAM, path, ok=ok, timeout=timeout)
    if not is_digest(result.text) and not (result.status == MISSING and not result.text):
        raise OddOutput(result, "it is not a digest")
    return result.text


def is_digest(text: str) -> bool:
    """Return whether a text is a SHA-256 digest in hexadecimal: names of files on other hosts contain it."""
    return bool(re.fullmatch("[0-9a-f]{64}", text))
