"""Contents by their digest, on the state disk: written beside, checked, renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path

from appliance.provision.problem import HttpProblem, bad_request

SPARE_B = 64 << 20
"""Bytes of the disk that master files leave free: the inventory needs them."""
KEPT_S = 3600
"""A content that nobody names yet has so long until somebody must."""
FULL = "sms files list shows what may go; `sms image list` too"


class Blobs:
    """A folder of contents."""

    def __init__(self, folder: Path, *, spare_b: int = SPARE_B) -> None:
        self.folder, self.spare_b = folder, spare_b

    def path(self, digest: str) -> Path:
        """Where a content is, or would be."""
        return self.folder / digest[:2] / digest

    def read(self, digest: str) -> bytes | None:
        """A content; None where it is not there, or is not what it was."""
        try:
            data = self.path(digest).read_bytes()
        except FileNotFoundError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None

    async def take(self, digest: str, size: int, blocks: AsyncIterator[bytes]) -> None:
        """Keep what comes, if it is what its digest and size say; 400 where it is not, 507 where the disk is full."""
        self.check_space(size)
        path = self.path(digest)
        beside = path.with_name(f".{digest}.{secrets.token_hex(4)}")
        found, came = hashlib.sha256(), 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Blocks are small, and come as fast as the network brings them: no thread is worth its while.
            with beside.open("xb") as stream:
                beside.chmod(0o600)
                async for block in blocks:
                    came += len(block)
                    if came > size:
                        raise bad_request(f"more than the {size} bytes came that were announced")
                    found.update(block)
                    stream.write(block)
                stream.flush()
                os.fsync(stream.fileno())
            if came != size or found.hexdigest() != digest:
                raise bad_request("what came is not what its digest and size say: cut off on its way?")
            beside.replace(path)
        except OSError as error:
            raise full(error) from error
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()

    def check_space(self, size: int) -> None:
        """507 where so many bytes would fill the disk."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise full(error) from error
        if free - size < self.spare_b:
            raise HttpProblem(
                507, f"the VM's disk is full: {free >> 20} MiB are free, {self.spare_b >> 20} must stay", hint=FULL
            )

    def prune(self, named: Collection[str]) -> int:
        """Remove what nobody names and is not new; how many."""
        gone = 0
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(OSError):
                if path.name not in named and path.stat().st_mtime < time.time() - KEPT_S:
                    path.unlink()
                    gone += 1
        return gone


def full(error: OSError) -> HttpProblem:
    """A failed write, as the client is to hear it."""
    return HttpProblem(507, f"the VM's disk cannot be written: {(error.strerror or str(error)).lower()}", hint=FULL)
