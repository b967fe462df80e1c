"""The identity of a cluster: its UUID, which is in the lease, and which snapshots are its own.

Names of clusters are not unique: two of one name may use one repository or one folder of snapshots. What has another
UUID belongs to another cluster and is never changed or restored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Identity:
    """A cluster, as far as it is known.

    Attributes:
        uuid: empty: it has none yet, as in earlier versions.
        adopted: generation up to which snapshots without a UUID are its own.
        hosts: that have taken those; empty: any, as in a store beside its lease.
        new: the host knows no lease: the cluster was never started, or its leases were lost.
        assumed: the UUID is that of received snapshots: enough to restore them, not to remove any.
    """

    uuid: str = ""
    adopted: int = 0
    hosts: tuple[str, ...] = ()
    new: bool = False
    assumed: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {**asdict(self), "hosts": list(self.hosts)}

    def owns(self, snapshot: Mapping[str, Any]) -> bool:
        """Return whether a snapshot is one of this cluster, given its manifest."""
        found = uuid_of(snapshot)
        if found or not self.uuid:
            return found == self.uuid
        return snapshot["generation"] <= self.adopted and (not self.hosts or snapshot["host"] in self.hosts)


def uuid_of(snapshot: Mapping[str, Any]) -> str:
    """Return the UUID of a snapshot's cluster; empty for one of an earlier version."""
    return snapshot.get("cluster_uuid") or ""


def own_uuid(host: str, snapshots: Iterable[Mapping[str, Any]]) -> tuple[str, int]:
    """Return the UUID of the last snapshot that ``host`` has taken, and the generation of its first with that UUID.

    Args:
        snapshots: manifests, oldest first. Received ones do not count.
    """
    own = [one for one in snapshots if uuid_of(one) and one["host"] == host and not one.get("came")]
    if not own:
        return "", 0
    last = uuid_of(own[-1])
    return last, min(one["generation"] for one in own if uuid_of(one) == last)


def identify(recorded: Identity, host: str, snapshots: Sequence[Mapping[str, Any]]) -> Identity:
    """Return the identity by which a host treats the snapshots in its store.

    That of its lease. Where the lease was lost: that of the snapshots that it has taken itself, else ``assume``.

    Args:
        recorded: in the host's lease file.
        snapshots: manifests in its store, oldest first.
    """
    if recorded.uuid:
        return recorded
    uuid, first = own_uuid(host, snapshots)
    if uuid:
        return replace(recorded, uuid=uuid, adopted=first)
    return assume(recorded, snapshots)


def assume(identity: Identity, snapshots: Sequence[Mapping[str, Any]]) -> Identity:
    """Return the identity, for a new cluster the only one of these snapshots: it may restore what it has received."""
    named = [one for one in snapshots if uuid_of(one)]
    uuids = {uuid_of(one) for one in named}
    if identity.uuid or not identity.new or len(uuids) != 1:
        return identity
    return replace(identity, uuid=uuids.pop(), adopted=min(one["generation"] for one in named), assumed=True)
