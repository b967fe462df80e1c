"""``sms overlay prune``: remove snapshots by the site's retention, or by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from appliance.errors import Refused
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.operations.snapshots.list import (
    Listing,
    Snapshot,
    foreign_error,
    foreign_note,
    list_snapshots,
    store,
)
from appliance.plan.snapshots.retention import NEWEST, Candidate, Decision, decide, newest_of_hosts
from appliance.shared.identity import Identity, uuid_of

NAMED = "named"
NOT_NAMED = "not named"


@dataclass(frozen=True)
class Pruned:
    """The decision on each of a host's snapshots, oldest first; ``removed`` is empty in a dry run.

    ``swept``: unreferenced chunks were removed. ``stored_bytes``: size of the store afterwards.
    """

    host: str
    snapshots: tuple[Snapshot, ...] = ()
    decisions: tuple[Decision, ...] = ()
    broken: dict[int, str] = field(default_factory=dict)
    removed: tuple[int, ...] = ()
    swept: bool = False
    chunks: int = 0
    freed_bytes: int = 0
    stored_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        facts = {one["number"]: one for one in self.snapshots}
        return {
            **asdict(self),
            "decisions": [
                {**asdict(one), "taken": facts[one.number]["taken"] if one.number in facts else None}
                for one in self.decisions
            ],
            "snapshots": len(self.snapshots),
        }


def prune(
    cluster: Cluster,
    host: Host,
    numbers: Sequence[int],
    *,
    dry_run: bool = False,
    identity: Identity | None = None,
) -> Pruned:
    """Remove snapshots, then the chunks that no remaining snapshot references. Those of other clusters stay.

    Args:
        numbers: remove exactly these; empty: those that the site's retention does not keep.
        dry_run: only decide.
        identity: as for ``list_snapshots``.

    Raises:
        Busy: another run adds or reads snapshots.
        Refused: there is no such snapshot, or it is the newest verified one, of all or of an admin host.
    """
    listing = certain(list_snapshots(cluster, host, identity=identity))
    decisions = choose(cluster, listing, numbers) if numbers else by_rule(cluster, listing)
    if note := foreign_note(listing.foreign, host.name):
        cluster.env.progress.report(note)
    found = Pruned(host.name, listing.snapshots, tuple(decisions), listing.broken, stored_bytes=listing.stored_bytes)
    # Even without snapshots there may be chunks of a run that was killed.
    if dry_run or not listing.stored_bytes:
        return found
    doomed = [one.number for one in decisions if not one.keep]
    request = {"store": store(cluster), "numbers": doomed, "sweep": True}
    reply = cluster.env.agents.call(host, "remove", request, cluster.env.progress)
    return replace(
        found,
        broken={number: why for number, why in listing.broken.items() if number not in doomed},
        removed=tuple(reply["removed"]),
        swept=reply["swept"],
        chunks=reply["chunks"],
        freed_bytes=reply["freed_bytes"],
        stored_bytes=max(0, listing.stored_bytes - reply["freed_bytes"]),
    )


def certain(listing: Listing) -> Listing:
    """Return the listing with only those snapshots that are certainly the cluster's own: its lease has its UUID."""
    if not listing.identity.assumed:
        return listing
    own = tuple(one for one in listing.snapshots if not uuid_of(one))
    return replace(listing, snapshots=own, foreign=(*listing.foreign, *(o for o in listing.snapshots if uuid_of(o))))


def by_rule(cluster: Cluster, listing: Listing) -> list[Decision]:
    """Decide by the site's retention; snapshots with an unreadable manifest are left alone."""
    return decide(_candidates(listing), cluster.site.retention, now=cluster.env.clock.time())


def _candidates(listing: Listing) -> list[Candidate]:
    return [
        Candidate(one["number"], one["taken"], bool(one["health"].get("ok")), one.get("reason", ""), one["host"])
        for one in listing.snapshots
    ]


def choose(cluster: Cluster, listing: Listing, numbers: Sequence[int]) -> list[Decision]:
    """Decide to remove the given numbers and to keep all others.

    Raises:
        Refused: there is no such snapshot, or it is the newest verified one, of all or of an admin host.
    """
    known = [one["number"] for one in listing.snapshots]
    if other := [one for one in listing.foreign if one["number"] in numbers]:
        raise foreign_error(other, listing.host)
    unknown = sorted(set(numbers) - set(known) - set(listing.broken))
    if unknown:
        raise Refused(f"there is no snapshot {unknown[0]} on {listing.host}", hint="`sms overlay list` shows all")
    newest = next((one["number"] for one in reversed(listing.snapshots) if one["health"].get("ok")), None)
    take = f"take a newer one first: sms overlay snapshot --host {listing.host}"
    if newest in numbers:
        raise Refused(f"snapshot {newest} is the newest verified one on {listing.host} and is not removed", hint=take)
    admins = [admin.name for admin in cluster.site.admin_hosts]
    for one in newest_of_hosts(_candidates(listing)):
        if one.number in numbers and one.verified and one.host in admins:
            push = f"push a newer one first: sms overlay push --host {one.host} --to {listing.host}"
            raise Refused(
                f"snapshot {one.number} is the newest verified one of {one.host} and is not removed",
                hint=take if one.host == listing.host else push,
            )
    return [
        Decision(
            number, number not in numbers, (NAMED if number in numbers else NEWEST if number == newest else NOT_NAMED,)
        )
        for number in [*known, *sorted(set(numbers) & set(listing.broken))]
    ]
