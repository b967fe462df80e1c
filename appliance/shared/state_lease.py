"""The lease of a folder with state on an engine: its text form. `sms-run --jobsync` and `sms-lease` write it.

The rules are those of definitions/runtime/smslease.py, which is in the image; `sms-lease` is how others change one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from appliance.shared.lease import check_fields, read_object

LEASE_FILE, LOCK_FILE = ".sms-lease", ".sms-lock"
"""Their names in the folder with the state. They do not belong to the state: who copies that leaves them out."""


@dataclass(frozen=True)
class StateLease:
    """The contents of the file.

    Attributes:
        generation: raised by each task that takes it, and by each move.
        holder: task that may write the state; None when it is free.
        since: Unix time in seconds at which it was taken.
        last: task that released it; empty: not known.
        moved: where the state was carried, such as ``container``; no task starts with it here.
        boot: of the host of ``holder``, or of ``last``.
        token: of one run of ``sms-run``.
    """

    generation: int = 0
    holder: str | None = None
    since: float = 0
    last: str = ""
    moved: str = ""
    boot: str = ""
    token: str = ""

    def text(self) -> bytes:
        """Return the contents of the file."""
        return (json.dumps(asdict(self), sort_keys=True) + "\n").encode()


def parse_state_lease(data: bytes) -> StateLease:
    """Return the lease of a file's bytes, or of what `sms-lease` prints. They are not trusted.

    Raises:
        ValueError, TypeError: they are not a lease.
    """
    found = read_object(data)
    lease = StateLease(**{field.name: found[field.name] for field in fields(StateLease) if field.name in found})
    names = (lease.last, lease.moved, lease.boot, lease.token, lease.holder or "-")
    check_fields(lease.generation, lease.since, names)
    return lease
