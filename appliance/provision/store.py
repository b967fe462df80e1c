"""The database: SQLite in a file, or PostgreSQL by its URL. One writer at a time in either."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.pool import QueuePool

from appliance.errors import SmsError
from appliance.provision.migrations import LOCK_ID, migrate
from appliance.provision.problem import HttpProblem, conflict

POOL = 8
"""Connections kept; threads that answer requests share them."""


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
        """A transaction that sees one state of all tables."""
        with translated(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that may change; all of it counts at its end, or nothing. Others wait meanwhile."""
        # SQLite's own waiting looks again every so often; a queue in front of it is many times faster.
        if not self._queue.acquire(timeout=self.busy_s + 1):
            raise HttpProblem(503, "the database is busy: others write", retry_s=1)
        try:
            with translated(), self._writer.begin() as connection:
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
            raise SmsError(f"{kind} is no database for the inventory", hint="sqlite:////PATH or postgresql://...")
        sqlite = kind == "sqlite"
        if not sqlite:
            # What a plain postgresql:// means differs between SQLAlchemy's releases.
            parsed = parsed.set(drivername="postgresql+psycopg2")
        arguments: dict[str, Any] = (
            {"timeout": busy_s, "check_same_thread": False} if sqlite else {"connect_timeout": 10}
        )
        options: dict[str, Any] = {"poolclass": QueuePool, "pool_size": POOL, "max_overflow": 40, "future": True}
        engine = sa.create_engine(parsed, connect_args=arguments, pool_pre_ping=not sqlite, **options)
    except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ImportError) as error:
        raise SmsError(f"the database's URL is wrong: {error}", hint="sqlite:////PATH or postgresql://...") from error
    if sqlite:
        sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite if sqlite else _begin_postgresql)
    return engine


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # The driver's own way of beginning transactions leaves DDL outside of them.
    connection.isolation_level = None
    for words in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {words}")


def _writes(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get("sms_write"))


def _begin_sqlite(connection: Connection) -> None:
    # A reader that turns writer later could not wait for its turn.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if _writes(connection) else "BEGIN")


def _begin_postgresql(connection: Connection) -> None:
    if _writes(connection):
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK_ID})")


@contextmanager
def translated() -> Iterator[None]:
    """The database's errors as the client is to hear them: 409, 503, 507."""
    try:
        yield
    except IntegrityError as error:
        raise conflict(f"this is taken already: {first_line(error)}") from error
    except sa.exc.TimeoutError as error:
        raise HttpProblem(503, "the database has no connection left", retry_s=2) from error
    except DBAPIError as error:
        raise _problem(error) from error


def first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().partition("\n")[0]


def _problem(error: DBAPIError) -> HttpProblem:
    words = first_line(error)
    code = getattr(error.orig, "pgcode", None) or ""
    if "disk is full" in words or code == "53100":
        return HttpProblem(507, f"the disk of the database is full: {words}", hint="sms files list shows what may go")
    if "locked" in words or code in ("55P03", "40001", "40P01"):
        return HttpProblem(503, f"the database is busy: {words}", retry_s=1)
    if isinstance(error, OperationalError) or "malformed" in words or "not a database" in words:
        return HttpProblem(503, f"the database does not answer: {words}", hint="sms vm restore, or look at its disk")
    return HttpProblem(400, f"the database cannot hold this: {words}")


def _cannot_open(url: str, error: DBAPIError) -> SmsError:
    shown = sa.engine.make_url(url)
    hint = "sms vm restore brings an earlier state back"
    if "unable to open" in first_line(error) or shown.get_backend_name() == "postgresql":
        hint = "is it there, and may this user write to it?"
    return SmsError(f"the inventory {shown!r} cannot be opened: {first_line(error)}", hint=hint)
