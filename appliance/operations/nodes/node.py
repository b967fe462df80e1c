"""``sms node list | show | add | edit | remove``: what the inventory says of nodes, and by hand what it is to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.errors import ConfigError, Problem, Refused
from appliance.operations.context import Cluster
from appliance.operations.nodes.inventory import (
    Node,
    find_node,
    known_nodes,
    node_network,
    open_inventory,
    pick,
    reserved_addresses,
)
from appliance.operations.vm.client import need_vm
from appliance.plan.nodes.nodes import choose_groups, clean_mac, find_problems
from appliance.progress import Progress


@dataclass(frozen=True)
class Wishes:
    """What an admin says of a node; None is left as it is, empty text takes it away."""

    macs: tuple[str, ...] = ()
    address: str | None = None
    xname: str | None = None
    bmc: str | None = None
    profile: str | None = None
    groups: tuple[str, ...] = ()
    name: str | None = None


@dataclass(frozen=True)
class Change:
    """A node before and after; ``change`` is what the inventory is told."""

    name: str
    before: Mapping[str, Any] = field(default_factory=dict)
    change: Mapping[str, Any] = field(default_factory=dict)


def list_nodes(cluster: Cluster, words: Sequence[str], progress: Progress) -> list[Node]:
    """The nodes that words stand for; without any, all."""
    nodes = known_nodes(cluster, progress)
    return pick(nodes, words) if words else nodes


def list_unknown(cluster: Cluster, words: Sequence[str]) -> list[Node]:
    """Machines that have asked for a boot script, and that the inventory does not know.

    Raises:
        ConfigError: nodes are named: these have no names.
    """
    if words:
        raise ConfigError("machines that are unknown have no names", hint="sms node list --unknown")
    return open_inventory(cluster).unknown()


def show_node(cluster: Cluster, word: str, progress: Progress) -> Node:
    """All that is known of one."""
    return find_node(known_nodes(cluster, progress), word)


def add_node(cluster: Cluster, name: str, wishes: Wishes) -> Change:
    """Put a new node into the inventory.

    Raises:
        ConfigError: what is said of it is wrong; every problem.
        Refused: there is one of that name.
    """
    inventory = open_inventory(cluster)
    nodes = inventory.nodes()
    if any(node["name"] == name for node in nodes):
        raise Refused(f"the inventory has a node {name}", hint=f"sms node edit {name}")
    try:
        groups = choose_groups([], wishes.groups)
    except ValueError as error:
        raise ConfigError(str(error), hint="sms node add --help") from error
    made = _told(wishes) | ({"groups": groups} if groups else {})
    if not any(wishes.macs):
        raise ConfigError(f"{name} has no MAC address: it could not boot", hint="--mac 02:00:0a:4d:00:97")
    _check(cluster, {"name": name, **made}, nodes)
    made = _clean(made)
    inventory.put(name, made)
    inventory.refresh()
    return Change(name, {}, made)


def edit_node(cluster: Cluster, word: str, wishes: Wishes, *, dry_run: bool = False) -> Change:
    """Change what is said of a node, and nothing else.

    Raises:
        ConfigError: what is said of it is wrong, or nothing is; every problem.
        Refused: there is none of that name.
    """
    inventory = open_inventory(cluster)
    nodes = inventory.nodes()
    node = find_node(nodes, word)
    name = str(node["name"])
    if "" in wishes.macs:
        raise ConfigError(f"{name} needs a MAC address: it could not boot without", hint="--mac 02:00:0a:4d:00:97")
    change = _told(wishes)
    if wishes.groups:
        try:
            change["groups"] = choose_groups(list(node.get("groups") or ()), wishes.groups)
        except ValueError as error:
            raise ConfigError(str(error), hint="sms node edit --help") from error
    if wishes.macs and all(mac[:1] in "+-" for mac in wishes.macs):
        change["macs"] = _choose_macs(list(node.get("macs") or ()), wishes.macs)
    if not change:
        raise ConfigError("nothing is to be changed", hint="sms node edit --help")
    others = [one for one in nodes if one["name"] != name]
    _check(cluster, {"name": name, **{key: value for key, value in change.items() if value}}, others)
    change = {key: value for key, value in _clean(change).items() if (node.get(key) or None) != (value or None)}
    if change.get("macs") == []:
        raise ConfigError(f"{name} needs a MAC address: it could not boot without", hint="--mac 02:00:0a:4d:00:97")
    if change and not dry_run:
        inventory.patch(name, change)
        inventory.refresh()
    return Change(name, node, change)


def remove_nodes(cluster: Cluster, words: Sequence[str], progress: Progress, *, dry_run: bool = False) -> list[Node]:
    """Take nodes out of the inventory; give what it said of them.

    Raises:
        Refused: a word stands for no node.
    """
    inventory = open_inventory(cluster)
    chosen = pick(inventory.nodes(), words)
    if not dry_run:
        with progress.step(f"remove {len(chosen)} node{'s' * (len(chosen) != 1)}") as step:
            for number, node in enumerate(chosen, 1):
                inventory.delete(node["name"])
                step.detail(f"{number} of {len(chosen)}")
        inventory.refresh()
    return chosen


def _told(wishes: Wishes) -> dict[str, Any]:
    said = {key: getattr(wishes, key) for key in ("address", "xname", "bmc", "profile")}
    found: dict[str, Any] = {key: value for key, value in said.items() if value is not None}
    if wishes.macs:
        found["macs"] = list(wishes.macs)
    return found


def _clean(said: Mapping[str, Any]) -> dict[str, Any]:
    """As the inventory writes it: MACs in lower case with colons, None for an address or xname that is taken away."""
    found = {key: (None if value == "" and key in ("address", "xname") else value) for key, value in said.items()}
    if macs := found.get("macs"):
        found["macs"] = [clean_mac(mac) for mac in macs]
    return found


def _choose_macs(has: list[str], wishes: Sequence[str]) -> list[str]:
    """MACs after wishes such as ``+02:00:..`` and ``-02:00:..``; what is no MAC stays for the check to tell."""
    macs = list(has)
    for wish in wishes:
        mac = clean_mac(wish[1:]) or wish[1:]
        if wish.startswith("-"):
            macs = [one for one in macs if one != mac]
        elif mac not in macs:
            macs.append(mac)
    return macs


def _check(cluster: Cluster, node: Mapping[str, Any], others: Sequence[Node]) -> None:
    """Raises ConfigError with every problem."""
    problems = find_problems(node, others, node_network(cluster), reserved_addresses(cluster))
    profile, known = node.get("profile"), need_vm(cluster).profiles
    if profile and profile not in known:
        problems.append(f"the site has no profile {str(profile)[:60]!r}: {', '.join(known)}")
    if problems:
        raise ConfigError(problems=[Problem(str(node.get("name") or "node"), 0, "", one) for one in problems])
