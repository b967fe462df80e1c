"""What an administrator has changed in partitions with ``scontrol update``: the next reload or start drops it.

slurmctld keeps states of nodes and reservations, and reads partitions again (``read_slurm_conf`` of src/slurmctld).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

from appliance.plan.services.defined import Defined, Settings, read_names
from appliance.plan.services.effect import Present
from appliance.text import one_line

UNLIMITED = ("UNLIMITED", "INFINITE", "-1")


def _minutes(text: str) -> str:
    """Return a time limit of Slurm in minutes, rounded up as slurmctld does; the text itself if it has no limit."""
    if text.upper() in UNLIMITED:
        return UNLIMITED[0]
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not (dash or parts != [""]) or not all(
        re.fullmatch(r"\d{1,9}", one) for one in ([days] if dash else []) + parts
    ):
        return text.upper()
    numbers = [int(one) for one in parts]
    if dash or len(numbers) == 3:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return str((int(days or 0) * 24 + hours) * 60 + minutes + (seconds > 0))


def _yes(text: str) -> str:
    return "YES" if text.upper() in ("YES", "UP", "TRUE", "1") else "NO"


def _names(text: str) -> str:
    return ",".join(sorted(one for one in text.lower().split(",") if one))


def _nodes(text: str) -> str:
    return ",".join(sorted(read_names(text)))


class _Field(NamedTuple):
    """A field of ``scontrol show partition``: its keys in slurm.conf, its default, and how values are compared."""

    keys: tuple[str, ...]
    default: str
    form: Callable[[str], str] = str.upper


FIELDS = {
    "State": _Field(("state",), "UP"),
    "MaxTime": _Field(("maxtime",), "UNLIMITED", _minutes),
    "MaxNodes": _Field(("maxnodes",), "UNLIMITED", _minutes),
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
}
"""Of slurm.conf(5), those that administrators change while the cluster runs."""


def find_by_hand(present: Present, old: Defined, new: Defined) -> list[str]:
    """Return what a reload or start with ``new`` would drop, a line each; ``old``: what was read last.

    What the new configuration says, too, is kept. With ``ReconfigFlags=KeepPartInfo`` or ``KeepPartState``, Slurm keeps
    all of it.
    """
    if "keeppart" in new.keeps:
        return []
    partitions = {name: _with_rules(fields) for name, fields in present.partitions.items()}
    nodes = old.nodes.keys() | new.nodes.keys()
    return [
        f"partition {one_line(name, 60)}: {key} is {one_line(shown[key], 60)} by `scontrol update`, "
        f"and would be {one_line(_defined(field, new.partitions[name]), 60)}"
        for name, shown in partitions.items()
        if name in old.partitions and name in new.partitions
        for key, field in FIELDS.items()
        if key in shown and _differs(field, shown, key, nodes, old.partitions[name], new.partitions[name])
    ]


def _with_rules(shown: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of a partition with who is denied as a field, too: only one of both is shown."""
    kinds = ("Accounts", "Qos")
    return {
        **{f"Allow{kind}": "ALL" for kind in kinds if f"Deny{kind}" in shown},
        **{f"Deny{kind}": "" for kind in kinds if shown.get(f"Allow{kind}") == "ALL"},
        **shown,
    }


def _defined(field: _Field, settings: Settings) -> str:
    return next((settings[key].strip('"') for key in field.keys if key in settings), field.default)


def _differs(field: _Field, shown: Mapping[str, str], key: str, nodes: Set[str], *settings: Settings) -> bool:
    texts = [_defined(field, one) for one in settings]
    if field.form is _nodes and not all(read_names(text) <= nodes for text in texts):
        return False  # a NodeSet, or ALL
    return field.form(shown[key]) not in map(field.form, texts)
