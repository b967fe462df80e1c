"""The lease file: which host may write the overlay. Its text form, and the only way to write it.

Written by verbs and guards (operations/lease.py) and by the agents of a migration (agent/endpoint.py).
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Optional

from appliance.shared.files import ALWAYS, make_folder, replace_file
from appliance.shared.locks import Locked, hold_lock

MAX_GENERATION = 1 << 40
"""Enough for a million failovers a day for three years."""
MAX_NAME_LENGTH = 255
"""Characters of a name."""

WRITTEN, SAME, LOST_RACE, BUSY = "written", "same", "lost", "busy"
"""Outcomes of a write: done; this run has written the same file already, under another host's name; the file has
changed; another run holds its lock."""


@dataclass(frozen=True)
class Lease:
    """The contents of a lease file.

    ``holder`` is the name of an admin host, None when the lease is free; ``since`` is Unix time in seconds; ``file`` is
    the admin host that the file belongs to. A copy in another host's folder has that host's name: the holder's overlay
    is not in that folder. Empty: not known.
    """

    cluster: str
    generation: int = 0
    holder: str | None = None
    since: float = 0.0
    file: str = ""

    def text(self) -> bytes:
        """Return the contents of the file."""
        facts = asdict(self)
        if not self.file:
            del facts["file"]
        return (json.dumps(facts, indent=1) + "\n").encode()


def parse_lease(data: bytes) -> Lease:
    """Return the lease of a file's bytes. They are not trusted: another host may have written them.

    Raises:
        ValueError, TypeError: they are not a lease.
    """
    lease = Lease(**json.loads(data))
    if type(lease.generation) is not int or not 0 <= lease.generation <= MAX_GENERATION:
        raise ValueError(f"generation {str(lease.generation)[:20]!r}")
    if not isinstance(lease.since, (int, float)):
        raise TypeError("since is not a time")
    for name in (lease.cluster, lease.file, lease.holder or "-"):
        if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise ValueError(f"{str(name)[:20]!r} is not a name")
    return lease


def digest(data: bytes | None) -> str:
    """Return the digest that a lease file must still have when it is replaced (compare and swap)."""
    return "none" if data is None else hashlib.sha256(data).hexdigest()


def read_file(path: str) -> bytes | None:
    """Return the bytes of a lease file; None where there is none."""
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


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
    ``digest``, such as the agent of a migration, replaces it.

    ``digest``: that the file must have; empty: any. ``generation``: that the file must have; None: any.
    ``written``: digests of what this run has written for other hosts. A file with one of them is the same file, in a
    folder that hosts share, and only the text of the writer's ``own`` host replaces it. ``wait_s``: for the lock.
    """

    path: str
    text: str
    digest: str = ""
    generation: Optional[int] = None
    written: tuple[str, ...] = ()
    own: bool = True
    wait_s: float = 0.0

    def perform(self, may_commit: AbstractContextManager[bool] = ALWAYS) -> str:
        """Return the outcome.

        Args:
            may_commit: as for ``replace_file``; where it forbids the write, the outcome is ``BUSY``.

        Raises:
            OSError: the file cannot be written; it is unchanged.
        """
        make_folder(os.path.dirname(self.path), 0o700)
        try:
            with hold_lock(self.path + ".lock", wait_s=self.wait_s):
                data = read_file(self.path)
                found, generation, new = digest(data), peek(data)[0], self.text.encode()
                if found in self.written and not self.own:
                    return SAME
                if self.digest and found not in (self.digest, *self.written):
                    return LOST_RACE
                if self.generation not in (None, generation) or peek(new)[0] < generation:
                    return LOST_RACE
                return WRITTEN if replace_file(self.path, new, may_commit=may_commit) else BUSY
        except Locked:
            return BUSY
