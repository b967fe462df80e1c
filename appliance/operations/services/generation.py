"""The highest generation known to a cluster: what a start has to exceed after the lease was lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from appliance.errors import Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.history import read_history
from appliance.operations.lease import Leases
from appliance.operations.snapshots.list import store
from appliance.operations.snapshots.transfer import Offsite
from appliance.operations.start_note import read_note
from appliance.plan.migration.lease import was_taken
from appliance.shared.lease import LAST_RAISING

READ_S, SHORT_S = 60, 10
"""Seconds that reading the snapshots of a host may take: after every lease was lost, and if a lease is known."""


@dataclass(frozen=True)
class Known:
    """The highest generation in snapshots, histories and notes, and whether every copy of the lease was lost.

    ``lost`` is also true in a new cluster, where ``generation`` is 0. ``silent``: copies that were not read.
    ``unread``: why parts of the own host's state were not read, although a lease is known.
    """

    generation: int
    lost: bool = False
    silent: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What a start reports about it."""
        lines = [f"note: it may know a higher generation, but could not be read: {why}" for why in self.unread]
        if self.lost and self.generation:
            lines.append(f"note: every copy of the lease was lost; the highest known generation is {self.generation}")
        if self.silent:
            lines.append(f"note: {', '.join(self.silent)} may know a higher generation, but did not answer")
        return lines


def find_known(
    cluster: Cluster, leases: Leases, *, without: Collection[str] = (), without_remote: bool = False
) -> Known:
    """Return the highest generation known on ``leases.me``; where every lease was lost, also of all remote copies.

    Args:
        leases: queried already.
        without: hosts that are known to be off; their copies are not read.
        without_remote: go on although a remote copy does not answer.

    Raises:
        Refused: every lease was lost, and a remote copy of the state does not answer.
        SmsError: every lease was lost, and the own history or store cannot be read.
    """
    me = leases.hosts[leases.me]
    if was_taken(leases.views):
        return _find_known_here(cluster, me)
    top = query_generation(cluster, me)
    silent: dict[str, str] = {}
    for name, host in leases.hosts.items():
        if name == leases.me or name in without:
            continue
        try:
            if name in leases.unreachable:
                raise SmsError(leases.unread.get(name, "it cannot be reached"))
            top = max(top, query_generation(cluster, host))
        except SmsError as error:
            silent[name] = error.message
    if borg := cluster.site.snapshots.borg:
        try:
            top = max(top, highest(manifest["generation"] for manifest, _ in Offsite(cluster, me).open()))
        except SmsError as error:
            silent[borg.repository] = error.message
    if silent and not without_remote:
        raise Refused(
            "no host that answers knows the lease: this cluster is new, or every copy was lost; copies that do not "
            f"answer may know it: {'; '.join(f'{name} ({why})' for name, why in silent.items())}",
            hint="make them answer; `--without-remote` starts without them: snapshots there may then count as newer "
            "than all that follow",
        )
    return Known(top, True, tuple(silent))


def _find_known_here(cluster: Cluster, host: Host) -> Known:
    """Return what can be read at once: services must start although a disk with snapshots hangs or has failed."""
    found: list[object] = []
    unread = []
    parts: tuple[Callable[[], list[object]], ...] = (
        lambda: _in_snapshots(cluster, host, SHORT_S),
        lambda: _in_records(cluster, host),
    )
    for read in parts:
        try:
            found += read()
        except SmsError as error:
            unread.append(f"{error.message}; {error.hint}" if error.hint else error.message)
    return Known(highest(found), unread=tuple(unread))


def query_generation(cluster: Cluster, host: Host) -> int:
    """Return the highest generation in the snapshots, the history and the start note of a host.

    Raises:
        SmsError, Unreachable: they cannot be read.
    """
    return highest([*_in_snapshots(cluster, host, READ_S), *_in_records(cluster, host)])


def _in_snapshots(cluster: Cluster, host: Host, timeout: float) -> list[object]:
    reply = cluster.env.agents.query(host, "brief", {"store": store(cluster)}, timeout=timeout)
    return list(reply["generations"])


def _in_records(cluster: Cluster, host: Host) -> list[object]:
    note = read_note(cluster, host)
    # Generations of the VM's disks are others.
    events = [one for one in read_history(cluster, host) if not str(one.get("verb")).startswith("vm ")]
    return [note.generation if note else 0, *(one.get("generation") for one in events)]


def highest(generations: Iterable[object]) -> int:
    """Return the highest one; implausible ones do not count, because another host may have written them."""
    return max((one for one in generations if type(one) is int and 0 <= one <= LAST_RAISING), default=0)
