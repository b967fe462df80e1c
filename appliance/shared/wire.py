"""Frames between a migration and the agents at both its ends.

4 bytes the length of a message, the message as a JSON object; its `bytes` says how many bytes follow it
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct(">I")
LONGEST = 1 << 20
"""Bytes of a message, without what follows it."""
MOST_BYTES = 1 << 34
"""Of what follows one."""

Message = dict[str, Any]


class WireError(ValueError):
    """What came is not a frame."""


def pack_message(message: Message, size: int = 0) -> bytes:
    """A message as it is sent; ``size`` bytes follow it."""
    text = json.dumps({**message, "bytes": size}).encode()
    return LENGTH.pack(len(text)) + text


def read_message(read: Callable[[int], bytes], kind: str) -> Message:
    """The next message, whose field ``kind`` says what it is; what follows it is left to ``count_bytes``.

    Args:
        read: gives so many bytes, or raises.

    Raises:
        WireError: it is not one.
    """
    (length,) = LENGTH.unpack(read(LENGTH.size))
    if length > LONGEST:
        raise WireError(f"a message of {length} bytes")
    try:
        message = json.loads(read(length))
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get(kind), str):
        raise WireError("an invalid message")
    return message


def count_bytes(message: Message) -> int:
    """How many bytes follow a message.

    Raises:
        WireError: no number of bytes.
    """
    size = message.get("bytes", 0)
    if type(size) is not int or not 0 <= size <= MOST_BYTES:
        raise WireError(f"{str(size)[:20]} bytes")
    return size
