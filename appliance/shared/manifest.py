"""The manifest of a snapshot, as it is stored and reported."""

import dataclasses
from typing import Any, Dict, List, Optional


@dataclasses.dataclass(frozen=True)
class Checks:
    """What the check of a snapshot found; None: not checked. ``state_unread``: not all state files were read."""

    e2fsck: Optional[str] = None
    heads: Optional[List[str]] = None
    state_bytes: Optional[int] = None
    state_files: Optional[int] = None
    state_unread: Optional[bool] = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Description of a snapshot.

    ``taken``: Unix time. ``digests``: SHA-256 of the list of digests, in hex. ``image``: key and SHA-256 of the image
    that ran. ``came``: origin, number there and time of a snapshot that was received. ``sequence``: decides the order
    within a generation (shared/order.py). ``cluster_uuid``: of the cluster (shared/identity.py). Those of earlier
    versions have neither.
    """

    format: int
    uuid: str
    number: int
    cluster: str
    slurm_cluster: str
    host: str
    generation: int
    image: Dict[str, str]
    taken: float
    running: bool
    frozen_ms: float
    method: str
    found_by: str
    size: int
    used_bytes: int
    new_bytes: int
    digests: str
    checks: Checks
    notes: List[str]
    reason: str
    came: Optional[Dict[str, Any]] = None
    sequence: Optional[int] = None
    cluster_uuid: Optional[str] = None

    def to_dict(self) -> Dict[str, Any]:
        """Return the JSON object, in the order of its file; it has no null."""
        values = dataclasses.asdict(self)
        values["checks"] = {name: value for name, value in values["checks"].items() if value is not None}
        return {name: values[name] for name in sorted(values) if values[name] is not None}
