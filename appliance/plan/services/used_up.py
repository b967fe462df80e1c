"""Limits of accounts and QOS that are used up: slurmctld ends running jobs for them once it enforces limits.

The rules are those of ``acct_policy_job_time_out`` (src/slurmctld/acct_policy.c of Slurm). It looks at ``GrpTRESMins``
and ``GrpWall`` of the QOS of a job's partition, of its own QOS, of its association, and of the accounts above; what one
of these sets, the later ones do not. Not known here: limits of a single job (``MaxTRESMinsPerJob``), and a QOS that
comes before that of the partition (``OverPartQOS``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from appliance.plan.services.defined import Defined
from appliance.plan.services.jobs import Job, read_fields
from appliance.text import one_line

USAGE = ("scontrol", "--oneliner", "show", "assoc_mgr", "flags=assoc,qos")
"""Prints associations and QOS with their limits and usage, a line each (src/scontrol/info_assoc_mgr.c)."""
ROOT = "root"
"""The account above all others, whose limits do not count."""
MOST_LEVELS = 100
"""Of accounts: a hostile list may contain a circle."""
WALL = "GrpWall"
OF_ALL = {"cpu", "mem", "node", "billing", WALL}
"""What every running job uses; of the rest, energy never counts."""
Limits = Mapping[str, str]
"""Limits that are set, by resource: with their text if they are used up, else empty."""


@dataclass(frozen=True)
class Usage:
    """Limits by QOS, by association (account, user and partition, each may be empty), and the parents of accounts."""

    qos: Mapping[str, Limits]
    accounts: Mapping[tuple[str, str, str], Limits]
    parents: Mapping[str, str]

    def why(self, job: Job, partition_qos: str = "") -> str:
        """Return which limit of a job is used up; empty if none is."""
        partition = job.partitions[0] if job.partitions else ""
        uses = OF_ALL | {f"gres/{name}" for name in job.gres} | {f"license/{name}" for name in job.licenses}
        for name in dict.fromkeys((partition_qos, job.qos)):
            limits = self.qos.get(name, {})
            if used := _find_used(limits, uses):
                return f"QOS {one_line(name, 60)}: {used}"
            uses -= limits.keys()
        for account, limits in self._accounts_of(job, partition):
            if used := _find_used(limits, uses):
                return f"account {one_line(account, 60)}: {used}"
        return ""

    def _accounts_of(self, job: Job, partition: str) -> Iterator[tuple[str, Limits]]:
        """Yield the limits of a job's association and of the accounts above it."""
        account = job.account
        own = ((account, job.user, partition), (account, job.user, ""))
        yield account, next((self.accounts[key] for key in own if key in self.accounts), {})
        for _ in range(MOST_LEVELS):
            if account in ("", ROOT):
                return
            yield account, self.accounts.get((account, "", ""), {})
            account = self.parents.get(account, "")


def _find_used(limits: Limits, uses: Set[str]) -> str:
    return next((text for name, text in limits.items() if text and name in uses), "")


def begins_to_end(old: Defined, new: Defined) -> bool:
    """Return whether only the new configuration ends running jobs for such limits: with ``safe`` none is."""
    before, after = ("limits" in one.enforced and not one.enforced & {"safe", "all"} for one in (old, new))
    return after and not before


def read_usage(output: str) -> Usage:
    """Parse the output of ``USAGE``; other lines are ignored."""
    qos: dict[str, Limits] = {}
    accounts: dict[tuple[str, str, str], Limits] = {}
    parents: dict[str, str] = {}
    for line in output.splitlines():
        fields = read_fields(line)
        limits = dict(_read_limits(fields))
        if name := _without_id(fields.get("QOS", "")):
            qos[name] = limits
        elif account := fields.get("Account", ""):
            user = _without_id(fields.get("UserName", ""))
            accounts[account, user, fields.get("Partition", "")] = limits
            if not user:
                parents[account] = _without_id(fields.get("ParentAccount", ""))
    return Usage(qos, accounts, parents)


def _without_id(text: str) -> str:
    return text.partition("(")[0]


def _read_limits(fields: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the limits that are set: such as ``cpu`` with ``GrpTRESMins=cpu=100`` if it is used up, else empty."""
    each = [("GrpTRESMins=", one) for one in fields.get("GrpTRESMins", "").split(",")]
    for before, text in (*each, ("", f"{WALL}={fields.get(WALL, '')}")):
        if found := re.fullmatch(r"([\w/:.-]{1,80})=(\d{1,18})\((\d{1,18})(?:\.\d+)?\)", text):
            name, limit, used = found.groups()
            yield name, f"{before}{name}={limit}" if int(used) >= int(limit) else ""
