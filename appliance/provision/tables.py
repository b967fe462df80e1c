"""The inventory's tables: load the inventory, and save what differs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from appliance.provision.model import Boot, Component, Endpoint, Group, Interface, Inventory

_TYPES = {"enabled": sa.Boolean, "details": sa.JSON, "tags": sa.JSON, "cloud_init": sa.JSON}
"""Types of columns that are not stored as they are."""


def _table(name: str, columns: str) -> Any:
    return sa.table(name, *(sa.column(each, _TYPES.get(each)) for each in columns.split()))


_KIND = "role subrole state flag enabled software net_type arch klass"
COMPONENTS = _table("components", f"id type name xname nid address {_KIND} bmc profile details changed uuid")
INTERFACES = _table("interfaces", "mac component position description changed")
ADDRESSES = _table("addresses", "address mac network")
GROUPS = _table("groups", "label description exclusive tags")
MEMBERS = _table("members", "label component")
ENDPOINTS = _table("endpoints", "id type fqdn address mac enabled details changed")
BOOT = _table("boot", "scope key kernel initrd params cloud_init")


def load(connection: Connection) -> Inventory:
    """Return the whole inventory as of the transaction."""
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


def _rows(connection: Connection, table: Any) -> list[Mapping[str, Any]]:
    return [dict(row) for row in connection.execute(sa.select(table)).mappings()]


def _without(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return {name: value for name, value in row.items() if name != key}


def save(connection: Connection, old: Inventory, new: Inventory) -> None:
    """Write the differences. Removals come first, so that their unique values are free again."""
    now = time.time()
    interfaces = {
        mac: each if old.interfaces.get(mac) == each else replace(each, changed=now)
        for mac, each in new.interfaces.items()
    }
    _delete(connection, ADDRESSES, ("mac",), old.interfaces, interfaces)
    _delete(connection, INTERFACES, ("mac",), old.interfaces, interfaces)
    _delete(connection, MEMBERS, ("label",), old.groups, new.groups)
    _delete(connection, GROUPS, ("label",), old.groups, new.groups)
    for table, before, after in (
        (COMPONENTS, old.components, new.components),
        (ENDPOINTS, old.endpoints, new.endpoints),
    ):
        _delete(connection, table, ("id",), before, after)
        _insert(connection, table, [{**asdict(each), "changed": now} for each in _changed(before, after)])
    _delete(connection, BOOT, ("scope", "key"), old.boot, new.boot)
    _insert(connection, BOOT, [asdict(each) for each in _changed(old.boot, new.boot)])
    fresh = _changed(old.interfaces, interfaces)
    _insert(connection, INTERFACES, [_without(asdict(each), "addresses") for each in fresh])
    found = [(each.mac, *pair) for each in fresh for pair in each.addresses]
    _insert(connection, ADDRESSES, [{"mac": mac, "address": where, "network": net} for mac, where, net in found])
    groups = _changed(old.groups, new.groups)
    _insert(connection, GROUPS, [{**_without(asdict(each), "members"), "tags": list(each.tags)} for each in groups])
    _insert(connection, MEMBERS, [{"label": one.label, "component": each} for one in groups for each in one.members])


def _changed(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> list[Any]:
    return [value for key, value in new.items() if old.get(key) != value]


def _delete(
    connection: Connection, table: Any, names: tuple[str, ...], old: Mapping[Any, Any], new: Mapping[Any, Any]
) -> None:
    removed = [key if isinstance(key, tuple) else (key,) for key, value in old.items() if new.get(key) != value]
    if removed:
        where = sa.and_(*(table.c[name] == sa.bindparam(f"old_{name}") for name in names))
        rows = [{f"old_{name}": part for name, part in zip(names, key, strict=True)} for key in removed]
        connection.execute(sa.delete(table).where(where), rows)


def _insert(connection: Connection, table: Any, rows: Sequence[Mapping[str, object]]) -> None:
    if rows:
        connection.execute(sa.insert(table), rows)
