"""Wire format between the coordinator of a migration and the agents on its source and target.

4 bytes the length of a message, then the message as a JSON object; its field `bytes` is the number of bytes after it
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct(">I")
MAX_MESSAGE_BYTES = 1 << 20
"""Without the bytes that follow the message."""
MAX_BODY_BYTES = 1 << 30
"""Of the bytes that follow a message, which are kept in memory: the digests of an overlay of 2 TiB."""

Message = dict[str, Any]


class WireError(ValueError):
    """The data received is not a frame."""


def pack_message(message: Message, size: int = 0) -> bytes:
    """Return a message's frame; ``size`` bytes are to follow it."""
    text = json.dumps({**message, "bytes": size}).encode()
    return LENGTH.pack(len(text)) + text


def read_message(read: Callable[[int], bytes], kind: str) -> Message:
    """Read the next message. The bytes that follow it are left to the caller (``count_bytes``).

    Args:
        read: returns the given number of bytes, or raises.
        kind: the field that names the message's kind.

    Raises:
        WireError: the data is not a message.
    """
    (length,) = LENGTH.unpack(read(LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {length} bytes")
    try:
        message = json.loads(read(length))
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get(kind), str):
        raise WireError("an invalid message")
    return message


def count_bytes(message: Message) -> int:
    """Return the number of bytes that follow a message.

    Raises:
        WireError: it is invalid.
    """
    size = message.get("bytes", 0)
    if type(size) is not int or not 0 <= size <= MAX_BODY_BYTES:
        raise WireError(f"{str(size)[:20]} bytes")
    return size
