"""What the routes share: configuration, store, contract, and what other modules hang in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from appliance.provision import tables
from appliance.provision.config import Config
from appliance.provision.contract import Contract, find_contract
from appliance.provision.draft import Draft
from appliance.provision.model import Inventory
from appliance.provision.peers import Strangers
from appliance.provision.rules import find_problems, refuse
from appliance.provision.store import Store


class Image(Protocol):
    """An image that nodes boot: the digest of its root, which is its folder's name, and more of the command line."""

    @property
    def digest(self) -> str: ...

    @property
    def arguments(self) -> str: ...


class Images(Protocol):
    """The node images of the VM (images.py)."""

    def current(self, profile: str) -> Image | None: ...

    def profile_for(self, groups: list[str]) -> str: ...


class Tokens(Protocol):
    """One-time tokens of nodes that boot (tokens.py)."""

    def give(self, node: str) -> str: ...


class World:
    """Everything a route needs. ``images`` and ``tokens`` are None until their modules are there."""

    images: Images | None = None
    tokens: Tokens | None = None

    def __init__(self, config: Config, store: Store, contract: Contract) -> None:
        self.config = config
        self.store = store
        self.contract = contract
        self.strangers = Strangers()
        self.parts: dict[str, Any] = {}
        """What modules keep for each other, by their names."""
        self.generation = 0
        """Rises with each change of the inventory or the images: what was made from an older state is dropped."""
        self.watchers: list[Callable[[], None]] = []
        """Called after each change, by whoever made it: they return at once."""
        self._lock = threading.Lock()
        self._known: tuple[int, Inventory] | None = None

    def inventory(self) -> Inventory:
        """The inventory as it is now; read from the database once after each change."""
        known = self._known
        if known is not None and known[0] == self.generation:
            return known[1]
        with self._lock:
            generation = self.generation
            if self._known is None or self._known[0] != generation:
                with self.store.read() as connection:
                    self._known = generation, tables.load(connection)
            return self._known[1]

    @contextmanager
    def edit(self) -> Iterator[Draft]:
        """Changes to the inventory. They count if all of them keep the rules; else 400 or 409, and nothing changes."""
        with self.store.write() as connection:
            draft = Draft(tables.load(connection))
            yield draft
            new = draft.inventory()
            refuse([*draft.findings, *find_problems(self.config, draft.old, new)])
            tables.save(connection, draft.old, new)
        self.touch()
        self.strangers.forget(new)

    def touch(self) -> None:
        """What boot scripts say may have changed: the inventory, or an image. Rendered ones are dropped."""
        self.generation += 1
        for watcher in self.watchers:
            watcher()


def make_world(config: Config, *, contract: Path | None = None) -> World:
    """A world with its database open and at this release's version.

    SmsError where the database cannot be opened, Refused where a newer release wrote it.
    """
    return World(config, Store(config.database, busy_s=config.busy_s), Contract.read(contract or find_contract()))
