"""What slurmd on the nodes makes of the files of Slurm that they get: one that it cannot read ends it on all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from appliance.config.hostlist import fold
from appliance.config.slurm_files import FOLDER
from appliance.plan.services.defined import GRES_CONF, Defined, count_gres, find_described, read_names
from appliance.text import one_line

READ = (GRES_CONF, *(f"{FOLDER}/{name}" for name in ("cgroup.conf", "mpi.conf", "topology.conf", "topology.yaml")))
"""Files besides slurm.conf that slurmd reads at its start, and when slurmctld sends others."""
JOB_SUBMIT = f"{FOLDER}/job_submit.lua"
LUA_FUNCTIONS = ("slurm_job_submit", "slurm_job_modify")
"""That it has to define (src/plugins/job_submit/lua/job_submit_lua.c)."""
MOST_KINDS = 16
"""Kinds of nodes that are tried."""
OF_ONE = {"nodeaddr", "nodehostname", "bcastaddr", "port", "state", "reason", "weight", "comment", "extra"}
"""Settings by which nodes of one kind may differ."""


@dataclass(frozen=True)
class Tried:
    """What slurmd has said as a node. ``failed``: why it ended; ``gres``: how many of each generic resource it has."""

    failed: str = ""
    gres: Mapping[str, int] = field(default_factory=dict)


def reads_other(changed: Iterable[str], old: Defined, new: Defined) -> bool:
    """Return whether a change of these files can end slurmd, or make it find fewer resources than slurm.conf has."""
    described = find_described(old, new) | (new.nodes.keys() - old.nodes.keys())
    resources = any(old.nodes.get(name, {}).get("gres") != new.nodes[name].get("gres") for name in described)
    return resources or any(path in READ for path in changed)


def runs_other(changed: Iterable[str], old: Defined, new: Defined) -> bool:
    """Return whether slurmctld is to load another job_submit.lua: one that it cannot load keeps it from starting."""
    before, after = ("lua" in one.plugins.get("JobSubmitPlugins", "") for one in (old, new))
    return after and (not before or JOB_SUBMIT in changed)


def find_kinds(defined: Defined, gres_conf: str) -> dict[str, tuple[str, ...]]:
    """Return one node of each kind with all nodes of it, at most ``MOST_KINDS``: the largest ones.

    Nodes of one kind have the same settings in slurm.conf, and the same lines of gres.conf.
    """
    lines = [read_names(found[1]) for found in re.finditer(r"(?im)^[ \t]*NodeName=(\S+)", gres_conf)]
    kinds: dict[object, list[str]] = {}
    for name, settings in sorted(defined.nodes.items()):
        shared = frozenset(item for item in settings.items() if item[0] not in OF_ONE)
        kinds.setdefault((shared, tuple(name in names for names in lines)), []).append(name)
    largest = sorted(kinds.values(), key=len, reverse=True)[:MOST_KINDS]
    return {names[0]: tuple(names) for names in largest}


def find_unlisted(defined: Defined) -> frozenset[str]:
    """Return the nodes that the topology does not list: with it, no job starts on them."""
    return frozenset() if defined.connected is None else frozenset(defined.nodes).difference(*defined.connected)


def read_tried(output: str) -> dict[str, Tried]:
    """Parse the output of ``definitions/scripts/check-slurmd``: by node; one that it says nothing of is left out."""
    found: dict[str, Tried] = {}
    gres, name = dict[str, int](), ""
    for line in output.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "node":
            gres, name = {}, rest
        elif kind == "gres" and (match := re.match(r"Name=(\S+) .*?\bCount=(\d{1,18})\b", rest)):
            gres[match[1]] = gres.get(match[1], 0) + int(match[2])
        elif kind in ("started", "failed"):
            found[name] = Tried((one_line(rest, 300) or "it ended") if kind == "failed" else "", gres)
    return found


def judge_tried(
    tried: Mapping[str, Tried], kinds: Mapping[str, tuple[str, ...]], defined: Defined, gres_conf: str
) -> Iterator[str]:
    """Yield why nodes would take no job any more: what slurmd says as one of them, or finds fewer of.

    slurmctld refuses a node that has fewer of a resource than slurm.conf (``_gres_node_config_validate`` of
    src/interfaces/gres.c). With ``AutoDetect``, only the node itself knows how many it has.
    """
    detects = re.search(r"(?im)^[^#\n]*\bAutoDetect=(?!off\b)", gres_conf)
    for name, names in kinds.items():
        one, who = tried.get(name, Tried("it said nothing")), one_line(fold(names), 120)
        if one.failed:
            yield f"slurmd on {who} would end: {one.failed}"
            continue
        for gres, wanted in count_gres(defined.nodes[name].get("gres", "")).items():
            if not detects and one.gres.get(gres, 0) < wanted:
                yield f"{who} would be refused: {one.gres.get(gres, 0)} of {gres} by gres.conf, {wanted} by slurm.conf"
