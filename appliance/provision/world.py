"""What the routes share: configuration, store, contract, and what other modules hang in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from appliance.provision.config import Config
from appliance.provision.contract import Contract, find_contract
from appliance.provision.store import Store


class Image(Protocol):
    """An image that nodes boot: its folder's digest, and that of its root."""

    @property
    def digest(self) -> str: ...


class Images(Protocol):
    """The node images of the VM (images.py)."""

    def current(self, profile: str) -> Image | None: ...


class Tokens(Protocol):
    """One-time tokens of nodes that boot (tokens.py)."""

    def make(self, node: str) -> str: ...


class World:
    """Everything a route needs. ``images`` and ``tokens`` are None until their modules are there."""

    images: Images | None = None
    tokens: Tokens | None = None

    def __init__(self, config: Config, store: Store, contract: Contract) -> None:
        self.config = config
        self.store = store
        self.contract = contract
        self.parts: dict[str, Any] = {}

    def touch(self) -> None:
        """Something that boot scripts say has changed elsewhere than in the store: rendered ones are dropped."""
        self.store.generation += 1


def make_world(config: Config, *, contract: Path | None = None) -> World:
    """A world with its database open and at this release's version.

    SmsError where the database cannot be opened, Refused where a newer release wrote it.
    """
    return World(config, Store(config.database, busy_s=config.busy_s), Contract.read(contract or find_contract()))
