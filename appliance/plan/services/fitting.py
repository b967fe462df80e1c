"""Whether a node of a job's partitions has what it waits for: slurmctld holds a job that no node fits (priority 0).

It compares the memory, processors, disk and features that a job asks for on each node with those in slurm.conf
(``_build_node_list`` of src/slurmctld/node_scheduler.c; ``schedule`` of job_scheduler.c sets the priority).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from appliance.plan.services.defined import Defined, Settings, count_cores, count_each, read_features

UNITS = " KMGTP"


@dataclass(frozen=True)
class Needs:
    """What a job asks for on each node; memory and disk in MB. ``features``: names; ``gres``: how many of each."""

    memory_mb: int = 0
    cpus: int = 0
    disk_mb: int = 0
    features: frozenset[str] = frozenset()
    gres: frozenset[tuple[str, int]] = frozenset()

    def __str__(self) -> str:
        parts = [f"{self.memory_mb} MB of memory" * (self.memory_mb > 0), f"{self.cpus} processors" * (self.cpus > 1)]
        parts += [f"{self.disk_mb} MB of disk" * (self.disk_mb > 0), *sorted(self.features)]
        parts += [name if number == 1 else f"{name}:{number}" for name, number in sorted(self.gres)]
        return ", ".join(filter(None, parts))

    def fit(self, kinds: Set[Needs]) -> bool:
        """Return whether one of these nodes has all of it."""
        return any(
            one.memory_mb >= self.memory_mb
            and one.cpus >= self.cpus
            and one.disk_mb >= self.disk_mb
            and one.features >= self.features
            and covers(dict(one.gres), self.gres)
            for one in kinds
        )


def covers(there: Mapping[str, int], wanted: Iterable[tuple[str, int]]) -> bool:
    """Return whether there are as many of each resource as are wanted."""
    return all(there.get(name, 0) >= number for name, number in wanted)


def read_mb(text: str) -> int:
    """Return a size that squeue(1) prints in MB, such as ``4000M`` or ``1.5G``; 0 if it is none."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([KMGTP]?)", text)
    return int(float(found[1]) * 1024 ** (UNITS.index(found[2] or "M") - 2)) if found else 0


def find_kinds(defined: Defined) -> Mapping[str, Set[Needs] | None]:
    """Return what the nodes of each partition have, once for all that have the same; None if that is not known."""
    kinds = read_kinds(defined)
    return {
        name: None if names is None else frozenset(kinds[one] for one in names)
        for name, names in defined.members.items()
    }


def read_kinds(defined: Defined) -> dict[str, Needs]:
    """Return what each node has."""
    return {name: _read_kind(settings, defined) for name, settings in defined.nodes.items()}


def _read_kind(settings: Settings, defined: Defined) -> Needs:
    def number(key: str, default: int) -> int:
        text = settings.get(key, "")
        return int(text) if re.fullmatch(r"\d{1,12}", text) else default

    cores = count_cores(settings)
    cpus = max(number("cpus", 1), number("procs", 1), cores * number("threadspercore", 1))
    memory_mb = number("realmemory", 1)
    if defined.reserves_memory:  # src/plugins/select/cons_common/job_test.c
        memory_mb = max(memory_mb - number("memspeclimit", 0), 0)
    if defined.reserves_cores:
        threads = number("threadspercore", 1) if cpus > cores else 1
        # Whole cores (_convert_cpu_spec_list of src/common/node_conf.c).
        listed = {cpu // threads for cpu in _read_cpus(settings.get("cpuspeclist", ""))}
        cpus = max(cpus - (len(listed) or number("corespeccount", 0)) * threads, 0)
    gres = frozenset(count_each(settings.get("gres", "")).items())
    return Needs(memory_mb, cpus, number("tmpdisk", 0), read_features(settings), gres)


def _read_cpus(text: str) -> set[int]:
    """Return the processors of a list such as ``0-3,8``; none if it is not one."""
    if not re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", text):
        return set()
    ranges = (one.partition("-") for one in text.split(","))
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
