"""OpenPGP public keys (RFC 4880, RFC 9580) that packages are verified with: checked, and written in ASCII armour."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator

BLOCK = re.compile(
    rb"-----BEGIN PGP PUBLIC KEY BLOCK-----[ \t]*\r?\n(?P<body>.*?)\r?\n-----END PGP PUBLIC KEY BLOCK-----", re.DOTALL
)
LARGEST_B = 1 << 20
PUBLIC_KEY, USER_ID, SIGNATURE = 6, 13, 2
ALLOWED = frozenset({SIGNATURE, PUBLIC_KEY, 10, 12, USER_ID, 14, 17, 21})
"""Packets of a public key: signatures, keys and subkeys, markers, trust, user ids and attributes, padding."""


class KeyProblem(ValueError):
    """A file is not a public key."""


def read_keys(data: bytes) -> tuple[bytes, tuple[str, ...]]:
    """Return the keys of a file in ASCII armour, and their fingerprints in hexadecimal.

    Raises:
        KeyProblem: it contains anything but public keys.
    """
    if len(data) > LARGEST_B:
        raise KeyProblem("it is larger than 1 MiB")
    if b"PRIVATE KEY" in data:
        raise KeyProblem("it contains a private key")
    armored = b"-----BEGIN" in data
    binary = b"".join(_unarmor(found["body"]) for found in BLOCK.finditer(data)) if armored else data
    fingerprints = []
    for number, (tag, body) in enumerate(_packets(binary)):
        if tag in (5, 7):
            raise KeyProblem("it contains a private key")
        if tag not in ALLOWED or (not number and tag != PUBLIC_KEY):
            raise KeyProblem("it is not an OpenPGP public key")
        if tag == PUBLIC_KEY:
            fingerprints.append(_fingerprint(body))
    if not fingerprints:
        raise KeyProblem("it is not an OpenPGP public key")
    return _armor(binary), tuple(fingerprints)


def _unarmor(body: bytes) -> bytes:
    lines = [line.strip() for line in body.splitlines()]
    # Headers such as Version: end with an empty line.
    start = lines.index(b"") + 1 if b"" in lines else 0
    text = b"".join(line for line in lines[start:] if not line.startswith(b"="))
    sums = [line[1:] for line in lines[start:] if line.startswith(b"=")]
    try:
        data = base64.b64decode(text, validate=True)
        if sums and base64.b64decode(sums[-1], validate=True) != _crc24(data):
            raise KeyProblem("its checksum is wrong")
    except ValueError as error:
        raise error if isinstance(error, KeyProblem) else KeyProblem("its ASCII armour is damaged") from None
    return data


def _armor(data: bytes) -> bytes:
    text = base64.b64encode(data)
    lines = [text[at : at + 64] for at in range(0, len(text), 64)]
    begin, end = (b"-----%s PGP PUBLIC KEY BLOCK-----" % word for word in (b"BEGIN", b"END"))
    return b"\n".join([begin, b"", *lines, b"=" + base64.b64encode(_crc24(data)), end, b""])


def _crc24(data: bytes) -> bytes:
    crc = 0xB704CE
    for byte in data:
        crc ^= byte << 16
        for _ in range(8):
            crc <<= 1
            if crc & 0x1000000:
                crc ^= 0x1864CFB
    return crc.to_bytes(3, "big")


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and body of each packet.

    Raises:
        KeyProblem: the data is not a sequence of packets of known length.
    """
    at = 0
    while at < len(data):
        tag, header, length = _read_header(data[at : at + 6])
        body = data[at + header : at + header + length]
        if len(body) != length:
            raise KeyProblem("it is truncated")
        yield tag, body
        at += header + length


def _read_header(start: bytes) -> tuple[int, int, int]:
    """Return tag, length of the header, and length of the body."""
    first = start[0]
    if not first & 0x80 or len(start) < 2:
        raise KeyProblem("it is not an OpenPGP public key")
    if first & 0x40:
        tag, octet = first & 0x3F, start[1]
        if octet < 192:
            return tag, 2, octet
        if octet < 224 and len(start) > 2:
            return tag, 3, ((octet - 192) << 8) + start[2] + 192
        if octet == 255 and len(start) > 5:
            return tag, 6, int.from_bytes(start[2:6], "big")
        raise KeyProblem("it is not an OpenPGP public key")
    size = (1, 2, 4, 0)[first & 3]
    if not size or len(start) <= size:
        raise KeyProblem("it is not an OpenPGP public key")
    return first >> 2 & 0x0F, 1 + size, int.from_bytes(start[1 : 1 + size], "big")


def _fingerprint(body: bytes) -> str:
    version = body[:1]
    if version == b"\x04":
        return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest()
    if version == b"\x06":
        return hashlib.sha256(b"\x9b" + len(body).to_bytes(4, "big") + body).hexdigest()
    raise KeyProblem("it is not a key of version 4 or 6")
