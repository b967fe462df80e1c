"""The inventory's tables: how it is read from them, and how what differs is written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from appliance.provision.model import Boot, Component, Endpoint, Group, Interface, Inventory


def _table(name: str, *columns: str, json: tuple[str, ...] = ()) -> Any:
    return sa.table(name, *map(sa.column, columns), *(sa.column(each, sa.JSON) for each in json))


_COLUMNS = "id type name xname nid address role subrole state flag software net_type arch klass bmc profile changed"
COMPONENTS = sa.table(
    "components", *map(sa.column, _COLUMNS.split()), sa.column("enabled", sa.Boolean), sa.column("details", sa.JSON)
)
INTERFACES = _table("interfaces", "mac", "component", "position", "description", "changed")
ADDRESSES = _table("addresses", "address", "mac", "network")
GROUPS = _table("groups", "label", "description", "exclusive", json=("tags",))
MEMBERS = _table("members", "label", "component")
ENDPOINTS = sa.table(
    "endpoints",
    *map(sa.column, ("id", "type", "fqdn", "address", "mac", "changed")),
    sa.column("enabled", sa.Boolean),
    sa.column("details", sa.JSON),
)
BOOT = _table("boot", "scope", "key", "kernel", "initrd", "params", json=("cloud_init",))


def load(connection: Connection) -> Inventory:
    """The whole inventory, as of the transaction."""
    addresses: dict[str, list[tuple[str, str]]] = {}
    for row in connection.execute(sa.select(ADDRESSES).order_by(ADDRESSES.c.address)):
        addresses.setdefault(row.mac, []).append((row.address, row.network))
    members: dict[str, list[str]] = {}
    for row in connection.execute(sa.select(MEMBERS).order_by(MEMBERS.c.component)):
        members.setdefault(row.label, []).append(row.component)
    return Inventory(
        components={row["id"]: Component(**_without(row, "changed")) for row in _rows(connection, COMPONENTS)},
        interfaces={
            row["mac"]: Interface(**row, addresses=tuple(addresses.get(row["mac"], ())))
            for row in _rows(connection, INTERFACES)
        },
        groups={
            row["label"]: Group(**{**row, "tags": tuple(row["tags"])}, members=tuple(members.get(row["label"], ())))
            for row in _rows(connection, GROUPS)
        },
        endpoints={row["id"]: Endpoint(**_without(row, "changed")) for row in _rows(connection, ENDPOINTS)},
        boot={(row["scope"], row["key"]): Boot(**row) for row in _rows(connection, BOOT)},
    )


def _rows(connection: Connection, table: Any) -> list[dict[str, Any]]:
    return [dict(row) for row in connection.execute(sa.select(table)).mappings()]


def _without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


def save(connection: Connection, old: Inventory, new: Inventory) -> None:
    """Write what differs. What goes is removed first, so that what it had may be another's."""
    now = time.time()
    interfaces = {
        mac: each if old.interfaces.get(mac) == each else replace(each, changed=now)
        for mac, each in new.interfaces.items()
    }
    _drop(connection, ADDRESSES, ("mac",), old.interfaces, interfaces)
    _drop(connection, INTERFACES, ("mac",), old.interfaces, interfaces)
    _drop(connection, MEMBERS, ("label",), old.groups, new.groups)
    _drop(connection, GROUPS, ("label",), old.groups, new.groups)
    for table, before, after in (
        (COMPONENTS, old.components, new.components),
        (ENDPOINTS, old.endpoints, new.endpoints),
    ):
        _drop(connection, table, ("id",), before, after)
        _add(connection, table, [{**asdict(each), "changed": now} for each in _fresh(before, after)])
    _drop(connection, BOOT, ("scope", "key"), old.boot, new.boot)
    _add(connection, BOOT, [asdict(each) for each in _fresh(old.boot, new.boot)])
    fresh = _fresh(old.interfaces, interfaces)
    _add(connection, INTERFACES, [_without(asdict(each), "addresses") for each in fresh])
    found = [(each.mac, *pair) for each in fresh for pair in each.addresses]
    _add(connection, ADDRESSES, [{"mac": mac, "address": where, "network": net} for mac, where, net in found])
    groups = _fresh(old.groups, new.groups)
    _add(connection, GROUPS, [{**_without(asdict(each), "members"), "tags": list(each.tags)} for each in groups])
    _add(connection, MEMBERS, [{"label": one.label, "component": each} for one in groups for each in one.members])


def _fresh(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> list[Any]:
    return [value for key, value in new.items() if old.get(key) != value]


def _drop(
    connection: Connection, table: Any, names: tuple[str, ...], old: Mapping[Any, Any], new: Mapping[Any, Any]
) -> None:
    gone = [key if isinstance(key, tuple) else (key,) for key, value in old.items() if new.get(key) != value]
    if gone:
        where = sa.and_(*(table.c[name] == sa.bindparam(f"old_{name}") for name in names))
        rows = [{f"old_{name}": part for name, part in zip(names, key, strict=True)} for key in gone]
        connection.execute(sa.delete(table).where(where), rows)


def _add(connection: Connection, table: Any, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(sa.insert(table), rows)
