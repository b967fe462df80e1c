"""The lease: who may write the overlay and hold the addresses. Pure decisions over one small file.

The generation only ever grows: a host that comes back and finds a higher one than its own knows
that somebody else has taken over meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from appliance.errors import Refused, SmsError


@dataclass(frozen=True)
class Lease:
    """``holder`` is the admin host's name, None when it is free; ``since`` is Unix time, in seconds."""

    cluster: str
    generation: int = 0
    holder: str | None = None
    since: float = 0.0

    def text(self) -> bytes:
        """As it lies in its file."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def read_lease(data: bytes | None, cluster: str) -> Lease:
    """The lease of a file's bytes; a free one where there is no file.

    Raises:
        SmsError: the file is not a lease of this cluster.
    """
    if data is None:
        return Lease(cluster)
    try:
        lease = Lease(**json.loads(data))
        fine = lease.cluster == cluster and int(lease.generation) >= 0
    except (ValueError, TypeError) as error:
        raise SmsError(
            f"the lease file cannot be read: {error}", hint="see what is in it before you remove it"
        ) from error
    if not fine:
        raise SmsError(
            f"the lease file is of cluster {lease.cluster}", hint="do two clusters share one overlay folder?"
        )
    return lease


def take(lease: Lease, holder: str, *, now: float) -> Lease:
    """The lease, taken by ``holder``, who may have it already.

    Raises:
        Refused: another host holds it.
    """
    if lease.holder not in (None, holder):
        raise Refused(
            f"{lease.holder} holds the lease (generation {lease.generation})",
            hint=f"stop the appliance there first: sms stop --host {lease.holder}",
        )
    return replace(lease, generation=lease.generation + 1, holder=holder, since=now)


def release(lease: Lease, holder: str, *, now: float) -> Lease:
    """The lease, free, if ``holder`` has it; else as it is."""
    return replace(lease, holder=None, since=now) if lease.holder == holder else lease


def digest(data: bytes | None) -> str:
    """What the lease file must still hold when it is replaced."""
    return "none" if data is None else hashlib.sha256(data).hexdigest()
