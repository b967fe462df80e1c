"""Content-addressed files on the state disk: written to a temporary file, verified, renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path

from appliance.provision.problem import HttpProblem, bad_request
from appliance.shared.files import free_bytes, make_folder, sync_folder

RESERVE_B = 64 << 20
"""Bytes of the disk reserved for the inventory."""
GRACE_S = 3600
"""Seconds until unreferenced content is removed."""
FULL = "see `sms files list` and `sms image list` for what can be removed"


class Blobs:
    """A folder of content-addressed files."""

    def __init__(self, folder: Path, *, reserve_b: int = RESERVE_B) -> None:
        self.folder, self.reserve_b = folder, reserve_b

    def path(self, digest: str) -> Path:
        """Return the path of a content, which may not exist."""
        return self.folder / digest[:2] / digest

    def read(self, digest: str) -> bytes | None:
        """Return a content; None if it is missing or does not match its digest."""
        try:
            data = self.path(digest).read_bytes()
        except FileNotFoundError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None

    async def store(self, digest: str, size: int, blocks: AsyncIterator[bytes]) -> None:
        """Store content of this digest and size; 400 if it does not match, 507 if the disk is full."""
        self.check_space(size)
        path = self.path(digest)
        beside = path.with_name(f".{digest}.{secrets.token_hex(4)}")
        found, received = hashlib.sha256(), 0
        try:
            make_folder(str(path.parent))
            # Blocks are small and arrive at network speed: a thread would not pay off.
            with beside.open("xb") as stream:
                beside.chmod(0o600)
                async for block in blocks:
                    received += len(block)
                    if received > size:
                        raise bad_request(f"more than the announced {size} bytes received")
                    found.update(block)
                    stream.write(block)
                stream.flush()
                os.fsync(stream.fileno())
            if received != size or found.hexdigest() != digest:
                raise bad_request("digest or size does not match: was the transfer interrupted?")
            beside.replace(path)
            sync_folder(str(path.parent))
        except OSError as error:
            raise disk_full(error) from error
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()

    def check_space(self, size: int) -> None:
        """Raise 507 if ``size`` more bytes would use up the reserve."""
        try:
            make_folder(str(self.folder), 0o700)
            free = free_bytes(self.folder)
        except OSError as error:
            raise disk_full(error) from error
        if free - size < self.reserve_b:
            raise HttpProblem(
                507, f"the VM's disk is full: {free >> 20} MiB are free, {self.reserve_b >> 20} are reserved", hint=FULL
            )

    def prune(self, named: Collection[str]) -> int:
        """Remove content that is unreferenced and older than ``GRACE_S``; return how many files."""
        removed = 0
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(OSError):
                if path.name not in named and path.stat().st_mtime < time.time() - GRACE_S:
                    path.unlink()
                    removed += 1
        return removed


def disk_full(error: OSError) -> HttpProblem:
    """Return the 507 response for a failed write."""
    return HttpProblem(507, f"cannot write to the VM's disk: {(error.strerror or str(error)).lower()}", hint=FULL)
