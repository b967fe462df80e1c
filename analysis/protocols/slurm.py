"""Decode the header of Slurm messages.

A message begins with its length (4 bytes, src/common/slurm_protocol_socket.c) and the header written by ``pack_header``
in src/common/slurm_protocol_pack.c: version, flags, until 21.08 an index, type (2 bytes each), length of the body
(4 bytes), all big-endian. Versions: src/common/slurm_protocol_common.h; types: src/common/msg_type.h, before that
slurm_protocol_defs.h.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

PING = 1008
TYPES = {
    1001: "REQUEST_NODE_REGISTRATION_STATUS",
    1002: "MESSAGE_NODE_REGISTRATION_STATUS",
    PING: "REQUEST_PING",
    1016: "RESPONSE_PING_SLURMD",
    1017: "REQUEST_ACCT_GATHER_UPDATE",
    4003: "REQUEST_SUBMIT_BATCH_JOB",
    4005: "REQUEST_BATCH_JOB_LAUNCH",
    6001: "REQUEST_LAUNCH_TASKS",
    6002: "RESPONSE_LAUNCH_TASKS",
    6003: "MESSAGE_TASK_EXIT",
    6011: "REQUEST_TERMINATE_JOB",
    6012: "MESSAGE_EPILOG_COMPLETE",
    8001: "RESPONSE_SLURM_RC",
}
_RELEASES = (
    *(
        "2.6",
        "14.03",
        "14.11",
        "15.08",
        "16.05",
        "17.02",
        "17.11",
        "18.08",
        "19.05",
        "20.02",
        "20.11",
        "21.08",
        "22.05",
    ),
    *("23.02", "23.11", "24.05", "24.11", "25.05", "25.11", "26.05", "26.11"),
)
OLDEST, WITHOUT_INDEX = 26, 38
"""High bytes of the protocol version: of 2.6, and of 22.05, the first without an index."""


@dataclass(frozen=True)
class SlurmMessage:
    """A message. ``release``: "22.05", or "protocol 47" if newer than this list."""

    version: int
    type: int

    @property
    def release(self) -> str:
        """Slurm release of this protocol version."""
        at = (self.version >> 8) - OLDEST
        return _RELEASES[at] if at < len(_RELEASES) else f"protocol {self.version >> 8}"

    @property
    def name(self) -> str:
        """Name of the type in Slurm's source."""
        return TYPES.get(self.type, f"type {self.type}")


def read_slurm(payload: bytes) -> SlurmMessage | None:
    """Decode the message at the start of a payload; None if it is not a Slurm message."""
    if len(payload) < 16:
        return None
    length, version = struct.unpack_from("!IH", payload)
    high, low = version >> 8, version & 255
    if low or not OLDEST <= high < OLDEST + 40 or not 10 <= length <= 1 << 30:
        return None
    (kind,) = struct.unpack_from("!H", payload, 8 if high >= WITHOUT_INDEX else 10)
    return SlurmMessage(version, kind) if 1000 <= kind < 12000 else None
