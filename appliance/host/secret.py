"""Secrets that a program gets, and what it prints without them."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from urllib.parse import quote, quote_plus

REDACTED = b"[redacted]"
WITHHELD = b"[output withheld: it may have a secret]"
RUN = 8
"""Length of the shortest part of a secret that is redacted: what a program truncates is not shown either."""
SHORTEST = 4
"""Of a shorter secret no part of the output is shown: its letters are in each word."""
LARGEST = 1 << 14
"""Of larger secrets no part of the output is shown either: the comparison would take seconds."""
LAST_BYTES = 1 << 16
"""The part of an output that is searched and shown, from its end."""


class SecretInput(bytes):
    """Input of a command with secrets, which no message shows: ``Result`` redacts what the command prints."""

    secrets: tuple[bytes, ...]

    def __new__(cls, data: bytes, *secrets: bytes) -> SecretInput:
        """Create it. ``secrets``: those in the data, as they are before they are encoded; by default all of it."""
        new = super().__new__(cls, data)
        new.secrets = tuple(filter(None, secrets)) if secrets else tuple(filter(None, (data,)))
        return new


def secrets_of(data: bytes | None) -> tuple[bytes, ...]:
    """Return the secrets of an input."""
    return data.secrets if isinstance(data, SecretInput) else ()


def redact(output: bytes, secrets: Sequence[bytes]) -> bytes:
    """Return the end of an output without secrets, and without parts of them, in all encodings of ``_forms``.

    Encodings are compared letter by letter, and again by their letters and digits alone: so line breaks, quotes,
    padding, and the alphabet of base64 make no difference.
    """
    if not secrets or not output:
        return output
    secrets = tuple(secrets)
    if any(len(each) < SHORTEST for each in secrets) or sum(map(len, secrets)) > LARGEST:
        return WITHHELD
    text = output[-LAST_BYTES:].decode("latin-1")
    hidden = bytearray(len(text))
    exact, short, plain = _patterns(secrets)
    for word in short:
        at = text.find(word)
        while at >= 0:
            hidden[at : at + len(word)] = b"\1" * len(word)
            at = text.find(word, at + 1)
    for start in _runs(text, exact):
        hidden[start : start + RUN] = b"\1" * RUN
    places = [at for at, letter in enumerate(text) if letter.isascii() and letter.isalnum()]
    for start in _runs("".join(text[at] for at in places), plain):
        first, last = places[start], places[start + RUN - 1]
        hidden[first : last + 1] = b"\1" * (last + 1 - first)
    return _without(text, hidden)


def redact_text(text: str, secrets: Sequence[str | bytes]) -> str:
    """Return ``redact`` of a text."""
    given = [each.encode() if isinstance(each, str) else each for each in secrets]
    return redact(text.encode(errors="surrogateescape"), [each for each in given if each]).decode(errors="replace")


def _without(text: str, hidden: bytearray) -> bytes:
    parts, at = [], 0
    while at < len(text):
        end = hidden.find(not hidden[at], at)
        end = len(text) if end < 0 else end
        parts.append(REDACTED if hidden[at] else text[at:end].encode("latin-1"))
        at = end
    return b"".join(parts)


def _runs(text: str, known: frozenset[str]) -> Iterator[int]:
    """Yield where a part of a secret begins."""
    return (at for at in range(len(text) - RUN + 1) if text[at : at + RUN] in known) if known else iter(())


@lru_cache(maxsize=4)
def _patterns(secrets: tuple[bytes, ...]) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return parts of the encodings of secrets, whole encodings that are shorter, and parts by letters and digits."""
    exact: set[str] = set()
    short: set[str] = set()
    plain: set[str] = set()
    for form in {form for secret in secrets for form in _forms(secret)}:
        letters = "".join(letter for letter in form if letter.isascii() and letter.isalnum())
        exact.update(form[at : at + RUN] for at in range(len(form) - RUN + 1))
        plain.update(letters[at : at + RUN] for at in range(len(letters) - RUN + 1))
        if SHORTEST <= len(form) < RUN:
            short.add(form)
    return frozenset(exact), frozenset(short), frozenset(plain)


def _forms(secret: bytes) -> Iterator[str]:
    """Yield a secret as programs print it, and the stripped one: each as text of one letter per byte."""
    for data in {secret, secret.strip()} - {b""}:
        yield from _quoted(data)
        whole, *parts = _base64(data)
        yield from (each.decode() for each in parts)
        for each in (whole, base64.urlsafe_b64encode(data)):
            yield from (each.decode(), _in_url(each.decode()))
            # An encoded request that has the encoded secret.
            yield from (inner.decode() for inner in _base64(each))


def _base64(data: bytes) -> Iterator[bytes]:
    """Yield base64 of data that stands alone, and within other data: the letters that are only its own."""
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(data)
        for before in (1, 2):
            yield encode(bytes(before) + data)[before + 1 :].rstrip(b"=")[:-1]
        yield encode(data).rstrip(b"=")[:-1]


def _quoted(data: bytes) -> Iterator[str]:
    text = data.decode("utf-8", "surrogateescape")
    yield data.decode("latin-1")
    for change in _QUOTES:
        yield change(text).encode("utf-8", "surrogateescape").decode("latin-1")
    yield from (data.hex(), data.hex().upper(), repr(data)[2:-1], " ".join(map(str, data)))
    yield "".join(f"\\x{byte:02x}" for byte in data)
    yield "".join(f"\\{byte:03o}" for byte in data)


def _in_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _in_json_utf8(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _in_url(text: str) -> str:
    return quote(text, safe="", errors="surrogateescape")


def _in_query(text: str) -> str:
    return quote_plus(text, errors="surrogateescape")


def _in_go(text: str) -> str:
    """Return text as Go's encoding/json writes it."""
    return _in_json_utf8(text).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _in_replaced(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


_QUOTES: tuple[Callable[[str], str], ...] = (
    _in_json,
    _in_json_utf8,
    _in_go,
    _in_url,
    _in_query,
    shlex.quote,
    _in_replaced,
)
