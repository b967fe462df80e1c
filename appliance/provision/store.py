"""The database: SQLite or PostgreSQL, selected by its URL. One writer at a time in both."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.pool import QueuePool

from appliance.errors import SmsError
from appliance.provision.migrations import LOCK_ID, migrate
from appliance.provision.problem import HttpProblem, conflict

POOL = 8
"""Connections in the pool, shared by the request threads."""


class Store:
    """Transactions on one database."""

    def __init__(self, url: str, *, busy_s: float = 5.0) -> None:
        self.engine = _open(url, busy_s)
        self.busy_s = busy_s
        self._queue = threading.Lock()
        self._writer = self.engine.execution_options(sms_write=True)
        try:
            with self._writer.begin() as connection:
                self.version = migrate(connection)
        except DBAPIError as error:
            self.close()
            raise _cannot_open(url, error) from error

    @property
    def kind(self) -> str:
        """``sqlite`` or ``postgresql``."""
        return self.engine.dialect.name

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read transaction with a consistent view of all tables."""
        with translate_errors(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A write transaction: committed at the end of the context, rolled back on error. Other writers wait."""
        # SQLite polls for its lock; queueing writers here is many times faster.
        if not self._queue.acquire(timeout=self.busy_s + 1):
            raise HttpProblem(503, "the database is busy", retry_s=1)
        try:
            with translate_errors(), self._writer.begin() as connection:
                yield connection
        finally:
            self._queue.release()

    def close(self) -> None:
        self.engine.dispose()


def _open(url: str, busy_s: float) -> sa.engine.Engine:
    try:
        parsed = sa.engine.make_url(url)
        kind = parsed.get_backend_name()
        if kind not in ("sqlite", "postgresql"):
            raise SmsError(f"database type {kind} is not supported", hint="sqlite:////PATH or postgresql://...")
        sqlite = kind == "sqlite"
        if not sqlite:
            # The default driver of postgresql:// differs between SQLAlchemy releases.
            parsed = parsed.set(drivername="postgresql+psycopg2")
        engine = sa.create_engine(
            parsed,
            connect_args={"timeout": busy_s, "check_same_thread": False} if sqlite else {"connect_timeout": 10},
            pool_pre_ping=not sqlite,
            poolclass=QueuePool,
            pool_size=POOL,
            max_overflow=40,
            future=True,
        )
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ImportError) as error:
        raise SmsError(f"invalid database URL: {error}", hint="sqlite:////PATH or postgresql://...") from error
    if sqlite:
        sa.event.listen(engine, "connect", partial(_prepare_sqlite, busy_s))
    sa.event.listen(engine, "begin", _begin_sqlite if sqlite else _begin_postgresql)
    return engine


def _prepare_sqlite(busy_s: float, connection: Any, _record: Any) -> None:
    # With NORMAL a power failure takes away the last commits: a used token would be valid again.
    # The driver's implicit transactions do not include DDL.
    connection.isolation_level = None
    _use_wal(connection, time.monotonic() + busy_s)
    for setting in ("synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {setting}")


def _use_wal(connection: Any, deadline: float) -> None:
    """Change the journal mode. SQLite's own timeout does not cover that where another connection changes it, too."""
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _writes(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get("sms_write"))


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that upgrades from reader to writer fails instead of waiting.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if _writes(connection) else "BEGIN")


def _begin_postgresql(connection: Connection) -> None:
    if _writes(connection):
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK_ID})")


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate database errors to HTTP errors: 409, 503, 507."""
    try:
        yield
    except IntegrityError as error:
        raise conflict(f"the value exists already: {first_line(error)}") from error
    except sa.exc.TimeoutError as error:
        raise HttpProblem(503, "the database has no connection left", retry_s=2) from error
    except DBAPIError as error:
        raise _problem(error) from error


def first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().partition("\n")[0]


def _problem(error: DBAPIError) -> HttpProblem:
    message = first_line(error)
    code = getattr(error.orig, "pgcode", None) or ""
    if "disk is full" in message or code == "53100":
        return HttpProblem(507, f"the disk of the database is full: {message}", hint="sms files list shows what may go")
    if "locked" in message or code in ("55P03", "40001", "40P01"):
        return HttpProblem(503, f"the database is busy: {message}", retry_s=1)
    if isinstance(error, OperationalError) or "malformed" in message or "not a database" in message:
        return HttpProblem(503, f"the database does not answer: {message}", hint="sms vm restore, or check its disk")
    return HttpProblem(400, f"the database rejects this: {message}")


def _cannot_open(url: str, error: DBAPIError) -> SmsError:
    shown = sa.engine.make_url(url)
    hint = "`sms vm restore` restores an earlier state"
    if "unable to open" in first_line(error) or shown.get_backend_name() == "postgresql":
        hint = "does it exist, and is it writable for this user?"
    return SmsError(f"cannot open the inventory {shown!r}: {first_line(error)}", hint=hint)
