"""Clusters with leases and snapshots, for tests of their UUIDs."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from appliance.agent.store import Store
from appliance.operations.services import start
from appliance.operations.services.start import StartOptions
from appliance.progress import Silent
from appliance.shared.lease import Lease, parse_lease
from tests import stores
from tests.pairs import STATE, Pair
from tests.unit.snapshots.conftest import START

SEQUENCE = count(1)
SNAPSHOT = "01234567-89ab-4cde-8f01-23456789abcd"
FACTS = {
    "uuid": SNAPSHOT,
    "generation": 1,
    "taken": START,
    "size": 9,
    "used_bytes": 9,
    "new_bytes": 9,
    "digests": "0" * 64,
}
MANIFEST = stores.make_manifest(1, FACTS).to_dict()
U1, U2, U3 = (f"{digit * 8}-0000-4000-8000-{digit * 12}" for digit in "123")


class Reported(Silent):
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def report(self, text: str) -> None:
        self.notes.append(text)


def lease_path(pair: Pair, name: str = "host-a") -> Path:
    return Path(str(pair.cluster.places.lease).replace(STATE, str(pair.hosts[name].folder)))


def store_of(pair: Pair, name: str = "host-a") -> Store:
    return Store(str(pair.cluster.places.snapshots).replace(STATE, str(pair.hosts[name].folder)))


def uuid_in(path: Path) -> str:
    found: str = json.loads(path.read_bytes()).get("cluster_uuid", "") if path.exists() else ""
    return found


def start_on(pair: Pair, name: str = "host-a", progress: Silent | None = None) -> int:
    """Do what a start does with the lease; return its generation."""
    with ExitStack() as undo:
        leases = pair.leases(name)
        found = start._take_lease(pair.hosts[name], leases, progress or Silent(), undo, StartOptions()).generation
        undo.pop_all()
    return found


def add(pair: Pair, many: int = 1, *, on: str = "host-a", **facts: Any) -> list[int]:
    """Add snapshots as ``on`` takes them; return their numbers."""
    path, store = lease_path(pair, on), store_of(pair, on)
    lease = parse_lease(path.read_bytes()) if path.exists() else Lease("")
    named: dict[str, Any] = {"generation": lease.generation, "host": on, "cluster": pair.cluster.site.cluster}
    named |= {"cluster_uuid": uuid_in(path) or None, **facts}
    places = ({"sequence": next(SEQUENCE), "uuid": str(uuid4())} for _ in range(many))
    return [stores.add_snapshot(store, [b"x"], **{**named, **place}).number for place in places]


def name(pair: Pair, uuid: str, *, on: tuple[str, ...] = ("host-a", "host-b"), **facts: Any) -> None:
    """Write the leases of a stopped cluster."""
    for host in on:
        path = lease_path(pair, host)
        path.parent.mkdir(parents=True, exist_ok=True)
        usual = Lease(pair.cluster.site.cluster, 3, None, START, host, "host-a", cluster_uuid=uuid)
        path.write_bytes(replace(usual, **facts).text())


def other_cluster(pair: Pair, **facts: Any) -> int:
    """Add a snapshot of another cluster; return its number."""
    about = {"generation": 90, "host": "host-x", "came": {"from": "host-x"}, "cluster_uuid": U2, **facts}
    return stores.add_snapshot(store_of(pair), [b"y"], **about).number
