"""State shared by the routes: configuration, store, contract, images, tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from appliance.provision import tables
from appliance.provision.config import Config
from appliance.provision.contract import Contract, find_contract
from appliance.provision.draft import Draft
from appliance.provision.images import Images
from appliance.provision.model import Inventory
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
        self.unknown_machines = UnknownMachines()
        self.on_stop: list[Callable[[], None]] = []
        """Called when the service stops, in the server's event loop."""
        self.generation = 0
        """Incremented with each change of the inventory or the images; invalidates caches."""
        self.watchers: list[Callable[[], None]] = []
        """Called after each change in the thread that made it; they must not block."""
        self._lock = threading.Lock()
        self._cached: tuple[int, Inventory] | None = None

    def inventory(self) -> Inventory:
        """Return the current inventory, cached until the next change."""
        known = self._cached
        if known is not None and known[0] == self.generation:
            return known[1]
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
            new = draft.inventory()
            refuse([*draft.findings, *find_problems(self.config, draft.old, new)])
            tables.save(connection, draft.old, new)
        self.touch()
        self.unknown_machines.forget(new)

    def touch(self) -> None:
        """Invalidate rendered boot scripts: the inventory or an image has changed."""
        self.generation += 1
        for watcher in self.watchers:
            watcher()


class Views:
    """Request handlers."""

    def __init__(self, world: World) -> None:
        self.world = world
