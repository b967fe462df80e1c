"""Which nodes a topology connects: a job gets nodes of one switch, with what is below it, and of no two others.

The rules are those of topology/tree (``_validate_switches``; ``_eval_nodes_topo`` of plugins/select/cons_tres) and of
topology/block (eval_nodes_block.c of newer versions), in which a job may span all blocks. No job starts on a node that
is not listed. A topology.yaml (Slurm 25.05) replaces topology.conf; one with several topologies is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import yaml

from appliance.config.hostlist import HostListError, expand
from appliance.config.model import line_settings
from appliance.plan.services.jobs import Job

Connected = tuple[frozenset[str], ...]
"""Sets of nodes: those of each switch that is below no other one, or of all blocks."""
DEEPEST = 20
"""Levels of switches, of which slurmctld reads no more."""
KINDS = {"topology/tree": "switchname", "topology/block": "blockname"}
_Rows = Sequence[Mapping[str, str]]


def read_conf(lines: Iterable[str], plugin: str, nodes: Set[str]) -> Connected | None:
    """Return what a topology.conf connects; None if that is not known, or nothing is restricted.

    Args:
        plugin: ``TopologyPlugin``.
        nodes: all that there are.
    """
    name = KINDS.get(plugin.lower(), "")
    rows = [dict(line_settings(line)) for line in lines]
    return _connect([{**row, "name": row[name]} for row in rows if name in row], nodes)


def read_yaml(text: str, nodes: Set[str]) -> Connected | None:
    """Return what a topology.yaml connects; None if that is not known, or nothing is restricted."""
    try:
        found: Any = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return None  # slurmd refuses it
    one = found[0] if isinstance(found, list) and len(found) == 1 else None
    for kind, key, name in (("tree", "switches", "switch"), ("block", "blocks", "block")):
        part = one.get(kind) if isinstance(one, dict) else None
        rows = part.get(key) if isinstance(part, dict) else None
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            words = ({str(key): str(value) for key, value in row.items()} for row in rows)
            each = [{"switches": row.get("children", ""), **row, "name": row.get(name, "")} for row in words]
            return _connect(each, nodes)
    return None


def _connect(rows: _Rows, nodes: Set[str]) -> Connected | None:
    """Return the nodes of the switches at the top; of blocks, which have no parents, all in one."""
    by_name = {row["name"]: row for row in rows}
    try:
        leaves = {
            name: nodes if row["nodes"].strip('"').upper() == "ALL" else frozenset(expand(row["nodes"].strip('"')))
            for name, row in by_name.items()
            if row.get("nodes")
        }
        below = {name: expand(row["switches"].strip('"')) for name, row in by_name.items() if row.get("switches")}
    except HostListError:
        return None  # slurmd refuses it
    if not leaves:
        return None
    if any("blockname" in row or "block" in row for row in rows):
        return (frozenset().union(*leaves.values()),)

    def collect(name: str, depth: int = 0) -> frozenset[str]:
        children = below.get(name, ()) if depth < DEEPEST else ()
        return frozenset(leaves.get(name, ())).union(*(collect(one, depth + 1) for one in children))

    children = {one for each in below.values() for one in each}
    return tuple(collect(name) for name in by_name if name not in children)


class Topology:
    """What a topology leaves for jobs of each partition, computed once for all of them."""

    def __init__(self, connected: Connected | None, members: Mapping[str, Set[str] | None]) -> None:
        self.connected = connected
        self._most = [
            (each, {name: len(each) if names is None else len(each & names) for name, names in members.items()})
            for each in connected or ()
        ]

    def fits(self, job: Job) -> bool:
        """Return whether a waiting job can have all nodes that it requires, and as many as it asks for."""
        if self.connected is None:
            return True
        return any(
            job.required <= each and any(most.get(name, 0) >= job.least_nodes for name in job.partitions)
            for each, most in self._most
        )


def find_separated(old: Connected | None, new: Connected | None, nodes: Set[str]) -> Iterator[frozenset[str]]:
    """Yield sets of nodes that were connected, and are no more; ``nodes``: those that stay."""
    for each in (frozenset(nodes),) if old is None else old:
        if new is not None and not any(each & nodes <= other for other in new):
            yield each & nodes
