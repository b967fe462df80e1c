"""Which nodes a topology connects, and which jobs it keeps from starting."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.plan.services.defined import TOPOLOGY_CONF, TOPOLOGY_YAML, Defined, read_defined
from appliance.plan.services.effect import Present, can_cost, find_losses
from appliance.plan.services.node_files import find_unlisted
from tests.unit.services.test_effect import job

NODES = b"NodeName=g[1-3]\nNodeName=c[1-9]\nPartitionName=normal Nodes=ALL\nPartitionName=c Nodes=c[1-9]\n"
TREE = "SwitchName=s1 Nodes=c[1-9]\nSwitchName=s2 Nodes=g[1-3]\nSwitchName=s Switches=s[1-2]\n"
APART = "SwitchName=s1 Nodes=c[1-9]\nSwitchName=s2 \\\n Nodes=g[1-3] # the others\n"
DEEP = "SwitchName=top Switches=a,b\nSwitchName=a Switches=s1\nSwitchName=b Switches=s2\n" + APART
BLOCKS = "BlockName=b1 Nodes=c[1-9]\nBlockName=b2 Nodes=g[1-3]\nBlockSizes=4\n"
YAML = "- topology: t\n  cluster_default: true\n  tree:\n    switches:\n"
YAML_APART = YAML + "    - {switch: s1, nodes: 'c[1-9]'}\n    - {switch: s2, nodes: 'g[1-3]'}\n"
YAML_TREE = YAML_APART + "    - {switch: s, children: 's[1-2]'}\n"
YAML_BLOCKS = "- topology: t\n  block:\n    block_sizes: [4]\n    blocks:\n    - {block: b1, nodes: 'c[1-9]'}\n"


def define(topology: str, plugin: str = "topology/tree", more: str = "") -> Defined:
    path = TOPOLOGY_YAML if topology.startswith("-") else TOPOLOGY_CONF
    conf = NODES + f"TopologyPlugin={plugin}\n{more}\n".encode()
    return read_defined({"/etc/slurm/slurm.conf": conf, **({path: topology.encode()} if topology else {})})


@pytest.mark.parametrize(
    ("plugin", "topology", "wanted"),
    [
        ("topology/tree", TREE, set()),
        ("topology/tree", TREE.replace("g[1-3]", "g[1-2]"), {"g3"}),
        ("topology/tree", DEEP, set()),
        ("topology/none", "SwitchName=s1 Nodes=c1\n", set()),
        ("topology/tree", "SwitchName=s1 Nodes=ALL\n", set()),
        ("topology/tree", "SwitchName=s1 Nodes=c[1-\n", set()),  # slurmd refuses it
        ("topology/tree", "", set()),
        ("topology/block", BLOCKS, set()),
        ("topology/Block", BLOCKS.replace("g[1-3]", "g[1-2]"), {"g3"}),
        ("topology/default", YAML_TREE, set()),
        ("topology/default", YAML_TREE.replace("g[1-3]", "g1"), {"g2", "g3"}),
        ("topology/default", YAML_BLOCKS, {"g1", "g2", "g3"}),
        ("topology/default", "- topology: t\n  flat: true\n", set()),
        ("topology/default", YAML_BLOCKS + YAML_TREE.replace("topology: t", "topology: u"), set()),  # not known
        ("topology/default", "- [\n", set()),
        ("topology/tree", "SwitchName=a Switches=b\nSwitchName=b Switches=a\nSwitchName=s Nodes=ALL\n", set()),
    ],
)
def test_nodes_that_a_topology_does_not_list(plugin: str, topology: str, wanted: set[str]) -> None:
    assert find_unlisted(define(topology, plugin)) == wanted


@pytest.mark.parametrize(
    ("old", "new", "fields", "lost"),
    [
        (TREE, APART, {"required": {"c1", "g1"}}, True),
        (TREE, APART, {"required": {"c1", "c2"}}, False),
        (TREE, APART, {"least_nodes": 10}, True),
        (TREE, APART, {"least_nodes": 9}, False),
        (TREE, APART, {"least_nodes": 9, "required": {"g1"}}, True),
        ("", APART, {"least_nodes": 10}, True),
        (APART, APART, {"least_nodes": 10}, False),  # it never could
        (TREE, DEEP, {"least_nodes": 10}, False),
        (YAML_TREE, YAML_APART, {"least_nodes": 10}, True),
        (TREE, YAML_APART, {"required": {"c1", "g1"}}, True),
        (TREE, "", {"least_nodes": 10}, False),
        (TREE, TREE.replace("g[1-3]", "g[1-2]"), {"required": {"g3"}}, True),
    ],
)
def test_jobs_whose_nodes_have_no_common_switch(old: str, new: str, fields: dict[str, Any], lost: bool) -> None:
    """They run on; what waits for them never starts."""
    both = define(old), define(new)
    waits, runs = job(state="PENDING", **fields), job(2, nodes={"c1", "g1"})
    assert [one.name for one in find_losses(Present((waits, runs)), *both)] == ["1"] * lost
    assert can_cost(*both) or not lost


def test_a_topology_that_restricts_no_job() -> None:
    both = define(TREE), define(APART, more="TopologyParam=TopoOptional")
    assert find_losses(Present((job(state="PENDING", least_nodes=10),)), *both) == () and not can_cost(*both)
    blocks = define(TREE), define(BLOCKS, "topology/block")  # a job may have nodes of several
    assert find_losses(Present((job(state="PENDING", least_nodes=10),)), *blocks) == () and not can_cost(*blocks)
