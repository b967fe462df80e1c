"""Schema migrations of the database, run with alembic's operations in one transaction.

A released migration is never changed; new ones are appended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from appliance.errors import Refused
from appliance.provision.sync_tables import add_certificates, add_tables

if TYPE_CHECKING:
    from alembic.operations import Operations

LOCK_ID = 0x534D5301
"""PostgreSQL's advisory lock that serializes writers."""


def first(op: Operations) -> None:
    """Create the inventory: components, interfaces, addresses, groups, endpoints, boot parameters."""
    op.create_table(
        "components",
        sa.Column("id", sa.String(63), primary_key=True),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("name", sa.String(63), unique=True),
        sa.Column("xname", sa.String(63), unique=True),
        sa.Column("nid", sa.Integer, unique=True),
        sa.Column("address", sa.String(45), unique=True),
        sa.Column("role", sa.String(32), nullable=False),
        sa.Column("subrole", sa.String(32), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("flag", sa.String(32), nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("software", sa.String(255), nullable=False),
        sa.Column("net_type", sa.String(32), nullable=False),
        sa.Column("arch", sa.String(32), nullable=False),
        sa.Column("klass", sa.String(32), nullable=False),
        sa.Column("bmc", sa.String(255), nullable=False),
        sa.Column("profile", sa.String(63), nullable=False),
        sa.Column("details", sa.JSON, nullable=False),
        sa.Column("changed", sa.Float, nullable=False),
    )
    op.create_table(
        "interfaces",
        sa.Column("mac", sa.String(17), primary_key=True),
        sa.Column("component", sa.String(63), nullable=False, index=True),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("description", sa.String(255), nullable=False),
        sa.Column("changed", sa.Float, nullable=False),
    )
    op.create_table(
        "addresses",
        sa.Column("address", sa.String(45), primary_key=True),
        sa.Column(
            "mac",
            sa.String(17),
            sa.ForeignKey("interfaces.mac", ondelete="CASCADE", onupdate="CASCADE"),
            nullable=False,
            index=True,
        ),
        sa.Column("network", sa.String(63), nullable=False),
    )
    op.create_table(
        "endpoints",
        sa.Column("id", sa.String(63), primary_key=True),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("fqdn", sa.String(255), nullable=False),
        sa.Column("address", sa.String(45), nullable=False),
        sa.Column("mac", sa.String(17), nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("details", sa.JSON, nullable=False),
        sa.Column("changed", sa.Float, nullable=False),
    )
    op.create_table(
        "groups",
        sa.Column("label", sa.String(63), primary_key=True),
        sa.Column("description", sa.String(1024), nullable=False),
        sa.Column("exclusive", sa.String(63), nullable=False),
        sa.Column("tags", sa.JSON, nullable=False),
    )
    op.create_table(
        "members",
        sa.Column(
            "label", sa.String(63), sa.ForeignKey("groups.label", ondelete="CASCADE"), primary_key=True, nullable=False
        ),
        sa.Column("component", sa.String(63), primary_key=True, nullable=False, index=True),
    )
    op.create_table(
        "boot",
        sa.Column("scope", sa.String(8), primary_key=True),
        sa.Column("key", sa.String(1024), primary_key=True),
        sa.Column("kernel", sa.Text, nullable=False),
        sa.Column("initrd", sa.Text, nullable=False),
        sa.Column("params", sa.Text, nullable=False),
        sa.Column("cloud_init", sa.JSON, nullable=False),
    )


MIGRATIONS: list[Callable[[Operations], None]] = [first, add_tables, add_certificates]
"""The first N migrations lead to version N."""


def migrate(connection: Connection) -> int:
    """Migrate a database to this release's version and return it. The caller's transaction holds the writers' lock.

    Raises Refused, with nothing changed, if a newer release wrote it.
    """
    table = sa.Table("sms_schema", sa.MetaData(), sa.Column("version", sa.Integer, nullable=False))
    table.create(connection, checkfirst=True)
    version = connection.execute(sa.select(table.c.version)).scalar()
    if version is None:
        version = 0
        connection.execute(table.insert().values(version=0))
    if version > len(MIGRATIONS):
        raise Refused(
            f"the inventory has version {version}, this release supports up to {len(MIGRATIONS)}",
            hint="start the newer VM image again: sms vm build, sms vm start",
        )
    if version < len(MIGRATIONS):
        # A quarter of the import time at start, and most starts have nothing to migrate.
        from alembic.migration import MigrationContext
        from alembic.operations import Operations

        op = Operations(MigrationContext.configure(connection))
        for step in MIGRATIONS[version:]:
            step(op)
        connection.execute(table.update().values(version=len(MIGRATIONS)))
    return len(MIGRATIONS)
