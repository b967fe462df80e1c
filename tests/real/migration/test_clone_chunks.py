"""The copy of an overlay that is written meanwhile, by reflink: the first part of a switch on one host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from appliance.agent.clone import clone_chunks
from appliance.agent.store import CHUNK, ZERO, digest_of
from tests.real.overlays import file_system

pytestmark = pytest.mark.real
READ = [b"a" * CHUNK, b"b" * CHUNK, bytes(CHUNK), b"d" * CHUNK]
"""Chunks when the source read them; the second and third one are written before the clone, the fourth became zeros."""
NOW = [READ[0], b"B" * CHUNK, b"c" * CHUNK, bytes(CHUNK)]


@pytest.mark.parametrize("kind", ["xfs", ""])
def test_only_chunks_as_they_were_read_count(kind: str, tmp_path: Path) -> None:
    digests = [digest_of(data) if any(data) else ZERO for data in READ]
    with file_system(tmp_path, kind or "ext4", 400) as folder:
        source, target = folder / "source", folder / "target"
        source.write_bytes(b"".join(NOW))
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT)
        try:
            found = clone_chunks(str(source), descriptor, len(READ) * CHUNK, digests.__getitem__)
        finally:
            os.close(descriptor)
        assert found == ({0} if kind else None)
        data = target.read_bytes()
    assert len(data) == len(READ) * CHUNK
    assert data[2 * CHUNK : 3 * CHUNK] == bytes(CHUNK), "not used when it was read"
    assert data[:CHUNK] == (READ[0] if kind else bytes(CHUNK))
