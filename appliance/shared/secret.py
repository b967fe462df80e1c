"""Secrets that a program gets, and what it prints without them. Also used by the agent."""

import base64
import binascii
import io
import json
import re
import shlex
import tarfile
from typing import Callable, Iterator, List, Optional, Sequence, Set, Tuple, Union
from urllib.parse import quote, quote_plus

REDACTED = b"[redacted]"
WITHHELD = b"[output withheld: it may have a secret]"
UNKNOWN = b"\0"
"""Stands for the secret that a program reads: of its output nothing is shown."""
RUN = 8
"""Length of the shortest part of a secret that is redacted: what a program truncates is not shown either."""
SHORTEST = 4
"""Of a shorter secret no part of the output is shown: its letters are in each word."""
LARGEST = 1 << 15
"""Of larger secrets no part of the output is shown either: the comparison would take seconds."""
LAST_BYTES = 1 << 16
"""The part of an output that is searched and shown, from its end."""
PASSWORD = re.compile(rb"(?im)^[ \t]*\w*(?:authtok|passw|secret|token)\w*[ \t]*=[ \t]*(\S.*?)[ \t\r]*$")
"""A password in a file of settings, such as sssd.conf."""
HASH = re.compile(rb"(?m)^[^:\n]*:([^:\n]{4,}):")
"""A password's hash in shadow(5)."""
OTHER = re.compile("[^A-Za-z0-9]+")
CERTIFICATE = b"-----BEGIN CERTIFICATE-----"


class SecretInput(bytes):
    """Input of a command with secrets, which no message shows: ``Result`` redacts what the command prints."""

    secrets: Tuple[bytes, ...]

    def __new__(cls, data: bytes, *secrets: bytes) -> "SecretInput":
        """Create it. ``secrets``: those in the data, as they are before they are encoded; by default all of it."""
        new = super().__new__(cls, data)
        new.secrets = tuple(filter(None, secrets or (bytes(data),)))
        return new


READS_SECRET = SecretInput(b"", UNKNOWN)
"""Empty input of a program that reads a secret."""


def secrets_of(data: Optional[bytes]) -> Tuple[bytes, ...]:
    """Return the secrets of an input."""
    return data.secrets if isinstance(data, SecretInput) else ()


def secret_archive(data: bytes) -> SecretInput:
    """Return a tar archive with the secrets of its files that only their owner may read; of other data, all of it."""
    found: List[bytes] = []
    new = SecretInput(data)
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() and not member.mode & 0o077 else None
                if content:
                    found += secret_parts(member.name, content.read())
    except tarfile.TarError:
        return new
    new.secrets = tuple(found)
    return new


def secret_parts(path: str, data: bytes) -> Sequence[bytes]:
    """Return what of a private file is secret: of shadow the hashes, of settings the passwords, else all of it."""
    if path.endswith("shadow"):
        return HASH.findall(data)
    if path.endswith(".conf"):
        return PASSWORD.findall(data)
    return () if not data or data.startswith(CERTIFICATE) else (data,)


def redact(output: bytes, secrets: Sequence[bytes]) -> bytes:
    """Return the end of an output without secrets, and without parts of them, in all encodings of ``_forms``.

    Encodings are compared letter by letter, and again by their letters and digits alone: so line breaks, quotes,
    padding, and the alphabet of base64 make no difference.
    """
    if not secrets or not output:
        return output
    if any(len(each) < SHORTEST for each in secrets) or sum(map(len, secrets)) > LARGEST:
        return WITHHELD
    text = output[-LAST_BYTES:].decode("latin-1")
    places = [at for at, letter in enumerate(text) if _is_plain(letter)]
    letters = "".join(text[at] for at in places)
    in_text, in_letters, short = _parts(text), _parts(letters), set()
    exact: Set[str] = set()
    plain: Set[str] = set()
    for form in {form for secret in set(secrets) for form in _forms(secret)}:
        exact.update(filter(in_text.__contains__, _parts(form)))
        plain.update(filter(in_letters.__contains__, _parts(OTHER.sub("", form))))
        if SHORTEST <= len(form) < RUN:
            short.add(form)
    hidden = bytearray(len(text))
    for word in (*short, *exact):
        at = text.find(word)
        while at >= 0:
            hidden[at : at + len(word)] = b"\1" * len(word)
            at = text.find(word, at + 1)
    for word in plain:
        at = letters.find(word)
        while at >= 0:
            first, last = places[at], places[at + RUN - 1]
            hidden[first : last + 1] = b"\1" * (last + 1 - first)
            at = letters.find(word, at + 1)
    return _without(text, hidden)


def redact_text(text: str, secrets: Sequence[Union[str, bytes]]) -> str:
    """Return ``redact`` of a text."""
    given = [each.encode() if isinstance(each, str) else each for each in secrets if each]
    return redact(text.encode(errors="surrogateescape"), given).decode(errors="replace") if given else text


def _is_plain(letter: str) -> bool:
    return letter.isascii() and letter.isalnum()


def _parts(text: str) -> Set[str]:
    return {text[at : at + RUN] for at in range(len(text) - RUN + 1)}


def _without(text: str, hidden: bytearray) -> bytes:
    parts, at = [], 0
    while at < len(text):
        end = hidden.find(not hidden[at], at)
        end = len(text) if end < 0 else end
        parts.append(REDACTED if hidden[at] else text[at:end].encode("latin-1"))
        at = end
    return b"".join(parts)


def _forms(secret: bytes) -> Iterator[str]:
    """Yield a secret as programs print it, each as text of one letter per byte: stripped, and decoded, as well."""
    for data in {secret, secret.strip(), _decoded(secret)} - {b""}:
        yield from _quoted(data)
        whole, *parts = _base64(data)
        yield from (each.decode() for each in parts)
        for each in (whole, base64.urlsafe_b64encode(data)):
            yield from (each.decode(), _in_url(each.decode()))
            # An encoded request that has the encoded secret.
            yield from (inner.decode() for inner in _base64(each))


def _decoded(secret: bytes) -> bytes:
    try:
        return base64.b64decode(secret.strip(), validate=True)
    except binascii.Error:
        return b""


def _base64(data: bytes) -> Iterator[bytes]:
    """Yield base64 of data that stands alone, and within other data: the letters that are only its own."""
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(data)
        for before in (1, 2):
            yield encode(bytes(before) + data)[before + 1 :].rstrip(b"=")[:-1]
        yield encode(data).rstrip(b"=")[:-1]


def _quoted(data: bytes) -> Iterator[str]:
    yield data.decode("latin-1")
    for text in {data.decode("utf-8", "surrogateescape"), data.decode("utf-8", "replace"), data.decode("latin-1")}:
        for change in _QUOTES:
            yield change(text).encode("utf-8", "surrogateescape").decode("latin-1")
    yield from (data.hex(), data.hex().upper(), repr(data)[2:-1], " ".join(map(str, data)))
    yield "".join(f"\\x{byte:02x}" for byte in data)
    yield "".join(f"\\{byte:03o}" for byte in data)


def _in_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _in_json_utf8(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _in_go(text: str) -> str:
    """Return text as Go's encoding/json writes it."""
    return _in_json_utf8(text).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _in_url(text: str) -> str:
    return quote(text, safe="", errors="surrogateescape")


def _in_query(text: str) -> str:
    return quote_plus(text, errors="surrogateescape")


_QUOTES: Tuple[Callable[[str], str], ...] = (str, _in_json, _in_json_utf8, _in_go, _in_url, _in_query, shlex.quote)
"""Changes of text by programs; ``str`` changes nothing."""
