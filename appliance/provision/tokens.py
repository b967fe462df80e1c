"""One-time tokens that a node exchanges for a certificate after its boot."""

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
from appliance.provision.sync_tables import TOKENS, find_nodes, has_name

ATTEMPTS, PERIOD_S = 10, 60.0
"""Attempts per address, and period in seconds."""
MAX_ADDRESSES = 4096
ISSUES = 4
"""New tokens per node in ``PERIOD_S``: each is a write to the database, which delays all nodes."""
MAX_ISSUED = 70000


# Built once: they are in the hot path when hundreds of nodes boot together.
_COMPONENTS = sa.table("components", sa.column("id"), sa.column("name"), sa.column("type"))
_IS_NODE = sa.select(_COMPONENTS.c.id).where(
    has_name(_COMPONENTS, sa.bindparam("node")), _COMPONENTS.c.type == sa.literal_column("'Node'")
)
_DELETE_OLD = TOKENS.delete().where(sa.or_(TOKENS.c.node == sa.bindparam("old"), TOKENS.c.ends < sa.bindparam("now")))
_INSERT = TOKENS.insert()


class Tokens:
    """The tokens of a store, which contains only their digests."""

    def __init__(self, store: Store, *, token_s: int, clock: Callable[[], float] = time.time) -> None:
        self.store, self.token_s, self.clock = store, token_s, clock
        self._issued: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Unused tokens and their creation times, in memory only."""
        self._creating: set[str] = set()
        self._rate_limit = RateLimit(ISSUES)
        self._lock = threading.Lock()

    def issue(self, node: str) -> str:
        """Return the token of a booting node: its last one if that is unused and has half of its lifetime left.

        Repeated requests therefore neither invalidate tokens nor write to the database. HttpProblem 429 if a node
        needs new ones too often; SmsError if the inventory has no such node.
        """
        with self._lock:
            token, made = self._issued.get(node, ("", 0.0))
            if token and made <= self.clock() < made + self.token_s / 2:
                return token
            if node in self._creating or self._rate_limit.wait_s(node):
                raise HttpProblem(429, f"{node} requests tokens too often")
            self._creating.add(node)
        try:
            return self.make(node)
        finally:
            with self._lock:
                self._creating.discard(node)

    def make(self, node: str) -> str:
        """Create a token for a node, valid once and for ``token_s`` seconds; its earlier tokens become invalid.

        SmsError if the inventory has no such node.
        """
        token = secrets.token_hex(16)
        now = self.clock()
        with self.store.write() as connection:
            if connection.execute(_IS_NODE, {"node": node}).first() is None:
                raise SmsError(f"the inventory has no node {node}", hint="sms node list")
            connection.execute(_DELETE_OLD, {"old": node, "now": now})
            connection.execute(_INSERT, {"hash": _digest(token), "node": node, "ends": now + self.token_s})
        with self._lock:
            self._issued[node] = token, now
            self._issued.move_to_end(node)
            while len(self._issued) > MAX_ISSUED:
                self._issued.popitem(last=False)
        return token

    def use(self, token: str, address: str) -> str:
        """Consume a token and return its node; empty if it is invalid.

        A request from another address does not consume it, so that nobody else can invalidate a node's token.
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
            self._issued.pop(row.node, None)
        return str(row.node)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


class RateLimit:
    """Rate limit per address, with bounded memory."""

    def __init__(
        self, attempts: int = ATTEMPTS, period_s: float = PERIOD_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.attempts, self.period_s, self.clock = attempts, period_s, clock
        self.seen: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, address: str) -> int:
        """Count an attempt and return 0, or return the seconds until the next one is allowed."""
        now = self.clock()
        times = self.seen.setdefault(address, deque())
        self.seen.move_to_end(address)
        while len(self.seen) > MAX_ADDRESSES:
            self.seen.popitem(last=False)
        while times and times[0] <= now - self.period_s:
            times.popleft()
        if len(times) >= self.attempts:
            return int(times[0] + self.period_s - now) + 1
        times.append(now)
        return 0
