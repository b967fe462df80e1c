"""``sms overlay list``, ``show`` and ``verify``: what snapshots there are on a host, and whether they are whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import ConfigError, Refused, SmsError
from appliance.host.base import Host
from appliance.operations.context import Cluster
from appliance.plan.snapshots.retention import RESTORE
from appliance.progress import Progress
from appliance.tools import agent

LATEST = "latest"
"""Stands for the newest verified one."""

Snapshot = dict[str, Any]
"""A manifest with ``number`` and ``health``, as the agent tells it."""


@dataclass(frozen=True)
class Listing:
    """The snapshots of one host, the oldest first; ``broken`` are those that do not tell what they are, with why."""

    host: str
    snapshots: tuple[Snapshot, ...] = ()
    broken: dict[int, str] = field(default_factory=dict)
    stored_bytes: int = 0
    free_bytes: int = 0

    @property
    def damaged(self) -> bool:
        """Whether any of them is known to be no good."""
        return bool(self.broken) or not all(one["health"].get("ok", False) for one in self.snapshots)


@dataclass(frozen=True)
class Verified:
    """What a check of one snapshot found; none of it: it is whole."""

    number: int
    damage: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether it is whole."""
        return not self.damage


def store(cluster: Cluster) -> str:
    """The folder of the cluster's snapshots on an admin host."""
    return str(cluster.places.snapshots)


def state_paths(cluster: Cluster) -> list[str]:
    """Paths in the container whose files must be readable in a snapshot."""
    return list(dict.fromkeys(path for service in cluster.services for path in service.state))


def state_heads(cluster: Cluster) -> dict[str, str]:
    """State files, and what stands near their beginning."""
    return {path: text for service in cluster.services for path, text in service.state_heads.items()}


def list_snapshots(cluster: Cluster, host: Host) -> Listing:
    """All that there are on the host; a host without a store has none.

    Raises:
        Refused: the host has no Python.
    """
    said = agent.ask(host, "list", {"store": store(cluster)})
    broken = {int(number): str(why) for number, why in said["broken"].items()}
    return Listing(host.name, tuple(said["snapshots"]), broken, said["stored_bytes"], said["free_bytes"])


def find_snapshot(listing: Listing, wanted: str) -> Snapshot:
    """The snapshot of a number, or the ``latest``, which is the newest verified one.

    Raises:
        ConfigError: ``wanted`` is neither.
        Refused: there is none.
        SmsError: it does not tell what it is any more.
    """
    if wanted != LATEST and not wanted.isdecimal():
        raise ConfigError(
            f"{wanted} is no snapshot", hint=f"give its number, or {LATEST}; `sms overlay list` shows all"
        )
    if not listing.snapshots and not listing.broken:
        raise Refused(
            f"there are no snapshots on {listing.host}", hint=f"`sms overlay snapshot --host {listing.host}` takes one"
        )
    if wanted == LATEST:
        good = [one for one in listing.snapshots if one["health"].get("ok")]
        if not good:
            raise Refused(
                f"no snapshot on {listing.host} is verified",
                hint="`sms overlay verify --all` tells what is wrong with them; `sms overlay snapshot` takes one",
            )
        # What a restore has kept is the state that somebody wanted to get away from.
        chosen = [one for one in good if not one["reason"].startswith(RESTORE)]
        return (chosen or good)[-1]
    number = int(wanted)
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
    cluster: Cluster, host: Host, wanted: Sequence[str], progress: Progress, *, everything: bool = False
) -> list[Verified]:
    """Read snapshots again, every byte, and check them; what is found is written down beside them.

    Args:
        wanted: numbers, or ``latest``.
        everything: all that there are, whatever ``wanted`` says.

    Raises:
        Refused: there is no such snapshot.
    """
    numbers, broken = _choose(list_snapshots(cluster, host), wanted, everything)
    found = [Verified(number, (why,)) for number, why in broken.items()]
    if numbers:
        request = {
            "store": store(cluster),
            "numbers": numbers,
            "state": state_paths(cluster),
            "heads": state_heads(cluster),
        }
        said = agent.ask(host, "verify", request, progress)
        found += [Verified(one["number"], tuple(one["damage"])) for one in said["snapshots"]]
    return sorted(found, key=lambda one: one.number)


def rehearse_verify(
    cluster: Cluster, host: Host, wanted: Sequence[str], *, everything: bool = False
) -> list[dict[str, int]]:
    """Number and bytes of the snapshots that ``verify`` would read, in their order.

    Raises:
        Refused: there is no such snapshot.
    """
    listing = list_snapshots(cluster, host)
    numbers, _ = _choose(listing, wanted, everything)
    return [
        {"number": one["number"], "used_bytes": one["used_bytes"]}
        for one in listing.snapshots
        if one["number"] in numbers
    ]


def _choose(listing: Listing, wanted: Sequence[str], everything: bool) -> tuple[list[int], dict[int, str]]:
    """Numbers of the snapshots that are meant, and of those of them that do not tell what they are, with why."""
    broken: dict[int, str] = dict(listing.broken) if everything else {}
    if everything:
        if not listing.snapshots and not broken:
            find_snapshot(listing, LATEST)
        numbers = [one["number"] for one in listing.snapshots]
    else:
        numbers = []
        for word in wanted:
            if word.isdecimal() and int(word) in listing.broken:
                broken[int(word)] = listing.broken[int(word)]
            else:
                numbers.append(find_snapshot(listing, word)["number"])
    return list(dict.fromkeys(numbers)), broken


def show(cluster: Cluster, host: Host, wanted: str) -> Snapshot:
    """All that is known of a snapshot.

    Raises:
        ConfigError, Refused, SmsError: as ``find_snapshot``.
    """
    return find_snapshot(list_snapshots(cluster, host), wanted)
