"""The VM's start note: what a host writes down of the machine that it starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VmNote:
    """Empty where nothing is known.

    ``key`` names the contents of the image, ``digest`` is that of its manifest, ``signer`` the key that verified it;
    ``why``: why there is no KVM; ``at`` and ``issuer_ends`` (of the certificate that vouches for nodes): Unix time in
    seconds.
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
