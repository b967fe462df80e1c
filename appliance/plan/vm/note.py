"""The VM's start note: the record that a host keeps of the machine that it started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VmNote:
    """Record of a start; fields are empty if unknown.

    Attributes:
        key, digest, signer: key of the image, digest of its manifest, name of the key that verified it.
        why: why KVM is not used.
        at: time of the start, as Unix time in seconds.
        issuer_ends: when the certificate expires that signs those of nodes, as Unix time in seconds.
    """

    image: str = ""
    key: str = ""
    digest: str = ""
    signer: str = ""
    accel: str = ""
    why: str = ""
    generation: int = 0
    host: str = ""
    at: float = 0.0
    issuer_ends: float = 0.0
