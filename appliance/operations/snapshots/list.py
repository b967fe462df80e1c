"""``sms overlay list``, ``show`` and ``verify``: the snapshots on a host, and whether they are intact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.plan.snapshots.offsite import LATEST
from appliance.plan.snapshots.retention import RESTORE
from appliance.progress import Progress
from appliance.tools import agent

Snapshot = dict[str, Any]
"""A manifest with ``number`` and ``health``, as the agent reports it."""


@dataclass(frozen=True)
class Listing:
    """The snapshots of one host, oldest first; ``broken``: numbers with an unreadable manifest, and the reason."""

    host: str
    snapshots: tuple[Snapshot, ...] = ()
    broken: dict[int, str] = field(default_factory=dict)
    stored_bytes: int = 0
    free_bytes: int = 0

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


def state_paths(cluster: Cluster) -> list[str]:
    """Return paths in the container whose files must be readable in a snapshot."""
    return list(dict.fromkeys(path for service in cluster.services for path in service.state))


def state_heads(cluster: Cluster) -> dict[str, str]:
    """Return the text expected near the beginning of each state file, by path."""
    return {path: text for service in cluster.services for path, text in service.state_heads.items()}


def list_snapshots(cluster: Cluster, host: Host) -> Listing:
    """List the snapshots on the host; a host without a store has none.

    Raises:
        Refused: the host has no Python.
    """
    reply = agent.call(host, "list", {"store": store(cluster)})
    broken = {int(number): str(why) for number, why in reply["broken"].items()}
    return Listing(host.name, tuple(reply["snapshots"]), broken, reply["stored_bytes"], reply["free_bytes"])


def find_snapshot(listing: Listing, selector: str) -> Snapshot:
    """Return the snapshot with a number, or the newest verified one for ``latest``.

    Raises:
        ConfigError: ``selector`` is neither a number nor ``latest``.
        Refused: there is no such snapshot.
        SmsError: its manifest cannot be read.
    """
    if selector != LATEST and not selector.isdecimal():
        raise ConfigError(
            f"invalid snapshot {selector!r}", hint=f"give its number, or {LATEST}; `sms overlay list` shows all"
        )
    if not listing.snapshots and not listing.broken:
        raise Refused(
            f"there are no snapshots on {listing.host}", hint=f"`sms overlay snapshot --host {listing.host}` takes one"
        )
    if selector == LATEST:
        good = [one for one in listing.snapshots if one["health"].get("ok")]
        if not good:
            raise Refused(
                f"no snapshot on {listing.host} is verified",
                hint="`sms overlay verify --all` shows what is wrong with them; `sms overlay snapshot` takes one",
            )
        # A snapshot that a restore took holds the state that the user wanted to leave.
        chosen = [one for one in good if not one["reason"].startswith(RESTORE)]
        return (chosen or good)[-1]
    number = int(selector)
    if number in listing.broken:
        raise SmsError(
            f"snapshot {number} is damaged: {listing.broken[number]}",
            hint=f"`sms overlay list` shows others; `sms overlay prune {number}` removes it",
        )
    for one in listing.snapshots:
        if one["number"] == number:
            return one
    newest = ", ".join(str(one["number"]) for one in listing.snapshots[-5:]) or "none"
    raise Refused(f"there is no snapshot {number} on {listing.host}", hint=f"the newest are: {newest}")


def verify(
    cluster: Cluster, host: Host, selectors: Sequence[str], progress: Progress, *, everything: bool = False
) -> list[Verified]:
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
        request = {
            "store": store(cluster),
            "numbers": numbers,
            "state": state_paths(cluster),
            "heads": state_heads(cluster),
        }
        reply = agent.call(host, "verify", request, progress)
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
            if selector.isdecimal() and int(selector) in listing.broken:
                broken[int(selector)] = listing.broken[int(selector)]
            else:
                numbers.append(find_snapshot(listing, selector)["number"])
    return list(dict.fromkeys(numbers)), broken
