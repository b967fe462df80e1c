"""The start note: the record that a host keeps of the instance started last."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StartNote:
    """Image, generation of the lease and time of a start (Unix time, seconds).

    ``key`` identifies the image's contents, ``sha256`` is the digest of its file, ``signer`` the key that verified it.
    """

    image: str
    key: str
    sha256: str
    signer: str
    generation: int
    host: str
    started: float
