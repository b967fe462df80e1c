"""The lease file: which host may write the overlay. Its text form, and the only way to write it.

Written by verbs and guards (operations/lease.py) and by the agents of a migration (agent/host_state.py).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Optional

from appliance.shared.files import ALWAYS, make_folder, open_regular, replace_file
from appliance.shared.identity import UUID
from appliance.shared.locks import Locked, hold_lock

MAX_GENERATION = 1 << 40
"""Enough for a million failovers a day for three years; also the limit of the sequence number."""
LAST_GENERATION = 1 << 31
"""Of a snapshot: a million failovers. A larger one would make its snapshot the latest forever."""
LAST_RAISING = LAST_GENERATION // 2
"""Generation up to which a snapshot, a history or a remote copy raises what this host takes next. They may come from
another host: what this host takes afterwards must remain valid there."""
MAX_TIME = 1 << 36
"""Unix time in the year 4147; one beyond the year 9999 cannot be shown."""
MAX_NAME_LENGTH = 255
"""Characters of a name."""
MAX_FILE = 1 << 16
"""Bytes that are read of a file."""

ENGINE = "engine:"
"""Before the name of an engine that has the services, as the holder: no admin host has such a name."""

WRITTEN, SAME, LOST_RACE, BUSY = "written", "same", "lost", "busy"
"""Outcomes of a write: done; this run has written the same file already, under another host's name; the file has
changed; another run holds its lock."""


@dataclass(frozen=True)
class Lease:
    """The contents of a lease file.

    ``holder`` is the name of an admin host, or that of an engine behind ``ENGINE``, None when the lease is free;
    ``since`` is Unix time in seconds, 0 if it was never taken; ``file`` is the admin host that the file belongs to. A
    copy in another host's folder has that host's name: the holder's overlay is not in that folder. Empty: not known.
    ``last`` is the host that released it; empty: not known. Where a deployment gave the lease to an engine, without the
    state of a services container, it is the host with the newest overlay, or that engine. ``sequence`` is the number of
    the last snapshot that the file's host began to take. ``cluster_uuid`` and ``adopted``: the identity of the cluster
    (shared/identity.py). ``floor``: generation of a snapshot that the file's host has pulled or restored; the lease is
    taken above it. It does not show that any host has taken it.
    """

    cluster: str
    generation: int = 0
    holder: str | None = None
    since: float = 0.0
    file: str = ""
    last: str = ""
    sequence: int = 0
    cluster_uuid: str = ""
    adopted: int = 0
    floor: int = 0

    @property
    def taker(self) -> str:
        """The host that took this generation, whether it holds it still or has released it; empty: not known."""
        return self.holder or self.last

    @property
    def engine(self) -> str:
        """The engine that has the services; empty where an admin host may have them."""
        before, name, after = (self.holder or "").partition(ENGINE)
        return after if name and not before else ""

    def with_identity_of(self, other: Lease) -> Lease:
        """Return this lease; without a UUID, with that of ``other``. No write removes a cluster's UUID."""
        if self.cluster_uuid or not other.cluster_uuid:
            return self
        return replace(self, cluster_uuid=other.cluster_uuid, adopted=other.adopted)

    def written_over(self, other: Lease) -> Lease:
        """Return this lease as it replaces ``other`` in a file: no write removes a UUID, or lowers the floor."""
        return replace(self.with_identity_of(other), floor=max(self.floor, other.floor))

    def text(self) -> bytes:
        """Return the contents of the file."""
        facts = asdict(self)
        for name in ("file", "last", "sequence", "cluster_uuid", "adopted", "floor"):
            if not facts[name]:
                del facts[name]
        return (json.dumps(facts, indent=1) + "\n").encode()


def parse_lease(data: bytes) -> Lease:
    """Return the lease of a file's bytes. They are not trusted: another host may have written them.

    Unknown fields are ignored: a newer version wrote them.

    Raises:
        ValueError, TypeError: they are not a lease.
    """
    found = read_object(data)
    lease = Lease(**{field.name: found[field.name] for field in fields(Lease) if field.name in found})
    check_fields(lease.generation, lease.since, (lease.cluster, lease.file, lease.last, lease.holder or "-"))
    for what, number in (("sequence", lease.sequence), ("adopted", lease.adopted), ("floor", lease.floor)):
        if type(number) is not int or not 0 <= number <= MAX_GENERATION:
            raise ValueError(f"{what} {str(number)[:20]!r}")
    if lease.cluster_uuid and not UUID.fullmatch(lease.cluster_uuid):
        raise ValueError(f"cluster_uuid {str(lease.cluster_uuid)[:40]!r}")
    return lease


def read_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a lease file of any kind.

    Raises:
        ValueError, TypeError: there is none.
    """
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise TypeError("it is not an object")
    return found


def check_fields(generation: object, since: object, names: Sequence[object]) -> None:
    """Check what leases of all kinds have.

    Raises:
        ValueError: it is not a generation, a time or a name.
    """
    if type(generation) is not int or not 0 <= generation <= MAX_GENERATION:
        raise ValueError(f"generation {str(generation)[:20]!r}")
    if not isinstance(since, (int, float)) or isinstance(since, bool) or not 0 <= since < MAX_TIME:  # not NaN
        raise ValueError(f"since {str(since)[:20]!r} is not a time")
    for name in names:
        if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise ValueError(f"{str(name)[:20]!r} is not a name")


def digest(data: bytes | None) -> str:
    """Return the digest that a lease file must still have when it is replaced (compare and swap)."""
    return "none" if data is None else hashlib.sha256(data).hexdigest()


def read_file(path: str) -> bytes | None:
    """Return the bytes of a lease file, of ``MAX_FILE`` at most; None where there is none.

    Raises:
        OSError: it cannot be read, or is not a file: a pipe would keep the caller waiting.
    """
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as stream:
        data = stream.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise OSError("%s has more than %d bytes" % (path, MAX_FILE))
    return data


def peek(data: bytes | None) -> tuple[int, str]:
    """Return generation and holder in a lease file's bytes, also of a lease that a newer version wrote.

    0 and empty where there is none, or where they are not a lease.
    """
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return 0, ""
    generation, holder = found.get("generation"), found.get("holder")
    return generation if type(generation) is int else 0, holder if isinstance(holder, str) else ""


@dataclass(frozen=True)
class SwapLease:
    """Replace lease file ``path`` by ``text``, under the file's lock, if it is still as the writer knows it.

    A generation is never lowered. An unreadable file counts as generation 0: only a writer that does not require a
    ``digest``, such as the agent of a migration, replaces it; the file's sequence number and UUID are then kept.

    ``digest``: that the file must have; empty: any. ``generation``: that the file must have; None: any.
    ``written``: digests of what this run has written for other hosts. A file with one of them is the same file, in a
    folder that hosts share, and only the text of the writer's ``own`` host replaces it. ``wait_s``: for the lock.
    ``locked``: the caller holds the lock.
    """

    path: str
    text: str
    digest: str = ""
    generation: Optional[int] = None
    written: tuple[str, ...] = ()
    own: bool = True
    wait_s: float = 0.0
    locked: bool = False

    def perform(self, may_commit: AbstractContextManager[bool] = ALWAYS) -> str:
        """Return the outcome.

        Args:
            may_commit: as for ``replace_file``; where it forbids the write, the outcome is ``BUSY``.

        Raises:
            OSError: the file cannot be written; it is unchanged.
        """
        make_folder(os.path.dirname(self.path), 0o700)
        try:
            with _locked(self.path, wait_s=self.wait_s, by_caller=self.locked):
                data = read_file(self.path)
                found, generation, new = digest(data), peek(data)[0], self.text.encode()
                if not self.digest:
                    new = _keep(data, new)
                if found in self.written and not self.own:
                    return SAME
                if self.digest and found not in (self.digest, *self.written):
                    return LOST_RACE
                if self.generation not in (None, generation) or peek(new)[0] < generation:
                    return LOST_RACE
                return WRITTEN if replace_file(self.path, new, may_commit=may_commit) else BUSY
        except Locked:
            return BUSY


def _locked(path: str, *, wait_s: float, by_caller: bool) -> AbstractContextManager[None]:
    return nullcontext() if by_caller else hold_lock(path + ".lock", wait_s=wait_s)


def _keep(old: bytes | None, new: bytes) -> bytes:
    """Return the new contents of a file, with the UUID of the old ones, and their sequence number if it is higher."""
    try:
        before, after = parse_lease(old or b""), parse_lease(new)
    except (ValueError, TypeError):
        return new
    return replace(after.written_over(before), sequence=max(before.sequence, after.sequence)).text()


def advance_sequence(path: str, used: int, *, wait_s: float = 0.0, locked: bool = False) -> int:
    """Return the next sequence number: above that in lease file ``path`` and above ``used``; the file has it then.

    It is on the disk when this returns. Where there is no file none is created: a lost lease must stay recognizable.

    Args:
        used: the highest one known from snapshots.
        wait_s: seconds to wait for the file's lock.
        locked: the caller holds the lock.

    Raises:
        Locked: another run holds the lock.
        OSError: the file cannot be written.
        ValueError, TypeError: it is not a lease.
    """
    with _locked(path, wait_s=wait_s, by_caller=locked):
        data = read_file(path)
        if data is None:
            return used + 1
        lease = parse_lease(data)
        number = max(lease.sequence, used) + 1
        replace_file(path, replace(lease, sequence=number).text())
        return number
