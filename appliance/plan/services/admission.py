"""Whether a partition admits a job that waits: one that no partition of its own admits never starts.

The rules are those of ``_part_access_check`` and ``_valid_pn_min_mem`` (src/slurmctld/job_mgr.c of Slurm), of
``part_policy_valid_acct``, ``part_policy_valid_qos`` and ``validate_alloc_node`` (partition_mgr.c), and, of
``MaxCPUsPerNode``, of plugins/select/cons_common. ``MaxMemPerCPU`` bars no job, which gets more processors for its
memory. Flags of a QOS that lift limits (``PartitionTimeLimit``) are not known here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache

from appliance.plan.services.defined import NOT_DEFINED, YES, Defined, Settings, read_allowed, read_names
from appliance.plan.services.fitting import Needs, covers, read_kinds
from appliance.plan.services.jobs import Job
from appliance.text import one_line

UNLIMITED = ("UNLIMITED", "INFINITE", "-1")
ROOT = "root"


@cache
def minutes(text: str) -> str:
    """Return a time limit of Slurm in minutes, rounded up as slurmctld does; the text itself if it has no limit."""
    found = read_seconds(text)
    return text.upper() if found is None else UNLIMITED[0] if math.isinf(found) else str(-int(-found // 60))


def read_seconds(text: str) -> float | None:
    """Return a time of Slurm in seconds, such as ``1-00:00:00``, or minutes; infinite without a limit."""
    if text.upper() in UNLIMITED:
        return math.inf
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not (dash or parts != [""]) or not all(
        re.fullmatch(r"\d{1,9}", one) for one in ([days] if dash else []) + parts
    ):
        return None
    numbers = [int(one) for one in parts]
    if dash or len(numbers) == 3:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def read_limit(text: str, default: float = math.inf) -> float:
    """Return a time limit in minutes, or another number: infinite without a limit, ``default`` if it is none."""
    found = minutes(text)
    return math.inf if found == UNLIMITED[0] else int(found) if found.isdecimal() else default


@dataclass(frozen=True)
class Limits:
    """What a partition admits. Sets of names: None if all are admitted, or it is not known who is.

    ``there``, ``cpus_there``, ``gres_there``: how much all of its nodes have; of the last, None if that is not known.
    """

    minutes: float = math.inf
    least_nodes: int = 0
    nodes: float = math.inf
    there: float = math.inf
    memory_mb: float = math.inf
    accounts: frozenset[str] | None = None
    no_accounts: frozenset[str] = frozenset()
    qos: frozenset[str] | None = None
    no_qos: frozenset[str] = frozenset()
    users: frozenset[str] | None = None
    hosts: frozenset[str] | None = None
    flags: frozenset[str] = frozenset()
    cpus: float = math.inf
    cpus_there: float = math.inf
    gres_there: Mapping[str, int] | None = None

    def why_barred(self, job: Job) -> str:
        """Return why a job may not start there, in words that follow ``it``; empty if it may."""
        account, qos = job.account.lower(), job.qos.lower()
        rules = (
            (job.minutes > self.minutes, f"asks for more time than MaxTime ({self.minutes:.0f} minutes)"),
            (job.most_nodes > self.nodes, f"asks for more nodes than MaxNodes ({self.nodes:.0f})"),
            (0 < job.least_nodes < self.least_nodes, f"asks for fewer nodes than MinNodes ({self.least_nodes})"),
            (job.least_nodes > self.there, f"asks for {job.least_nodes} nodes, of {self.there:.0f} that are left"),
            (job.memory_mb > self.memory_mb, f"asks for more memory than MaxMemPerNode ({self.memory_mb:.0f} MB)"),
            (job.cpus > self.cpus, f"asks for more processors than MaxCPUsPerNode ({self.cpus:.0f})"),
            (
                job.total_cpus > min(self.cpus_there, self.cpus * self.there),
                f"asks for {job.total_cpus} processors, more than the nodes",
            ),
            (
                self.gres_there is not None and not covers(self.gres_there, job.gres_total),
                f"asks for more of {', '.join(sorted(name for name, _ in job.gres_total))} than the nodes",
            ),
            (_bars(self.accounts, self.no_accounts, account), f"has account {one_line(account, 60) or '(none)'}"),
            (bool(qos) and _bars(self.qos, self.no_qos, qos), f"has QOS {one_line(qos, 60)}"),
            (self.users is not None and job.user not in {ROOT, *self.users}, "has a user in none of AllowGroups"),
            (self.hosts is not None and job.host not in self.hosts, f"was submitted on {one_line(job.host, 60)}"),
            ("rootonly" in self.flags and job.user != ROOT, "is not of root, as RootOnly demands"),
            ("disablerootjobs" in self.flags and job.user == ROOT, "is of root"),
            ("reqresv" in self.flags and not job.reservation, "has no reservation, which ReqResv demands"),
        )
        return next((why for barred, why in rules if barred), "")

    def narrower(self, old: Limits) -> bool:
        """Return whether it may bar what ``old`` admits."""
        allowed = ((self.accounts, old.accounts), (self.qos, old.qos), (self.users, old.users), (self.hosts, old.hosts))
        fewer = any(now is not None and (was is None or was - now) for now, was in allowed)
        more = self.no_accounts - old.no_accounts or self.no_qos - old.no_qos or self.flags - old.flags
        most = (self.minutes, self.nodes, self.there, self.memory_mb, self.cpus, self.cpus_there)
        had = (old.minutes, old.nodes, old.there, old.memory_mb, old.cpus, old.cpus_there)
        less = any(now < was for now, was in zip(most, had, strict=True))
        if self.gres_there is not None and old.gres_there is not None:
            less = less or not covers(self.gres_there, old.gres_there.items())
        return bool(fewer or more or less or self.least_nodes > old.least_nodes)


def _bars(allowed: Set[str] | None, denied: Set[str], name: str) -> bool:
    """Slurm looks at those that are denied only where it has no list of those that are allowed."""
    return name not in allowed if allowed is not None else name in denied


def find_limits(defined: Defined) -> dict[str, Limits]:
    """Return what each partition admits."""
    members, kinds = defined.members, read_kinds(defined)
    return {
        name: _read_limits(settings, members[name], kinds, defined.groups, defined.memory)
        for name, settings in defined.partitions.items()
    }


def _read_limits(
    settings: Settings,
    members: Set[str] | None,
    kinds: Mapping[str, Needs],
    groups: Mapping[str, Set[str]] | None,
    memory: str,
) -> Limits:
    gres: Counter[str] = Counter()
    for one in members or ():
        gres.update(dict(kinds[one].gres))
    allowed, hosts = read_allowed(settings), read_names(settings.get("allocnodes", ""))
    known = groups is not None and bool(allowed) and allowed <= groups.keys()
    least = read_limit(settings.get("minnodes", ""), 0)
    return Limits(
        minutes=read_limit(settings.get("maxtime", "")),
        least_nodes=0 if math.isinf(least) else int(least),
        nodes=read_limit(settings.get("maxnodes", "")),
        there=math.inf if members is None else len(members),
        # 0 means unlimited.
        memory_mb=read_limit(settings.get("maxmempernode") or memory) or math.inf,
        accounts=_read_list(settings, "allowaccounts"),
        no_accounts=_read_list(settings, "denyaccounts") or frozenset(),
        qos=_read_list(settings, "allowqos"),
        no_qos=_read_list(settings, "denyqos") or frozenset(),
        users=frozenset(user for group in allowed for user in groups[group]) if known and groups else None,
        hosts=None if not hosts or "ALL" in {one.upper() for one in hosts} else hosts,
        flags=frozenset(
            key for key in ("rootonly", "disablerootjobs", "reqresv") if settings.get(key, "").upper() in YES
        ),
        cpus=read_limit(settings.get("maxcpuspernode", "")) or math.inf,
        cpus_there=math.inf if members is None else sum(kinds[one].cpus for one in members),
        gres_there=None if members is None else gres,
    )


def _read_list(settings: Settings, key: str) -> frozenset[str] | None:
    """Return names in lower case; None if there are none, or it is all."""
    found = {one.lower() for one in settings.get(key, "").strip('"').split(",") if one and one not in NOT_DEFINED}
    return frozenset(found) if found and "all" not in found else None


def read_groups(passwd: str, group: str) -> dict[str, frozenset[str]]:
    """Return the members of each group of both files, also those whose first group it is."""
    first: dict[str, set[str]] = {}
    for line in passwd.splitlines():
        if len(parts := line.split(":")) == 7:
            first.setdefault(parts[3], set()).add(parts[0])
    rows = [parts for line in group.splitlines() if len(parts := line.split(":")) == 4]
    return {row[0]: frozenset(one for one in row[3].split(",") if one) | first.get(row[2], set()) for row in rows}
