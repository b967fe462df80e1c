"""What a slurm.conf with its includes defines: nodes, partitions, programs, licences; read as slurmctld reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from appliance.config.hostlist import HostListError, expand
from appliance.config.model import line_settings
from appliance.config.slurm_files import FOLDER
from appliance.plan.adopt.frames import Frames, Section
from appliance.plan.adopt.read_slurm import read_entries, read_lines, single_setting
from appliance.plan.services.topology import Connected, read_conf, read_yaml

PROGRAMS = (
    "Prolog",
    "Epilog",
    "TaskProlog",
    "TaskEpilog",
    "HealthCheckProgram",
    "RebootProgram",
    "UnkillableStepProgram",
)
"""Settings of slurm.conf(5) that name a program which slurmd runs: one that lacks it drains its node, or fails jobs."""
OWN_PROGRAMS = (
    "MailProg",
    "PrologSlurmctld",
    "EpilogSlurmctld",
    "ResumeProgram",
    "SuspendProgram",
    "ResumeFailProgram",
    "ResvProlog",
    "ResvEpilog",
    "SlurmctldPrimaryOnProg",
    "SlurmctldPrimaryOffProg",
)
"""Settings that name a program which slurmctld runs, in the container."""
PLUGINS = {
    **dict.fromkeys(("AccountingStorageType", "AuthType", "AuthAltTypes", "BurstBufferType", "CredType"), ""),
    **dict.fromkeys(("JobCompType", "MCSPlugin", "NodeFeaturesPlugins", "PowerPlugin", "PreemptType"), ""),
    **dict.fromkeys(("PriorityType", "SchedulerType", "SelectType", "SiteFactorPlugin", "SwitchType"), ""),
    "TopologyPlugin": "",
    **dict.fromkeys(("JobAcctGatherType", "JobContainerType", "ProctrackType"), ""),
    "CliFilterPlugins": "cli_filter",
    "JobSubmitPlugins": "job_submit",
    "TaskPlugin": "task",
    "PrEpPlugins": "prep",
    "SlurmctldPlugstack": "",
}
"""Settings that name plugins which slurmctld, slurmd or commands load, and what precedes those written without it.

None starts without one of its own.
"""
PLUGSTACK_CONF = f"{FOLDER}/plugstack.conf"
GRES_CONF = f"{FOLDER}/gres.conf"
TOPOLOGY_CONF, TOPOLOGY_YAML = f"{FOLDER}/topology.conf", f"{FOLDER}/topology.yaml"
AT_START = {
    "ProctrackType": "proctrack/cgroup",
    "SlurmdPort": "6818",
    "SlurmdSpoolDir": "/var/spool/slurmd",
    "SlurmdUser": "root",
    "CredType": "cred/munge",
    "SwitchType": "switch/none",
}
"""Settings that slurmd reads only when it starts, and their defaults (slurm.conf(5)): until then it serves with those
of before. With another kind of switch, slurmctld cannot read its jobs either."""
LIMITS = (
    *("OverTimeLimit", "SlurmdTimeout", "ResvOverRun", "ResumeTimeout", "BatchStartTimeout", "PrologFlags"),
    *("PreemptType", "PreemptMode", "PreemptExemptTime", "MaxJobCount", "DisableRootJobs"),
)
"""Settings by which slurmctld ends or refuses jobs."""
ENFORCING = {"associations", "limits", "qos", "safe", "wckeys", "all"}
"""Words of ``AccountingStorageEnforce`` with which a user without an association may not run jobs."""
ENFORCED = {"1": "associations", "2": "limits"}
"""Older words of it."""
BY_FILE = {"gpu", "shard", "mps", "nic"}
"""Generic resources whose number is that of their files, also without a line in gres.conf."""
PLUGIN_FOLDER = "PluginDir"
YES = {"YES", "UP", "TRUE", "1"}
NOT_DEFINED = {"(null)", "N/A", ""}
Settings = Mapping[str, str]
"""Values by lower-case key."""


@dataclass(frozen=True)
class Defined:
    """The nodes and partitions of a slurm.conf with their settings, by name.

    ``programs``: those that nodes run, by setting; ``own``: those that slurmctld runs; ``plugins``: those that are
    loaded, and ``PluginDir``; ``at_start``: settings of ``AT_START``. ``licenses``: how many there are of each.
    ``by_cores``: jobs are allocated cores, and not whole nodes. ``keeps``: ``ReconfigFlags``, in lower case.
    ``sets``: settings of each NodeSet. ``gres_types``: names in ``GresTypes``. ``by_file``: generic resources that a
    gres.conf numbers by their files. ``enforced``: words of ``AccountingStorageEnforce``, in lower case. ``memory``:
    ``MaxMemPerNode`` of partitions without one. ``groups``: members of groups of the container; None if its accounts
    are not the site's. ``reserves_memory``, ``reserves_cores``: whether no job gets what ``MemSpecLimit`` and
    ``CoreSpecCount`` set aside. ``limits``: settings of ``LIMITS``. ``connected``: nodes that a topology connects; None
    if none restricts jobs.
    """

    nodes: Mapping[str, Settings] = field(default_factory=dict)
    partitions: Mapping[str, Settings] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)
    plugins: Mapping[str, str] = field(default_factory=dict)
    at_start: Mapping[str, str] = field(default_factory=dict)
    licenses: Mapping[str, int] = field(default_factory=dict)
    by_cores: bool = True
    keeps: str = ""
    sets: Mapping[str, Settings] = field(default_factory=dict)
    gres_types: frozenset[str] = frozenset()
    by_file: frozenset[str] = frozenset()
    enforced: frozenset[str] = frozenset()
    memory: str = ""
    groups: Mapping[str, frozenset[str]] | None = None
    reserves_memory: bool = False
    reserves_cores: bool = True
    limits: Mapping[str, str] = field(default_factory=dict)
    connected: Connected | None = None

    @property
    def gang(self) -> bool:
        """Whether jobs share nodes in turns."""
        return "gang" in self.limits.get("PreemptMode", "").lower()

    @property
    def features(self) -> frozenset[str]:
        """Those that a node has."""
        return frozenset(one for settings in self.nodes.values() for one in read_features(settings))

    @property
    def gres(self) -> frozenset[str]:
        """Names of the generic resources that a node has, and those with their type: ``gpu``, ``gpu:a100``."""
        return frozenset(one for settings in self.nodes.values() for one in count_each(settings.get("gres", "")))

    @property
    def default(self) -> str:
        """The partition of jobs that name none; the last one counts, and none if it is empty."""
        names = [name for name, one in self.partitions.items() if one.get("default", "").upper() in YES]
        return names[-1] if names else ""

    @property
    def members(self) -> Mapping[str, frozenset[str] | None]:
        """The nodes of each partition; None if one of its words is not known, as a node that registers itself."""
        return {name: self._resolve(settings.get("nodes", "")) for name, settings in self.partitions.items()}

    def _resolve(self, text: str) -> frozenset[str] | None:
        found: set[str] = set()
        for name in read_names(text.strip('"')):
            if name in self.nodes:
                found.add(name)
            elif name.upper() == "ALL":
                found |= self.nodes.keys()
            elif name in self.sets:
                of_set = self.sets[name]
                found |= read_names(of_set.get("nodes", "")) & self.nodes.keys()
                if feature := of_set.get("feature", "").strip('"'):
                    found |= {one for one, settings in self.nodes.items() if feature in read_features(settings)}
            else:
                return None
        return frozenset(found)


def read_allowed(settings: Settings) -> frozenset[str]:
    """Return the groups whose members may use a partition; none if everybody may."""
    found = _split(settings.get("allowgroups", ""))
    return frozenset() if "ALL" in {one.upper() for one in found} else found


def read_features(settings: Settings) -> frozenset[str]:
    """Return the features of a node."""
    return _split(",".join(settings.get(key, "") for key in ("features", "feature")))


@cache
def _split(text: str) -> frozenset[str]:
    return frozenset(one for one in text.replace('"', "").split(",") if one)


@cache
def read_names(text: str) -> frozenset[str]:
    """Return the names of a host list; none if it is not one."""
    try:
        return frozenset() if text in NOT_DEFINED else frozenset(expand(text))
    except HostListError:
        return frozenset()


@cache
def count_gres(text: str) -> Mapping[str, int]:
    """Return how many of each generic resource, of all types, a node's ``Gres`` has."""
    return {name: count for name, count in count_each(text).items() if ":" not in name}


@cache
def count_each(text: str) -> Mapping[str, int]:
    """Return how many of each generic resource a node's ``Gres`` has, and of each type: ``gpu``, ``gpu:a100``."""
    found: dict[str, int] = {}
    for one in text.strip('"').split(","):
        name, *more = one.split(":")
        number = re.fullmatch(r"(\d{1,18})([KMGTP]?)", more[-1].split("(")[0].upper()) if more else None
        each = int(number[1]) << 10 * " KMGTP".index(number[2] or " ") if number else 1
        of_type = [f"{name}:{more[0]}"] if more and re.match("[A-Za-z_]", more[0]) else []
        for kind in [name, *of_type] if name else ():
            found[kind] = found.get(kind, 0) + each
    return found


def count_cores(settings: Settings) -> int:
    """Return how many cores a node has: ``_build_single_nodeline_info`` of src/common/read_config.c of Slurm."""

    def number(*keys: str, default: int = 0) -> int:
        return next((int(settings[key]) for key in keys if re.fullmatch(r"\d{1,9}", settings.get(key, ""))), default)

    cpus = number("cpus", "procs", default=1)
    per_socket, threads = number("corespersocket", default=1), number("threadspercore", default=1)
    sockets = number("sockets") or number("boards", default=1) * number("socketsperboard")
    return sockets * per_socket if sockets else max(cpus // max(threads, 1), per_socket)


def read_defined(files: Mapping[str, bytes]) -> Defined:
    """Return what the slurm.conf among these files, by path, defines, with what it includes; nothing without one."""
    file = f"{FOLDER}/slurm.conf"
    if file not in files:
        return Defined()
    frames = Frames({path: Section(path, "read", body) for path, body in files.items()})
    nodes, partitions = read_entries(frames, file)
    programs, own, plugins, at_start, limits = (
        {key: value for key in keys if (value := single_setting(frames, file, key.lower()))}
        for keys in (PROGRAMS, OWN_PROGRAMS, (*PLUGINS, PLUGIN_FOLDER), AT_START, LIMITS)
    )
    if "lua" in plugins.get("CliFilterPlugins", ""):  # slurmctld sends the script to no node
        programs["CliFilterPlugins"] = f"{FOLDER}/cli_filter.lua"
    programs |= _read_plugstack(files.get(PLUGSTACK_CONF, b"").decode(errors="replace"))
    by_node = {name: each for entry in nodes for name, each in _each_node(entry.name, _lower(entry.settings))}
    sets: dict[str, Settings] = {}
    for settings in (line_settings(line) for line in read_lines(frames, file)):
        key, name = settings[0] if settings else ("", "")
        if key == "nodeset":
            sets[name] = dict(settings)
        elif key == "downnodes" and (state := dict(settings).get("state")):  # read after the nodes
            by_node |= {one: {"state": state, **by_node[one]} for one in read_names(name) & by_node.keys()}
    return Defined(
        by_node,
        {entry.name: _lower(entry.settings) for entry in partitions},
        programs,
        own,
        plugins,
        at_start,
        licenses=count_licenses(single_setting(frames, file, "licenses")),
        by_cores=single_setting(frames, file, "selecttype").lower() != "select/linear",
        keeps=single_setting(frames, file, "reconfigflags").lower(),
        sets=sets,
        gres_types=_split(single_setting(frames, file, "grestypes")),
        by_file=_read_by_file(files.get(GRES_CONF, b"").decode(errors="replace")),
        enforced=frozenset(
            ENFORCED.get(one, one) for one in _split(single_setting(frames, file, "accountingstorageenforce").lower())
        ),
        memory=single_setting(frames, file, "maxmempernode"),
        reserves_memory="memory" in single_setting(frames, file, "selecttypeparameters").lower(),
        reserves_cores=single_setting(frames, file, "allowspecresourcesusage").upper() not in YES,
        limits=limits,
        connected=_read_topology(frames, file, plugins.get("TopologyPlugin", ""), frozenset(by_node)),
    )


def _read_topology(frames: Frames, file: str, plugin: str, nodes: frozenset[str]) -> Connected | None:
    if "topooptional" in single_setting(frames, file, "topologyparam").lower():
        return None
    if text := frames.text(TOPOLOGY_YAML):
        return read_yaml(text, nodes)
    return read_conf(read_lines(frames, TOPOLOGY_CONF), plugin, nodes) if TOPOLOGY_CONF in frames.files else None


def _read_by_file(text: str) -> frozenset[str]:
    """Return the generic resources that a gres.conf numbers by their files."""
    lines = re.findall(r"(?im)^[^#\n]*\b(?:Multiple)?Files?=.*$", text)
    return frozenset(BY_FILE) | {found[1] for line in lines if (found := re.search(r"(?i)\bName=([\w.-]+)", line))}


def _read_plugstack(text: str) -> dict[str, str]:
    """Return the plugins that a plugstack.conf requires by their whole path, each under a name of its own."""
    found = re.findall(r"(?m)^[ \t]*required[ \t]+(/\S+)", text)
    return {f"plugstack.conf required {path}": path for path in found}


def _each_node(text: str, settings: Settings) -> Iterator[tuple[str, Settings]]:
    """Yield the nodes of a line, each with its own address if the line has one for each."""
    try:
        names, addresses = expand(text), expand(settings.get("nodeaddr", ""))
    except HostListError:
        names, addresses = sorted(read_names(text)), []
    if len(names) != len(addresses):
        yield from ((name, settings) for name in names)
        return
    yield from ((name, {**settings, "nodeaddr": one}) for name, one in zip(names, addresses, strict=True))


def find_plugins(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """Return the files of plugins that only the new configuration loads, each with its setting.

    Args:
        old, new: ``plugins`` of both. Where the folder changes, all of the new one count.
    """
    before = old if old.get(PLUGIN_FOLDER) == new.get(PLUGIN_FOLDER) else {}
    found = {}
    for key, value in find_new(before, new).items():
        for name in re.findall(r"[\w/]+", value) if key in PLUGINS else ():
            kind, slash, rest = name.rpartition("/")
            if rest.lower() != "none":  # newer versions have no such plugins
                found[f"{kind if slash else PLUGINS[key]}_{rest}.so"] = f"{key}={value}"
    return found


def _lower(settings: Settings) -> Settings:
    return {key.lower(): value for key, value in settings.items()}


def count_licenses(text: str) -> dict[str, int]:
    """Return how many of each a list of licences has, such as ``matlab:4,ansys``."""
    found: dict[str, int] = {}
    for one in re.split("[,;|]", text.strip('"')):
        name, *number = re.split(r"[:*=]", one, maxsplit=1)
        if name and name not in NOT_DEFINED:
            found[name] = int(number[0]) if number and re.fullmatch(r"\d{1,9}", number[0]) else 1
    return found


def find_described(old: Defined, new: Defined) -> set[str]:
    """Return the nodes whose settings differ, without those that are added or removed."""
    return {name for name, settings in new.nodes.items() if old.nodes.get(name, settings) != settings}


def find_new(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """Return the programs that only the new configuration names, by setting."""
    return {key: path for key, path in new.items() if old.get(key) != path}
