"""What an administrator has changed with ``scontrol``: partitions; features, weights and addresses of nodes; the next
reload or start drops it.

slurmctld keeps states of nodes and reservations, and reads the rest again (``read_slurm_conf`` of src/slurmctld). Of a
partition, all is compared that ``scontrol update`` sets (src/scontrol/update_part.c); of a node not ``Gres``, whose
number slurmd reports, ``CpuBind`` and ``NodeHostName``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

from appliance.plan.services.admission import minutes
from appliance.plan.services.defined import YES, Defined, Settings, read_features, read_names
from appliance.plan.services.effect import Present
from appliance.text import one_line


def _yes(text: str) -> str:
    return "YES" if text.upper() in YES else "NO"


def _names(text: str) -> str:
    return ",".join(sorted(one for one in text.lower().split(",") if one))


def _sharing(text: str) -> str:
    return {"YES": "YES:4", "FORCE": "FORCE:4"}.get(text.upper(), text.upper())


def _least(text: str) -> str:
    return text.lstrip("0") or "1"


def _nodes(text: str) -> str:
    return ",".join(sorted(read_names(text)))


def _hosts(text: str) -> str:
    return _nodes(text).lower()


def _given(text: str) -> str:
    return _names(text.replace("(null)", ""))


def _binding(text: str) -> str:
    return text.lower().rstrip("s")  # `core` is printed as `cores`


def _number(text: str) -> str:
    """Return a number of processors or MB; 0: without a limit."""
    return minutes(text.lstrip("0") or "UNLIMITED")


class _Field(NamedTuple):
    """A field of ``scontrol show partition``: its keys in slurm.conf, its default, and how values are compared."""

    keys: tuple[str, ...]
    default: str
    form: Callable[[str], str] = str.upper


FIELDS = {
    "State": _Field(("state",), "UP"),
    "MaxTime": _Field(("maxtime",), "UNLIMITED", minutes),
    "MaxNodes": _Field(("maxnodes",), "UNLIMITED", minutes),
    "Nodes": _Field(("nodes",), "(null)", _nodes),
    "AllowAccounts": _Field(("allowaccounts",), "ALL", _names),
    "AllowGroups": _Field(("allowgroups",), "ALL", _names),
    "AllowQos": _Field(("allowqos",), "ALL", _names),
    "DenyAccounts": _Field(("denyaccounts",), "", _names),
    "DenyQos": _Field(("denyqos",), "", _names),
    "PriorityTier": _Field(("priority", "prioritytier"), "1"),
    "PriorityJobFactor": _Field(("priority", "priorityjobfactor"), "1"),
    "Hidden": _Field(("hidden",), "NO", _yes),
    "RootOnly": _Field(("rootonly",), "NO", _yes),
    "QoS": _Field(("qos",), "N/A"),
    "DefaultTime": _Field(("defaulttime",), "NONE", minutes),
    "MinNodes": _Field(("minnodes",), "0", _least),
    "PreemptMode": _Field(("preemptmode",), "OFF"),
    "OverTimeLimit": _Field(("overtimelimit",), "NONE", minutes),
    "OverSubscribe": _Field(("oversubscribe", "shared"), "NO", _sharing),
    "Default": _Field(("default",), "NO", _yes),
    "AllocNodes": _Field(("allocnodes",), "ALL", _hosts),
    "DisableRootJobs": _Field(("disablerootjobs",), "NO", _yes),
    "ExclusiveUser": _Field(("exclusiveuser",), "NO", _yes),
    "ExclusiveTopo": _Field(("exclusivetopo",), "NO", _yes),
    "ReqResv": _Field(("reqresv",), "NO", _yes),
    "LLN": _Field(("lln",), "NO", _yes),
    "PowerDownOnIdle": _Field(("powerdownonidle",), "NO", _yes),
    "GraceTime": _Field(("gracetime",), "0"),
    "MaxCPUsPerNode": _Field(("maxcpuspernode",), "UNLIMITED", _number),
    "MaxCPUsPerSocket": _Field(("maxcpuspersocket",), "UNLIMITED", _number),
    "DefMemPerCPU": _Field(("defmempercpu",), "UNLIMITED", _number),
    "DefMemPerNode": _Field(("defmempernode",), "UNLIMITED", _number),
    "MaxMemPerCPU": _Field(("maxmempercpu",), "UNLIMITED", _number),
    "MaxMemPerNode": _Field(("maxmempernode",), "UNLIMITED", _number),
    "JobDefaults": _Field(("jobdefaults",), "", _given),
    "TRESBillingWeights": _Field(("tresbillingweights",), "", _given),
    "Alternate": _Field(("alternate",), "", _given),
    "CpuBind": _Field(("cpubind",), "", _binding),
    "Topology": _Field(("topology",), "", _given),
}
"""Of slurm.conf(5), those that administrators change while the cluster runs."""
MEMORY = ("DefMemPer", "MaxMemPer")
UNSHOWN = {"TRESBillingWeights": "", "Alternate": "", "CpuBind": "", "Topology": ""}
"""Fields that are shown only where they are set, and what they are elsewhere."""
MODES = {"OFF", "CANCEL", "REQUEUE"}
"""Modes of preemption that are one word."""


def find_by_hand(present: Present, old: Defined, new: Defined) -> list[str]:
    """Return what a reload or start with ``new`` would drop, a line each; ``old``: what was read last.

    What the new configuration says, too, is kept. With ``ReconfigFlags=KeepPartInfo`` or ``KeepPartState``, Slurm keeps
    all of it.
    """
    return [*_find_partitions(present, old, new), *_find_nodes(present, old, new)]


def _find_nodes(present: Present, old: Defined, new: Defined) -> list[str]:
    """Return the features and weights that nodes do not have in slurm.conf; a plugin may have set features itself."""
    found = []
    for name, shown in present.described.items():
        if name not in old.nodes or name not in new.nodes:
            continue
        both = (old.nodes[name], new.nodes[name])
        features = shown.get("AvailableFeatures", "").replace("(null)", "")
        if not new.plugins.get("NodeFeaturesPlugins") and _names(features) not in (
            ",".join(sorted(one.lower() for one in read_features(settings))) for settings in both
        ):
            found.append(f"node {one_line(name, 60)}: AvailableFeatures is {one_line(features, 60) or 'empty'}")
        if (weight := shown.get("Weight", "1")) not in [settings.get("weight", "1") for settings in both]:
            found.append(f"node {one_line(name, 60)}: Weight is {one_line(weight, 60)}")
    for node in present.nodes:
        lines = [one.nodes[node.name] for one in (old, new) if node.name in one.nodes]
        addresses = {one.get("nodeaddr") or one.get("nodehostname") or node.name for one in lines}
        # Slurm keeps the address of a node that comes and goes.
        keeps = {one.get("state", "").upper() for one in lines} & {"CLOUD", "FUTURE"}
        if len(lines) == 2 and not keeps and node.address not in addresses:
            found.append(f"node {one_line(node.name, 60)}: NodeAddr is {one_line(node.address, 60)}")
    return [f"{one} by `scontrol update`, and slurm.conf has another one" for one in found]


def _find_partitions(present: Present, old: Defined, new: Defined) -> list[str]:
    if "keeppart" in new.keeps:
        return []
    made = present.partitions.keys() - old.partitions.keys() - new.partitions.keys()
    lines = [
        f"partition {one_line(name, 60)} was made by `scontrol create`, and would be gone" for name in sorted(made)
    ]
    partitions = {name: _with_rules(fields) for name, fields in present.partitions.items()}
    nodes = old.nodes.keys() | new.nodes.keys()
    return lines + [
        f"partition {one_line(name, 60)}: {key} is {one_line(shown[key], 60)} by `scontrol update`, "
        f"and would be {one_line(_defined(field, _settings(new, name)), 60)}"
        for name, shown in partitions.items()
        if name in old.partitions and name in new.partitions
        for key, field in FIELDS.items()
        if key in shown and _differs(field, shown, key, nodes, *(_settings(one, name) for one in (old, new)))
    ]


def _settings(defined: Defined, name: str) -> Settings:
    """Return the settings of a partition, with those that all have."""
    shared = {key.lower(): defined.limits[key] for key in ("PreemptMode", "DisableRootJobs") if key in defined.limits}
    found = {**shared, **defined.partitions[name], "default": "YES" if defined.default == name else "NO"}
    for key in (f"{one.lower()}cpu" for one in MEMORY if f"{one.lower()}node" in found):
        found.pop(key, None)  # Slurm ignores it
    return found


def _with_rules(shown: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a partition with those that are not shown: who is denied, or no limit of memory."""
    kinds = ("Accounts", "Qos")
    return {
        **{f"Allow{kind}": "ALL" for kind in kinds if f"Deny{kind}" in shown},
        **{f"Deny{kind}": "" for kind in kinds if shown.get(f"Allow{kind}") == "ALL"},
        **{f"{one}{per}": "UNLIMITED" for one in MEMORY for per in ("CPU", "Node")},
        **UNSHOWN,
        **shown,
    }


def _defined(field: _Field, settings: Settings) -> str:
    return next((settings[key].strip('"') for key in field.keys if key in settings), field.default)


def _differs(field: _Field, shown: Mapping[str, str], key: str, nodes: Set[str], *settings: Settings) -> bool:
    texts = [_defined(field, one) for one in settings]
    if field.form is _nodes and not all(read_names(text) <= nodes for text in texts):
        return False  # a NodeSet, or ALL
    if key == "DefaultTime" and shown[key] == "NONE":
        return False  # Slurm drops one that is over MaxTime
    if key == "PreemptMode" and not {text.upper() for text in (shown[key], *texts)} <= MODES:
        return False  # lists of flags are printed in another order, and with others
    return field.form(shown[key]) not in map(field.form, texts)
