"""Tables of one-time tokens, master files and client reports; queries of nodes for these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from sqlalchemy.engine import Connection

_META = sa.MetaData()

TOKENS = sa.Table(
    "tokens",
    _META,
    sa.Column("hash", sa.String(64), primary_key=True),
    sa.Column("node", sa.String(63), nullable=False, index=True),
    sa.Column("ends", sa.Float, nullable=False),
)
MASTERS = sa.Table(
    "masters",
    _META,
    sa.Column("path", sa.String(1024), primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
)
"""The current version of each path; a removed path is missing here, but its versions are kept."""
VERSIONS = sa.Table(
    "master_versions",
    _META,
    sa.Column("path", sa.String(1024), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("sha256", sa.String(64), nullable=False, index=True),
    sa.Column("size", sa.Integer, nullable=False),
    sa.Column("details", sa.JSON, nullable=False),
    sa.Column("made", sa.Float, nullable=False),
)
REPORTS = sa.Table(
    "file_reports",
    _META,
    sa.Column("client", sa.String(80), primary_key=True),
    sa.Column("push", sa.Integer, nullable=False),
    sa.Column("files", sa.JSON, nullable=False),
    sa.Column("failed", sa.JSON, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
)
COUNTERS = sa.Table(
    "counters",
    _META,
    sa.Column("name", sa.String(32), primary_key=True),
    sa.Column("value", sa.Integer, nullable=False),
)

CERTIFICATES = sa.Table(
    "certificates",
    sa.MetaData(),
    sa.Column("fingerprint", sa.String(40), primary_key=True),
    sa.Column("serial", sa.String(40), nullable=False),
    sa.Column("uuid", sa.String(36), nullable=False),
    sa.Column("node", sa.String(63), nullable=False, index=True),
    sa.Column("address", sa.String(45), nullable=False),
    sa.Column("mac", sa.String(17), nullable=False),
    sa.Column("issued", sa.Float, nullable=False),
    sa.Column("ends", sa.Float, nullable=False, index=True),
    sa.Column("replaces", sa.String(40), nullable=False),
    sa.Column("used", sa.Float),
)
"""Certificates issued to nodes; fields as in certificates.py."""

_COMPONENTS = sa.table("components", *map(sa.column, ("id", "name", "xname", "address", "type", "profile")))
_MEMBERS = sa.table("members", *map(sa.column, ("label", "component")))


def add_tables(op: Operations) -> None:
    """Create these tables (schema migration)."""
    for table in _META.sorted_tables:
        op.create_table(table.name, *[column._copy() for column in table.columns])


def add_certificates(op: Operations) -> None:
    """Create the table of nodes' certificates; add the UUIDs of nodes, which those that exist do not have yet."""
    op.create_table(CERTIFICATES.name, *[column._copy() for column in CERTIFICATES.columns])
    op.add_column("components", sa.Column("uuid", sa.String(36), nullable=False, server_default=""))


@dataclass(frozen=True)
class Node:
    """A node with the fields that templates use."""

    name: str
    address: str
    groups: tuple[str, ...]
    xname: str = ""
    profile: str = ""


def has_name(components: Any, name: Any) -> Any:
    """Return the SQL condition that a component has this name; a component without one is named by its ID."""
    return sa.or_(components.c.name == name, sa.and_(components.c.name.is_(None), components.c.id == name))


def find_nodes(connection: Connection, name: str | None = None) -> list[Node]:
    """Return all nodes sorted by name, or only the one called ``name``."""
    query = sa.select(_COMPONENTS).where(_COMPONENTS.c.type == "Node")
    members = sa.select(_MEMBERS)
    if name is not None:
        condition = has_name(_COMPONENTS, name)
        query = query.where(condition)
        members = members.where(_MEMBERS.c.component.in_(sa.select(_COMPONENTS.c.id).where(condition)))
    groups: dict[str, list[str]] = {}
    for row in connection.execute(members):
        groups.setdefault(row.component, []).append(row.label)
    return sorted((_node(row, groups) for row in connection.execute(query)), key=lambda node: node.name)


def _node(row: Any, groups: dict[str, list[str]]) -> Node:
    own = tuple(sorted(groups.get(row.id, ())))
    return Node(row.name or row.id, row.address or "", own, row.xname or "", row.profile or "")


def read_counter(connection: Connection, name: str) -> int:
    """Return a counter's value; 0 if it does not exist."""
    return connection.execute(sa.select(COUNTERS.c.value).where(COUNTERS.c.name == name)).scalar() or 0


def increment_counter(connection: Connection, name: str) -> int:
    """Increment a counter; return its new value."""
    value = read_counter(connection, name) + 1
    if value == 1:
        connection.execute(COUNTERS.insert().values(name=name, value=value))
    else:
        connection.execute(COUNTERS.update().where(COUNTERS.c.name == name).values(value=value))
    return value
