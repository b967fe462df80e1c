"""One-time tokens: what a node shows once, after its boot, to get a certificate of its own."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import sqlalchemy as sa

from appliance.errors import SmsError
from appliance.provision.problem import HttpProblem
from appliance.provision.store import Store
from appliance.provision.sync_tables import TOKENS, find_nodes, is_called

TRIES, PER_S = 10, 60.0
"""So many tries an address has in so many seconds."""
MOST_ADDRESSES = 4096
MADE = 4
"""So many tokens a node is given in ``PER_S``: each is a write to the database, which all nodes wait for."""
MOST_GIVEN = 70000


# Written once: hundreds of nodes that start together wait for these.
_COMPONENTS = sa.table("components", sa.column("id"), sa.column("name"), sa.column("type"))
_IS_NODE = sa.select(_COMPONENTS.c.id).where(
    is_called(_COMPONENTS, sa.bindparam("node")), _COMPONENTS.c.type == sa.literal_column("'Node'")
)
_FORGET = TOKENS.delete().where(sa.or_(TOKENS.c.node == sa.bindparam("old"), TOKENS.c.ends < sa.bindparam("now")))
_KEEP = TOKENS.insert()


class Tokens:
    """The tokens of a store; only their digests are in it."""

    def __init__(self, store: Store, *, token_s: int, clock: Callable[[], float] = time.time) -> None:
        self.store, self.token_s, self.clock = store, token_s, clock
        self._given: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Tokens that nobody has used yet, and when they were made; in memory alone."""
        self._making: set[str] = set()
        self._bound = Bound(MADE)
        self._lock = threading.Lock()

    def give(self, node: str) -> str:
        """The token of a node that boots: its last one, while nobody has used it and half its time is left.

        Who asks again and again so voids no token and writes nothing. HttpProblem 429 where a node wants new ones too
        often; SmsError where the inventory has no such node.
        """
        with self._lock:
            token, made = self._given.get(node, ("", 0.0))
            if token and made <= self.clock() < made + self.token_s / 2:
                return token
            if node in self._making or self._bound.wait_s(node):
                raise HttpProblem(429, f"{node} asks for tokens too often")
            self._making.add(node)
        try:
            return self.make(node)
        finally:
            with self._lock:
                self._making.discard(node)

    def make(self, node: str) -> str:
        """A token for a node, good once and for ``token_s`` seconds; those that it had before are void.

        SmsError where the inventory has no such node.
        """
        token = secrets.token_hex(16)
        now = self.clock()
        with self.store.write() as connection:
            if connection.execute(_IS_NODE, {"node": node}).first() is None:
                raise SmsError(f"the inventory has no node {node}", hint="sms node list")
            connection.execute(_FORGET, {"old": node, "now": now})
            connection.execute(_KEEP, {"hash": _digest(token), "node": node, "ends": now + self.token_s})
        with self._lock:
            self._given[node] = token, now
            self._given.move_to_end(node)
            while len(self._given) > MOST_GIVEN:
                self._given.popitem(last=False)
        return token

    def use(self, token: str, address: str) -> str:
        """The node that a token was made for, and the token is spent; empty where it is none.

        It stays good where somebody at another address shows it: he is not to take it from the node.
        """
        now = self.clock()
        with self.store.write() as connection:
            row = connection.execute(sa.select(TOKENS).where(TOKENS.c.hash == _digest(token))).first()
            if row is None or row.ends < now:
                return ""
            nodes = find_nodes(connection, row.node)
            if not nodes or not nodes[0].address or nodes[0].address != address:
                return ""
            connection.execute(TOKENS.delete().where(TOKENS.c.hash == row.hash))
        with self._lock:
            self._given.pop(row.node, None)
        return str(row.node)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


class Bound:
    """How often one address may try; what it remembers has an end."""

    def __init__(self, tries: int = TRIES, per_s: float = PER_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.tries, self.per_s, self.clock = tries, per_s, clock
        self.seen: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, address: str) -> int:
        """0, and the try is counted; or the seconds until the next one is heard."""
        now = self.clock()
        times = self.seen.setdefault(address, deque())
        self.seen.move_to_end(address)
        while len(self.seen) > MOST_ADDRESSES:
            self.seen.popitem(last=False)
        while times and times[0] <= now - self.per_s:
            times.popleft()
        if len(times) >= self.tries:
            return int(times[0] + self.per_s - now) + 1
        times.append(now)
        return 0
