"""``sms overlay list``, ``show`` and ``verify``: the snapshots on a host, and whether they are intact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.plan.snapshots.offsite import LATEST
from appliance.plan.snapshots.retention import RESTORE
from appliance.shared.identity import Identity, uuid_of
from appliance.shared.manifest import Manifest
from appliance.shared.records import RecordError, check_value, from_value
from appliance.text import whole_number
from appliance.tools.agent import Bounds
from appliance.tools.reply import ENDED_HINT

LIST_BOUNDS = Bounds(300.0, 64 << 20)
"""Seconds that the manifests of a store may take, on a slow disk, and their bytes: tens of thousands."""
Snapshot = dict[str, Any]
"""A manifest with ``number`` and ``health``, as the agent reports it."""


class _Health(TypedDict, total=False):
    ok: bool
    at: float
    damage: list[str]


class _Reported(TypedDict):
    health: _Health


@dataclass(frozen=True)
class Listing:
    """The snapshots of one host, oldest first; ``broken``: numbers with an unreadable manifest, and the reason.

    ``foreign``: those of other clusters of this name, which no verb touches.
    """

    host: str
    snapshots: tuple[Snapshot, ...] = ()
    broken: dict[int, str] = field(default_factory=dict)
    stored_bytes: int = 0
    free_bytes: int = 0
    foreign: tuple[Snapshot, ...] = ()
    identity: Identity = field(default_factory=Identity)

    @property
    def unknown(self) -> bool:
        """Whether it is not known which cluster the host is of: its lease has no UUID, or could not get it."""
        return not self.identity.uuid

    @property
    def damaged(self) -> bool:
        """Whether any snapshot is damaged."""
        return bool(self.broken) or not all(one["health"].get("ok", False) for one in self.snapshots)


@dataclass(frozen=True)
class Verified:
    """Result of verifying one snapshot; ``damage`` is empty when it is intact."""

    number: int
    damage: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the snapshot is intact."""
        return not self.damage


def store(cluster: Cluster) -> str:
    """Return the folder of the cluster's snapshots on an admin host."""
    return str(cluster.places.snapshots)


def check_request(cluster: Cluster) -> dict[str, Any]:
    """Return the part of a request by which the agent checks a snapshot.

    Of the overlay: paths in the container whose files must be readable, and the text expected near the beginning of
    files, by path. The VM's state is an ext4 file system without files of services.
    """
    if cluster.vm:
        return {"whole": True}
    paths = (path for service in cluster.services for path in service.state)
    heads = {path: text for service in cluster.services for path, text in service.state_heads.items()}
    return {"state": list(dict.fromkeys(paths)), "heads": heads}


def store_request(cluster: Cluster, host: Host) -> dict[str, Any]:
    """Return the part of a request by which the agent knows the store, and which snapshots are the cluster's own."""
    return {"store": store(cluster), "lease": str(cluster.places.lease), "host": host.name}


def list_snapshots(cluster: Cluster, host: Host, *, identity: Identity | None = None) -> Listing:
    """List the snapshots on the host; a host without a store has none.

    Args:
        identity: of the cluster, if the host is a target of a push; else the host's own lease has it.

    Raises:
        Refused: the host has no Python.
        SmsError: what it reports is not a list of snapshots.
    """
    reply = cluster.env.agents.call(host, "list", store_request(cluster, host), bounds=LIST_BOUNDS)
    try:
        there = from_value(Identity, reply.get("identity", {}))
        # The host may be compromised, and a manifest not what it has stored.
        every: tuple[Snapshot, ...] = tuple(check_value(list[_Reported], reply["snapshots"], "snapshots"))
        for number, one in enumerate(every):
            from_value(Manifest, one, f"snapshots[{number}]")
        broken = {int(number): why for number, why in check_value(dict[str, str], reply["broken"], "broken").items()}
    except RecordError as error:
        raise SmsError(f"{host.name} sent an invalid list of snapshots: {error}", hint=ENDED_HINT) from None
    except ValueError:
        raise SmsError(f"{host.name} sent an invalid number of a snapshot", hint=ENDED_HINT) from None
    known = identity or there
    return Listing(
        host.name,
        tuple(one for one in every if known.owns(one)),
        broken,
        reply["stored_bytes"],
        reply["free_bytes"],
        tuple(one for one in every if not known.owns(one)),
        there,
    )


def find_snapshot(listing: Listing, selector: str) -> Snapshot:
    """Return the snapshot with a number, or the newest verified one for ``latest``.

    Raises:
        ConfigError: ``selector`` is neither a number nor ``latest``.
        Refused: there is no such snapshot.
        SmsError: its manifest cannot be read.
    """
    number = whole_number(selector)
    if selector != LATEST and number is None:
        raise ConfigError(
            f"invalid snapshot {selector!r}", hint=f"give its number, or {LATEST}; `sms overlay list` shows all"
        )
    if not listing.snapshots and not listing.broken and not listing.foreign:
        raise Refused(
            f"there are no snapshots on {listing.host}", hint=f"`sms overlay snapshot --host {listing.host}` takes one"
        )
    if selector == LATEST:
        good = [one for one in listing.snapshots if one["health"].get("ok")]
        if listing.foreign and (listing.unknown or not good):
            raise foreign_error(listing.foreign, listing.host)
        if not good:
            raise Refused(
                f"no snapshot on {listing.host} is verified",
                hint="`sms overlay verify --all` shows what is wrong with them; `sms overlay snapshot` takes one",
            )
        # A snapshot that a restore took holds the state that the user wanted to leave.
        chosen = [one for one in good if not one["reason"].startswith(RESTORE)]
        return (chosen or good)[-1]
    if number in listing.broken:
        raise SmsError(
            f"snapshot {number} is damaged: {listing.broken[number]}",
            hint=f"`sms overlay list` shows others; `sms overlay prune {number}` removes it",
        )
    for one in listing.snapshots:
        if one["number"] == number:
            return one
    if other := [one for one in listing.foreign if one["number"] == number]:
        raise foreign_error(other, listing.host)
    newest = ", ".join(str(one["number"]) for one in listing.snapshots[-5:]) or "none"
    raise Refused(f"there is no snapshot {number} on {listing.host}", hint=f"the newest are: {newest}")


def foreign_error(found: Sequence[Snapshot], where: str) -> Refused:
    """Return the refusal to use snapshots of other clusters of this name."""
    number = f"snapshot {found[0]['number']} on {where} is" if len(found) == 1 else f"the snapshots on {where} are"
    return Refused(
        f"{number} not of this cluster, but of {describe_foreign(found)}",
        hint="`sms overlay identity` shows the UUIDs; `sms overlay identity UUID` continues that cluster",
    )


def describe_foreign(found: Sequence[Snapshot]) -> str:
    """Return text on whose the snapshots of other clusters are."""
    uuids = sorted({uuid_of(one) for one in found})
    hosts = ", ".join(sorted({one["host"] for one in found}))
    names = [f"cluster {uuid}" if uuid else "a cluster without a UUID" for uuid in uuids]
    return f"{' and '.join(names)} (taken on {hosts})"


def foreign_note(found: Sequence[Snapshot], where: str) -> str:
    """Return a note on snapshots of other clusters of this name; empty without any."""
    if not found:
        return ""
    what = f"{len(found)} snapshot{'s' * (len(found) != 1)}"
    return f"note: {where} has {what} of {describe_foreign(found)}: not touched"


def verify(cluster: Cluster, host: Host, selectors: Sequence[str], *, everything: bool = False) -> list[Verified]:
    """Read every byte of snapshots again and verify them; the result is recorded with each snapshot.

    Args:
        selectors: numbers, or ``latest``.
        everything: verify all snapshots and ignore ``selectors``.

    Raises:
        Refused: there is no such snapshot.
    """
    numbers, broken = _select(list_snapshots(cluster, host), selectors, everything)
    found = [Verified(number, (why,)) for number, why in broken.items()]
    if numbers:
        request = {"store": store(cluster), "numbers": numbers, **check_request(cluster)}
        reply = cluster.env.agents.call(host, "verify", request, cluster.env.progress)
        found += [Verified(one["number"], tuple(one["damage"])) for one in reply["snapshots"]]
    return sorted(found, key=lambda one: one.number)


def rehearse_verify(
    cluster: Cluster, host: Host, selectors: Sequence[str], *, everything: bool = False
) -> list[dict[str, int]]:
    """Return number and used bytes of the snapshots that ``verify`` would read, oldest first.

    Raises:
        Refused: there is no such snapshot.
    """
    listing = list_snapshots(cluster, host)
    numbers, _ = _select(listing, selectors, everything)
    return [
        {"number": one["number"], "used_bytes": one["used_bytes"]}
        for one in listing.snapshots
        if one["number"] in numbers
    ]


def _select(listing: Listing, selectors: Sequence[str], everything: bool) -> tuple[list[int], dict[int, str]]:
    """Return the numbers of the selected snapshots, and those of them with an unreadable manifest, with the reason."""
    broken: dict[int, str] = dict(listing.broken) if everything else {}
    if everything:
        if not listing.snapshots and not broken:
            find_snapshot(listing, LATEST)
        numbers = [one["number"] for one in listing.snapshots]
    else:
        numbers = []
        for selector in selectors:
            number = whole_number(selector)
            if number is not None and number in listing.broken:
                broken[number] = listing.broken[number]
            else:
                numbers.append(find_snapshot(listing, selector)["number"])
    return list(dict.fromkeys(numbers)), broken
