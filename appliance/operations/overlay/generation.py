"""Compares the overlays of all hosts before a start: one that is not the newest is set aside and not started."""

from __future__ import annotations

from dataclasses import replace

from appliance.errors import SmsError
from appliance.host.base import CommandError, Host, Unreachable
from appliance.operations.context import Cluster
from appliance.operations.lease import QUERY_TIMEOUT_S, Leases, query_all_leases, query_lease
from appliance.operations.overlay.mirrored import is_linked
from appliance.operations.start_note import parse_note, start_note_path
from appliance.plan.overlay.generation import (
    Newer,
    OverlayState,
    find_newer_overlay,
    find_older_by_file,
    is_shared,
    read_mark,
    refusal,
)
from appliance.shared.overlay import MarkOverlay, mark_path
from appliance.tools import ext3, files
from appliance.tools.scripts import script_argv

SETTLE_S = 1.0
"""Seconds after which a lease file that names another holder is read again: on a shared folder it is written twice."""
NAMES = 100
"""Overlays of one generation that are set aside at most."""


def query_overlay(cluster: Cluster, host: Host) -> OverlayState:
    """Return what is beside the overlay's path on a host.

    An overlay without a mark was last used by an older version, or by no start: the start note has the generation.

    Raises:
        SmsError: the mark is not one of this cluster.
        Unreachable, CommandError: the host cannot be queried.
    """
    path = str(cluster.places.overlay)
    mark = mark_path(path)
    argv = script_argv("query-overlay", path, mark, start_note_path(cluster))
    head, _, rest = host.run(*argv, timeout=QUERY_TIMEOUT_S).stdout.partition(b"end\n")
    marked, note = ([*rest.split(b"\n"), b"", b""])[:2]
    exists = head.startswith(b"exists")
    if not marked:
        recorded = parse_note(note[1:])
        return OverlayState(exists, recorded.generation if recorded and exists else 0, b"past" in head)
    try:
        return OverlayState(exists, read_mark(marked[1:], cluster.site.cluster), True, marked=True)
    except SmsError as error:
        raise SmsError(f"{host.name}: {mark}: {error.message}", hint=error.hint) from error


def query_overlays(cluster: Cluster, leases: Leases) -> dict[str, OverlayState | None]:
    """Query all hosts in parallel; None for one that does not answer.

    Another host's invalid mark does not keep ``leases.me`` from its own overlay: that host counts as unreachable.

    Raises:
        SmsError: a mark is not one of this cluster; that of another host only where ``leases.me`` has no overlay.
        Unreachable, CommandError: ``leases.me`` cannot be queried.
    """
    invalid: dict[str, SmsError] = {}

    def query(name: str) -> OverlayState | None:
        try:
            silent = name in leases.unreachable and name not in leases.unread  # an unread one answers
            return None if silent else query_overlay(cluster, leases.hosts[name])
        except SmsError as error:
            if name == leases.me:
                raise
            if not isinstance(error, Unreachable | CommandError):
                invalid[name] = error
            return None

    with cluster.env.pool(max(1, len(leases.hosts))) as pool:
        found = dict(zip(leases.hosts, pool.map(query, leases.hosts), strict=True))
    mine = found[leases.me]
    for name, error in invalid.items():
        if not mine or not mine.exists:
            raise error
        leases.unread[name] = error.message
    return found


def _find_newer(cluster: Cluster, leases: Leases, chosen: int = 0) -> tuple[OverlayState, Newer | None]:
    """Return the overlay of ``leases.me``, and why it is not the newest. ``chosen``: as for ``refuse_older``."""
    overlays = query_overlays(cluster, leases)
    mine = overlays[leases.me]
    assert mine
    if mine.exists and chosen:
        mine = overlays[leases.me] = replace(mine, generation=max(mine.generation, chosen))
    files = {name: view.lease for name, view in leases.views.items()}
    return mine, find_newer_overlay(leases.me, overlays, files)


def mark_overlay(cluster: Cluster, host: Host, generation: int) -> None:
    """Record the generation of the lease under which the overlay on ``host`` is used from now on, on the disk.

    Raises:
        SmsError: it could not be written.
    """
    mark = MarkOverlay(mark_path(str(cluster.places.overlay)), cluster.site.cluster, generation)
    cluster.env.agents.perform(host, mark)


def refuse_older(cluster: Cluster, host: Host, leases: Leases, *, set_aside: bool = True, chosen: int = 0) -> int:
    """Check that ``host`` has the newest overlay, or that no host has ever had one; return its generation.

    The leases must have been queried before: a start in between changes them, and the lease cannot be taken.

    Args:
        leases: as queried; hosts that they leave out are known to be off.
        set_aside: rename an older overlay that has a mark, so that nothing uses it.
        chosen: in a failover, the generation as which the overlay counts: it was chosen, whatever its mark.

    Raises:
        Refused: another host has a newer one.
        SmsError: a mark is not one of this cluster.
    """
    mine, newer = _find_newer(cluster, leases, chosen)
    if newer is None:
        return mine.generation
    kept = _set_aside(cluster, host, mine, newer) if set_aside else ""
    raise refusal(host.name, newer, exists=mine.exists, kept=kept)


def refuse_second(cluster: Cluster, host: Host) -> int:
    """Check that an empty overlay may be created on ``host``; return the generation of its mark.

    Raises:
        Refused: another host has an overlay, or may have; one that is gone does not prevent it.
        SmsError: a mark is not one of this cluster.
    """
    leases = query_all_leases(host, cluster)
    _, newer = _find_newer(cluster, leases)
    if newer and not newer.lost:
        raise refusal(host.name, newer, exists=False)
    return leases.top


def find_lost(cluster: Cluster, host: Host) -> Newer | None:
    """Return the newest overlay if it is gone and ``host`` has an older one, which no start uses; else None.

    Raises:
        SmsError: a mark is not one of this cluster.
    """
    mine, newer = _find_newer(cluster, query_all_leases(host, cluster))
    return newer if mine.exists and newer and newer.lost else None


def set_aside_older(cluster: Cluster, host: Host) -> str:
    """Set the overlay of ``host`` aside if its own lease file shows that another host has taken over since.

    The guard of the other host may have written that file. Return the new path, empty if nothing was renamed.
    """
    mine = query_overlay(cluster, host)
    newer = find_older_by_file(host.name, mine, query_lease(host, cluster))
    return _set_aside(cluster, host, mine, newer) if newer else ""


def _set_aside(cluster: Cluster, host: Host, mine: OverlayState, newer: Newer) -> str:
    # By the start notes, which are never shared, the only overlay of two hosts could look older than itself.
    if not mine.exists or not mine.marked:
        return ""
    cluster.env.clock.sleep(SETTLE_S)
    if is_shared(query_lease(host, cluster), host.name):
        return ""
    return retire_overlay(cluster, host, newer.generation)


def retire_overlay(cluster: Cluster, host: Host, generation: int) -> str:
    """Rename this host's overlay after another host took over, so that no start uses it; return its new path.

    It is kept because it may hold data that was lost elsewhere. Empty where there is none, or it is mirrored or in use.
    """
    path = str(cluster.places.overlay)
    if is_linked(cluster, host) or not host.works("test", "-f", path) or ext3.users_of(host, path):
        return ""
    for number in range(1, NAMES):
        past = f"{path}.past-{generation}" + (f".{number}" if number > 1 else "")
        if not host.works("test", "-e", past):
            files.rename(host, path, past)
            host.remove(mark_path(path))
            return past
    return ""
