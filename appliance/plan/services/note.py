"""The start note: what a host writes down of the start of what runs there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StartNote:
    """Its image, the lease's generation, and when (Unix time, seconds).

    ``key`` names the contents of the image, ``sha256`` is the digest of its file, ``signer`` the key that verified it.
    """

    image: str
    key: str
    sha256: str
    signer: str
    generation: int
    host: str
    started: float
