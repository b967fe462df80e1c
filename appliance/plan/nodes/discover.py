"""Decisions of a discovery: create new nodes, fill empty fields, keep what an administrator has set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NEW, CHANGED, SAME, DIFFERS, CONFLICT = "new", "changed", "same", "differs", "conflict"


@dataclass(frozen=True)
class Found:
    """A system behind a controller. ``bmc``: its URL; ``facts``: hardware details, for information."""

    bmc: str
    macs: tuple[str, ...]
    xname: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What to do with a found system: create a node, change one, or nothing.

    ``change``: the keys to write to the inventory; ``differences``: conflicts with what an administrator has set.
    """

    found: Found
    what: str
    name: str = ""
    change: Mapping[str, object] = field(default_factory=dict)
    differences: tuple[str, ...] = ()


Name = Callable[[], str]
Address = Callable[[str], str]


def decide(
    found: Sequence[Found],
    nodes: Sequence[Mapping[str, Any]],
    *,
    name: Name,
    address: Address,
    groups: Sequence[str] = (),
    update: bool = False,
) -> Iterator[Decision]:
    """Yield the decision for each found system, in their order.

    Args:
        name: returns the next free name.
        address: returns the address of a new node by its name; empty for none.
        groups: of new nodes.
        update: also change what differs from what an administrator has set.
    """
    by_mac = {mac: node for node in nodes for mac in node.get("macs") or ()}
    by_bmc = {str(node["bmc"]): node for node in nodes if node.get("bmc")}
    seen: dict[str, Found] = {}
    for one in found:
        others = [seen[mac] for mac in one.macs if mac in seen and seen[mac].bmc != one.bmc]
        twice = sorted({other.bmc for other in others})
        for mac in one.macs:
            seen.setdefault(mac, one)
        owners = {node["name"]: node for mac in one.macs if (node := by_mac.get(mac))}
        known = by_bmc.get(one.bmc)
        if others and all(_same_machine(one, other) for other in others):
            yield Decision(one, SAME, differences=(f"is the same machine as that of {', '.join(map(_host, twice))}",))
        elif twice:
            yield Decision(one, CONFLICT, differences=(f"shares a MAC address with {', '.join(twice)}",))
        elif len(owners) > 1 or (known and owners and known["name"] not in owners):
            yield Decision(one, CONFLICT, differences=tuple(_owners(one, by_mac, known)))
        elif known or owners:
            yield _compare(one, known or next(iter(owners.values())), update)
        else:
            yield _make(one, name, address, groups)


def _host(url: str) -> str:
    return url.removeprefix("https://").partition("/")[0]


def _same_machine(one: Found, other: Found) -> bool:
    """Return whether both are one machine: the controllers of an enclosure and of a node can show the same system."""
    uuid = one.facts.get("uuid")
    return bool(uuid) and uuid == other.facts.get("uuid") and set(one.macs) == set(other.macs)


def _owners(one: Found, by_mac: Mapping[str, Mapping[str, Any]], known: Mapping[str, Any] | None) -> Iterator[str]:
    if known:
        yield f"{one.bmc} is the controller of {known['name']}"
    for mac in one.macs:
        if node := by_mac.get(mac):
            yield f"{mac} is a MAC address of {node['name']}"


def _make(one: Found, name: Name, address: Address, groups: Sequence[str]) -> Decision:
    if not one.macs:
        return Decision(one, CONFLICT, differences=("has no MAC address: add it with `sms node add`",))
    chosen = name()
    change: dict[str, object] = {"macs": list(one.macs), "bmc": one.bmc, "details": dict(one.facts)}
    if groups:
        change["groups"] = list(groups)
    if one.xname:
        change["xname"] = one.xname
    if given := address(chosen):
        change["address"] = given
    return Decision(one, NEW, chosen, change)


def _compare(one: Found, node: Mapping[str, Any], update: bool) -> Decision:
    """Fill empty fields and update facts; report fields that are set and differ."""
    change: dict[str, object] = {}
    differences = []
    for key, value in (("bmc", one.bmc), ("xname", one.xname)):
        has = str(node.get(key) or "")
        # A controller's address is extended by the path of the system, which identifies the node.
        if value and (not has or (key == "bmc" and value.startswith(f"{has.rstrip('/')}/"))):
            change |= {key: value} if has != value else {}
        elif value and has != value:
            differences.append(f"{key}: {has}, found {value}")
            change |= {key: value} if update else {}
    macs = list(node.get("macs") or ())
    missing, added = [mac for mac in macs if mac not in one.macs], [mac for mac in one.macs if mac not in macs]
    if one.macs and not macs:
        change["macs"] = list(one.macs)
    elif one.macs and (missing or added):
        words = [*(f"{mac} was not found" for mac in missing), *(f"{mac} is new" for mac in added)]
        differences.append(f"macs: {', '.join(words)}")
        if update:
            change["macs"] = [*(mac for mac in macs if mac not in missing), *added]
    if known := _new_facts(one.facts, node.get("details") or {}):
        change["details"] = known
    what = DIFFERS if differences and not update else CHANGED if change else SAME
    return Decision(one, what, str(node["name"]), change, tuple(differences))


def _new_facts(found: Mapping[str, Any], has: Mapping[str, Any]) -> dict[str, object]:
    """Return the existing facts updated by the found ones; empty if nothing changes."""
    return {} if all(has.get(key) == value for key, value in found.items()) else {**has, **found}
