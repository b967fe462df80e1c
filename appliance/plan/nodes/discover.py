"""What discovery changes in the inventory: new nodes are made, gaps are filled, what an admin has set stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NEW, CHANGED, SAME, DIFFERS, CONFLICT = "new", "changed", "same", "differs", "conflict"


@dataclass(frozen=True)
class Found:
    """A system behind a controller: where it is asked, what it has, and facts for people."""

    bmc: str
    macs: tuple[str, ...]
    xname: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What becomes of a found system: a new node, a change of one, or nothing, and why.

    ``change`` is what the inventory is to take; ``differences`` are left as the admin has them.
    """

    found: Found
    what: str
    name: str = ""
    change: Mapping[str, Any] = field(default_factory=dict)
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
    """What becomes of each, in the order that they are given in.

    Args:
        name: gives the next free name.
        address: gives the address of a new node by its name; empty for none.
        groups: of new nodes.
        update: what differs from what an admin has set is changed as well.
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
        held = by_bmc.get(one.bmc)
        if others and all(_same_machine(one, other) for other in others):
            yield Decision(one, SAME, differences=(f"is the same machine as that of {', '.join(map(_host, twice))}",))
        elif twice:
            yield Decision(one, CONFLICT, differences=(f"a MAC address of it is that of {', '.join(twice)}, too",))
        elif len(owners) > 1 or (held and owners and held["name"] not in owners):
            yield Decision(one, CONFLICT, differences=tuple(_owned(one, by_mac, held)))
        elif held or owners:
            yield _compare(one, held or next(iter(owners.values())), update)
        else:
            yield _make(one, name, address, groups)


def _host(url: str) -> str:
    return url.removeprefix("https://").partition("/")[0]


def _same_machine(one: Found, other: Found) -> bool:
    """Two controllers may show one machine: an enclosure's own, and that of the node."""
    uuid = one.facts.get("uuid")
    return bool(uuid) and uuid == other.facts.get("uuid") and set(one.macs) == set(other.macs)


def _owned(one: Found, by_mac: Mapping[str, Mapping[str, Any]], held: Mapping[str, Any] | None) -> Iterator[str]:
    if held:
        yield f"{one.bmc} is the controller of {held['name']}"
    for mac in one.macs:
        if node := by_mac.get(mac):
            yield f"{mac} is a MAC address of {node['name']}"


def _make(one: Found, name: Name, address: Address, groups: Sequence[str]) -> Decision:
    if not one.macs:
        return Decision(one, CONFLICT, differences=("no MAC address is known: add it by hand with `sms node add`",))
    chosen = name()
    change: dict[str, Any] = {"macs": list(one.macs), "bmc": one.bmc, "details": dict(one.facts)}
    if groups:
        change["groups"] = list(groups)
    if one.xname:
        change["xname"] = one.xname
    if given := address(chosen):
        change["address"] = given
    return Decision(one, NEW, chosen, change)


def _compare(one: Found, node: Mapping[str, Any], update: bool) -> Decision:
    """Gaps are filled and facts are discovery's own; what is set and differs is told."""
    change: dict[str, Any] = {}
    differences = []
    for key, value in (("bmc", one.bmc), ("xname", one.xname)):
        has = str(node.get(key) or "")
        # A controller's address gets the path of the system, by which it is the node's alone.
        if value and (not has or (key == "bmc" and value.startswith(f"{has.rstrip('/')}/"))):
            change |= {key: value} if has != value else {}
        elif value and has != value:
            differences.append(f"{key}: {has}, found {value}")
            change |= {key: value} if update else {}
    macs = list(node.get("macs") or ())
    gone, come = [mac for mac in macs if mac not in one.macs], [mac for mac in one.macs if mac not in macs]
    if one.macs and not macs:
        change["macs"] = list(one.macs)
    elif one.macs and (gone or come):
        words = [*(f"{mac} is not found" for mac in gone), *(f"{mac} is found as well" for mac in come)]
        differences.append(f"macs: {', '.join(words)}")
        if update:
            change["macs"] = [*(mac for mac in macs if mac not in gone), *come]
    if known := _new_facts(one.facts, node.get("details") or {}):
        change["details"] = known
    left = () if update else tuple(differences)
    shown = tuple(differences) if update else left
    what = DIFFERS if left else CHANGED if change else SAME
    return Decision(one, what, str(node["name"]), change, shown)


def _new_facts(found: Mapping[str, Any], has: Mapping[str, Any]) -> dict[str, Any]:
    """The facts as they are to be, others' among them; empty where nothing is new."""
    return {} if all(has.get(key) == value for key, value in found.items()) else {**has, **found}
