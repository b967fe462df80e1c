"""``sms node list | show | add | edit | remove``: show and change entries of the inventory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from appliance.errors import ConfigError, Problem, Refused, SmsError
from appliance.operations.context import Cluster
from appliance.operations.nodes.controllers import confirm_controllers
from appliance.operations.nodes.inventory import (
    find_node,
    known_nodes,
    node_network,
    open_inventory,
    pick,
    reserved_addresses,
)
from appliance.operations.vm.client import open_api, read_certificates
from appliance.plan.nodes.nodes import choose_groups, clean_mac, find_problems
from appliance.plan.vm.vm import need_vm
from appliance.provision.payloads import Node, UnknownMachine
from appliance.units import format_time


@dataclass(frozen=True)
class NodeSpec:
    """Options for a node; None keeps the current value, an empty text clears it."""

    macs: tuple[str, ...] = ()
    address: str | None = None
    xname: str | None = None
    bmc: str | None = None
    profile: str | None = None
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """A change of a node. ``before``: its entry; ``change``: the keys sent to the inventory."""

    name: str
    before: Node = field(default_factory=Node)
    change: Node = field(default_factory=Node)


def list_nodes(cluster: Cluster, words: Sequence[str]) -> list[Node]:
    """Return the nodes that match ``words``; all if there are none."""
    nodes = known_nodes(cluster)
    return pick(nodes, words) if words else nodes


def list_unknown(cluster: Cluster, words: Sequence[str]) -> list[UnknownMachine]:
    """Return the unknown machines that have requested a boot script.

    Raises:
        ConfigError: nodes are named.
    """
    if words:
        raise ConfigError("unknown machines have no names", hint="sms node list --unknown")
    return open_inventory(cluster).unknown()


def show_node(cluster: Cluster, word: str) -> dict[str, object]:
    """Return the entry of one node; unless the VM is off, also its certificate and requests that were refused.

    The certificate (``certificate``) is the newest; ``enrolments`` is the number of tokens that were exchanged for one
    in the last seven days, about one per boot.
    """
    node = find_node(known_nodes(cluster), word)
    shown: dict[str, object] = dict(node)
    # A VM of an earlier release has no such log.
    with suppress(SmsError):
        log = read_certificates(open_api(cluster), node["name"])
        recent = [one for one in log.certificates if not one.renewed and one.issued > log.now - 7 * 86400]
        if newest := next(iter(log.certificates), None):
            shown["certificate"] = {
                "serial": newest.serial,
                "issued": format_time(newest.issued),
                "until": format_time(newest.ends),
                "address": newest.address,
                "mac": newest.mac,
                "accepted": newest.accepted,
                "enrolments": len(recent),
            }
        shown["refused"] = [
            f"{one.count} from {one.address}, last at {format_time(one.last)}: {one.reason}" for one in log.refused
        ]
    return shown


def add_node(cluster: Cluster, name: str, spec: NodeSpec) -> Change:
    """Add a node to the inventory.

    Raises:
        ConfigError: options are invalid; names all problems.
        Refused: the name is in use.
    """
    try:
        groups = choose_groups([], spec.groups)
    except ValueError as error:
        raise ConfigError(str(error), hint="sms node add --help") from error
    made = _spec_fields(spec)
    if groups:
        made["groups"] = groups
    if not any(spec.macs):
        raise ConfigError(f"{name} has no MAC address: it could not boot", hint="--mac 02:00:0a:4d:00:97")
    inventory = open_inventory(cluster)
    try:
        nodes = inventory.nodes()
    except SmsError:
        _check(cluster, {"name": name, **made}, ())  # what is wrong in any inventory comes first
        raise
    if any(node["name"] == name for node in nodes):
        raise Refused(f"node {name} already exists", hint=f"sms node edit {name}")
    _check(cluster, {"name": name, **made}, nodes)
    made = _clean(made)
    inventory.put(name, made)
    inventory.refresh()
    return Change(name, change=made)


def edit_node(cluster: Cluster, word: str, spec: NodeSpec, *, dry_run: bool = False) -> Change:
    """Change the given options of a node.

    Raises:
        ConfigError: options are invalid, or none is given; names all problems.
        Refused: there is no such node.
    """
    if "" in spec.macs:
        raise ConfigError(f"{word} needs a MAC address: it could not boot without", hint="--mac 02:00:0a:4d:00:97")
    change = _spec_fields(spec)
    if not change and not spec.groups:
        raise ConfigError("nothing to change", hint="sms node edit --help")
    inventory = open_inventory(cluster)
    nodes = inventory.nodes()
    node = find_node(nodes, word)
    name = str(node["name"])
    if spec.groups:
        try:
            change["groups"] = choose_groups(list(node.get("groups") or ()), spec.groups)
        except ValueError as error:
            raise ConfigError(str(error), hint="sms node edit --help") from error
    if spec.macs and all(mac[:1] in "+-" for mac in spec.macs):
        change["macs"] = _choose_macs([str(mac) for mac in node.get("macs") or ()], spec.macs)
    others = [one for one in nodes if one["name"] != name]
    _check(cluster, {"name": name, **_only(change, lambda _, value: bool(value))}, others)
    change = _only(_clean(change), lambda key, value: (node.get(key) or None) != (value or None))
    if change.get("macs") == []:
        raise ConfigError(f"{name} needs a MAC address: it could not boot without", hint="--mac 02:00:0a:4d:00:97")
    if spec.bmc and not dry_run:
        # Also if the inventory has it already: this confirms a controller that was changed elsewhere.
        confirm_controllers(cluster, {name: spec.bmc})
    if change and not dry_run:
        inventory.patch(name, change)
        inventory.refresh()
    return Change(name, node, change)


def remove_nodes(cluster: Cluster, words: Sequence[str], *, dry_run: bool = False) -> list[Node]:
    """Remove nodes from the inventory. Returns their entries.

    Raises:
        Refused: a word matches no node.
    """
    inventory = open_inventory(cluster)
    chosen = pick(inventory.nodes(), words)
    if not dry_run:
        with cluster.env.progress.step(f"remove {len(chosen)} node{'s' * (len(chosen) != 1)}") as step:
            for number, node in enumerate(chosen, 1):
                inventory.delete(node["name"])
                step.detail(f"{number} of {len(chosen)}")
        inventory.refresh()
    return chosen


def _spec_fields(spec: NodeSpec) -> Node:
    """Return the given options as fields of a node, without groups."""
    fields = _only(cast("Node", vars(spec)), lambda key, value: key not in ("macs", "groups") and value is not None)
    return {**fields, "macs": list(spec.macs)} if spec.macs else fields


def _only(node: Node, wanted: Callable[[str, object], bool]) -> Node:
    """Return those fields of a node that are wanted, by key and value."""
    return cast("Node", {key: value for key, value in node.items() if wanted(key, value)})


def _clean(node: Node) -> Node:
    """Return the inventory's form: MACs in lower case with colons, None for an address or xname to clear."""
    found = node.copy()
    if found.get("address") == "":
        found["address"] = None
    if found.get("xname") == "":
        found["xname"] = None
    if macs := found.get("macs"):
        found["macs"] = [clean_mac(mac) for mac in macs]
    return found


def _choose_macs(current: list[str], changes: Sequence[str]) -> list[str]:
    """Apply changes such as ``+02:00:..`` and ``-02:00:..``; invalid MACs are left for the later check to report."""
    macs = list(current)
    for change in changes:
        mac = clean_mac(change[1:]) or change[1:]
        if change.startswith("-"):
            macs = [one for one in macs if one != mac]
        elif mac not in macs:
            macs.append(mac)
    return macs


def _check(cluster: Cluster, node: Node, others: Sequence[Node]) -> None:
    """Raise ConfigError that names every problem."""
    problems = find_problems(node, others, node_network(cluster), reserved_addresses(cluster))
    profile, known = node.get("profile"), need_vm(cluster.site).profiles
    if profile and profile not in known:
        problems.append(f"the site has no profile {str(profile)[:60]!r}: {', '.join(known)}")
    if problems:
        label, hints = str(node.get("name") or "node"), [*[""] * (len(problems) - 1), "sms node add --help"]
        raise ConfigError(problems=[Problem(label, 0, "", *one) for one in zip(problems, hints, strict=True)])
