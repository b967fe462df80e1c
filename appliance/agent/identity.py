"""Which snapshots of a store are those of this host's cluster, by the lease beside its overlay."""

from typing import Any, Dict, Sequence

from appliance.agent.protocol import field
from appliance.agent.store import Snapshot
from appliance.shared.identity import Identity, identify
from appliance.shared.lease import Lease, parse_lease, read_file


def read_identity(request: Dict[str, Any], snapshots: Sequence[Snapshot]) -> Identity:
    """Return the identity of the cluster as known on this host.

    With an unreadable lease no UUID is assumed; a caller that changes anything reports it.

    Args:
        request: may have ``lease``, a path, and ``host``, the name of this host.
        snapshots: of the store, oldest first.
    """
    lease = Lease("")
    path = field(request, "lease", str, "")
    try:
        data = read_file(path) if path else None
        lease = lease if data is None else parse_lease(data)
    except (OSError, ValueError, TypeError):
        lease = Lease("", since=1.0)
    recorded = Identity(lease.cluster_uuid, lease.adopted, new=not lease.since)
    return identify(recorded, field(request, "host", str, ""), [vars(one.manifest) for one in snapshots])
