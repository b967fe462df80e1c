"""State shared by the routes: configuration, store, contract, images, tokens."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import sqlalchemy as sa

from appliance.provision import tables
from appliance.provision.certificates import Certificates, RevokedSerials
from appliance.provision.config import Config
from appliance.provision.contract import Contract, find_contract
from appliance.provision.draft import Draft
from appliance.provision.images import Images
from appliance.provision.model import Component, Inventory
from appliance.provision.peers import UnknownMachines
from appliance.provision.rules import find_problems, refuse
from appliance.provision.store import Store
from appliance.provision.tokens import Tokens


class World:
    """Everything a route needs."""

    def __init__(self, config: Config) -> None:
        """Open the database and migrate it.

        Raises:
            SmsError: the database cannot be opened; Refused: a newer release wrote it.
        """
        self.config = config
        self.store = Store(config.database, busy_s=config.busy_s)
        self.contract = Contract.read(find_contract())
        self.images = Images(config.state / "images")
        self.tokens = Tokens(self.store, token_s=config.token_s)
        self.certificates = Certificates(self.store)
        self.revoked = RevokedSerials(config.tls / "revoked.map")
        self.unknown_machines = UnknownMachines()
        self.on_stop: list[Callable[[], None]] = []
        """Called when the service stops, in the server's event loop."""
        self.generation = 0
        """Incremented with each change of the inventory or the images; invalidates caches."""
        self.watchers: list[Callable[[], None]] = []
        """Called after each change in the thread that made it; they must not block."""
        self._lock = threading.Lock()
        self._cached: tuple[int, Inventory] | None = None

    def cached_inventory(self) -> Inventory | None:
        """Return the current inventory if it is in memory."""
        known = self._cached
        return known[1] if known is not None and known[0] == self.generation else None

    def inventory(self) -> Inventory:
        """Return the current inventory, cached until the next change."""
        if (known := self.cached_inventory()) is not None:
            return known
        with self._lock:
            generation = self.generation
            if self._cached is None or self._cached[0] != generation:
                with self.store.read() as connection:
                    self._cached = generation, tables.load(connection)
            return self._cached[1]

    @contextmanager
    def edit(self) -> Iterator[Draft]:
        """Edit the inventory: commit at the end of the context; 400 or 409, unchanged, if a rule is violated."""
        with self.store.write() as connection:
            draft = Draft(tables.load(connection))
            yield draft
            new = assign_uuids(draft.old, draft.inventory())
            refuse([*draft.findings, *find_problems(self.config, draft.old, new)])
            tables.save(connection, draft.old, new)
        self.touch()
        self.unknown_machines.forget(new)

    def add_uuid(self, node: Component) -> Component:
        """Give a UUID to a node's entry that is older than UUIDs; return the entry."""
        made = str(uuid.uuid4())
        columns = tables.COMPONENTS.c
        with self.store.write() as connection:
            where = sa.and_(columns.id == node.id, columns.uuid == "")
            connection.execute(tables.COMPONENTS.update().where(where).values(uuid=made))
            made = connection.execute(sa.select(columns.uuid).where(columns.id == node.id)).scalar() or made
        self.touch()
        return replace(node, uuid=made)

    def touch(self) -> None:
        """Invalidate rendered boot scripts: the inventory or an image has changed."""
        self.generation += 1
        for watcher in self.watchers:
            watcher()


def assign_uuids(old: Inventory, new: Inventory) -> Inventory:
    """Return the new inventory, in which each node has another UUID if it is new or stands for another machine.

    It stands for another machine if it has none of the MAC addresses any more that it had.
    """
    before = {each.uuid: each for each in old.components.values() if each.uuid}
    components = dict(new.components)
    for key, node in new.components.items():
        there = before.get(node.uuid) or old.components.get(key)
        if node.type != "Node" or (there == node and new.interfaces_of(key) == old.interfaces_of(key)):
            continue
        macs = {each.mac for each in old.interfaces_of(there.id)} if there else set()
        if there is None or (macs and macs.isdisjoint(each.mac for each in new.interfaces_of(key))):
            components[key] = replace(node, uuid=str(uuid.uuid4()))
    return replace(new, components=components)


class Views:
    """Request handlers."""

    def __init__(self, world: World) -> None:
        self.world = world
